"""One ordered lane per agent: turns run one at a time, in the order in which they were accepted.

A place is taken before the turn is stored and given up if storing fails, so the order of the lane is the
order of acceptance. Everything waits on a future that its own task owns: a cancelled turn leaves no trace.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from .errors import QueueFull

# What a queued client is told to wait for when nothing was measured yet, in seconds.
FIRST_GUESS = 5.0

# How much the newest turn weighs in the running mean of turn times.
SMOOTHING = 0.2


@dataclass(eq=False, slots=True)
class Place:
    """A turn's place in its lane. Enter it with `async with lanes.turn(place)`."""

    key: int
    granted: asyncio.Future[None] = field(repr=False)


class Lanes:
    """`limit` bounds how many turns wait or run in one lane; beyond it a request is refused (`QueueFull`)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lanes: dict[int, deque[Place]] = {}
        self._mean = FIRST_GUESS

    def take(self, key: int) -> Place:
        """The last place in this agent's lane, or `QueueFull` with the time in which one should be free."""
        lane = self._lanes.get(key, deque())
        if len(lane) >= self._limit:
            raise QueueFull(
                f"{len(lane)} requests to this agent are waiting already; send this one again later",
                retry_after=max(1.0, self._mean),
            )
        place = Place(key, asyncio.get_running_loop().create_future())
        lane.append(place)
        self._lanes[key] = lane
        if lane[0] is place:
            place.granted.set_result(None)
        return place

    def give_up(self, place: Place) -> None:
        """Leave the lane, from whatever position, and let the next one in. Idempotent."""
        lane = self._lanes.get(place.key)
        if lane is None or place not in lane:
            return
        lane.remove(place)
        if not lane:
            del self._lanes[place.key]
        elif not lane[0].granted.done():
            lane[0].granted.set_result(None)

    def turn(self, place: Place) -> _Turn:
        return _Turn(self, place)

    @property
    def total(self) -> int:
        """How many turns wait or run in all lanes."""
        return sum(len(lane) for lane in self._lanes.values())

    def waiting(self, key: int) -> int:
        """How many turns wait or run in this agent's lane."""
        return len(self._lanes.get(key, ()))

    def took(self, seconds: float) -> None:
        self._mean += SMOOTHING * (seconds - self._mean)


class _Turn:
    def __init__(self, lanes: Lanes, place: Place) -> None:
        self._lanes = lanes
        self._place = place
        self._began = 0.0

    async def __aenter__(self) -> None:
        try:
            await self._place.granted
        except asyncio.CancelledError:
            self._lanes.give_up(self._place)
            raise
        self._began = time.monotonic()

    async def __aexit__(self, *exc: object) -> None:
        self._lanes.took(time.monotonic() - self._began)
        self._lanes.give_up(self._place)
