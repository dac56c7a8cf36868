"""What the clients of a history make of an answer that the model refused to give."""

from __future__ import annotations

from typing import Any

import pytest

from .doors import REFUSED, Wire, reader

# As each wire tells it, in a whole answer and at the end of a stream.
REFUSALS: list[tuple[Wire, list[dict[str, Any]]]] = [
    ("chat", [{"choices": [{"message": {"content": "I"}, "finish_reason": "content_filter"}]}]),
    ("chat", [{"choices": [{"delta": {}, "finish_reason": "content_filter"}]}]),
    ("responses", [{"output": [], "incomplete_details": {"reason": "content_filter"}, "id": "resp_1"}]),
    ("responses", [{"type": "response.incomplete", "response": {"incomplete_details": {"reason": "content_filter"}}}]),
    ("messages", [{"type": "message", "content": [{"type": "text", "text": "I"}], "stop_reason": "refusal"}]),
    ("generate", [{"candidates": [{"content": {"parts": [{"text": "I"}]}, "finishReason": "SAFETY"}]}]),
    ("ollama", [{"message": {"content": "I"}, "done": True, "done_reason": "content_filter"}]),
    ("interactions", [{"status": "incomplete", "steps": [], "id": "interaction_1"}]),
    ("messages", [{"type": "message_delta", "delta": {"stop_reason": "refusal"}}, {"type": "message_stop"}]),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "said"), REFUSALS)
def test_an_answer_that_is_refused_is_no_answer(wire: Wire, said: list[dict[str, Any]]) -> None:
    reading = reader(wire)
    for data in said:
        assert reading.error is None
        reading.feed(data)
    assert (reading.got, reading.error) == (None, REFUSED)
