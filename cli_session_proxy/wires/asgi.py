"""HTTP for all wires: routes, request bodies, headers and errors.

A small body is parsed on the event loop, a medium one in a thread, a large one in a helper process (see `aside`). Each
step of the first two takes less than 50 ms for the worst body of that size.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import logs
from ..aside.pool import Aside, OutOfBoundsError
from ..domain.models import JSON
from ..errors import Interrupted, InvalidRequest, ProxyError, RequestTooLarge
from .base import ANY, AddressClaim, RequestAddress, Wire
from .common import Naming, compact, naming, read_bytes, retry_headers

log = logs.get(__name__)

T = TypeVar("T")

# Seconds for a whole body: a program on this machine that takes longer is stuck.
BODY_TIMEOUT = 300.0
# The scope extension of our server: whether the client has closed the connection (`is_closed`), and a function that
# sends now what was written in this loop iteration (`flush`).
CLOSED = "cli_session_proxy.closed"
# Bytes that are parsed on the event loop: under 1 ms for text, 10 ms for the worst JSON (2,000 one-letter messages).
SMALL = 64 * 1024
# Bytes that are parsed in a thread: the longest call into C, which also blocks the event loop, takes 20 ms for the
# worst JSON. Most agent programs send sizes between these two.
MIDDLING = 512 * 1024


async def read_call(request: Request, limit: int, read: Callable[[JSON, Naming], T]) -> T:
    """Read the body (at most `limit` bytes), and parse it with the wire's `read`. Raises `InvalidRequest`."""
    return await read_aside(request.app.state.aside, await read_body(request, limit), named(request), read)


async def read_aside(aside: Aside, raw: bytes, naming: Naming, read: Callable[[JSON, Naming], T]) -> T:
    """Parse a received body with `read`, outside the event loop if it is large."""
    if len(raw) <= SMALL:
        return read_bytes(raw, naming, read)
    if len(raw) <= MIDDLING:
        return await aside.thread(read_bytes, raw, naming, read)
    try:
        return await aside.reading.call(read_bytes, raw, naming, read)
    except OutOfBoundsError as exc:
        raise InvalidRequest(f"the body cannot be read: {exc}; send less, or simpler JSON") from exc


def named(request: HTTPConnection) -> Naming:
    """The names and options in a request's path and headers."""
    state = request.scope["state"]
    return naming(state["headers"], path_agent=state["agent_id"], request_id=state["request_id"], owner=state["owner"])


def owner_of(request: HTTPConnection) -> str:
    """The name of the key that the request came with."""
    owner: str = request.scope["state"]["owner"]
    return owner


def at_once(receive: Receive) -> Message | None:
    """The server's next message of a request, if it is already there; else None.

    Runs the receiver only as far as possible without waiting, so it needs no timer and no loop iteration.
    """
    asking = receive().__await__()
    try:
        next(asking)
    except StopIteration as there:
        message: Message = there.value
        return message
    asking.close()
    return None


def has_left(scope: Scope, receive: Receive) -> bool:
    """Whether the client has disconnected, by our server and the kernel or, with another server, by its next message.
    Only after the body was read."""
    connection = scope.get("extensions", {}).get(CLOSED)
    if connection is not None:
        return bool(connection["is_closed"]())
    message = at_once(receive)
    return message is not None and message["type"] == "http.disconnect"


