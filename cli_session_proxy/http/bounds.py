"""Limits for each owner: what one key holds open takes no place of another key's.

Beyond a bound a request is refused with 429 `queue_full`; what it held is given back when it ends, however it ends.
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

# Requests of one owner beside those that run or wait as turns.
SPARE_REQUESTS = 128
# Each open event stream asks the store twice a second.
EVENT_STREAMS = 64
# Bodies that one owner's open requests hold together, in the largest that one may have.
BODIES = 4
# A second is what most bodies of a program on this machine take to arrive.
RETRY_AFTER = 1.0
# The limit of open files that is asked for: more than connections and CLIs need, or what every macOS grants.
OPEN_FILES = (65_536, 10_240)
# Open connections in all, at most: half of the files that this process may have open; the CLIs' pipes need theirs.
MOST_CONNECTIONS = 2048
# Files that are left for the rest where few may be open: 36 of an idle `serve`, the start of a CLI, a client in hand.
OWN = 56
LEAST_CONNECTIONS = 4


def raise_open_files() -> None:
    """Let this process open as many files as it may: systems allow 256 or 1024 until a program asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in OPEN_FILES:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        with contextlib.suppress(OSError, ValueError):  # macOS refuses more than its kern.maxfilesperproc
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def connections() -> int:
    """Of all owners, by this process's limit of open files."""
    return max_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def max_connections(files: int) -> int:
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files // 2, files - OWN))


@dataclass(slots=True)
class Bounds:
    """The counts of all owners. One per app."""

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
            requests = min(requests, math.ceil(OWNERS_SHARE * connections()))
        return Bounds(requests, BODIES * settings.max_body, EVENT_STREAMS)

    def request(self, owner: str) -> RequestHold:
        """One request of this owner's: `with` it, while it is answered."""
        return RequestHold(self, owner)


@dataclass(slots=True)
class RequestHold:
    """What one request holds. To enter it, and both methods, raise `QueueFull`."""

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
