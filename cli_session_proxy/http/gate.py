"""The first and last thing a request meets: its id, its Host, its agent's path prefix, and any error left over.

One ASGI layer around the whole app, so that every route has the same rules and every wire the same prefix
`/agents/{agent_id}/v1/…` (or `/v1beta/…`), which is cut off before the routes see the path.
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

from .. import logs
from ..domain.models import JSON
from ..errors import InvalidRequest, ProxyError
from ..sandbox import LOCAL_OWNER
from ..wires.common import decoded_agent_id, retry_after
from ..wires.failures import SHAPES, wire_of
from .keys import Keys

log = logs.get(__name__)

REQUEST_ID = "X-Request-Id"
# Answered without a key: is it there, can it serve, and the files of the page (what they show needs the key).
OPEN = frozenset({"/healthz", "/readyz", "/ui"})
OPEN_BELOW = "/ui/"
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
# A client's id goes into logs and a header: plain characters, and no longer than common tracing ids need.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
CHAINS = b"/v1/chains/"
_AGENT_PREFIX = re.compile(rb"/agents/(.*?)(/v1(?:beta)?/.*)", re.S)


class Gate:
    """`host` is the name or address the proxy was told to listen on; loopback names are always right.

    With keys, a request's owner is known before any route sees it (`state["owner"]`); without one it is a 401.
    """

    def __init__(self, app: ASGIApp, *, host: str, keys: Keys) -> None:
        self._app = app
        self._host = host.lower()
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        request_id = _request_id(headers.get("x-request-id"))
        agent, inner = _inside(scope, headers, request_id)
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
                if not _is_open(inner["path"]):
                    query = scope.get("query_string", b"").decode("latin-1")
                    inner["state"]["owner"] = self._keys.owner_of(headers, query)
                if agent is not None:
                    inner["state"]["agent_id"] = decoded_agent_id(agent)
                await self._app(inner, receive, with_id)
            except Exception as exc:  # noqa: BLE001 - the last place: whatever it is, the client gets an answer
                error = as_proxy_error(exc)
                if started:
                    # A body that is not ended makes the server close the connection: the client sees a cut.
                    log.warning("answer cut", code=error.code)
                else:
                    await send_error(with_id, inner, error)

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
        if name in {"localhost", self._host} or _is_loopback(name):
            return True
        # A machine that listens on every address has more names than we know. There the key is the lock: a foreign
        # page has none.
        return bool(self._keys) and self._host in EVERY_ADDRESS


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


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


def _inside(scope: Scope, headers: Mapping[str, str], request_id: str) -> tuple[bytes | None, dict[str, Any]]:
    """The agent named by the path, still encoded, and the scope that the routes see: without it, with our `state`."""
    agent, inner = None, dict(scope)
    prefixed = _AGENT_PREFIX.fullmatch(raw_path(scope))
    if prefixed is not None:
        agent = prefixed[1]
        inner.update(raw_path=prefixed[2], path=unquote(prefixed[2].decode("latin-1")))
    wire = wire_of(inner["path"], headers, scope.get("query_string", b"").decode("latin-1"))
    known = {"request_id": request_id, "agent_id": None, "wire": wire, "owner": LOCAL_OWNER}
    inner["state"] = {**scope.get("state", {}), **known}
    if raw_path(inner).startswith(CHAINS):
        # Routed as it was sent, so that an agent's encoded slash is not taken for the one before `/turns`.
        inner["path"] = raw_path(inner).decode("latin-1")
    return agent, inner


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


def error_body(scope: Scope, error: ProxyError) -> JSON:
    """The error in the words of the wire that this request speaks."""
    state = scope["state"]
    return SHAPES[state["wire"]](error, state["request_id"])


async def send_error(send: Send, scope: Scope, error: ProxyError, headers: Mapping[str, str] | None = None) -> None:
    """The whole answer for an error, before anything else was sent."""
    await send_json(send, error.status, error_body(scope, error), {**(headers or {}), **retry_after(error)})


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": encoded(sent)})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
