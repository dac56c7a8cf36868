"""The bodies of the Messages API, as `/openapi.json` shows them."""

from __future__ import annotations

from ..schemas import FLAG, MODEL, NUMBER, OBJECT, OBJECTS, TEXT_OR_OBJECTS, TEXTS, THINKING, body, messages

BODY = body(
    {"messages": messages("user", "assistant"), "max_tokens": {"type": "integer"}},
    model=MODEL, system=TEXT_OR_OBJECTS, stream=FLAG, metadata=OBJECT, thinking=THINKING, output_config=OBJECT,
    stop_sequences=TEXTS, tools=OBJECTS, tool_choice=OBJECT, temperature=NUMBER, thread=OBJECT,
)  # fmt: skip
COUNTED = body({"messages": messages("user", "assistant")}, model=MODEL, system=TEXT_OR_OBJECTS, tools=OBJECTS)
