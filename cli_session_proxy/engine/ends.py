"""Ends of turns that failed or were cancelled: each is stored (retried while the store is away) and told to clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .. import logs
from ..domain.models import ANSWERED, FINISHED, JSON, Status, Turn
from ..errors import Interrupted, LeaseLost, NotFound, ProxyError, StoreUnavailable, TurnCancelled
from ..stores.base import Lease, Store
from ..tasks import Tasks
from .live import LiveTurn, Observer, Requested, with_end
from .ownership import Instances

log = logs.get(__name__)

# Seconds between attempts to store the end of a turn.
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
    requested: Requested | None = None


class Ends:
    """One per engine. Until an end is stored, other proxies take its turn for a running one and wait."""

    def __init__(self, store: Store, instances: Instances, tasks: Tasks, observers: Sequence[Observer]) -> None:
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._observers = observers
        self.waiting: dict[str, _End] = {}  # ends that are not stored yet, by turn
        self._one_at_a_time = asyncio.Lock()

    def failed(self, live: LiveTurn, error: ProxyError) -> None:
        """Queue its end to be stored (by `tell`). The agent's lease is not handed over before that."""
        status: Status = "cancelled" if isinstance(error, TurnCancelled | Interrupted) else "failed"
        log.warning("turn_failed", agent=live.agent_id, turn_id=live.turn.id, code=error.code, message=error.message)
        now = live.now()
        live.attempts = with_end(live.attempts, {"ended_at": now, "status": status, "code": error.code})
        self.waiting[live.turn.id] = _End(
            live.turn.id, status, error.as_dict(), live.attempts, live.timings, now, live.lease, live.requested
        )

    async def tell(self, live: LiveTurn, error: ProxyError) -> None:
        """Store the end of a turn that failed, and tell its clients. Never raises."""
        try:
            await self.store_all()
        except Exception as exc:
            trace = not isinstance(exc, StoreUnavailable)
            log.warning("failure_not_noted", turn_id=live.turn.id, error=str(exc), exc_info=trace)
            self._instances.failed(live.turn.id)
            self._tasks.serve(self._keep_trying())
        live.fail(error)

    def never_ran(self, turn_id: str, attempts: Sequence[JSON] = ()) -> None:
        """Accepting it failed, and its client knows, but the store may have it as queued. If so, end it as soon as the
        store can be written: other turns would wait for it."""
        error = Interrupted("the store was lost while this turn was accepted; send it again")
        now = self._instances.now()
        self.waiting[turn_id] = _End(turn_id, "cancelled", error.as_dict(), list(attempts), {}, now, None)
        self._tasks.serve(self._keep_trying())

    def applied(self, turn: Turn) -> Turn:
        """The turn with its end, if the store still has it as unfinished because that end is not stored yet."""
        end = self.waiting.get(turn.id)
        if end is None or turn.status in FINISHED:
            return turn
        return replace(
            turn, status=end.status, error=end.error, attempts=tuple(end.attempts), timings=end.timings,
            finished_at=end.at,
        )  # fmt: skip

    async def store_all(self) -> None:
        """Store all queued ends. Raises `StoreUnavailable`."""
        async with self._one_at_a_time:
            for end in list(self.waiting.values()):
                await self._store_one(end)
                del self.waiting[end.turn_id]

    async def _store_one(self, end: _End) -> None:
        fail = partial(
            self._store.fail, end.turn_id, end.status, end.error, end.attempts, end.timings, end.at,
            instance=self._instances.id,
        )  # fmt: skip
        try:
            try:
                turn = await fail(lease=end.lease) if end.lease is not None else None
            except LeaseLost:
                turn = None
            if turn is None:
                # A queued turn is its own proxy's to end: ours. All others are ended by the holder of the lease.
                now = await self._store.turn(end.turn_id)
                if now is None or now.status != "queued":
                    return
                turn = await fail()
        except NotFound:
            return  # its agent was deleted
        except StoreUnavailable as exc:
            if "status" not in exc.detail:
                raise
            if exc.detail["status"] in ANSWERED:
                # The commit did succeed, though its client was told that it failed.
                await self._store.set_delivery(end.turn_id, "undelivered")
            return
        for observer in self._observers:
            observer.turn_ended(turn, (), end.requested, end.at)

    async def _keep_trying(self) -> None:
        while self.waiting:
            await asyncio.sleep(AGAIN)
            try:
                await self.store_all()
            except Exception as exc:
                log.warning("failure_not_noted", error=str(exc), exc_info=not isinstance(exc, StoreUnavailable))
