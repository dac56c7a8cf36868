"""How turns end that are not completed: stored at once, or as soon as the store can write again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .. import logs
from ..domain.models import ANSWERED, JSON, Status
from ..errors import Interrupted, LeaseLost, NotFound, ProxyError, StoreUnavailable, TurnCancelled
from ..stores.base import Lease, Store
from ..tasks import Tasks
from .executor import Observer
from .live import LiveTurn
from .ownership import Instances

log = logs.get(__name__)

# How often the end of a turn that could not be stored is tried again. Seconds.
AGAIN = 1.0


@dataclass(frozen=True, slots=True)
class _End:
    turn_id: str
    status: Status
    error: JSON
    attempts: list[JSON]
    timings: JSON
    at: float
    lease: Lease | None


class Ends:
    """One per engine. Until an end is stored its turn seems to run, and other proxies wait for it."""

    def __init__(self, store: Store, instances: Instances, tasks: Tasks, observers: Sequence[Observer]) -> None:
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._observers = observers
        self._waiting: dict[str, _End] = {}
        self._one_at_a_time = asyncio.Lock()

    @property
    def all_stored(self) -> bool:
        return not self._waiting

    async def failed(self, live: LiveTurn, error: ProxyError) -> None:
        """Store it and tell the clients. Never raises."""
        status: Status = "cancelled" if isinstance(error, TurnCancelled | Interrupted) else "failed"
        log.warning("turn_failed", agent=live.agent_id, turn_id=live.turn.id, code=error.code, message=error.message)
        now = time.time()
        live.attempt_ended({"ended_at": now, "status": status, "code": error.code})
        self._waiting[live.turn.id] = _End(
            live.turn.id, status, error.as_dict(), live.attempts, live.timings, now, live.lease
        )
        try:
            await self.store_all()
        except StoreUnavailable as exc:
            log.warning("failure_not_noted", turn_id=live.turn.id, error=exc.message)
            self._instances.failed(live.turn.id)
            self._tasks.serve(self._keep_trying())
        live.fail(error)

    async def store_all(self) -> None:
        """Also those that could not be stored before. Raises `StoreUnavailable`."""
        if not self._waiting:
            return
        async with self._one_at_a_time:
            for end in list(self._waiting.values()):
                await self._store_one(end)
                del self._waiting[end.turn_id]

    async def _store_one(self, end: _End) -> None:
        try:
            turn = await self._store.fail(
                end.turn_id, end.status, end.error, end.attempts, end.timings, end.at, lease=end.lease
            )
        except (NotFound, LeaseLost):
            return  # its agent was deleted; or whoever has the lease now settles the turn
        except StoreUnavailable as exc:
            if exc.detail.get("status") not in ANSWERED:
                raise
            # The commit was kept after all, and its client was told that it was not.
            await self._store.set_delivery(end.turn_id, "undelivered")
            return
        for observer in self._observers:
            observer.turn_ended(turn, ())

    async def _keep_trying(self) -> None:
        while self._waiting:
            await asyncio.sleep(AGAIN)
            try:
                await self.store_all()
            except StoreUnavailable as exc:
                log.warning("failure_not_noted", error=exc.message)
