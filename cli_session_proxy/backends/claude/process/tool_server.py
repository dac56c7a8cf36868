"""The MCP server with the client's tools, which a CLI uses over its control channel.

Run on 2.1.329: after a control request `mcp_set_servers` with `{"client": {"type": "sdk", "name": "client"}}` the CLI
sends initialize and tools/list, and for a model's call tools/call, each as a `control_request` of subtype
`mcp_message`; `params._meta["claudecode/toolUseId"]` is the call's id. It waits for an answer until the server's
`timeout`. Changing a tool, or removing one while others stay, needs a new process: a running CLI keeps the old tools.
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
# Seconds that the CLI waits for a result longer than we do: else it would tell the model that none came.
TOOL_SLACK = 600.0
# Characters of JSON up to which every CLI accepts a result.
SMALL_RESULT = 20_000


class Ask(Protocol):
    """Sends a control request; returns whether it succeeded (None: no answer)."""

    async def __call__(self, subtype: str, **fields: object) -> bool | None: ...


class ToolServer:
    """One process's server: its tools, waiting calls, and results that came before their call."""

    def __init__(self) -> None:
        self.offers = Offers()
        self.listed = asyncio.Event()  # the CLI has read the present tools
        self._seen: dict[str, JSON] = {}
        self._waiting: dict[str, tuple[str, object]] = {}  # by call: the request that waits for its result
        self._early: dict[str, JSON] = {}

    def takes(self, offers: Offers) -> bool:
        """Whether a running process can switch to these: only to more tools, or none."""
        grown = not offers or set(offers.entries) >= set(self.offers.entries)
        return grown and all(self._seen.get(name, entry) == entry for name, entry in offers.entries.items())

    def offer(self, offers: Offers) -> None:
        self.offers = offers
        self.listed.clear()
        self._seen.update(offers.entries)

    def forget(self) -> None:
        """Drop the turn's calls: it is over."""
        self._waiting.clear()
        self._early.clear()

    def handle(self, frame: JSON, *, in_turn: bool = True) -> JSON | None:
        """The frame that answers this control request; None if it has to wait for the client's result. Between turns
        the model makes no calls: forged ones are not stored."""
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
        reply: JSON = {"error": {"code": -32601, "message": f"no method {method}"}}
        if method == "initialize":
            version = _dict(message.get("params")).get("protocolVersion", PROTOCOL)
            info = {"name": SERVER, "version": "1"}
            reply = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
        elif method == "tools/list":
            self.listed.set()
            reply = {"result": {"tools": list(self.offers.entries.values())}}
        elif method == "ping":
            reply = {"result": {}}
        return _response(request_id, {"jsonrpc": "2.0", "id": number, **reply})

    def answer(self, call: str, result: JSON) -> JSON | None:
        """The frame with this result for the CLI; None if the CLI has not sent the call yet."""
        if call not in self._waiting:
            self._early[call] = result
            return None
        request_id, number = self._waiting.pop(call)
        return _response(request_id, {"jsonrpc": "2.0", "id": number, "result": result})


def not_taken(frame: JSON | None, results: Mapping[str, JSON]) -> str | None:
    """A call for which the CLI showed the model an error of its own, although the client's result was no error.

    2.1.330 does this if it cannot read the result: "The tool call was interrupted before a result was received." A too
    large result also becomes an error: that is the CLI's limit, and not reported here.
    """
    if frame is None or frame.get("type") != "user":
        return None
    content = _dict(frame.get("message")).get("content")
    for block in content if isinstance(content, list) else ():
        call = str(_dict(block).get("tool_use_id"))
        sent = results.get(call)
        if sent is None or sent.get("isError") or _dict(block).get("is_error") is not True:
            continue
        if len(json.dumps(sent)) <= SMALL_RESULT:
            return call
    return None


def called_in(frame: JSON) -> str:
    """The id of the call in a `tools/call` request."""
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
    """Set the tools of the running process. False if it cannot, if it ends (`until`), or if it has not read them within
    `wait` seconds."""
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
