"""The bodies of Chat Completions, as `/openapi.json` shows them."""

from __future__ import annotations

from ..schemas import (
    CHOICE,
    EFFORT,
    FLAG,
    FORMAT,
    FUNCTIONS,
    MODEL,
    NUMBER,
    OBJECT,
    TEXT_OR_NULL,
    TEXT_OR_TEXTS,
    body,
    messages,
)

BODY = body(
    {"messages": messages("system", "developer", "user", "assistant")},
    model=MODEL, stream=FLAG, stream_options=OBJECT, agent_id=TEXT_OR_NULL, metadata=OBJECT, reasoning_effort=EFFORT,
    stop=TEXT_OR_TEXTS, response_format=FORMAT, tools=FUNCTIONS, tool_choice=CHOICE, n={"enum": [1, None]},
    user=TEXT_OR_NULL, temperature=NUMBER, max_tokens=NUMBER,
)  # fmt: skip
