"""The bodies of generateContent, as `/openapi.json` shows them."""

from __future__ import annotations

from ..schemas import OBJECT, OBJECTS, TEXT_OR_NULL, body

_CONTENT = body({"parts": {"type": "array", "items": body({}, text={"type": "string"})}}, role=TEXT_OR_NULL)
BODY = body(
    {"contents": {"type": ["array"], "minItems": 1, "items": _CONTENT}},
    systemInstruction={"anyOf": [_CONTENT, {"type": "null"}]}, generationConfig=OBJECT, tools=OBJECTS,
    toolConfig=OBJECT,
)  # fmt: skip
COUNTED = body({}, contents=OBJECTS, generateContentRequest=OBJECT)
