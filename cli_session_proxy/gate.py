"""The first and last thing a request meets: its id, its Host, its agent's path prefix, and any error left over.

One ASGI layer around the whole app, so that every route has the same rules and every wire the same prefix
`/agents/{agent_id}/v1/…`, which is cut off before the routes see the path.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import logs
from .errors import InvalidRequest, ProxyError
from .protocols.common import as_openai_error, decoded_agent_id, retry_after

log = logs.get(__name__)

REQUEST_ID = "X-Request-Id"
# A client's id goes into logs and a header: plain characters, and no longer than common tracing ids need.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
_AGENT_PREFIX = re.compile(rb"/agents/(.*?)(/v1/.*)", re.S)


class Gate:
    """`host` is the name or address the proxy was told to listen on; loopback names are always right."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        request_id = _request_id(headers.get("x-request-id"))
        started = False

        async def with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        with logs.bound(request_id=request_id):
            try:
                self._check_host(headers)
                await self._app(_inside(scope, request_id), receive, with_id)
            except Exception as exc:  # noqa: BLE001 - the last place: whatever it is, the client gets an answer
                error = as_proxy_error(exc)
                if started:
                    # A body that is not ended makes the server close the connection: the client sees a cut.
                    log.warning("answer cut", code=error.code)
                else:
                    await send_error(with_id, error)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse what a browser was tricked into: a foreign name that resolves to us, or a foreign page's request."""
        if not self._is_ours(headers.get("host", "")):
            raise InvalidRequest(
                "the Host header names another machine: call http://127.0.0.1 or http://localhost", param="Host"
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(origin.partition("://")[2]):
            raise InvalidRequest("requests from pages of other origins are not served", param="Origin")

    def _is_ours(self, netloc: str) -> bool:
        # Only the name is compared: tunnels and port maps change the port, a rebinding attack has to bring a name.
        try:
            name = (urlsplit(f"//{netloc}").hostname or "").lower()
        except ValueError:
            return False
        return name in {"localhost", self._host} or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def headers_of(scope: Scope) -> dict[str, str]:
    """Lower-case names, latin-1 values; the first of equal names, as a proxy in front would read it."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent, still percent-encoded: only there an encoded slash differs from a real one."""
    raw = scope.get("raw_path")
    return raw if isinstance(raw, bytes) else quote(scope["path"]).encode()


def _inside(scope: Scope, request_id: str) -> Scope:
    state: dict[str, Any] = {**scope.get("state", {}), "request_id": request_id, "agent_id": None}
    inner = {**scope, "state": state}
    prefixed = _AGENT_PREFIX.fullmatch(raw_path(scope))
    if prefixed is not None:
        state["agent_id"] = decoded_agent_id(prefixed[1])
        inner.update(raw_path=prefixed[2], path=unquote(prefixed[2].decode("latin-1")))
    return inner


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req_{secrets.token_hex(12)}"


def as_proxy_error(exc: Exception) -> ProxyError:
    """The error to show. One that nobody foresaw is logged by its frames alone: its text may hold a prompt."""
    if isinstance(exc, ProxyError):
        return exc
    frames = "".join(traceback.format_tb(exc.__traceback__))
    log.error("unexpected error", error=type(exc).__name__, frames=frames)
    return ProxyError("the proxy failed unexpectedly: its log has the details under this X-Request-Id")


async def send_error(send: Send, error: ProxyError, headers: Mapping[str, str] | None = None) -> None:
    """The whole answer for an error, before anything else was sent."""
    await send_json(send, error.status, as_openai_error(error), {**(headers or {}), **retry_after(error)})


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": encoded(sent)})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
