"""The first and last thing a request meets: its id, who may ask, its agent's path prefix, and any error left over.

One ASGI layer around the whole app, so that every route has the same rules and every wire the same prefix
`/agents/{agent_id}/v1/…` (or what else its `bases` are), which is cut off before the routes see the path.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import logs, redact
from ..engine.live import RESTART
from ..errors import Interrupted, InvalidRequest, NotFound, Unauthorized
from ..sandbox import LOCAL_OWNER
from ..wires.base import Table, Wire
from ..wires.common import decoded_agent_id
from ..wires.sending import as_proxy_error, encoded, headers_of, raw_path, send_error
from .bounds import Bounds
from .keys import Keys
from .origins import Origins, check_body, is_preflight, permitted, readable_by

log = logs.get(__name__)

REQUEST_ID = "X-Request-Id"
# Answered without a key: what is this, is it there, can it serve, and the files of the page (what they show needs the
# key).
OPEN = frozenset({"/", "/healthz", "/readyz", "/ui"})
OPEN_BELOW = "/ui/"
# Nobody frames an answer, guesses its type, embeds it in a page of their own, or keeps it.
_PROTECTION = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
# What a refusal names that is about who asks, not about what is asked for.
_WHO_ASKS = frozenset({"Host", "Origin", "Content-Type"})
# RFC 6455: the code of a refusal, and how long its reason may be in bytes.
POLICY_VIOLATION, LONGEST_REASON = 1008, 123
# A client's id goes into logs and a header: plain characters, and no longer than common tracing ids need.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
CHAINS = b"/v1/chains/"


class Gate:
    """Every scope of the server passes here; what is neither HTTP nor a WebSocket is no way in.

    With keys, a request's owner is known before any route sees it (`state["owner"]`); without one it is a 401.
    """

    def __init__(self, app: ASGIApp, *, wires: Table, origins: Origins, keys: Keys, bounds: Bounds) -> None:
        self._app = app
        self._wires = wires
        self._origins = origins
        self._keys = keys
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server's own: nobody asks for anything
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"no way in for {scope['type']}: the proxy speaks HTTP")
        is_socket = scope["type"] == "websocket"
        headers = headers_of(scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{secrets.token_hex(12)}"
        agent, inner = self._inside(scope, headers, request_id)
        wire: Wire = inner["state"]["wire"]
        added = {"x-request-id": request_id}
        started = False

        async def out(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.accept"):
                started = True
                given = list(message.get("headers", ()))
                named = {name for name, _ in given}
                lacking = [pair for pair in _PROTECTION if pair[0] not in named]
                message["headers"] = [*given, *lacking, *encoded(added)]
            if is_socket and message["type"].startswith("http."):
                message = {**message, "type": f"websocket.{message['type']}"}
            await send(message)

        with logs.bound(request_id=request_id):
            try:
                for name in (b"host", b"origin"):
                    # Of two equal headers another reader may take the other one (RFC 9112, 3.2).
                    if sum(given == name for given, _ in scope["headers"]) > 1:
                        shown = name.decode()
                        raise InvalidRequest(f"the {shown} header stands twice: send it once", param=shown.title())
                self._origins.check_host(headers)
                reader = self._origins.check_page(headers, scope["scheme"].replace("ws", "http", 1), inner["path"])
                if reader is not None:
                    if not is_socket and is_preflight(scope["method"], headers):
                        allowed = encoded(permitted(reader, headers))
                        await out({"type": "http.response.start", "status": 204, "headers": allowed})
                        await out({"type": "http.response.body", "body": b"", "more_body": False})
                        return
                    added |= readable_by(reader)
                check_body(headers)
                is_open = inner["path"] in OPEN or inner["path"].startswith(OPEN_BELOW)
                if not is_open:
                    query = scope.get("query_string", b"").decode("latin-1")
                    inner["state"]["owner"] = self._keys.owner_of(headers, query if wire.key_in_address else "")
                if agent is not None:
                    inner["state"]["agent_id"] = decoded_agent_id(agent)
                if is_socket and inner["path"] not in wire.sockets:
                    raise NotFound("nothing speaks WebSocket here: send the same as a POST, with stream for events")
                if is_open:
                    await self._app(inner, receive, out)
                    return
                with self._bounds.request(inner["state"]["owner"]) as held:
                    inner["state"]["held"] = held
                    await self._app(inner, receive, out)
            except asyncio.CancelledError:
                # The server stops, and what a turn still needs for its end takes longer than the drain.
                if not started:
                    why = "the proxy stopped before this answer was ready: send the request again"
                    await send_error(out, inner, Interrupted(why, retry_after=RESTART))
                raise
            except Exception as exc:  # noqa: BLE001 - the last place: whatever it is, the client gets an answer
                error = as_proxy_error(exc)
                if error.code == Unauthorized.code or error.param in _WHO_ASKS:
                    # Not who: what was presented is a secret, or a stranger's own words.
                    log.info("refused", code=error.code, param=error.param, wire=wire.errors.name)
                if started:
                    # A body that is not ended makes the server close the connection: the client sees a cut.
                    log.warning("answer cut", code=error.code)
                elif is_socket and "websocket.http.response" not in (scope.get("extensions") or {}):
                    # The server cannot send an HTTP answer to a WebSocket handshake.
                    why = redact.text(error.message).encode()[:LONGEST_REASON].decode("utf-8", "ignore")
                    await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": why})
                else:
                    await send_error(out, inner, error)

    def _inside(self, scope: Scope, headers: Mapping[str, str], request_id: str) -> tuple[bytes | None, dict[str, Any]]:
        """The agent named by the path, still encoded, and the scope that the routes see: without it, with our state."""
        agent, inner = None, dict(scope)
        prefixed = self._wires.agent_of(raw_path(scope))
        if prefixed is not None:
            agent, rest = prefixed
            inner.update(raw_path=rest, path=unquote(rest.decode("latin-1")))
        wire = self._wires.of(inner["path"], headers, scope.get("query_string", b"").decode("latin-1"))
        known = {"request_id": request_id, "agent_id": None, "wire": wire, "owner": LOCAL_OWNER}
        inner["state"] = {**scope.get("state", {}), **known}
        if raw_path(inner).startswith(CHAINS):
            # Routed as it was sent, so that an agent's encoded slash is not taken for the one before `/turns`.
            inner["path"] = raw_path(inner).decode("latin-1")
        return agent, inner
