"""Did the answer arrive? What the next turn needs to know of this one, kept in the store as its clients come and go."""

from __future__ import annotations

import asyncio

import structlog

from ..domain.models import Delivery, Turn
from ..errors import StoreUnavailable
from ..stores.base import Store
from ..tasks import Tasks
from .live import LiveTurn

log = structlog.get_logger(__name__)


class Deliveries:
    """Makes live turns that note their delivery. `grace`: seconds that a turn runs on without a client."""

    def __init__(self, store: Store, tasks: Tasks, grace: float) -> None:
        self._store = store
        self._tasks = tasks
        self._grace = grace

    def live(self, turn: Turn, agent_id: str) -> LiveTurn:
        """The turn for its clients, whoever runs it."""
        noted: list[asyncio.Task[None]] = []

        def on_delivery(arrived: bool) -> None:
            noted[:] = [self._tasks.own(self._ended(live, arrived))]

        def on_empty() -> None:
            self._tasks.own(self._give_up(live, noted[-1]))

        def on_return() -> None:
            self._tasks.own(self._note(turn.id, "pending"))

        live = LiveTurn(
            turn, agent_id, grace=self._grace, on_empty=on_empty, on_delivery=on_delivery, on_return=on_return
        )
        return live

    async def _ended(self, live: LiveTurn, arrived: bool) -> None:
        # From "pending" to "delivered" nothing changes for the next turn; an undelivered one it would leave off.
        soon = arrived and live.turn.delivery == "pending"
        await self._note(live.turn.id, "delivered" if arrived else "undelivered", soon=soon)

    async def _note(self, turn_id: str, delivery: Delivery, *, soon: bool = False) -> None:
        try:
            await self._store.set_delivery(turn_id, delivery, soon=soon)
        except StoreUnavailable as exc:
            log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)

    async def _give_up(self, live: LiveTurn, noted: asyncio.Task[None]) -> None:
        """Nobody waits for the turn here any more. Somebody may at another proxy (see `Engine._follow`)."""
        await asyncio.wait([noted])
        try:
            turn = await self._store.turn(live.turn.id)
        except StoreUnavailable:
            turn = None
        if live.abandoned and (turn is None or turn.delivery == "undelivered"):
            live.cancel("every client has left")
