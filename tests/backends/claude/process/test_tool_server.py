"""What the server of the client's tools answers, whatever it is asked."""

from __future__ import annotations

import pytest

from cli_session_proxy.backends.claude.process.tool_server import ToolServer
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
