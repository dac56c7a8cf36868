"""Ends of turns that failed or were cancelled: each is stored, as soon as the store is there, and clients are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .. import logs
from ..domain.models import ANSWERED, FINISHED, JSON, ChainSummary, Delivery, Status, Turn
from ..errors import Interrupted, LeaseLost, NotFound, ProxyError, StoreUnavailable, TurnCancelled
from ..stores.base import Lease, Store, TurnPage
from ..tasks import Tasks
from .live import LiveTurn, Observer, Requested, with_end
from .ownership import Instances

log = logs.get(__name__)

# Seconds between attempts to store the end of a turn.
RETRY_INTERVAL = 1.0
# Seconds in which a server that was silent may still commit that a turn was accepted; the most between two looks.
LATEST_COMMIT, LONGEST_PAUSE = 3600.0, 60.0


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a turn, until it is stored."""

    turn_id: str
    status: Status
    error: JSON
    attempts: list[JSON]
    timings: JSON
    at: float
    lease: Lease | None
    requested: Requested | None = None
    if_answered: Delivery = "undelivered"  # what to note if the store has an answer all the same
    may_come: bool = False  # the store may queue the turn later, if it has not yet
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class Ends:
    """One per engine. Until the end of a turn is stored, other proxies take the turn for a running one, and wait."""

    def __init__(
        self,
        store: Store,
        instances: Instances,
        tasks: Tasks,
        observers: Sequence[Observer],
        lease: float,
        running: Callable[[str], object],
    ) -> None:
        """`running`: a turn that runs or waits in this proxy, by its id; None for any other."""
        self._lease = lease
        self._running = running
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._observers = observers
        self.waiting: dict[str, _End] = {}  # ends that are not stored yet, by turn
        self._one_at_a_time = asyncio.Lock()

    def failed(self, live: LiveTurn, error: ProxyError) -> None:
        """Queue the end of a failed turn; `tell` stores it. The agent's lease is not handed over before that."""
        status: Status = "cancelled" if isinstance(error, TurnCancelled | Interrupted) else "failed"
        log.warning(
            "turn_failed", **live.agent.named_in_logs, turn_id=live.turn.id, code=error.code, message=error.message
        )
        now = live.now()
        live.attempts = with_end(live.attempts, {"ended_at": now, "status": status, "code": error.code})
        self.waiting[live.turn.id] = _End(
            live.turn.id, status, error.as_dict(), live.attempts, live.timings, now, live.lease, live.requested,
            live.delivery_if_failed,
        )  # fmt: skip

    async def tell(self, live: LiveTurn, error: ProxyError) -> None:
        """Store the end of a turn that failed, and tell its clients. Never raises."""
        end = self.waiting.get(live.turn.id)
        try:
            await self.store_all()
        except Exception as exc:
            trace = not isinstance(exc, StoreUnavailable)
            log.warning("failure_not_noted", turn_id=live.turn.id, error=str(exc), exc_info=trace)
            self._instances.failed(live.turn.id)
            self._tasks.serve(self._keep_trying())
            if end is not None and error.detail.get("in_doubt"):
                # Its answer may be stored. Told too early, a client would send the same again to a proxy that reaches
                # the store, as a second turn. After `lease` seconds others take this proxy for one that has ended.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lease):
                        await end.stored.wait()
        live.fail(error)

    def never_ran(self, turn_id: str, attempts: Sequence[JSON] = ()) -> None:
        """Accepting the turn failed, and its client knows. If the store has the turn as queued all the same, end it as
        soon as the store can be written: other turns would wait for it."""
        error = Interrupted("the store was lost while this turn was accepted; send it again")
        now = self._instances.now()
        end = _End(turn_id, "cancelled", error.as_dict(), list(attempts), {}, now, None, may_come=True)
        self.waiting[turn_id] = end
        self._tasks.serve(self._keep_trying())

    def as_ended(self, turn: Turn) -> Turn:
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
                end.stored.set()

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
                # Without the lease, this proxy may only end a turn that is still queued.
                now = await self._store.turn(end.turn_id)
                if end.may_come and not _has_come(end, now):
                    self._tasks.serve(self._end_when_it_comes(end))
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
                await self._store.set_delivery(end.turn_id, end.if_answered, by=self._instances.id)
            return
        for observer in self._observers:
            observer.turn_ended(turn, (), end.requested, end.at)

    async def _end_when_it_comes(self, end: _End) -> None:
        """End the turn once the store has queued it: no proxy runs it."""
        pause, waited = RETRY_INTERVAL, 0.0
        while waited < LATEST_COMMIT:
            await asyncio.sleep(pause)
            pause, waited = min(2 * pause, LONGEST_PAUSE), waited + pause
            with suppress(StoreUnavailable):
                now = await self._store.turn(end.turn_id)
                if _has_come(end, now):
                    if self._running(end.turn_id) is None:  # else another request has queued it
                        self.waiting[end.turn_id] = end
                        await self._keep_trying()
                    return

    async def _keep_trying(self) -> None:
        while self.waiting:
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                await self.store_all()
            except Exception as exc:
                log.warning("failure_not_noted", error=str(exc), exc_info=not isinstance(exc, StoreUnavailable))


def _has_come(end: _End, now: Turn | None) -> bool:
    """Whether the store has queued the turn after `end` was made."""
    return now is not None and (now.status not in FINISHED or list(now.attempts) != end.attempts)


class StoreView:
    """A `Store` for reading, as people and clients see it: a turn whose end is not stored yet (e.g. because the disk is
    full) reads as ended. Other methods are those of the store itself."""

    def __init__(self, store: Store, ends: Ends) -> None:
        self._store = store
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def turn(self, turn_id: str) -> Turn | None:
        turn = await self._store.turn(turn_id)
        return None if turn is None else self._ends.as_ended(turn)

    async def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        async for turn in self._store.turns(agent_key, after_seq=after_seq):
            yield self._ends.as_ended(turn)

    async def page(self, agent_key: int, **bounds: Any) -> TurnPage:
        page = await self._store.page(agent_key, **bounds)
        return replace(page, turns=tuple(self._ends.as_ended(turn) for turn in page.turns))

    async def summaries(self, owner: str | None = None, *, since: float | None = None) -> AsyncIterator[ChainSummary]:
        async for row in self._store.summaries(owner, since=since):
            if self._ends.waiting and row.state is not None and row.state not in FINISHED:
                newest = (await self.page(row.agent.key, before_seq=None, limit=1)).turns
                yield replace(row, state=newest[0].status) if newest else row
            else:
                yield row
