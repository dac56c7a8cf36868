"""The bodies of the Interactions, as `/openapi.json` shows them."""

from __future__ import annotations

from ..schemas import FLAG, MODEL, OBJECT, OBJECTS, TEXT_OR_NULL, body

BODY = body(
    {
        "model": {**MODEL, "type": "string"},
        "input": {"type": ["string", "array", "object"], "items": {"type": "object"}},
    },
    previous_interaction_id=TEXT_OR_NULL, system_instruction=TEXT_OR_NULL, store=FLAG, stream=FLAG, background=FLAG,
    generation_config=OBJECT, tools=OBJECTS, response_modalities={"enum": [["text"], None]},
)  # fmt: skip
