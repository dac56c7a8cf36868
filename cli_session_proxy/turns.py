"""The engine: one request walks through here, top to bottom.

    submit    1 placement: which parent does this continue, is it a retry?   2 accepted durably, in its lane
    _run        the lane's turn comes
    _execute  3 sessions: a process whose memory is the path                 4 one frame in, events out
    _commit   5 answer, records, links and head in one transaction           6 acknowledged: `Finished`

A turn that fails never moves the head, and its session is made equal to the path again before it is used.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from . import continuity
from .claude import failures
from .claude.events import (
    ApiRetry,
    AssistantMessage,
    Compacted,
    ProcessDied,
    Result,
    SessionSeen,
    ToolActivity,
)
from .claude.pool import Pool
from .continuity import Decision
from .errors import (
    ClaudeUnavailable,
    ConfigError,
    ProxyError,
    StoreUnavailable,
    TurnCancelled,
    TurnTimeout,
    UpstreamError,
)
from .lanes import Lanes, Place
from .live import Answer, LiveTurn, replay
from .models import (
    JSON,
    ON_PATH,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Started,
    Status,
    Turn,
    TurnRequest,
)
from .placement import Placement, new_id
from .recovery import adopt, settle
from .sandbox import Sandboxes
from .sessions import Foreign, Plan, Ready, Sessions
from .settings import Settings
from .stores.base import Begun, Commit, KeyTaken, NewTurn, Store
from .stores.sql import store_for

__all__ = ["Answer", "Engine"]

log = structlog.get_logger(__name__)

# A turn whose process dies before it said anything is run once more by itself; more would hide a broken CLI.
ATTEMPTS = 2

HOUR = 3600.0


class Engine:
    """Everything between the doors and the CLI. Start it once per process, stop it to drain."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self._store = store
        self._pool = Pool(settings)
        self._sandboxes = Sandboxes(settings)
        self._lanes = Lanes(settings.lane_limit)
        self._slots = asyncio.Semaphore(settings.max_turns)
        self._live: dict[str, LiveTurn] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._instance = uuid.uuid4().hex
        self._open = False

    # --- life

    async def start(self) -> None:
        """Open the store, prepare `var/`, settle what a dead proxy left. Raises `ConfigError`, `StoreUnavailable`."""
        _prepare_var(self.settings.var)
        if self._store is None:
            self._store = store_for(self.settings)
        await self.store.open()
        self._sessions = Sessions(self.settings, self.store, self._pool, self._sandboxes)
        self._placement = Placement(self.store, self._sessions)
        await settle(self.store)
        self._open = True
        if self.settings.retention_days is not None:
            self._spawn(self._retention(self.settings.retention_days))

    async def stop(self) -> None:
        """Accept nothing new, let running turns finish (bounded by `drain_timeout`), end every process."""
        self._open = False
        running = {live.task for live in self._live.values() if live.task is not None}
        if running:
            await asyncio.wait(running, timeout=self.settings.drain_timeout)
        for live in list(self._live.values()):
            live.cancel("the proxy is shutting down")
        for task in self._tasks - running:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._pool.close()
        if self._store is not None:
            await self._store.close()

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StoreUnavailable("the engine is not started")
        return self._store

    @property
    def ready(self) -> bool:
        return self._open

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that this engine owns: `stop` waits for it, and a fault in it is logged, not lost."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task_failed", exc_info=task.exception())

    # --- 1, 2: place and accept

    async def submit(self, request: TurnRequest) -> Answer:
        """Accept a request durably and in order; it runs on its own from here. Raises `ProxyError`."""
        if not self._open:
            raise ClaudeUnavailable("the proxy is shutting down: send this again in a moment", retry_after=5.0)
        self.settings.profile_for(request.profile)
        now = time.time()
        earlier = await self._placement.earlier(request, now)
        if earlier is not None:
            return await self._again(earlier)
        agent, decision = await self._placement.place(request)
        parent = await self._placement.bring_in(agent, decision, request.model)
        place = self._lanes.take(agent.key)
        try:
            turn = await self.store.accept(self._new_turn(request, agent, decision, parent, now))
        except KeyTaken as taken:
            self._lanes.give_up(place)
            first = await self.store.turn(taken.turn_id)
            assert first is not None
            return await self._again(first)
        except BaseException:
            self._lanes.give_up(place)
            raise
        return self._launch(turn, agent, place, at_head=decision.at_head)

    def _new_turn(
        self, request: TurnRequest, agent: Agent, decision: Decision, parent: str | None, now: float
    ) -> NewTurn:
        until = now + self.settings.idempotency_hours * HOUR if request.idempotency_key else None
        return NewTurn(
            id=new_id("turn"),
            agent_key=agent.key,
            model=request.model,
            input=decision.new,
            created_at=now,
            parent_id=parent,
            system=request.system,
            effort=request.effort,
            profile=request.profile,
            reason=decision.reason | {"delta": decision.delta},
            origin=request.wire,
            fingerprint=request.fingerprint,
            idempotency_key=request.idempotency_key,
            idempotency_until=until,
            instance=self._instance,
        )

    def _launch(self, turn: Turn, agent: Agent, place: Place, *, at_head: bool) -> Answer:
        live = self._make_live(turn, agent.agent_id)
        self._live[turn.id] = live
        answer = live.attach()
        live.task = self._spawn(self._run(live, agent.key, place, at_head=at_head))
        return answer

    def _make_live(self, turn: Turn, agent_id: str) -> LiveTurn:
        def on_delivery(arrived: bool) -> None:
            self._spawn(self._delivered(turn.id, arrived))

        def on_empty() -> None:
            live.cancel("every client has left")

        live = LiveTurn(
            turn, agent_id, grace=self.settings.disconnect_grace, on_empty=on_empty, on_delivery=on_delivery
        )
        return live

    async def _delivered(self, turn_id: str, arrived: bool) -> None:
        try:
            await self.store.set_delivery(turn_id, "delivered" if arrived else "undelivered")
        except StoreUnavailable as exc:
            log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)

    async def _again(self, turn: Turn) -> Answer:
        """The same request once more: attach while it runs, replay when it is there, else one new attempt."""
        live = self._live.get(turn.id)
        if live is not None and not live.done:
            return live.attach(replayed=True)
        agent = await self.store.agent_by_key(turn.agent_key)
        assert agent is not None
        if turn.status in ON_PATH:
            live = self._make_live(turn, agent.agent_id)
            replay(live)
            return live.attach(replayed=True)
        place = self._lanes.take(agent.key)
        try:
            turn = await self.store.requeue(turn.id, self._instance)
        except BaseException:
            self._lanes.give_up(place)
            raise
        return self._launch(turn, agent, place, at_head=turn.reason.get("rule") == "head")

    # --- the lane's turn

    async def _run(self, live: LiveTurn, agent_key: int, place: Place, *, at_head: bool) -> None:
        turn = live.turn
        live.begun = True
        try:
            if live.cancelled_because is not None:
                raise asyncio.CancelledError
            async with self._lanes.turn(place), self._slots:
                agent = await self.store.agent_by_key(agent_key)
                if agent is None:
                    raise TurnCancelled("the agent was deleted while this request was queued")
                await self._execute(live, agent, at_head=at_head)
        except asyncio.CancelledError:
            why = live.cancelled_because or "the proxy is shutting down"
            await self._failed(live, TurnCancelled(f"{why}; nothing of this turn was kept"))
        except ProxyError as exc:
            await self._failed(live, exc)
        except Exception:
            log.exception("turn_crashed", turn_id=turn.id)
            await self._failed(live, UpstreamError("the proxy failed in this turn; its log has the trace"))
        finally:
            self._lanes.give_up(place)
            self._live.pop(turn.id, None)

    async def _failed(self, live: LiveTurn, error: ProxyError) -> None:
        status: Status = "cancelled" if isinstance(error, TurnCancelled) else "failed"
        log.warning("turn_failed", turn_id=live.turn.id, code=error.code)
        now = time.time()
        attempts = [*live.turn.attempts, {"ended_at": now, "status": status, "code": error.code}]
        try:
            await self.store.fail(live.turn.id, status, error.as_dict(), attempts, {}, now)
        except StoreUnavailable as exc:
            log.warning("failure_not_noted", turn_id=live.turn.id, error=exc.message)
        live.fail(error)

    # --- 3, 4: a session, a frame, the events

    async def _execute(self, live: LiveTurn, agent: Agent, *, at_head: bool) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            run = _Run(live, agent, attempt)
            try:
                await self._attempt(run, at_head=at_head)
                return
            except ProcessDied as died:
                if attempt == ATTEMPTS or live.spoke or run.plan.profile.tools:
                    raise failures.error_for_death(died) from died
                log.warning("turn_repeated", turn_id=live.turn.id, why=died.why)
            finally:
                if run.ready is not None and not run.committed:
                    await self._spoiled(run.ready, run)

    async def _attempt(self, run: _Run, *, at_head: bool) -> None:
        parent = run.parent = await self._parent(run, at_head=at_head)
        run.plan = self._plan(run.live.turn, parent)
        ready = await self._ready(run, parent, at_head=at_head)
        run.ready = ready
        run.at("session_ready")
        await self.store.begin(self._begun(run, ready))
        result = await self._drive(run, ready)
        if result.is_error:
            raise failures.error_for(result, retries=run.retries)
        await asyncio.shield(self._spawn(self._commit(run, ready, result)))

    async def _parent(self, run: _Run, *, at_head: bool) -> Turn | None:
        """The turn to continue: decided by the request, or the head as it is now, less what never arrived."""
        turn_id = run.agent.head if at_head else run.live.turn.parent_id
        parent = await self.store.turn(turn_id) if turn_id else None
        while at_head and parent is not None and parent.delivery == "undelivered":
            run.reason["left_off"] = parent.id
            parent = await self.store.turn(parent.parent_id) if parent.parent_id else None
        return parent

    def _plan(self, turn: Turn, parent: Turn | None) -> Plan:
        profile = self.settings.profile_for(turn.profile)
        system = turn.system
        if system is None and turn.reason.get("delta") and parent is not None:
            system = parent.system
        if system is None:
            system = profile.system_prompt or (None if profile.tools else self.settings.system_prompt)
        model = profile.model if turn.model == "default" and profile.model else turn.model
        return Plan(model, system, turn.effort, profile)

    async def _ready(self, run: _Run, parent: Turn | None, *, at_head: bool) -> Ready:
        try:
            return await self._sessions.ready(run.agent, parent, run.plan, run.live.turn.id, adopt=at_head)
        except Foreign as foreign:
            assert parent is not None
            adopted = await adopt(self.store, run.agent, parent, foreign)
            run.parent = adopted
            return await self._sessions.ready(run.agent, adopted, run.plan, run.live.turn.id, adopt=False)

    def _begun(self, run: _Run, ready: Ready) -> Begun:
        run.reason |= ready.reason
        now = time.time()
        entry = {"n": run.number, "session_id": ready.session.id, "frame_uuid": run.frame_uuid, "started_at": now}
        return Begun(
            turn_id=run.live.turn.id,
            parent_id=run.parent.id if run.parent else None,
            session_id=ready.session.id,
            frame_uuid=run.frame_uuid,
            continuity=ready.continuity,
            reason=run.live.turn.reason | run.reason,
            started_at=now,
            attempt=entry,
            instance=self._instance,
        )

    async def _drive(self, run: _Run, ready: Ready) -> Result:
        """Send the frame and pass on what comes, within the turn's time; a running tool is not idle."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.turn_timeout
        content = [block for message in run.live.turn.input for block in message.content]
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + self.settings.idle_timeout)) as clock:
                async for event in ready.process.turn(run.frame_uuid, content):
                    busy = isinstance(event, ToolActivity)
                    clock.reschedule(deadline if busy else min(deadline, loop.time() + self.settings.idle_timeout))
                    if isinstance(event, Result):
                        run.at("result")
                        return event
                    self._take(run, ready, event)
        except TimeoutError as exc:
            over = loop.time() >= deadline
            limit = self.settings.turn_timeout if over else self.settings.idle_timeout
            what = "the turn took longer than" if over else "nothing came from the CLI for"
            raise TurnTimeout(f"{what} {limit:g} s; send it again, or raise the limit in the settings") from exc
        raise ProcessDied("the CLI ended the turn without a result", returncode=None, stderr="")

    def _take(self, run: _Run, ready: Ready, event: object) -> None:
        match event:
            case BlockStart() | BlockDelta() | BlockStop():
                run.start(ready)
                run.live.publish(event)
            case AssistantMessage():
                run.output.extend(block for block in event.blocks if block.get("type") != "tool_use")
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

    async def _spoiled(self, ready: Ready, run: _Run) -> None:
        """The session's process knows a prompt that is not on the path: it must be gone before the next turn."""
        await asyncio.shield(self._spawn(self._sessions.spoil(ready, run.session_id)))

    # --- 5, 6: commit and acknowledge

    async def _commit(self, run: _Run, ready: Ready, result: Result) -> None:
        live, turn = run.live, run.live.turn
        captured = await self._sessions.capture(
            ready, turn, run.frame_uuid, run.output, result.session_id, result.cost_total_usd
        )
        before = run.parent.path_hash if run.parent else None
        commit = Commit(
            turn_id=turn.id,
            status="completed",
            output=tuple(run.output),
            stop_reason=result.stop_reason,
            usage=result.usage,
            cost_usd=_cost(ready.session.cost_total_usd, result.cost_total_usd),
            tools=tuple(run.tools),
            timings=run.timings(turn.created_at),
            attempts=(*turn.attempts, {"n": run.number, "session_id": result.session_id, "status": "completed"}),
            records=captured.records,
            session=captured.session,
            links=(*ready.links, *captured.links),
            path_hash=continuity.path_hash(before, turn.input, run.output),
            depth=(run.parent.depth if run.parent else 0) + 1,
            delivery="undelivered" if live.abandoned else "pending",
            finished_at=time.time(),
            reason=turn.reason | run.reason | {"records": captured.note},
        )
        try:
            committed = await self.store.commit(commit)
        except StoreUnavailable as exc:
            raise StoreUnavailable(f"the model answered, but the answer could not be kept: {exc.message}") from exc
        run.committed = True
        await self._pool.checkin(ready.process)
        for link in commit.links:
            if link.reason in ("rebuilt", "moved", "adopted"):
                log.info("repaired", agent=run.agent.agent_id, turn_id=turn.id, reason=link.reason)
        run.start(ready)
        live.finish(committed)

    # --- data

    async def delete(self, owner: str, agent_id: str) -> bool:
        """End the agent's process and remove chain, transcripts, sandbox and keys. False when unknown."""
        agent = await self.store.agent(owner, agent_id)
        if agent is None:
            return False
        running = [live for live in self._live.values() if live.turn.agent_key == agent.key]
        for live in running:
            live.cancel("the agent was deleted")
        tasks = [live.task for live in running if live.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        session_ids = {turn.session_id async for turn in self.store.turns(agent.key) if turn.session_id}
        chain = await self.store.chain(agent.key)
        session_ids |= {session.id for session in chain.sessions} if chain else set()
        await self._sessions.forget(agent, sorted(session_ids))
        await asyncio.to_thread(self._sandboxes.remove, agent.dir)
        await self.store.delete_agent(agent.key)
        return True

    async def _retention(self, days: float) -> None:
        """Once an hour, delete the agents whose last turn is older than `retention_days`."""
        while True:
            for agent in await self.store.expired_agents(time.time() - days * 24 * HOUR):
                log.info("expired", agent=agent.agent_id)
                await self.delete(agent.owner, agent.agent_id)
            await asyncio.sleep(HOUR)


class _Run:
    """One attempt of one turn, while it is under way."""

    def __init__(self, live: LiveTurn, agent: Agent, number: int) -> None:
        self.live = live
        self.agent = agent
        self.number = number
        self.frame_uuid = str(uuid.uuid4())
        self.parent: Turn | None = None
        self.plan: Plan
        self.ready: Ready | None = None
        self.session_id: str | None = None
        self.output: list[Block] = []
        self.tools: list[JSON] = []
        self.retries: list[JSON] = []
        self.reason: JSON = {}
        self.committed = False
        self._started = False
        self._at: dict[str, float] = {"begun": time.time()}

    def at(self, step: str) -> None:
        self._at.setdefault(step, time.time())

    def start(self, ready: Ready) -> None:
        """Tell the clients where the turn runs, once, before the first piece of the answer."""
        if not self._started:
            self._started = True
            self.at("first_block")
            session_id = self.session_id or ready.session.id
            self.live.publish(Started(self.agent.agent_id, self.live.turn.id, session_id, ready.continuity))

    def timings(self, accepted: float) -> JSON:
        """Milliseconds from the acceptance to each step."""
        return {step: round((at - accepted) * 1000, 1) for step, at in self._at.items()}


def _cost(before: float, total: float | None) -> float | None:
    """This turn's share of the CLI's running total, which starts anew where the CLI did not restore it."""
    if total is None:
        return None
    return total - before if total >= before else total


def _prepare_var(var: Path) -> None:
    try:
        var.mkdir(mode=0o700, parents=True, exist_ok=True)
        var.chmod(0o700)
        probe = var / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ConfigError(
            f"cannot write to {var}: {exc.strerror}; make it writable or choose another place with --var"
        ) from exc
