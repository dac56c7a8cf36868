"""The bodies of Responses and Conversations, as `/openapi.json` shows them."""

from __future__ import annotations

from ...domain.models import JSON
from ..schemas import (
    CHOICE,
    COUNT,
    FLAG,
    MODEL,
    NUMBER,
    OBJECT,
    OBJECTS,
    TEXT,
    TEXT_OR_NULL,
    TEXT_OR_OBJECT,
    body,
    message,
)

METADATA: JSON = {"type": ["object", "null"], "additionalProperties": {"type": "string"}, "maxProperties": 16}
_SAID = message("input_text", "user", "assistant", "system", "developer")
_ITEMS: JSON = {"type": "array", "maxItems": 20, "items": _SAID}
_ASKED: JSON = {"anyOf": [{"type": "string"}, {"type": "array", "items": _SAID}]}

BODY = body(
    {"input": _ASKED},
    model=MODEL, instructions=TEXT_OR_NULL, previous_response_id=TEXT_OR_NULL, conversation=TEXT_OR_OBJECT,
    store=FLAG, stream=FLAG, background=FLAG, metadata=METADATA, reasoning=OBJECT, text=OBJECT, tools=OBJECTS,
    tool_choice=CHOICE, agent_id=TEXT_OR_NULL, temperature=NUMBER, max_output_tokens=NUMBER,
)  # fmt: skip
CONVERSATION = body({}, items={**_ITEMS, "type": ["array", "null"]}, metadata=METADATA)
NOTES = body({"metadata": METADATA})
ITEMS = body({"items": _ITEMS})
# The query of a list.
PAGE = {"limit": COUNT, "after": TEXT, "order": {"enum": ["asc", "desc"]}}
