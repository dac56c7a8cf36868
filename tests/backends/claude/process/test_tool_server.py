"""What the server of the client's tools answers, whatever it is asked."""

from __future__ import annotations

import pytest

from cli_session_proxy.backends.claude.process.tool_server import SMALL_RESULT, ToolServer, not_taken
from cli_session_proxy.domain.client_tools import SERVER
from cli_session_proxy.domain.models import JSON


@pytest.mark.parametrize(
    "request_",
    [
        None,
        "text",
        {"subtype": "hook_callback"},
        {"subtype": "mcp_message", "server_name": SERVER, "message": [1]},
        {"subtype": "mcp_message", "server_name": SERVER, "message": {"method": "tools/call", "id": 1, "params": "x"}},
        {"subtype": "mcp_message", "server_name": SERVER, "message": {"method": "initialize", "id": 1, "params": [1]}},
    ],
)
def test_a_request_that_nobody_knows_ends_no_process(request_: JSON | str | None) -> None:
    answer = ToolServer().handle({"type": "control_request", "request_id": "r", "request": request_})
    assert answer is None or answer["response"]["request_id"] == "r"


def test_an_error_of_the_clis_own_in_the_place_of_a_result_is_noticed() -> None:
    brought = {"call_1": {"content": [{"type": "text", "text": "sunny"}], "isError": False}}

    def shown(call: str, **more: object) -> JSON:
        block = {"type": "tool_result", "tool_use_id": call, "content": "interrupted", **more}
        return {"type": "user", "message": {"role": "user", "content": [block]}}

    assert not_taken(shown("call_1", is_error=True), brought) == "call_1"
    assert not_taken(shown("call_1"), brought) is None
    assert not_taken(shown("call_2", is_error=True), brought) is None
    assert not_taken({"type": "user", "message": {"content": "words"}}, brought) is None
    assert not_taken(None, brought) is None
    failed = {"call_1": {"content": [{"type": "text", "text": "no such city"}], "isError": True}}
    assert not_taken(shown("call_1", is_error=True), failed) is None
    large = {"call_1": {"content": [{"type": "text", "text": "x" * SMALL_RESULT}]}}
    assert not_taken(shown("call_1", is_error=True), large) is None
