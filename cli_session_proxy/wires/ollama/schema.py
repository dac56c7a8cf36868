"""The bodies of Ollama's API, as `/openapi.json` shows them."""

from __future__ import annotations

from ...domain.models import JSON
from ..schemas import FLAG, FUNCTIONS, MODEL, NUMBER, OBJECT, TEXT, TEXT_OR_NULL, TEXTS, body

_KEEP: JSON = {"type": ["number", "string", "null"]}
_FORMAT: JSON = {"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]}
_THINK: JSON = {"enum": [True, False, "low", "medium", "high", "max", None]}
_OPTIONS: JSON = {
    "type": ["object", "null"],
    "properties": {"temperature": NUMBER, "num_predict": NUMBER, "num_ctx": NUMBER, "seed": NUMBER, "stop": TEXTS},
}
_MESSAGE = body({"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT})

CHAT = body(
    {"messages": {"type": "array", "items": _MESSAGE}},
    model=MODEL, stream=FLAG, tools=FUNCTIONS, format=_FORMAT, options=_OPTIONS, think=_THINK, keep_alive=_KEEP,
    agent_id=TEXT_OR_NULL, metadata=OBJECT,
)  # fmt: skip
GENERATE = body(
    {"prompt": TEXT},
    model=MODEL, system=TEXT_OR_NULL, stream=FLAG, format=_FORMAT, options=_OPTIONS, think=_THINK, keep_alive=_KEEP,
    context={"type": ["array", "null"], "items": {"type": "integer"}}, images=TEXTS, agent_id=TEXT_OR_NULL,
    metadata=OBJECT,
)  # fmt: skip
SHOW = body({"model": {**MODEL, "type": "string"}})
