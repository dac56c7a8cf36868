"""Bounds how much of long conversations is in memory at once.

A path that was read is in memory, often more than once, until a CLI has its turn's request, a model of another
provider has answered it, or its HTTP request is answered. So turns and requests open a `Hold`, and the store adds to it
what it is about to read. A hold that does not fit waits for others to end, and is refused after `PATIENCE`.

It counts the largest of its reads. A hold that has something already only grows: it never waits for others while
others wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..errors import QueueFull

# Bytes of a path that are read without being counted: nearly every conversation.
UNCOUNTED = 8 * 1024 * 1024
# Bytes of all holds together, and of one owner's. Where these have nothing else, one path may be larger.
MOST, MOST_OF_AN_OWNER = 768 * 1024 * 1024, 512 * 1024 * 1024
# Seconds that a hold waits. A large path is read and written again in some seconds.
PATIENCE = 60.0
RETRY_AFTER = 5.0

_current: ContextVar[Hold | None] = ContextVar("hold", default=None)


@dataclass(slots=True, eq=False)
class Holds:
    """All holds of one engine. `bytes`: by owner."""

    bytes: Counter[str] = field(default_factory=Counter)
    _waiting: list[tuple[Hold, int, asyncio.Future[None]]] = field(default_factory=list)

    @contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """Count what this task and its own tasks read from now on, until the end of the block."""
        hold = Hold(self, owner)
        token = _current.set(hold)
        try:
            yield
        finally:
            _current.reset(token)
            hold.release()

    def fits(self, owner: str, size: int) -> bool:
        of_owner, total = self.bytes[owner], self.bytes.total()
        return (not of_owner or of_owner + size <= MOST_OF_AN_OWNER) and (not total or total + size <= MOST)

    async def wait(self, hold: Hold, size: int) -> None:
        """Wait until this fits, and count it. Raises `QueueFull`."""
        if self._waiting or not self.fits(hold.owner, size):
            place = hold, size, asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            self.admit()
            try:
                async with asyncio.timeout(PATIENCE):
                    await place[2]
            except TimeoutError:
                raise QueueFull(
                    f"too many long conversations are in memory, of yours {self.bytes[hold.owner]:,} bytes: "
                    "send this again in a moment",
                    retry_after=RETRY_AFTER,
                ) from None
            finally:
                if place in self._waiting:
                    self._waiting.remove(place)
                    self.admit()  # those behind it
        else:
            hold.count(size)

    def admit(self) -> None:
        """Let in those that fit, in order. Only an owner that has reached its own bound is overtaken, by other
        owners."""
        full: set[str] = set()
        for place in list(self._waiting):
            hold, size, future = place
            if future.done() or hold.owner in full:  # done: its task was cancelled
                continue
            if self.fits(hold.owner, size):
                self._waiting.remove(place)
                hold.count(size)
                future.set_result(None)
            elif self.bytes[hold.owner] and self.bytes[hold.owner] + size > MOST_OF_AN_OWNER:
                full.add(hold.owner)
            else:
                break


@dataclass(slots=True, eq=False)
class Hold:
    """What one turn or request has in memory: `size` bytes of a path."""

    holds: Holds
    owner: str
    size: int = 0
    released: bool = False

    def count(self, size: int) -> None:
        if not self.released:
            self.size += size
            self.holds.bytes[self.owner] += size

    def release(self) -> None:
        """Idempotent."""
        self.released = True
        size, self.size = self.size, 0
        self.holds.bytes[self.owner] -= size
        if not self.holds.bytes[self.owner]:
            del self.holds.bytes[self.owner]
        if size:
            self.holds.admit()


def release() -> None:
    """What the present turn or request has read is not needed any more, and what it reads later is not counted."""
    hold = _current.get()
    if hold is not None:
        hold.release()


def is_held() -> bool:
    """Whether the present turn or request holds a long path."""
    hold = _current.get()
    return hold is not None and hold.size > 0


def has_room_for_another() -> bool:
    """Whether the path of the present request may be held twice. If not, a turn on it would wait for this request."""
    hold = _current.get()
    return hold is None or 2 * hold.size <= MOST_OF_AN_OWNER


async def about_to_read(size: int) -> None:
    """Called before so many bytes of a path are read. Raises `QueueFull`. Without a hold nothing is counted: in
    commands, and at the end of a turn."""
    hold = _current.get()
    if hold is None or hold.released:
        return
    if hold.size:  # the same path once more, or its records
        hold.count(max(0, size - hold.size))
    else:
        await hold.holds.wait(hold, size)
