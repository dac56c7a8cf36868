"""A client's history as records: calls and results."""

from __future__ import annotations

from cli_session_proxy.backends.claude.sessions.history import NO_RESULT, Mender
from cli_session_proxy.domain.evidence import Note
from cli_session_proxy.domain.models import Block, Message


def result(given: str, said: str) -> Block:
    return {"type": "tool_result", "tool_use_id": given, "content": said}


def test_results_come_in_the_order_of_their_calls_and_one_that_is_missing_is_said_to_be() -> None:
    """Those of an answer that is known already are in its records' ids."""
    mender = Mender({"x": "x", "y": "y-n2", "z": "z"})
    asked = mender.asked([Message("user", (result("y", "second"), result("x", "first")))])
    assert [(block["tool_use_id"], block["content"]) for block in asked.content] == [
        ("x", "first"), ("y-n2", "second"), ("z", NO_RESULT),
    ]  # fmt: skip
    assert mender.notes() == [Note("calls_without_result", 1)]
