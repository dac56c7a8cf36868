"""Limits for each owner: what one key holds open takes no place of another key's.

Beyond a bound a request is refused with 429 `queue_full`; what it held is given back when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import QueueFull
from ..settings import Settings

# Requests of one owner beside those that run or wait as turns.
SPARE_REQUESTS = 128
# Each open event stream asks the store twice a second.
EVENT_STREAMS = 64
# Bodies that one owner's open requests hold together, in the largest that one may have.
BODIES = 4
# A second is what most bodies of a program on this machine take to arrive.
RETRY_AFTER = 1.0
# Open connections in all, at most: half of the files that this process may have open; the CLIs' pipes need theirs.
MOST_CONNECTIONS = 2048


def connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(MOST_CONNECTIONS, soft // 2))


@dataclass(slots=True)
class Bounds:
    """The counts of all owners. One per app."""

    requests: int
    bodies: int
    _open: Counter[str] = field(default_factory=Counter)
    _streams: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(settings: Settings) -> Bounds:
        return Bounds(settings.queue_limit + settings.max_turns + SPARE_REQUESTS, BODIES * settings.max_body)

    @contextlib.contextmanager
    def request(self, owner: str) -> Iterator[Held]:
        """One request of this owner's, while it is answered. Raises `QueueFull`."""
        if self._open[owner] >= self.requests:
            raise QueueFull(f"{self.requests} requests are open already: wait for one", retry_after=RETRY_AFTER)
        self._open[owner] += 1
        held = Held(self, owner)
        try:
            yield held
        finally:
            self._streams[owner] -= held.streams
            self._bytes[owner] -= held.bytes
            self._open[owner] -= 1
            if not self._open[owner]:
                for counts in (self._open, self._streams, self._bytes):
                    del counts[owner]

    def stream(self, owner: str) -> None:
        if self._streams[owner] >= EVENT_STREAMS:
            raise QueueFull(f"{EVENT_STREAMS} event streams are open already: close one", retry_after=5.0)
        self._streams[owner] += 1

    def body(self, owner: str, size: int) -> None:
        if self._bytes[owner] + size > self.bodies:
            raise QueueFull(
                f"open requests hold {self.bodies} bytes of bodies already: send this again in a moment",
                retry_after=RETRY_AFTER,
            )
        self._bytes[owner] += size


@dataclass(slots=True)
class Held:
    """What one request holds. Both methods raise `QueueFull`."""

    bounds: Bounds
    owner: str
    streams: int = 0
    bytes: int = 0

    def stream(self) -> None:
        """It is an event stream."""
        self.bounds.stream(self.owner)
        self.streams += 1

    def body(self, size: int) -> None:
        """So many bytes more of its body have arrived."""
        self.bounds.body(self.owner, size)
        self.bytes += size