def check_client_is_there(request: Request) -> None:
    """Raises `Interrupted` if the client has left: another proxy may have done it since, and have new turns."""
    if has_left(request.scope, request.receive):
        raise Interrupted("the client left before this was done: nothing was changed", retry_after=0.0)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises `RequestTooLarge`, before reading if the length is declared, and
    `QueueFull` if this owner's bodies are too large together.
    """
    state = request.scope["state"]
    declared = state["headers"].get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise _too_large(limit)
    body = bytearray()

    def take(message: Message) -> bool:
        """Whether more of it is to come."""
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client left before its body had arrived")
        chunk = message.get("body", b"")
        state["held"].body(len(chunk))
        body.extend(chunk)
        if len(body) > limit:
            raise _too_large(limit)
        return bool(message.get("more_body", False))

    first = at_once(request.receive)  # most bodies are small and arrive with the head: no timer needed
    if first is None or take(first):
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while take(await request.receive()):
                    pass
        except TimeoutError as exc:
            raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT:.0f} s: send it again") from exc
    return bytes(body)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is over {limit} bytes: send less, or raise max_body in the settings")


def is_on(request: Request, name: str, *, default: bool) -> bool:
    """A query parameter that is 1 or 0. Raises `InvalidRequest`."""
    given = request.query_params.get(name)
    if given not in (None, "0", "1"):
        raise InvalidRequest(f"{name} must be 1 or 0", param=name)
    return default if given is None else given == "1"


def whole_number(request: Request, name: str, default: int | None) -> int | None:
    """A query parameter that is an integer of at least 1. Raises `InvalidRequest`."""
    given = request.query_params.get(name)
    if given is None:
        return default
    # SQLite's integers have 64 bits.
    if not given.isascii() or not given.isdigit() or len(given) > 18 or int(given) == 0:
        raise InvalidRequest(f"{name} must be a whole number from 1", param=name)
    return int(given)


# --- Which wire an address belongs to


class Table:
    """All wires, found by a path's first segments. Raises `ValueError` if no wire claims all other paths."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        self.wires = tuple(wires)
        self._claims: dict[str, list[tuple[AddressClaim, Wire]]] = {}
        for wire in wires:
            for claim in wire.claims:
                self._claims.setdefault(claim.root, []).append((claim, wire))
        if ANY not in self._claims:
            raise ValueError(f"one wire must claim {ANY}: it answers for addresses that are no wire's own")
        for claims in self._claims.values():
            claims.sort(key=lambda one: (one[0].form is None, one[0].by is None))
        # Roots of a single wire: most requests need only one lookup.
        self._sole = {root: claims[0][1] for root, claims in self._claims.items() if claims[0][0] == AddressClaim(root)}
        bases = dict.fromkeys(base for wire in wires for base in wire.bases)
        self._prefixed = re.compile(rf"/agents/(.*?)((?:{'|'.join(map(re.escape, bases))}).*)".encode(), re.S)

    def of(self, path: str, headers: Mapping[str, str], query: str = "") -> Wire:
        """The wire that a request speaks; `path` has no agent prefix, `headers` have lower-case names."""
        end = path.find("/", path.find("/", 1) + 1)
        if (sole := self._sole.get(path if end < 0 else path[:end])) is not None:
            return sole
        asked = RequestAddress(path, headers, query)
        for root in _roots(path):
            for claim, wire in self._claims.get(root, ()):
                if claim.holds(asked):
                    return wire
        raise AssertionError(f"{ANY} is claimed without a condition")

    def all_of(self, path: str) -> tuple[Wire, ...]:
        """All wires that may handle this path."""
        found: list[Wire] = []
        for root in _roots(path):
            for claim, wire in self._claims.get(root, ()):
                if claim.form is not None and not claim.form.fullmatch(path):
                    continue
                found.append(wire)
                if claim.by is None:  # it takes every request that no claim before it has taken
                    return tuple(one for one in self.wires if one in found)
        raise AssertionError(f"{ANY} is claimed without a condition")

    def agent_of(self, raw_path: bytes) -> tuple[bytes, bytes] | None:
        """The agent in the path's prefix, still encoded, and the rest of the path; None without such a prefix."""
        if not raw_path.startswith(b"/agents/"):
            return None
        prefixed = self._prefixed.fullmatch(raw_path)
        return None if prefixed is None else (prefixed[1], prefixed[2])


def _roots(path: str) -> tuple[str, ...]:
    """The roots under which a claim of this path may be listed, the longest first."""
    first, _, rest = path[1:].partition("/")
    return (f"/{first}/{rest.partition('/')[0]}", f"/{first}", ANY)


# --- Addresses: a method, a path, and a handler that names the pieces of the address it wants

Handler = Callable[..., Awaitable[Any]]

