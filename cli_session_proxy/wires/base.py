"""What a wire says of itself, and which wire a request speaks.

A wire is a folder with a `Wire` in it and a line in `registry`. It brings its routes, bodies, answers, streams and
error shape; it touches no other wire. The server asks the `Table` of all wires and knows none by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
class Asked:
    """The parts of a request that identify its wire: the path without an agent's prefix, lower-case header names."""

    path: str
    headers: Mapping[str, str]
    query: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Addresses that a wire speaks: `root` (its first one or two segments) and all below it.

    Where several wires have the same root, a whole path's `form` decides, then who asks (`by`), then nothing more.
    """

    root: str
    form: re.Pattern[str] | None = None
    by: Callable[[Asked], bool] | None = None

    def holds(self, asked: Asked) -> bool:
        if self.form is not None and not self.form.fullmatch(asked.path):
            return False
        return self.by is None or self.by(asked)


@dataclass(frozen=True, slots=True)
class Models:
    """The list of models at an address that wires share. `info` takes a name, the time of our start, and
    whose it is."""

    info: Callable[[str, int, str], JSON]
    listed: Callable[[list[JSON]], JSON]


class Routes(Protocol):
    def add_to(self, app: Starlette) -> None: ...


class Writer(Protocol):
    """A wire's stream: events in, bytes out. One for each stream; it ends with what `Finished` or `error` gives."""

    @property
    def media_type(self) -> str: ...

    def feed(self, event: TurnEvent) -> Iterable[bytes]: ...

    def error(self, error: ProxyError) -> Iterable[bytes]:
        """The end of a stream that has begun and failed."""

    def keep_alive(self) -> bytes:
        """What says nothing, and may be sent at any time before the end."""


class EventStream:
    """The part of a `Writer` that all streams of server-sent events share."""

    media_type = "text/event-stream; charset=utf-8"

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Wire:
    """`bases` are what an agent's own base URL goes on with: `/agents/{agent_id}/v1/…`.

    `key_in_address`: its clients know no other way than `?key=`. An address ends up in logs and histories.
    `sockets`: paths that speak WebSocket too.
    """

    name: str
    claims: tuple[Claim, ...]
    errors: ErrorShape
    routes: Callable[[Engine, Settings], Routes]
    models: Models | None = None
    bases: tuple[str, ...] = ("/v1/",)
    key_in_address: bool = False
    sockets: frozenset[str] = frozenset()


class Table:
    """All wires, found by a request's first segments. Raises `ValueError` where no wire claims the rest."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        self.wires = tuple(wires)
        self._claims: dict[str, list[tuple[Claim, Wire]]] = {}
        for wire in wires:
            for claim in wire.claims:
                self._claims.setdefault(claim.root, []).append((claim, wire))
        if ANY not in self._claims:
            raise ValueError(f"one wire must claim {ANY}: it answers for addresses that are no wire's own")
        for claims in self._claims.values():
            claims.sort(key=lambda one: (one[0].form is None, one[0].by is None))
        # Roots that are one wire's alone: nearly every request is known by one look at its address.
        self._sole = {root: claims[0][1] for root, claims in self._claims.items() if claims[0][0] == Claim(root)}
        bases = dict.fromkeys(base for wire in wires for base in wire.bases)
        self._prefixed = re.compile(rf"/agents/(.*?)((?:{'|'.join(map(re.escape, bases))}).*)".encode(), re.S)

    def of(self, path: str, headers: Mapping[str, str], query: str = "") -> Wire:
        """The wire that a request speaks; `path` has no agent prefix, `headers` have lower-case names."""
        end = path.find("/", path.find("/", 1) + 1)
        if (sole := self._sole.get(path if end < 0 else path[:end])) is not None:
            return sole
        asked = Asked(path, headers, query)
        for root in _roots(path):
            for claim, wire in self._claims.get(root, ()):
                if claim.holds(asked):
                    return wire
        raise AssertionError(f"{ANY} is claimed without a condition")

    def all_of(self, path: str) -> tuple[Wire, ...]:
        """The wires that this path can belong to, for any client."""
        found: list[Wire] = []
        for root in _roots(path):
            for claim, wire in self._claims.get(root, ()):
                if claim.form is not None and not claim.form.fullmatch(path):
                    continue
                found.append(wire)
                if claim.by is None:
                    return tuple(one for one in self.wires if one in found)
        raise AssertionError(f"{ANY} is claimed without a condition")

    def agent_of(self, raw_path: bytes) -> tuple[bytes, bytes] | None:
        """The agent that a path begins with, still encoded, and the rest of the path; None where there is none."""
        if not raw_path.startswith(b"/agents/"):
            return None
        prefixed = self._prefixed.fullmatch(raw_path)
        return None if prefixed is None else (prefixed[1], prefixed[2])


def _roots(path: str) -> tuple[str, ...]:
    first, _, rest = path[1:].partition("/")
    return (f"/{first}/{rest.partition('/')[0]}", f"/{first}", ANY)
