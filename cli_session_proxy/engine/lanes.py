"""One ordered lane per agent, and the slots that the agents' turns share: who waits, in which order, and how long.

A place is taken before the turn is stored and given up if storing fails, so the order of the lane is the
order of acceptance. Only the first of a lane asks for a slot, and slots are given first come, first served: however
many turns one agent has waiting, each other agent waits for one of them at most.
Everything waits on a future that its own task owns: a cancelled turn leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..errors import QueueFull
from ..tasks import Average

# What a queued client is told to wait for when nothing was measured yet, in seconds.
FIRST_GUESS = 5.0
# Nobody is asked to come again sooner than this, in seconds.
LEAST_WAIT = 0.1
# How many agents' turn times are remembered; any other's are taken to be like everybody's.
KNOWN = 1024


class Slots:
    """How many turns run at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.time = Average(FIRST_GUESS)  # of a turn that has its slot
        self._free = asyncio.Semaphore(limit)  # first come, first served

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with self._free:
            clock = asyncio.get_running_loop().time
            began = clock()
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
                self.time.add(clock() - began)


@dataclass(eq=False, slots=True)
class LanePlace:
    """A turn's place in its lane. Enter it with `async with lanes.turn(place)`."""

    key: int
    granted: asyncio.Future[None] = field(repr=False)
    began: float = 0.0

    async def again(self) -> None:
        """Wait until it is the first once more, where others were put before it; how long that took does not count."""
        await self.granted
        self.began = asyncio.get_running_loop().time()


class Lanes:
    """`limit` bounds how many turns wait or run in one lane, `waiting` how many wait in all of them for `slots`.

    Beyond it a request is refused (`QueueFull`), with the time in which those before it should be done.
    """

    def __init__(self, limit: int, waiting: int, slots: Slots) -> None:
        self._limit = limit
        self._most_waiting = waiting
        self._slots = slots
        self._lanes: dict[int, deque[LanePlace]] = {}
        self._total = 0
        self._time = Average(FIRST_GUESS)  # of a turn at the head of its lane, with its wait for a slot
        self._times: OrderedDict[int, Average] = OrderedDict()

    def take(self, key: int) -> LanePlace:
        """The last place in this agent's lane. Raises `QueueFull`."""
        lane = self._lanes.get(key, deque())
        if len(lane) >= self._limit:
            # Seconds that the lane needs for its turns, the running one less what it has had.
            each = self._times.get(lane[0].key, self._time).value
            left = max(0.0, each - (asyncio.get_running_loop().time() - lane[0].began))
            raise QueueFull(
                f"{len(lane)} requests to this agent are waiting already: send this one again later",
                retry_after=max(LEAST_WAIT, (len(lane) - 1) * each + left),
            )
        self.admit()
        place = LanePlace(key, asyncio.get_running_loop().create_future())
        lane.append(place)
        self._lanes[key] = lane
        self._total += 1
        if lane[0] is place:
            self._grant(place)
        return place

    def take_before(self, key: int, at: int) -> LanePlace:
        """The place behind the first `at` ones, for a turn that was accepted before the others. The one that was the
        first is so no more: its turn asks (`LanePlace.granted`) once it has the agent, before it begins."""
        place = LanePlace(key, asyncio.get_running_loop().create_future())
        lane = self._lanes.setdefault(key, deque())
        if lane and at == 0:
            lane[0].granted = asyncio.get_running_loop().create_future()
        lane.insert(at, place)
        self._total += 1
        if lane[0] is place:
            self._grant(place)
        return place

    def admit(self) -> None:
        """Raises `QueueFull` while too many wait in all lanes together."""
        ahead = self._total - self._slots.running
        if ahead >= self._most_waiting:
            # A lane has one turn at once, so few lanes cannot use all slots.
            parallel = max(1, min(self._slots.limit, len(self._lanes)))
            raise QueueFull(
                f"{ahead} requests are waiting already: send this one again later, or raise queue_limit",
                retry_after=max(LEAST_WAIT, (ahead + 1) * self._slots.time.value / parallel),
            )

    def give_up(self, place: LanePlace) -> None:
        """Leave the lane, from whatever position, and let the next one in. Idempotent."""
        lane = self._lanes.get(place.key)
        if lane is None or place not in lane:
            return
        lane.remove(place)
        self._total -= 1
        if not lane:
            del self._lanes[place.key]
        elif not lane[0].granted.done():
            self._grant(lane[0])

    def _grant(self, place: LanePlace) -> None:
        place.began = asyncio.get_running_loop().time()
        place.granted.set_result(None)

    @asynccontextmanager
    async def turn(self, place: LanePlace) -> AsyncIterator[None]:
        """Wait until the place is the first of its lane; leave the lane at the end."""
        try:
            await place.granted
            try:
                yield
            finally:
                took = asyncio.get_running_loop().time() - place.began
                self._time.add(took)
                self._times.setdefault(place.key, Average(took)).add(took)
                self._times.move_to_end(place.key)
                if len(self._times) > KNOWN:
                    self._times.popitem(last=False)
        finally:
            self.give_up(place)

    @property
    def total(self) -> int:
        """How many turns wait or run in all lanes."""
        return self._total

    def waiting(self, key: int) -> int:
        """How many turns wait or run in this agent's lane."""
        return len(self._lanes.get(key, ()))
