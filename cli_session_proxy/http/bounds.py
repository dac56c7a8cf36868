"""Limits per owner, so that one key's open requests do not block another key's.

Beyond a limit a request is refused with 429 `queue_full`. Its counts are released when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from ..errors import QueueFull
from ..settings import OWNERS_SHARE, Settings

# Open requests of one owner, apart from queued and running turns.
SPARE_REQUESTS = 128
# Event streams of one owner: each polls the store twice a second.
EVENT_STREAMS = 64
# Bytes of one owner's request bodies, in multiples of the largest one.
BODIES = 4
# Retry-After: most bodies from this machine arrive within a second.
RETRY_AFTER = 1.0
# Limits of open files, requested in turn: more than connections and CLIs need, then what every macOS grants.
OPEN_FILES = (65_536, 10_240)
# The most connections: half of the file descriptors; CLIs' pipes need the rest.
MOST_CONNECTIONS = 2048
# File descriptors that clients cannot take if the limit is low: an idle `serve` has 36 open; the others start a CLI
# and serve one client.
RESERVED_FILES = 56
# The fewest connections, however low the limit is.
LEAST_CONNECTIONS = 4


def raise_open_files() -> None:
    """Raise this process's limit of open files: the default is 256 or 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for requested in OPEN_FILES:
        limit = requested if hard == resource.RLIM_INFINITY else min(requested, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return  # it is high enough already
        with contextlib.suppress(OSError, ValueError):  # macOS refuses more than its kern.maxfilesperproc: try the next
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def connection_limit() -> int:
    """The most connections of all owners, by this process's limit of open files."""
    return max_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def max_connections(files: int) -> int:
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files // 2, files - RESERVED_FILES))


@dataclass(slots=True)
class Bounds:
    """The limits of one owner, and the present counts by owner. One per app.

    Limits: `requests`, `bodies` (in bytes), `event_streams`. Counts: `open` (requests), `streams`, `bytes` (of bodies).
    """

    requests: int
    bodies: int
    event_streams: int = EVENT_STREAMS
    open: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(settings: Settings) -> Bounds:
        requests = settings.queue_limit + settings.max_turns + SPARE_REQUESTS
        if settings.has_owners:  # an open request has a connection
            requests = min(requests, math.ceil(OWNERS_SHARE * connection_limit()))
        return Bounds(requests, BODIES * settings.max_body, EVENT_STREAMS)

    def request(self, owner: str) -> RequestHold:
        """A hold for one request of this owner: use `with` while it is answered."""
        return RequestHold(self, owner)


@dataclass(slots=True)
class RequestHold:
    """The counts of one request. Entering it and both methods may raise `QueueFull`."""

    bounds: Bounds
    owner: str
    streams: int = 0
    bytes: int = 0

    def __enter__(self) -> Self:
        bounds = self.bounds
        if bounds.open[self.owner] >= bounds.requests:
            raise QueueFull(f"{bounds.requests} requests are open already: wait for one", retry_after=RETRY_AFTER)
        bounds.open[self.owner] += 1
        return self

    def __exit__(self, *raised: object) -> None:
        bounds, owner = self.bounds, self.owner
        bounds.streams[owner] -= self.streams
        bounds.bytes[owner] -= self.bytes
        bounds.open[owner] -= 1
        if not bounds.open[owner]:
            for counts in (bounds.open, bounds.streams, bounds.bytes):
                del counts[owner]

    def stream(self) -> None:
        """Count this request as an event stream."""
        if self.bounds.streams[self.owner] >= self.bounds.event_streams:
            raise QueueFull(f"{self.bounds.event_streams} event streams are open already: close one", retry_after=5.0)
        self.bounds.streams[self.owner] += 1
        self.streams += 1

    def body(self, size: int) -> None:
        """Count these further bytes of its body."""
        if self.bounds.bytes[self.owner] + size > self.bounds.bodies:
            raise QueueFull(
                f"open requests hold {self.bounds.bodies} bytes of bodies already: send this again in a moment",
                retry_after=RETRY_AFTER,
            )
        self.bounds.bytes[self.owner] += size
        self.bytes += size

    def read_again(self) -> None:
        """Stop counting the body: it will be read again."""
        self.bounds.bytes[self.owner] -= self.bytes
        self.bytes = 0
