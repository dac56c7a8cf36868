"""The outermost layer: request ids, access checks, limits, the agent's path prefix, and unhandled errors.

One ASGI layer around the whole app, so that every route has the same rules and every wire the same prefix
`/agents/{agent_id}/v1/…` (or what else its `bases` are), which is cut off before the routes see the path.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import logs, redact
from ..domain.plan import HEADER, Plan
from ..engine.live import RESTART, TRACE_CONTEXT
from ..engine.passing import ORIGIN
from ..errors import Interrupted, InvalidRequest, NotFound, Unauthorized
from ..sandbox import LOCAL_OWNER
from ..stores import held
from ..stores.held import Holds
from ..wires.asgi import CLOSED, Table, as_proxy_error, encoded, headers_of, raw_path, send_error
from ..wires.base import Wire
from ..wires.common import decoded_agent_id
from .audit import Audit, RequestAudit
from .bounds import Bounds
from .gateway import is_among
from .hop import REFUSED, REPEATED, Incoming
from .keys import Keys
from .origins import Origins, check_body, permitted, readable_by
from .proof import BODY, HOP_MARK, OLD_MARK, PROOF, QUESTIONS, caller_of, checked

if TYPE_CHECKING:  # its HTTP client is only loaded with a cluster
    from .relay import Relay

log = logs.get(__name__)

# Log lines name turns by id and no agents, so that they hold no names of deleted ones.
TURN_ID = b"x-turn-id"
PLAN_STATUS = f"{HEADER}-status".encode()  # one of the headers about the plan's limits
# Methods that only read. They are not logged: the page sends one every other second.
READING = frozenset({"GET", "HEAD", "OPTIONS"})
# Answered without a key: what this program is, health, readiness, and the files of the page (its data needs the key).
NO_KEY_NEEDED = frozenset({"/", "/healthz", "/readyz", "/ui"})
NO_KEY_NEEDED_BELOW = "/ui/"
# No framing, type sniffing, embedding in other pages, or caching.
_PROTECTION = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
# Parameters of errors about the caller, not about the request.
_ABOUT_CALLER = frozenset({"Host", "Origin", "Content-Type"})
# RFC 6455: the close code of a refusal, and the most bytes of its reason.
POLICY_VIOLATION, LONGEST_REASON = 1008, 123
# A client's id goes into logs and a header: plain characters, and no longer than common tracing ids need.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
CHAINS = b"/v1/chains/"
# Bytes of an answer that are given to the server at once. It takes the next ones when the client has read these: all of
# a large answer would count as unread, and the client would be disconnected (`connection.UNREAD`).
PIECE = 256 * 1024
# Seconds in which a client has to take a message of more than one piece, or all of an answer while a long path is held
# for it (`stores.held`): a client that reads a little now and then would keep that memory.
TAKEN_WITHIN = 900.0


class _ClientLeftError(ConnectionResetError):
    """The client left before it had a whole message of the answer, or did not read it in time. Nothing may follow the
    part that it has."""


class _Answer:
    """One answer on its way to the client: with the headers that every answer has, in pieces, and within a time.

    `headers`: what is added to it when it begins. `prove`: signs it for another proxy, which has signed its request
    (the status, and whether nothing was done). `connection`: what the server says of the connection, if it does.
    """

    def __init__(self, scope: Scope, send: Send, plan: Callable[[], Plan | None], headers: dict[str, str]) -> None:
        self.is_socket = scope["type"] == "websocket"
        self.connection = scope.get("extensions", {}).get(CLOSED)
        self.headers = headers
        self.prove: Callable[[int, bool], str] | None = None
        self.audit: RequestAudit | None = None
        self.has_begun = False
        self.log_fields: dict[str, Any] = {}
        self._send = send
        self._plan = plan
        self._deadline: float | None = None  # by the loop's time: for all of the answer

    async def send(self, message: Message) -> None:
        """Pass a message of the app on. Raises `_ClientLeftError`."""
        if begins := message["type"] in ("http.response.start", "websocket.accept"):
            self._begin(message)
        if self.is_socket and message["type"].startswith("http."):
            message = {**message, "type": f"websocket.{message['type']}"}
        body, sent = message.get("body", b""), 0
        now = asyncio.get_running_loop().time()
        if begins and held.is_held():
            self._deadline = now + TAKEN_WITHIN
        if len(body) <= PIECE and self._deadline is None:
            await self._send(message)
            return
        try:
            async with asyncio.timeout_at(self._deadline or now + TAKEN_WITHIN):
                while len(body) - sent > PIECE:
                    await self._send({**message, "body": body[sent : sent + PIECE], "more_body": True})
                    sent += PIECE
                    if self.connection is not None and self.connection["is_closed"]():
                        raise _ClientLeftError  # the server would drop the rest without a word
                await self._send({**message, "body": body[sent:]} if sent else message)
        except TimeoutError:
            log.warning("client_reads_too_slowly", seconds=TAKEN_WITHIN)
            raise _ClientLeftError from None

    def _begin(self, message: Message) -> None:
        """Add to the message that begins the answer what every answer has."""
        status = message.get("status", 0)
        if self.audit is not None:
            self.audit.answers(status)
        self.has_begun = True
        headers = list(message.get("headers", ()))
        by_name = dict(headers)
        headers += [(name, value) for name, value in _PROTECTION if name not in by_name]
        self.log_fields["status"] = message.get("status")
        if self.prove is not None:
            self.headers[PROOF] = self.prove(status, REFUSED in self.headers)
        if TURN_ID in by_name:
            self.log_fields["turn_id"] = by_name[TURN_ID].decode()
            plan = self._plan()
            if plan is not None and PLAN_STATUS not in by_name:  # else another proxy has set it
                headers += encoded(dict(plan.headers()))
        message["headers"] = [*headers, *encoded(self.headers)]


class Gate:
    """Every ASGI scope passes here; only HTTP and WebSockets are accepted.

    With keys, a request's owner is known before any route sees it (`state["owner"]`); without one it is a 401.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        wires: Table,
        origins: Origins,
        keys: Keys,
        bounds: Bounds,
        holds: Holds,
        relay: Relay | None = None,
        plan: Callable[[], Plan | None] = lambda: None,
        audit: Audit | None = None,
    ) -> None:
        self._app = app
        self._wires = wires
        self._origins = origins
        self._keys = keys if keys else None
        self._bounds = bounds
        self._holds = holds
        self._plan = plan
        self._audit = audit
        self._relay = relay
        # For forwarded requests: they are counted at the proxy that they came to first.
        self._unlimited = Bounds(sys.maxsize, sys.maxsize, sys.maxsize)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # no request
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"{scope['type']} is not served: the proxy speaks HTTP")
        headers = headers_of(scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{os.urandom(12).hex()}"
        agent, inner = self._inside(scope, headers, request_id)
        wire: Wire = inner["state"]["wire"]
        answer = _Answer(scope, send, self._plan, {"x-request-id": request_id})
        if self._audit is not None and not answer.is_socket:
            answer.audit = RequestAudit(self._audit, scope, inner["state"], raw_path(scope), self._keys is not None)
            inner["state"]["audit"] = answer.audit
        began = time.monotonic()
        # Always set: the task may have begun in the context of the connection's last request.
        parent = headers.get("traceparent")
        TRACE_CONTEXT.set(None if parent is None else (parent, headers.get("tracestate", "")))
        logs.bind(request_id=request_id)  # the server starts a task per request
        try:
            await self._serve(scope, inner, agent, receive, answer)
        except asyncio.CancelledError:
            # The server stops, and ending the turn takes longer than the drain. A begun answer stays unfinished.
            if not answer.has_begun:
                why = "the proxy stopped before this answer was ready: send the request again"
                await send_error(answer.send, inner, Interrupted(why, retry_after=RESTART))
            raise
        except _ClientLeftError:
            log.info("client_left")
        except Exception as exc:  # noqa: BLE001 - the last place: whatever it is, the client gets an answer
            error = as_proxy_error(exc)
            if error.code == Unauthorized.code or error.param in _ABOUT_CALLER:
                # The key is not logged: it may be a secret.
                log.info("refused", code=error.code, param=error.param, wire=wire.errors.name)
            if answer.has_begun:
                # An unfinished body makes the server close the connection, so that the client notices.
                log.warning("answer cut", code=error.code)
            elif answer.is_socket and "websocket.http.response" not in (scope.get("extensions") or {}):
                # The server cannot send an HTTP answer to a WebSocket handshake.
                why = redact.text(error.message).encode()[:LONGEST_REASON].decode("utf-8", "ignore")
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": why})
            else:
                await send_error(answer.send, inner, error)
        finally:
            if not answer.is_socket and scope["method"] not in READING:
                fields = {"method": scope["method"], "wire": wire.errors.name, **answer.log_fields}
                log.info("request", **fields, ms=round((time.monotonic() - began) * 1000))

    async def _serve(
        self, scope: Scope, inner: dict[str, Any], agent: bytes | None, receive: Receive, answer: _Answer
    ) -> None:
        """Check the caller (another proxy's signature, a page's origin, a key) and the limits, and run the route.
        `agent`: the name in the path, still encoded."""
        headers, wire = inner["state"]["headers"], inner["state"]["wire"]
        names = list(map(itemgetter(0), scope["headers"]))
        for name in (b"host", b"origin"):
            # Another parser may take the other of two equal headers (RFC 9112, 3.2).
            if names.count(name) > 1:
                header = name.decode()
                raise InvalidRequest(f"the {header} header occurs twice: send it once", param=header.title())
        forwarded_for: str | None = None  # the owner of a forwarded request: the other proxy has checked the key
        if self._relay is not None and (HOP_MARK in headers or OLD_MARK in headers):
            self._relay.signer.check(scope, headers)
            answer.prove = partial(self._relay.signer.prove, headers)
            if inner["path"] not in QUESTIONS:
                answer.headers[REPEATED] = "1"
                self._relay.signer.once(headers)
                del answer.headers[REPEATED]
            # Nothing is done yet: if a check fails, the answer says so to the other proxy.
            answer.headers[REFUSED] = "1"
            forwarded_for = self._relay.owner_of(headers)
            receive = checked(receive, headers[BODY])
            del answer.headers[REFUSED]
        from_browser = "origin" in headers or "sec-fetch-site" in headers
        allowed_origin: str | None = None
        if forwarded_for is None:
            self._origins.check_host(headers)
            if from_browser:
                scheme = scope["scheme"].replace("ws", "http", 1)
                allowed_origin = self._origins.check_page(headers, scheme, inner["path"])
        if allowed_origin is not None:
            if not answer.is_socket and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                allowed = encoded(permitted(allowed_origin, headers))
                await answer.send({"type": "http.response.start", "status": 204, "headers": allowed})
                await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            answer.headers |= readable_by(allowed_origin)
        if from_browser:
            check_body(headers)
        is_open = inner["path"] in NO_KEY_NEEDED or inner["path"].startswith(NO_KEY_NEEDED_BELOW)
        if forwarded_for is not None:
            inner["state"]["owner"] = forwarded_for
        elif not is_open and self._keys is not None:
            query = scope.get("query_string", b"").decode("latin-1") if wire.key_in_address else ""
            inner["state"]["owner"] = await self._owner(self._keys, scope, headers, query)
        if agent is not None:
            inner["state"]["agent_id"] = decoded_agent_id(agent)
        if answer.is_socket and inner["path"] not in wire.sockets:
            raise NotFound("there is no WebSocket at this address: send the same as a POST, with stream for events")
        if is_open:
            await self._app(inner, receive, answer.send)
            return
        if answer.connection is not None:
            answer.connection["admitted"] = True  # the stricter limits for clients without a key end here
        bounds = self._bounds if forwarded_for is None else self._unlimited
        owner = inner["state"]["owner"]
        with bounds.request(owner) as hold, self._holds.hold(owner):
            inner["state"]["held"] = hold
            if self._relay is None:
                await self._app(inner, receive, answer.send)
            elif answer.is_socket:
                token = ORIGIN.set("websocket")  # its messages cannot be forwarded
                try:
                    await self._app(inner, receive, answer.send)
                finally:
                    ORIGIN.reset(token)
            else:
                via = None if forwarded_for is None else caller_of(headers)
                await self._relay.serve(self._app, Incoming(scope, inner, receive, answer.send), via=via)

    async def _owner(self, keys: Keys, scope: Scope, headers: Mapping[str, str], query: str) -> str:
        """The owner of a request. Raises `Unauthorized`, and `InvalidRequest` for a wrong header of the gateway."""
        if (found := keys.gateway(scope)) is not None:
            gateway, peer = found
            # An agent's shell at another proxy has that machine's address: unlike a gateway, it must not name an owner.
            if self._relay is None or not await is_among(peer, await self._relay.others()):
                return gateway.owner_of(scope)
        return keys.owner_of(headers, query)

    def _inside(self, scope: Scope, headers: Mapping[str, str], request_id: str) -> tuple[bytes | None, dict[str, Any]]:
        """The agent in the path, still encoded, and the scope for the routes: with our state, without the agent's
        prefix."""
        agent, inner = None, dict(scope)
        prefixed = self._wires.agent_of(raw_path(scope))
        if prefixed is not None:
            agent, rest = prefixed
            inner.update(raw_path=rest, path=unquote(rest.decode("latin-1")))
        wire = self._wires.of(inner["path"], headers, scope.get("query_string", b"").decode("latin-1"))
        known = {"request_id": request_id, "agent_id": None, "wire": wire, "owner": LOCAL_OWNER, "headers": headers}
        inner["state"] = {**scope.get("state", {}), **known}
        if raw_path(inner).startswith(CHAINS):
            # Route by the raw path, so that an encoded slash in an agent's name is not the one before `/turns`.
            inner["path"] = raw_path(inner).decode("latin-1")
        return agent, inner
