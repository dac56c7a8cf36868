"""Did the answer arrive? What the next turn needs to know of this one, kept in the store as its clients come and go."""

from __future__ import annotations

import asyncio

from .. import logs
from ..domain.models import Delivery, Turn
from ..errors import StoreUnavailable
from ..stores.base import Store
from ..tasks import Tasks
from .live import LiveTurn
from .ownership import Instances

log = logs.get(__name__)


class Deliveries:
    """Makes live turns that note their delivery. `grace`: seconds that a turn runs on without a client."""

    def __init__(self, store: Store, instances: Instances, tasks: Tasks, grace: float) -> None:
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._grace = grace
        self._elsewhere: set[str] = set()  # turns that another proxy runs, and delivers to its own clients

    def live(self, turn: Turn, agent_id: str, *, elsewhere: bool = False) -> LiveTurn:
        """The turn for its clients. `elsewhere`: another proxy runs it; see `came_here`."""
        noted: list[asyncio.Task[None]] = []
        if elsewhere:
            self._elsewhere.add(turn.id)

        def on_delivery(arrived: bool) -> None:
            noted[:] = [self._tasks.own(self._ended(live, arrived))]

        def on_empty() -> None:
            self._tasks.own(self._give_up(live, noted[-1]))

        def on_return() -> None:
            self._tasks.own(self._returned(turn.id))

        live = LiveTurn(
            turn, agent_id, grace=self._grace, on_empty=on_empty, on_delivery=on_delivery, on_return=on_return
        )
        return live

    async def came_here(self, live: LiveTurn) -> None:
        """From now on this proxy delivers the answer, or runs the turn. Raises `StoreUnavailable`."""
        self._elsewhere.discard(live.turn.id)
        await self._store.unfollow(live.turn.id, self._instances.id)

    async def _ended(self, live: LiveTurn, arrived: bool) -> None:
        turn_id = live.turn.id
        elsewhere = turn_id in self._elsewhere
        try:
            if arrived or not elsewhere:
                # "pending" and "delivered" are the same to the next turn; an undelivered one it would leave off.
                soon = arrived and live.turn.delivery == "pending"
                delivery: Delivery = "delivered" if arrived else "undelivered"
                await self._store.set_delivery(turn_id, delivery, by=self._instances.id, soon=soon)
            if elsewhere:
                await self._store.unfollow(turn_id, self._instances.id)
        except StoreUnavailable as exc:
            log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)
        if arrived:
            self._elsewhere.discard(turn_id)

    async def _returned(self, turn_id: str) -> None:
        try:
            if turn_id in self._elsewhere:
                await self._store.follow(turn_id, self._instances.id)
            else:
                await self._store.set_delivery(turn_id, "pending")
        except StoreUnavailable as exc:
            log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)

    async def _give_up(self, live: LiveTurn, noted: asyncio.Task[None]) -> None:
        """Nobody waits for the turn here any more. Somebody may at another proxy (see `Engine._follow`)."""
        await asyncio.wait([noted])
        turn_id = live.turn.id
        waited_for = False
        if turn_id not in self._elsewhere:
            try:
                waited_for = any(self._instances.alive(proxy) for proxy in await self._store.followers(turn_id))
            except StoreUnavailable as exc:
                log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)
        if live.abandoned and not waited_for:
            self._elsewhere.discard(turn_id)
            live.cancel("left")
