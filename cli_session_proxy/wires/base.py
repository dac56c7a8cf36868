"""What a wire says of itself.

A wire is a folder with a `Wire` in it and a line in `registry`. It brings its routes, bodies, answers, streams and
error shape; it touches no other wire. The server asks the table of all wires (`asgi.Table`)
and knows none by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..domain.models import JSON, TurnEvent
from ..errors import ProxyError

if TYPE_CHECKING:  # bodies are read in a process of their own too, which needs no server and no engine
    from starlette.applications import Starlette

    from ..engine.engine import Engine
    from ..settings import Settings

# The root of all addresses that no wire claims.
ANY = "/"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an error looks. `write` takes the error and the id of its request; `schema` is the JSON Schema of it."""

    name: str
    write: Callable[[ProxyError, str], JSON]
    schema: JSON


@dataclass(frozen=True, slots=True)
class RequestAddress:
    """The parts of a request that identify its wire: the path without an agent's prefix, lower-case header names."""

    path: str
    headers: Mapping[str, str]
    query: str = ""


@dataclass(frozen=True, slots=True)
class AddressClaim:
    """Addresses that a wire speaks: `root` (its first one or two segments) and all below it.

    Where several wires have the same root, a whole path's `form` decides, then who asks (`by`), then nothing more.
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
    """The list of models at an address that wires share. `info` takes a name, the time of our start, and
    whose it is."""

    info: Callable[[str, int, str], JSON]
    listed: Callable[[list[JSON]], JSON]


class Writer(Protocol):
    """A wire's stream: events in, bytes out. One for each stream; it ends with what `Finished` or `error` gives."""

    @property
    def media_type(self) -> str: ...

    def feed(self, event: TurnEvent) -> Iterable[bytes]: ...

    def error(self, error: ProxyError) -> Iterable[bytes]:
        """The end of a stream that has begun and failed."""

    def keep_alive(self, words: str = "keep-alive") -> bytes:
        """What says nothing to a client's program, and may be sent at any time before the end. `words` are for people,
        where the protocol has a place for them."""


class EventStream:
    """The part of a `Writer` that all streams of server-sent events share."""

    media_type = "text/event-stream; charset=utf-8"

    def keep_alive(self, words: str = "keep-alive") -> bytes:
        return f": {words}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Wire:
    """`bases` are what an agent's own base URL goes on with: `/agents/{agent_id}/v1/…`. `routes` adds the wire's own to
    an application.

    `key_in_address`: its clients know no other way than `?key=`. An address ends up in logs and histories.
    `sockets`: paths that speak WebSocket too.
    """

    name: str
    claims: tuple[AddressClaim, ...]
    errors: ErrorShape
    routes: Callable[[Starlette, Engine, Settings], object]
    models: Models | None = None
    bases: tuple[str, ...] = ("/v1/",)
    key_in_address: bool = False
    sockets: frozenset[str] = frozenset()
