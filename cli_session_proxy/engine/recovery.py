"""Settles what a dead or replaced proxy left of an agent: ends its CLIs, and gives its unfinished turns an end.

This needs the agent's lease. If the transcript of a running turn has the whole exchange, the turn is committed, with
delivery `uncertain`. Else it is cancelled as `interrupted`, and its session is verified before its next use, so that
the prompt does not reach the model again.
A queued turn was never sent. If it waits for a limit, it goes on waiting here. Any other queued turn is cancelled if
its proxy has ended; if its proxy lives, that proxy still has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from .. import logs
from ..backends.base import Backend
from ..domain import lineage
from ..domain.models import FINISHED, Agent, Turn
from ..errors import DamagedRow, StoreUnavailable
from ..sandbox import Sandboxes
from ..stores.base import KeptTurn, Lease, Store
from ..tasks import failures_logged
from .budgets import BudgetsOf
from .live import Observer, Requested, with_end
from .ownership import Instances

log = logs.get(__name__)

# Take an agent's lease: `Hold` waits for it, `HoldIfFree` gives None if it is in use.
Hold = Callable[[Agent], AbstractAsyncContextManager[Lease]]
HoldIfFree = Callable[[Agent], AbstractAsyncContextManager[Lease | None]]
# Takes over a turn of another proxy. The number: after how many turns of its lane here it is queued.
Resume = Callable[[Agent, Turn, int], None]

# Seconds between checks whether another proxy has ended.
NEIGHBOUR_CHECK = 1.0
# Seconds after the last heartbeat of a proxy on another host has expired, until all that it left is settled: its
# machine may only be paused. An agent that gets a request is taken over as soon as its lease has expired.
SETTLE_SILENT_AFTER = 60.0
# Seconds between two reads of a turn that another proxy runs (only the store is shared), and of one that waits for a
# limit.
REREAD_TURN, REREAD_WAITING = 0.1, 1.0


class Recovery:
    """Settles turns and processes of proxies that ended or stopped responding."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        instances: Instances,
        sandboxes: Sandboxes,
        observers: Sequence[Observer],
        budgets: BudgetsOf,
        runs_here: Callable[[str], object],
        resume: Resume | None = None,
    ) -> None:
        """`runs_here`: a turn that runs or waits in this proxy, by its id; None for any other. `resume` takes over each
        turn that waits for a limit; None: such turns are left alone."""
        self._store = store
        self._backend = backend
        self._instances = instances
        self._sandboxes = sandboxes
        self._observers = observers
        self._budgets = budgets
        self._runs_here = runs_here
        self.resume = resume
        self._in_doubt: set[str] = set()  # ids of turns that wait for a limit, perhaps taken over but not resumed here
        # Ids of turns that are this proxy's in the store and do not run here: at the last look (one may be about to
        # begin), and at the one before it, too. The store has forgotten their ends (a standby or a backup lacks them).
        self._unknown: set[str] = set()
        self._forgotten: set[str] = set()

    async def settle(self, agent: Agent, lease: Lease) -> None:
        """Settle what other proxies left of this agent. Raises `StoreUnavailable`; other errors are retried later."""
        cwd = self._sandboxes.path(agent.dir)
        # First: nobody may write a transcript while it is read.
        strays = [stray for other in self._instances.others() for stray in self._instances.children(other, cwd)]
        if not await self._backend.end_strays(strays):
            # A process that cannot be ended may go on writing its session, so the next turn gets a new session.
            chain = await self._store.chain(agent.key)
            for session in chain.sessions if chain else ():
                await self._store.save_session(replace(session, tip_turn_id=None, mark=None))
        resumed = 0
        for turn in await self._store.unfinished_of(agent.key):
            forgotten = turn.id in self._forgotten and self._runs_here(turn.id) is None
            if turn.instance == self._instances.id and turn.id not in self._in_doubt and not forgotten:
                continue
            if turn.limit_wait is not None and not forgotten:  # else later turns may have been run since
                # Only the holder of the lease may send it: its former proxy may not, even if it lives.
                if self.resume is not None and await self._take_over(lease, turn.id):
                    self.resume(agent, turn, resumed)
                    resumed += 1
            elif forgotten or turn.status == "running" or await self._instances.is_gone(turn.instance):
                recovered = await self._recovered(agent, turn)
                if recovered is None:
                    await self._interrupt(lease, turn)
                else:
                    await self._complete(agent, lease, *recovered)
        await self._mark_uncertain(agent.key)

    async def _take_over(self, lease: Lease, turn_id: str) -> bool:
        """See `Store.take_over`. If its result is in doubt, it is tried again: nobody would run the turn."""
        try:
            taken = await self._store.take_over(lease, turn_id, self._instances.id)
        except StoreUnavailable as exc:
            if exc.detail.get("in_doubt"):
                self._in_doubt.add(turn_id)
            raise
        self._in_doubt.discard(turn_id)
        return taken is not None

    async def _mark_uncertain(self, agent_key: int | None = None) -> None:
        """Mark the answers as `uncertain` that a dead proxy was about to deliver, of one agent or (None) of all."""
        for turn in await self._store.pending_deliveries(agent_key):
            if await self._instances.is_gone(turn.instance):
                await self._store.set_delivery(turn.id, "uncertain", by=turn.instance)

    async def watch(self, hold_if_free: HoldIfFree) -> None:
        """Recover what other proxies leave when they end. Runs until it is cancelled."""
        pause, waits_read = NEIGHBOUR_CHECK, time.monotonic()
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, SETTLE_SILENT_AFTER)  # after failures, retry less and less often
            with failures_logged("not_recovered"):
                ended = any(not self._instances.alive(other) for other in self._instances.others())
                if time.monotonic() - waits_read > SETTLE_SILENT_AFTER:  # seldom, as it reads all unfinished turns
                    waits_read = time.monotonic()
                    ended = await self._look_at_unfinished() or ended
                ended = ended or bool(self._in_doubt or self._forgotten)
                if not (ended or await self._silent()) or await self.recover(hold_if_free):
                    pause = NEIGHBOUR_CHECK

    async def _look_at_unfinished(self) -> bool:
        """Whether a turn of a stopped proxy waits for a limit. Also finds the turns whose ends the store has lost."""
        waits, unknown = set[str | None](), set[str]()
        async for turn in self._store.unfinished():
            if turn.instance == self._instances.id and self._runs_here(turn.id) is None:
                unknown.add(turn.id)
            elif turn.limit_wait is not None:
                waits.add(turn.instance)
        self._forgotten = unknown & self._unknown
        self._unknown = unknown
        return any([await self._instances.is_gone(instance) for instance in waits])

    async def _silent(self) -> list[str]:
        """The proxies on other hosts whose heartbeat expired more than `SETTLE_SILENT_AFTER` seconds ago."""
        if not self._instances.spans_hosts:
            return []
        return [other for other in await self._store.silent(SETTLE_SILENT_AFTER) if not self._instances.alive(other)]

    async def recover(self, hold_if_free: HoldIfFree) -> bool:
        """Settle what dead proxies left of every agent, and forget these proxies. Several may run it at once, and
        repeatedly. Raises `StoreUnavailable`.

        False if an agent could not be settled (logged). Its proxy is not forgotten, so this is tried again, at the
        latest by the agent's next turn.
        """
        dead = [other for other in self._instances.others() if not self._instances.alive(other)]
        silent = await self._silent()
        strays = [stray for instance in dead for stray in self._instances.children(instance)]
        await self._backend.end_strays(strays)
        doubted, here = set(self._in_doubt), set[str]()
        open_turns: list[Turn] = []
        async for turn in self._store.unfinished():
            if turn.instance == self._instances.id:
                here.add(turn.id)
            if turn.id in self._in_doubt | self._forgotten or await self._instances.is_gone(turn.instance):
                open_turns.append(turn)
        self._in_doubt -= doubted - here
        self._forgotten &= here
        in_use, failed = False, 0
        for agent_key in dict.fromkeys(turn.agent_key for turn in open_turns):
            try:
                agent = await self._store.agent_by_key(agent_key)
            except DamagedRow:  # the log names it; the agents after it are settled all the same
                failed += 1
                continue
            if agent is None:
                continue
            try:
                async with hold_if_free(agent) as lease:
                    if lease is None:
                        in_use = True  # the user of the lease settles this agent; forget the dead proxy later
                    else:
                        await self.settle(agent, lease)
            except StoreUnavailable:
                raise
            except Exception:
                failed += 1
                log.exception("not_settled", **agent.named_in_logs)
        await self._mark_uncertain()
        for instance in () if in_use or failed else {*dead, *silent}:
            await self._store.resign(instance)
            self._instances.forget(instance)
        return not failed

    async def finished_elsewhere(
        self, turn_id: str, agent: Agent, hold: Hold, seen: Callable[[Turn], None] | None = None
    ) -> Turn | None:
        """Wait for the end of a turn of another proxy. If that one has ended or does not respond, settle the turn here.
        `seen` is called with each state of the turn that is read.

        None if its agent was deleted meanwhile. Waits without a limit: the caller bounds it.
        """
        while True:
            turn = await self._store.turn(turn_id)
            if turn is None or turn.status in FINISHED:
                return turn
            assert turn.instance is not None
            if seen is not None:
                seen(turn)
            if not self._instances.has_ended(turn.instance) and await self._store.responds(turn.instance):
                await asyncio.sleep(REREAD_TURN if turn.limit_wait is None else REREAD_WAITING)
                continue
            async with hold(agent) as lease:
                await self.settle(agent, lease)
                turn = await self._store.turn(turn_id)
                if turn is not None and turn.status == "queued" and turn.limit_wait is None:
                    await self._interrupt(lease, turn)  # its proxy does not respond

    # --- turns

    async def _interrupt(self, lease: Lease, turn: Turn) -> None:
        error = {
            "status": 503,
            "code": "interrupted",
            "message": "the proxy stopped before this turn was finished; send it again",
        }
        now = self._instances.now()
        attempts = with_end(turn.attempts, {"ended_at": now, "status": "cancelled", "code": "interrupted"})
        await self._store.fail(turn.id, "cancelled", error, attempts, {}, now, lease=lease)
        log.info("interrupted", turn_id=turn.id, was=turn.status)

    async def _complete(self, agent: Agent, lease: Lease, turn: Turn, kept: KeptTurn) -> None:
        parent = await self._store.turn(turn.parent_id) if turn.parent_id else None
        now = self._instances.now()
        settled = await self._store.commit(
            lease,
            lineage.answered(
                turn,
                parent,
                turn.output,
                status="completed",
                cost_usd=None,
                timings={},
                attempts=tuple(with_end(turn.attempts, {"ended_at": now, "status": "completed", "settled": True})),
                delivery="uncertain",
                finished_at=now,
                backend=self._backend.name,
                evidence=replace(turn.evidence, settled=True),
            ),
            kept,
            move_head=agent.moves_head_to(turn),
            budgets=self._budgets(agent.owner, agent.agent_id),
        )
        requested = Requested(agent.owner, agent.agent_id, turn.created_at)
        for observer in self._observers:
            observer.turn_ended(settled, kept.links, requested, now)
        log.info("settled", turn_id=turn.id, session_id=kept.session.id)

    async def _recovered(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        """The turn with its answer from its transcript; None if the transcript has no whole answer, the chain went on
        without this turn, or its client knows that it failed."""
        if turn.status == "queued" or self._instances.has_failed(turn) or turn.options.format is not None:
            return None  # a structured answer was not validated: do not deliver it
        head = await self._store.turn(agent.head) if agent.head else None
        if head is not None and (head.finished_at or 0.0) > (turn.started_at or 0.0):
            return None
        return await self._backend.recover_turn(agent, turn)
