"""The interface of a wire.

A wire is a folder with a `Wire` in it and a line in `registry`. It has its own routes, bodies, answers, streams and
error format, and does not use other wires. The server only knows the table of all wires (`asgi.Table`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..domain.models import JSON, TurnEvent
from ..errors import ProxyError

if TYPE_CHECKING:  # not imported in helper processes, which only parse bodies
    from starlette.applications import Starlette

    from ..engine.engine import Engine
    from ..settings import Settings

# The root for all paths that no wire claims.
ANY = "/"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The format of errors. `write` takes the error and the request's id; `schema`: its JSON Schema."""

    name: str
    write: Callable[[ProxyError, str], JSON]
    schema: JSON


@dataclass(frozen=True, slots=True)
class RequestAddress:
    """The parts of a request that identify its wire: the path without an agent's prefix; headers with lower-case
    names."""

    path: str
    headers: Mapping[str, str]
    query: str = ""


@dataclass(frozen=True, slots=True)
class AddressClaim:
    """Paths of a wire: `root` (the first one or two segments) and everything below.

    If several wires have the same root, the `form` of the whole path decides, then the client (`by`).
    """

    root: str
    form: re.Pattern[str] | None = None
    by: Callable[[RequestAddress], bool] | None = None

    def holds(self, asked: RequestAddress) -> bool:
        if self.form is not None and not self.form.fullmatch(asked.path):
            return False
        return self.by is None or self.by(asked)


@dataclass(frozen=True, slots=True)
class Models:
    """The list of models at a path that wires share. `info` takes a model's name, the time of our start, and the
    model's owner."""

    info: Callable[[str, int, str], JSON]
    listed: Callable[[list[JSON]], JSON]


class Writer(Protocol):
    """Converts a turn's events to bytes of a stream. One per stream; it ends with the bytes of `Finished` or
    `error`."""

    @property
    def media_type(self) -> str: ...

    def feed(self, event: TurnEvent) -> Iterable[bytes]: ...

    def error(self, error: ProxyError) -> Iterable[bytes]:
        """The last bytes of a stream that failed after its begin."""

    def keep_alive(self, words: str = "keep-alive") -> bytes:
        """Bytes that clients ignore, and that may be sent at any time before the end. `words`: for people, if the
        protocol has a place for them."""


@dataclass(frozen=True, slots=True)
class Wire:
    """`bases`: path prefixes after an agent's own: `/agents/{agent_id}/v1/…`. `routes` adds the wire's routes to an
    application.

    `key_in_address`: its clients can only send `?key=` (which is less safe: URLs are logged). `sockets`: paths that
    also accept WebSockets.
    """

    name: str
    claims: tuple[AddressClaim, ...]
    errors: ErrorShape
    routes: Callable[[Starlette, Engine, Settings], object]
    models: Models | None = None
    bases: tuple[str, ...] = ("/v1/",)
    key_in_address: bool = False
    sockets: frozenset[str] = frozenset()