EVENT_STREAM = "text/event-stream"
STREAMED = ("application/json", EVENT_STREAM)


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """Data for `/openapi.json` about a route: the schemas of its body and query, the media types of its answers.

    `turn`: it creates a turn, so its headers may name an agent.
    """

    body: JSON | None = None
    query: Mapping[str, JSON] = field(default_factory=dict)
    media: tuple[str, ...] = ("application/json",)
    turn: bool = False


class Address(Route):
    """A route with one method. `handler` takes `request` and the path parameters in its signature. It returns a
    `Response` or the object of a JSON answer. Its docstring is the route's description.

    `documented`: the documented paths of a route whose path has a special form, such as `{model}:{method}`."""

    def __init__(self, method: str, path: str, handler: Handler, documented: Mapping[str, RouteDoc]) -> None:
        names = tuple(inspect.signature(handler).parameters)

        async def endpoint(request: Request) -> Response:
            if (audit := request.scope["state"].get("audit")) is not None:  # the gate's
                audit.begins(path.replace(":path}", "}"))
            arguments = {**request.path_params, "request": request}
            answer = await handler(**{name: arguments[name] for name in names})
            return answer if isinstance(answer, Response) else JSONAnswer(answer)

        super().__init__(path, endpoint, methods=[method])
        self.methods = {method}  # without HEAD, which Starlette adds: it would render a whole dump
        self.description = inspect.getdoc(handler) or ""
        self.documented = documented


class Exact:
    """Routes without path parameters, found by one lookup.

    They skip Starlette's routing and its wrappers; the gate handles their errors.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._found: dict[tuple[str, str], Address] = {}
        for route in routes:
            if isinstance(route, Address) and "{" not in route.path:
                for method in route.methods or ():
                    self._found.setdefault((method, route.path), route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = self._found.get((scope.get("method", ""), scope.get("path", "")))
        if address is None:
            await self._app(scope, receive, send)
            return
        answer = await address.endpoint(Request(scope, receive, send))
        await answer(scope, receive, send)


def add(
    app: Starlette,
    method: str,
    path: str,
    handler: Handler,
    about: RouteDoc | None = None,
    documented: Mapping[str, RouteDoc] | None = None,
) -> None:
    plain = re.sub(r"\{(\w+):path\}", r"{\1}", path)
    app.router.routes.append(Address(method, path, handler, documented or {plain: about or RouteDoc()}))


def methods_of(app: Starlette, scope: Scope) -> set[str]:
    """All methods of this address. Starlette's own 405 names only those of the first route."""
    found = (route for route in app.routes if isinstance(route, Address) and route.matches(scope)[0] is not Match.NONE)
    return {method for route in found for method in route.methods or ()}


class JSONAnswer(Response):
    """JSON in ASCII, because a model's text may have half a surrogate pair."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return compact(content)


# --- Headers, and errors in the wire's format


def headers_of(scope: Scope) -> dict[str, str]:
    """Headers with lower-case names and latin-1 values. Of equal names the first counts, as for a proxy in front."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def raw_path(scope: Scope) -> bytes:
    """The raw path, still percent-encoded, so that an encoded slash differs from a real one."""
    raw = scope.get("raw_path")
    return raw if isinstance(raw, bytes) else quote(scope["path"]).encode()


def as_proxy_error(exc: Exception) -> ProxyError:
    """The error for the client. Of an unexpected one only stack frames are logged: its message may have a prompt."""
    if isinstance(exc, ProxyError):
        return exc
    frames = "".join(traceback.format_tb(exc.__traceback__))
    log.error("unexpected_error", error=type(exc).__name__, frames=frames)
    return ProxyError("the proxy failed unexpectedly: its log has the details under this X-Request-Id")


def error_body(scope: Scope, error: ProxyError) -> JSON:
    """The error in the format of the request's wire."""
    state = scope["state"]
    wire: Wire = state["wire"]
    return wire.errors.write(error, state["request_id"])


async def send_error(send: Send, scope: Scope, error: ProxyError, headers: Mapping[str, str] | None = None) -> None:
    """Send an error as the whole answer; nothing else may have been sent."""
    data = compact(error_body(scope, error))
    sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    sent |= retry_headers(error)
    await send({"type": "http.response.start", "status": error.status, "headers": encoded(sent)})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
