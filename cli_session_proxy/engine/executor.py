"""One turn on one CLI: steps 3 to 6 of a request (see `turns`), and once more where nothing was lost by it.

The caller has the agent for itself while this runs. A turn that fails never moves the head, and its session is
made equal to the path again before it is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import structlog

from ..backends.claude import failures
from ..backends.claude.events import (
    ApiRetry,
    AssistantMessage,
    Called,
    Compacted,
    ProcessDied,
    Result,
    SessionSeen,
    ToolActivity,
)
from ..backends.claude.process.pool import Pool
from ..backends.claude.process.restarts import Restarts
from ..backends.claude.sessions import adoption
from ..backends.claude.sessions.adoption import adopt
from ..backends.claude.sessions.manager import Foreign, Plan, Ready, Sessions
from ..backends.claude.sessions.stopping import Cutter
from ..domain import lineage, structured
from ..domain.client_tools import Answers, Judge, Wants, answers, instruction
from ..domain.models import Block, BlockDelta, BlockStart, BlockStop, Link, Turn
from ..errors import ClaudeUnavailable, StoreUnavailable, TurnCancelled
from ..settings import Settings
from ..stores.base import Begun, Commit, Lease, PathChanged, Standing, Store
from ..tasks import limited, limited_by_life, uninterrupted
from .attempt import End, Run
from .live import LiveTurn, said
from .ownership import Instances, Ownership

log = structlog.get_logger(__name__)

# A turn whose process dies before it said anything is run once more by itself; more would hide a broken CLI.
ATTEMPTS = 2

T = TypeVar("T")


class Observer(adoption.Observer, Protocol):
    """Is told what the engine did, for numbers and live views. It must not fail, and not wait."""

    def turn_ended(self, turn: Turn, links: Sequence[Link]) -> None:
        """A turn was committed, with these links, or it failed or was cancelled."""

    def spawned(self, seconds: float) -> None:
        """A CLI said its first word so long after its start."""


class Own(Protocol):
    """Makes a task that the engine waits for when it stops."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...


