"""The in-process MCP server of the client's tools, as the CLI talks to it over its control channel.

Run on 2.1.329: a control request `mcp_set_servers` with `{"client": {"type": "sdk", "name": "client"}}` makes the
CLI ask for initialize and tools/list, and at a model's call for tools/call, each as a `control_request` with the
subtype `mcp_message`; `params._meta["claudecode/toolUseId"]` names the call. A call that is not answered is waited
for until the server's `timeout`. A tool that is changed, or taken away while others stay, is only seen so by a new
process: the CLI keeps what it had.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

from ....domain.client_tools import SERVER, Offers
from ....domain.models import JSON
from ....settings import Settings

TOOL_USE_ID = "claudecode/toolUseId"
PROTOCOL = "2025-06-18"
# How much longer than we the CLI waits for a result (seconds): it would tell the model itself that none came.
TOOL_SLACK = 600.0
# A result of so many characters of JSON is not too large for any CLI.
SMALL_RESULT = 20_000


class Ask(Protocol):
    """Makes a control request, and tells whether it succeeded (None: no answer came)."""

    async def __call__(self, subtype: str, **fields: object) -> bool | None: ...


class ToolServer:
    """One process's server: what it offers, which calls wait, and which answers came before their call."""

    def __init__(self) -> None:
        self.offers = Offers()
        self.listed = asyncio.Event()  # the CLI has read the present offers
        self._seen: dict[str, JSON] = {}
        self._waiting: dict[str, tuple[str, object]] = {}  # call -> the requests that wait for its result
        self._early: dict[str, JSON] = {}

    def takes(self, offers: Offers) -> bool:
        """Can the running process be offered these? It can be given more tools, or none."""
        grown = not offers or set(offers.entries) >= set(self.offers.entries)
        return grown and all(self._seen.get(name, entry) == entry for name, entry in offers.entries.items())

    def offer(self, offers: Offers) -> None:
        self.offers = offers
        self.listed.clear()
        self._seen.update(offers.entries)

    def forget(self) -> None:
        """The turn is over: no call of it waits any more."""
        self._waiting.clear()
        self._early.clear()

    def handle(self, frame: JSON, *, in_turn: bool = True) -> JSON | None:
        """The frame that answers this control request; None when it has to wait for the client's result. Between turns
        no model calls anything: what a shell makes up in the CLI's place is not kept."""
        request = _dict(frame.get("request"))
        request_id = str(frame.get("request_id"))
        message = _dict(request.get("message"))
        if request.get("subtype") != "mcp_message" or request.get("server_name") != SERVER:
            error = f"{request.get('subtype')} is not served here"
            return {
                "type": "control_response",
                "response": {"subtype": "error", "request_id": request_id, "error": error},
            }
        method, number = message.get("method"), message.get("id")
        if method == "tools/call" and in_turn:
            call = called_in(frame)
            self._waiting[call] = (request_id, number)
            return self.answer(call, self._early.pop(call)) if call in self._early else None
        if number is None:
            return _response(request_id, {"jsonrpc": "2.0", "result": {}, "id": 0})
        if method == "tools/list":
            self.listed.set()
        return _response(request_id, {"jsonrpc": "2.0", "id": number, **self._result(method, message)})

    def answer(self, call: str, result: JSON) -> JSON | None:
        """The frame that brings this result to the CLI; None when the CLI has not made the call yet."""
        if call not in self._waiting:
            self._early[call] = result
            return None
        request_id, number = self._waiting.pop(call)
        return _response(request_id, {"jsonrpc": "2.0", "id": number, "result": result})

    def _result(self, method: object, message: JSON) -> JSON:
        if method == "initialize":
            version = _dict(message.get("params")).get("protocolVersion", PROTOCOL)
            info = {"name": SERVER, "version": "1"}
            return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
        if method == "tools/list":
            return {"result": {"tools": list(self.offers.entries.values())}}
        if method == "ping":
            return {"result": {}}
        return {"error": {"code": -32601, "message": f"no method {method}"}}


def not_taken(frame: JSON | None, results: Mapping[str, JSON]) -> str | None:
    """A call to which the model is shown an error of the CLI's own, though the client's result was none.

    2.1.330 makes one up where it cannot read the result: "The tool call was interrupted before a result was received."
    A result that is too large becomes an error too: that one is the CLI's limit, and stays.
    """
    if frame is None or frame.get("type") != "user":
        return None
    content = _dict(frame.get("message")).get("content")
    for block in content if isinstance(content, list) else ():
        call = str(_dict(block).get("tool_use_id"))
        brought = results.get(call)
        if brought is None or brought.get("isError") or _dict(block).get("is_error") is not True:
            continue
        if len(json.dumps(brought)) <= SMALL_RESULT:
            return call
    return None


def called_in(frame: JSON) -> str:
    """The call that a request for `tools/call` is."""
    message = _dict(_dict(frame.get("request")).get("message"))
    return str(_dict(_dict(message.get("params")).get("_meta")).get(TOOL_USE_ID))


def _dict(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _response(request_id: str, message: JSON) -> JSON:
    response = {"subtype": "success", "request_id": request_id, "response": {"mcp_response": message}}
    return {"type": "control_response", "response": response}


async def offer(
    server: ToolServer, offers: Offers, ask: Ask, *, until: asyncio.Future[None], settings: Settings, wait: float
) -> bool:
    """Make these what the running process offers. False where it cannot, where it ends (`until`) before it has, and
    where it has not read them in `wait` seconds."""
    if offers == server.offers:
        return True
    if not server.takes(offers) or (server.offers and not await ask("mcp_set_servers", servers={})):
        return False
    server.offer(offers)
    if not offers:
        return True
    timeout = int((settings.tool_timeout + TOOL_SLACK) * 1000)
    entry = {"type": "sdk", "name": SERVER, "timeout": timeout, "disableAutoBackground": True}
    if not await ask("mcp_set_servers", servers={SERVER: entry}):
        return False
    listed = asyncio.create_task(server.listed.wait())
    try:
        either: set[asyncio.Future[Any]] = {listed, until}
        await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        return listed.done()
    finally:
        listed.cancel()
