"""One ordered lane per agent, and the slots that all agents' turns share.

A place is taken before the turn is stored and given up if storing fails, so the order of the lane is the
order of acceptance. Only the first turn of a lane asks for a slot, and slots are given first come, first served:
however many turns one agent has queued, any other agent waits for at most one of them.
Each place has a future of its own that only its turn's task waits for, so a cancelled turn leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..errors import QueueFull
from ..tasks import Average

# The assumed time of a turn until one was measured, in seconds.
FIRST_GUESS = 5.0
# The least Retry-After, in seconds.
LEAST_WAIT = 0.1
# How many agents' turn times are remembered; for others the average of all is used.
KNOWN_AGENTS = 1024


class Slots:
    """How many turns run at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.time = Average(FIRST_GUESS)  # of a turn, without its wait for a slot
        self.free = asyncio.Semaphore(limit)  # first come, first served

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it."""
        await self.free.acquire()
        self.running += 1
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.running -= 1
            self.time.add(asyncio.get_running_loop().time() - began)
            self.free.release()


@dataclass(eq=False, slots=True)
class LanePlace:
    """A turn's place in its lane. Enter it with `async with lanes.turn(place)`."""

    key: int  # the agent's
    granted: asyncio.Future[None] = field(repr=False)  # done while the place is the first of its lane
    began: float = 0.0  # when its turn began, by the loop's time

    async def until_first(self) -> None:
        """Wait until this place is the first again, if others were put before it. The turn's time begins after it."""
        await self.granted
        self.began = asyncio.get_running_loop().time()


class Lanes:
    """The lanes of all agents. `limit`: how many turns may wait or run in one lane; `waiting`: how many may wait in all
    lanes together for one of the `slots`.

    Beyond these a request is refused (`QueueFull`), with the estimated time until there is room.
    """

    def __init__(self, limit: int, waiting: int, slots: Slots) -> None:
        self._limit = limit
        self._most_waiting = waiting
        self._slots = slots
        self._lanes: dict[int, deque[LanePlace]] = {}
        self.total = 0  # turns that wait or run in all lanes
        self._time = Average(FIRST_GUESS)  # of a turn, with its wait for a slot
        self._times: OrderedDict[int, Average] = OrderedDict()

    def take(self, key: int) -> LanePlace:
        """The last place in this agent's lane. Raises `QueueFull`."""
        lane = self._lanes.get(key, deque())
        if len(lane) >= self._limit:
            # Seconds until the lane is empty, by the average turn and how long the running one runs.
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
        self.total += 1
        if lane[0] is place:
            self._grant(place)
        return place

    def take_before(self, key: int, at: int) -> LanePlace:
        """A place after the first `at` places, for a turn that was accepted before the turns behind it. If another turn
        loses the first place, its `granted` is replaced; it checks that once it has the lease, before it begins."""
        place = LanePlace(key, asyncio.get_running_loop().create_future())
        lane = self._lanes.setdefault(key, deque())
        if lane and at == 0:
            lane[0].granted = asyncio.get_running_loop().create_future()
        lane.insert(at, place)
        self.total += 1
        if lane[0] is place:
            self._grant(place)
        return place

    def admit(self) -> None:
        """Raises `QueueFull` if too many turns wait in all lanes together."""
        ahead = self.total - self._slots.running
        if ahead >= self._most_waiting:
            # Each lane runs one turn at a time, so few lanes cannot use all slots.
            parallel = max(1, min(self._slots.limit, len(self._lanes)))
            raise QueueFull(
                f"{ahead} requests are waiting already: send this one again later, or raise queue_limit",
                retry_after=max(LEAST_WAIT, (ahead + 1) * self._slots.time.value / parallel),
            )

    def give_up(self, place: LanePlace) -> None:
        """Leave the lane, from any position. If it was the first, the next turn may run. Idempotent."""
        lane = self._lanes.get(place.key)
        if lane is None or place not in lane:
            return
        lane.remove(place)
        self.total -= 1
        if not lane:
            del self._lanes[place.key]
        elif not lane[0].granted.done():
            self._grant(lane[0])

    def _grant(self, place: LanePlace) -> None:
        place.began = asyncio.get_running_loop().time()
        place.granted.set_result(None)

    @asynccontextmanager
    async def turn(self, place: LanePlace) -> AsyncIterator[None]:
        """Wait until the place is the first of its lane. At the end, leave the lane and note how long the turn took."""
        try:
            await place.granted
        except BaseException:
            self.give_up(place)
            raise
        try:
            yield
        finally:
            took = asyncio.get_running_loop().time() - place.began
            self._time.add(took)
            self._times.setdefault(place.key, Average(took)).add(took)
            self._times.move_to_end(place.key)
            if len(self._times) > KNOWN_AGENTS:
                self._times.popitem(last=False)
            self.give_up(place)

    def waiting(self, key: int) -> int:
        """How many turns wait or run in this agent's lane."""
        return len(self._lanes.get(key, ()))