class Attempts:
    """Runs turns, one an agent at a time. One per engine."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        sessions: Sessions,
        pool: Pool,
        instances: Instances,
        ownership: Ownership,
        own: Own,
        observers: Sequence[Observer],
    ) -> None:
        self.settings = settings
        self.store = store
        self._sessions = sessions
        self._pool = pool
        self._instances = instances
        self._ownership = ownership
        self._own = own
        self._observers = observers
        self._restarts = Restarts()

    async def execute(self, live: LiveTurn, standing: Standing, *, at_head: bool, deadline: float) -> None:
        """Run the turn and tell its clients. `deadline` is the loop's time. Raises `ProxyError`."""
        lease = live.lease
        assert lease is not None
        fault: str | None = None
        attempt, again = 1, False
        while True:
            if live.cancelled_because is not None:  # while what the attempt before left was put away
                raise asyncio.CancelledError
            self._restarts.check(standing.agent.key)
            live.at("queued")
            run = Run(live, lease, standing.agent, attempt, fault)
            try:
                async with limited(deadline, self.too_long):
                    await self._verified(lease)
                    if again:  # what the attempt before left of the session is read anew
                        standing = await self._standing(run, live.turn.parent_id, at_head=at_head)
                    result = await self._attempt(run, standing, at_head=at_head, deadline=deadline)
                assert run.ready is not None
                self._restarts.lived(standing.agent.key)
                await uninterrupted(self._own(self._commit(run, run.ready, result)))
                return
            except ProcessDied as died:
                run.ended("failed", why=died.why)
                self._restarts.died(standing.agent.key, died)
                if attempt == ATTEMPTS or live.spoke or run.plan.profile.tools:
                    raise failures.error_for_death(died) from died
                log.warning("turn_repeated", turn_id=live.turn.id, why=died.why)
                attempt += 1
            except PathChanged:
                log.info("path_changed", turn_id=live.turn.id)  # nothing was sent: it begins anew on the path as it is
            except structured.InvalidOutput as invalid:
                if attempt == ATTEMPTS or run.plan.profile.tools:
                    raise invalid.as_error() from invalid
                fault = invalid.fault
                run.ended("failed", why=fault)
                log.warning("turn_repeated", turn_id=live.turn.id, why="invalid structured output")
                attempt += 1
            finally:
                again = True
                if run.ready is not None and not run.committed:
                    await self._spoiled(run.ready, run)

    # --- 3, 4: a session, a frame, the events

    async def _attempt(self, run: Run, standing: Standing, *, at_head: bool, deadline: float) -> Result | Called:
        try:
            ready = run.ready = await self._prepared(run, standing, at_head=at_head)
            run.live.at("session_ready")
            await self.store.begin(self._begun(run, ready))
        except StoreUnavailable as exc:
            raise not_run(exc) from exc
        result = await self._drive(run, ready, deadline)
        if isinstance(result, Result) and result.is_error and run.cutter.hit is None:
            raise failures.error_for(result, retries=run.retries)
        if isinstance(result, Result) and run.format is not None:
            run.output = await asyncio.to_thread(structured.checked, run.format, run.output)
        return result

    async def _verified(self, lease: Lease) -> None:
        """A proxy that was paused must not touch the sessions of an agent that another one writes by now."""
        try:
            await self._ownership.verify(lease)
        except StoreUnavailable as exc:
            raise not_run(exc) from exc

    async def _standing(self, run: Run, parent_id: str | None, *, at_head: bool) -> Standing:
        standing = await self.store.standing(run.agent.key, parent_id, at_head=at_head)
        if standing is None:
            raise TurnCancelled("the agent was deleted while this request ran")
        return standing

    async def _prepared(self, run: Run, standing: Standing, *, at_head: bool) -> Ready:
        standing = await self._arrived(run, standing, at_head=at_head)
        parent = run.parent = standing.parent
        run.kept_system = _kept_system(run.live.turn, parent)
        run.plan = self._plan(run, run.live.turn, parent)
        run.cutter = Cutter(run.plan.wants.stop)
        return await self._ready(run, standing, at_head=at_head)

    async def _arrived(self, run: Run, standing: Standing, *, at_head: bool) -> Standing:
        """The turn to continue: decided by the request, or the head as it is now, less what never arrived."""
        if "left_off" in run.live.turn.reason:
            run.reason["left_off"] = None  # of an earlier run of this turn: its client may have come for it since
        while at_head and standing.parent is not None and await self._never_arrived(standing.parent):
            run.left_off.append(standing.parent.id)
            run.reason["left_off"] = standing.parent.id
            standing = await self._standing(run, standing.parent.parent_id, at_head=False)
        parent = standing.parent
        if parent is not None and parent.delivery in ("undelivered", "uncertain"):
            # Whoever goes on from an answer has it, or does without: from now on the same words are said anew.
            await self.store.set_delivery(parent.id, "delivered")
        return standing

    async def _never_arrived(self, turn: Turn) -> bool:
        """Its clients left before they had the answer, here and at every other proxy."""
        if turn.delivery != "undelivered":
            return False
        return not any(self._instances.alive(proxy) for proxy in await self.store.followers(turn.id))

    def _plan(self, run: Run, turn: Turn, parent: Turn | None) -> Plan:
        profile = self.settings.profile_for(turn.profile)
        system = turn.system or run.kept_system
        if system is None:
            system = profile.system_prompt or (None if profile.tools else self.settings.system_prompt)
        model = turn.model if turn.model != "default" else profile.model or self.settings.default_model
        said = answers(parent.output if parent else (), turn.input)
        wants = Wants.of(turn.reason, parent.reason if parent and said.results and turn.reason.get("delta") else None)
        return Plan(model, system, turn.effort, profile, self._prompt(run, wants, said), wants, said)

    def _prompt(self, run: Run, wants: Wants, said: Answers) -> tuple[Block, ...]:
        """What is said to the CLI. To results alone nothing is added: the process goes on from them."""
        out = list(said.rest)
        if said.alone and run.fault is None:
            return ()
        if run.format is not None:
            out.append(structured.instruction(run.format, run.fault))
        asked = instruction(wants.choice, [tool.name for tool in wants.offers.tools])
        return (*out, asked) if asked is not None else tuple(out)

    async def _ready(self, run: Run, standing: Standing, *, at_head: bool) -> Ready:
        try:
            return await self._sessions.ready(standing, run.plan, run.live.turn.id, run.frame_uuid, adopt=at_head)
        except Foreign as foreign:
            assert standing.parent is not None
            run.parent = await adopt(self.store, run.lease, run.agent, standing.parent, foreign, self._observers)
            session = await self.store.session_at(run.agent.key, run.parent.id)
            grown = Standing(run.agent, run.parent, session)
            return await self._sessions.ready(grown, run.plan, run.live.turn.id, run.frame_uuid, adopt=False)

    def _begun(self, run: Run, ready: Ready) -> Begun:
        run.reason |= ready.reason
        now = time.time()
        entry = run.begun(ready.session.id, now, ready.reason.get("repaired"))
        return Begun(
            lease=run.lease,
            turn_id=run.live.turn.id,
            parent_id=run.parent.id if run.parent else None,
            session_id=ready.session.id,
            frame_uuid=run.frame_uuid,
            continuity=ready.continuity,
            system=run.kept_system,
            reason=run.live.turn.reason | run.reason,
            started_at=now,
            attempt=entry,
            instance=self._instances.id,
            left_off=tuple(run.left_off),
        )

    async def _drive(self, run: Run, ready: Ready, deadline: float) -> Result | Called:
        """Send the frame and pass on what comes; a silent CLI is given up, a running tool is not silent."""
        clock_of = asyncio.get_running_loop().time
        idle = self.settings.idle_timeout
        judge = Judge(run.plan.wants.offers, run.plan.wants.choice)
        if ready.results:
            events = ready.process.go_on(ready.results, judge)
        else:
            events = ready.process.turn(run.frame_uuid, run.plan.prompt, judge)
        silent = f"nothing came from the CLI for {idle:g} s; send it again, or raise idle_timeout"
        async with aclosing(events) as heard, limited_by_life(clock_of() + idle, silent) as limit:
            async for event in heard:
                limit.move(deadline if isinstance(event, ToolActivity) else clock_of() + idle)
                if isinstance(event, Result | Called):
                    run.live.at("result")
                    return event
                going = run.cutter.hit is None
                self._take(run, ready, event)
                if going and run.cutter.hit is not None:
                    await ready.process.interrupt()
        raise ProcessDied("the CLI ended the turn without a result", returncode=None, stderr="")

    @property
    def too_long(self) -> str:
        return f"the turn took longer than {self.settings.turn_timeout:g} s; send it again, or raise turn_timeout"

    def _take(self, run: Run, ready: Ready, event: object) -> None:
        match event:
            case BlockStart() | BlockDelta() | BlockStop():
                self._publish(run, ready, event)
            case AssistantMessage() if run.cutter.hit is None:
                run.output.extend(event.blocks)
            case SessionSeen():
                run.session_id = event.session_id
            case ToolActivity():
                run.tools.append(event.entry)
            case ApiRetry():
                run.retries.append(event.detail)
            case Compacted():
                run.reason["compacted"] = event.detail
            case _:
                pass

    def _publish(self, run: Run, ready: Ready, event: BlockStart | BlockDelta | BlockStop) -> None:
        going = run.cutter.hit is None
        for told in run.cutter.feed(event):
            if run.format is None:  # else told when it is known to be valid
                run.start(ready)
                run.live.publish(told)
        if going and run.cutter.hit is not None:
            run.output.append(run.cutter.last)
            run.reason["stop_sequence"] = run.cutter.hit

    async def _spoiled(self, ready: Ready, run: Run) -> None:
        """The session's process knows a prompt that is not on the path: it must be gone before the next turn."""
        owned = self._ownership.holds(run.lease)
        await uninterrupted(self._own(self._sessions.spoil(ready, run.session_id, owned=owned)))

    # --- 5, 6: commit and acknowledge

    async def _commit(self, run: Run, ready: Ready, result: Result | Called) -> None:
        live, turn = run.live, run.live.turn
        end = End.of(run, ready, result)
        run.output = list(end.said.output)
        captured = await self._sessions.capture(ready, turn, end.said)
        before = run.parent.path_hash if run.parent else None
        if run.retries:
            run.reason["retries"] = run.retries
        live.at("committed")
        commit = Commit(
            lease=run.lease,
            turn_id=turn.id,
            status=end.status,
            output=end.said.output,
            stop_reason=end.stop_reason,
            usage=result.usage,
            cost_usd=end.cost_usd,
            tools=tuple(run.tools),
            timings=live.timings,
            attempts=run.ended(end.status, session_id=end.said.session_id),
            records=captured.records,
            session=captured.session,
            links=(*ready.links, *captured.links),
            path_hash=lineage.path_hash(before, turn.input, run.output),
            depth=(run.parent.depth if run.parent else 0) + 1,
            delivery="undelivered" if live.abandoned else "pending",
            finished_at=time.time(),
            reason=turn.reason | run.reason | {"records": captured.note},
        )
        try:
            committed = await self.store.commit(commit)
        except StoreUnavailable as exc:
            raise StoreUnavailable(
                f"this turn was run, and its answer was not kept ({exc.message}); the conversation is as before: "
                "send it again",
                retry_after=exc.retry_after,
            ) from exc
        run.committed = True
        self._tell(run, ready, committed, commit.links)
        try:
            await self._pool.checkin(ready.process)
        except ClaudeUnavailable as exc:  # it cannot be killed; the turn is acknowledged all the same
            log.warning("process_left", pid=ready.process.pid, error=exc.message)
        for link in commit.links:
            if link.reason in ("rebuilt", "moved"):
                log.info("repaired", agent=run.agent.agent_id, turn_id=turn.id, reason=link.reason)

    def _tell(self, run: Run, ready: Ready, committed: Turn, links: Sequence[Link]) -> None:
        """The clients first: the observers' turn comes when the answers have been handed over."""
        run.start(ready)
        if run.format is not None:
            for event in said(committed.output):
                run.live.publish(event)
        run.live.finish(committed)
        loop = asyncio.get_running_loop()
        for observer in self._observers:
            loop.call_soon(loop.call_soon, observer.turn_ended, committed, links)


def _kept_system(turn: Turn, parent: Turn | None) -> str | None:
    """A delta without a system prompt keeps its parent's; stored with the turn, so that the next one finds it."""
    return parent.system if turn.system is None and turn.reason.get("delta") and parent is not None else None


def not_run(exc: StoreUnavailable) -> StoreUnavailable:
    return StoreUnavailable(f"this turn was not run: {exc.message}", retry_after=exc.retry_after, detail=exc.detail)
