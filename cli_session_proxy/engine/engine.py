"""The engine: the steps of one request, in order.

submit    1 `Placement.resolve`: is the request a retry, and which turn does it continue?
          2 the turn is stored, in its lane
_run        the turn is the first of its lane, and this proxy holds the agent's lease
executor  3 the backend prepares a process that has the path   4 one frame goes in, events come out
          5 answer, records, links and head are stored in one transaction
          6 the answer is acknowledged (`Finished`)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from .. import errors, logs
from ..aside.pool import Aside
from ..backends.auto import backend_for
from ..backends.base import Backend, ProcessHooks
from ..domain.approvals import Approval, Verdict
from ..domain.forms import replace
from ..domain.lineage import answer_text
from ..domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    ON_PATH,
    Agent,
    CancelledBy,
    Message,
    Record,
    Turn,
    TurnOptions,
    TurnRequest,
)
from ..errors import (
    BudgetExceeded,
    ClaudeUnavailable,
    ConfigError,
    DamagedRow,
    Interrupted,
    InvalidRequest,
    LeaseLost,
    NotFound,
    ProxyError,
    QueueFull,
    SessionBusy,
    StoreUnavailable,
    TurnTimeout,
    UpstreamError,
)
from ..sandbox import Sandboxes
from ..settings import NO_PROFILE, OWNERS_SHARE, BudgetSettings, Settings
from ..stores.auto import registry_for, store_for
from ..stores.base import AgentState, Expiry, KeyTaken, Lease, MirrorKey, Store
from ..stores.held import Holds, release
from ..stores.registry import Registry
from ..tasks import Tasks, TimeLimit, awake_clock, failures_logged, in_thread_at, uninterrupted
from .approvals import Question
from .budgets import Budgets
from .checks import Checks
from .committing import CommitOrder, Committed, commit
from .ends import Ends, StoreView
from .executor import Executor, adopt, not_run
from .forgetting import Forgetting
from .lanes import LanePlace, Lanes, Slots
from .live import (
    TRACE_CONTEXT,
    Answer,
    Deliveries,
    LiveTurn,
    Observer,
    Progress,
    Requested,
    cancelled,
    leave_accepted,
    replay,
)
from .mirroring import Mirroring
from .ownership import Instances, Ownership, UnusedLease
from .passing import AWAITED, ORIGIN, Elsewhere, Passing
from .placement import HOUR, Placement
from .plan import PlanWatch
from .readiness import Readiness, State
from .recovery import REREAD_TURN, Recovery
from .rewinding import Rewound, rewind

__all__ = ["Answer", "Engine", "HasLeft"]

logs.load()
log = logs.get(__name__)

# Whether the client of a request is known to have disconnected.
HasLeft = Callable[[], bool]


# Seconds that a CLI has after the drain to end by itself. Then it is killed: a stop must end (see `http.server`).
KILL_AFTER = 2.0
# The longest sleep of a turn that waits for a limit, in seconds: the machine may be suspended meanwhile.
LONGEST_NAP = 20.0
# Seconds for a look at what a person added to a session. Seconds, if it is very long.
LONGEST_LOOK = 30.0
# Seconds for which a request waits while an equal one is accepted. A silent store is waited for as long.
ACCEPTED_WITHIN = 60.0
# Seconds until such a turn is tried again if the store is not available when the limit is over.
STORE_AWAY = 5.0
# Seconds that another proxy has to end a turn on request, on top of `lease`. Then it counts as not responding.
END_ELSEWHERE = 10.0


async def _check_awaited() -> None:
    """Raises `Interrupted` if another proxy forwarded this request, and does not wait for it any more: its client may
    have sent it again, and have its answer from elsewhere."""
    is_awaited = AWAITED.get()
    if is_awaited is not None and not await is_awaited():
        raise Interrupted("nobody waits for this request any more: nothing was done", retry_after=0.0)


class AtAcceptance(NamedTuple):
    """What was read when a turn was accepted. If nobody has used the agent's lease since (`unused`), the state is still
    valid when the turn begins."""

    state: AgentState | None
    unused: UnusedLease | None


class Engine:
    """Everything between the wires and the CLI. Start it once per process, stop it to drain.

    `ready`: new turns are accepted. `instance_id`: this proxy's id in the store.
    """

    def __init__(self, settings: Settings, store: Store | None = None, backend: Backend | None = None) -> None:
        self.settings = settings
        self.store = store_for(settings) if store is None else store
        self.observers: list[Observer] = []
        self.aside = Aside()
        self._live: dict[str, LiveTurn] = {}
        self._cancelled_elsewhere: dict[str, CancelledBy] = {}  # turns of other proxies, until they end
        # One for each agent, and one for each fingerprint of a request.
        self._acceptance_locks: WeakValueDictionary[int | str, asyncio.Lock] = WeakValueDictionary()
        self._running = 0  # turns that have a slot
        self._forwarded: set[asyncio.Task[Any]] = set()  # see `forwarded`
        self.ready = self._stopped = False
        self._tasks = Tasks(expected=(ProxyError, Elsewhere))
        # No more slots than processes: a turn with a slot gets a process at once, if need be in place of an idle one.
        self.holds = Holds()
        self._slots = Slots(min(settings.max_turns, settings.max_processes))
        self._lanes = Lanes(settings.lane_limit, settings.queue_limit, self._slots)
        self.budgets = Budgets(settings.budgets)
        self._sandboxes = Sandboxes(settings)
        self._instances = Instances(settings.var, self.store if self.store.spans_hosts else None)
        self.instance_id = self._instances.id
        self.backend = backend or backend_for(
            settings,
            self.store,
            self._sandboxes,
            ProcessHooks(self._instances.on_spawn, self._instances.on_exit, self._spawned),
        )
        self._placement = Placement(
            self.store,
            self.backend,
            self.aside,
            instance=self.instance_id,
            idempotency_hours=settings.idempotency_hours,
            is_gone=self._is_gone,
            was_left=self._was_left,
            clock=self._instances.now,
        )
        self._recovery = Recovery(
            self.store, self.backend, self._instances, self._sandboxes, self.observers, self.budgets.of,
            self._run_here, resume=self._resume,
        )  # fmt: skip
        self._ownership = Ownership(
            self.store,
            self._instances,
            settings.lease,
            settle=self._recovery.settle,
            flush=self._before_handover,
            retire=self.backend.retire,
            lease_lost=self._lease_lost,
            busy=lambda: bool(self._live),
            in_lane=self.busy,
            end=self._cancel_here,
            address=settings.advertise,
        )
        self.registry: Registry | None = None
        self.passing: Passing | None = None
        if (secret := settings.cluster_secret()) is not None:
            self.registry = registry_for(settings, self.store, secret)
            self.passing = Passing(settings, secret, self.store, self.registry, self._ownership)
        self.plan = PlanWatch(self.store, self._tasks.own)
        self.readiness = Readiness(lambda: self.ready, self.store, self._tasks.own)
        self._ends = Ends(self.store, self._instances, self._tasks, self.observers, settings.lease, self._run_here)
        self.view = cast(Store, StoreView(self.store, self._ends))  # for readers: with ends that are not stored yet
        self.forgetting = Forgetting(settings, self.store, self._tasks, self._instances.now, self.delete)
        self._deliveries = Deliveries(
            self.store, self._instances, self._tasks, settings.disconnect_grace, self.forgetting.delivered
        )
        self.mirrors = Mirroring(self.store, self.backend, self._sandboxes, self._ownership, self.observers)
        self._executor = Executor(
            settings,
            self.store,
            self.backend,
            self._instances,
            self._ownership,
            self._tasks.own,
            self.observers,
            Checks(self.aside),
            self.passing,
            place_composed=self._placement.place_composed,
            budgets=self.budgets.of,
            plan=self.plan,
            holds=self.holds,
        )

    # --- life

    async def start(self) -> None:
        """Open the store, prepare `var/`, settle what a dead proxy left. Raises `ConfigError`, `StoreUnavailable`."""
        self._stopped = False
        self._deliveries.stopping.clear()
        var = self.settings.var

        def not_writable(exc: OSError) -> ConfigError:
            why = f"cannot write to {var}: {exc.strerror}; make it writable or choose another place with --var"
            return ConfigError(why)

        try:
            var.mkdir(mode=0o700, parents=True, exist_ok=True)
            var.chmod(0o700)
            probe = var / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
            if self.passing is not None:
                self.passing.enter()
        except OSError as exc:
            raise not_writable(exc) from exc
        await self.store.open()  # first: a migration is refused while proxies are alive, this one included
        try:
            self._instances.enter()
        except OSError as exc:
            await self.store.close()
            raise not_writable(exc) from exc
        await self._instances.set_clock()
        await self.plan.load()
        await self._recovery.recover(self._ownership.hold_if_free)
        self.ready = True
        self._tasks.serve(self._adopt_changes())
        self._tasks.serve(self._ownership.renew_leases())
        self._tasks.serve(self._ownership.serve_requests())
        self._tasks.serve(self._recovery.watch(self._ownership.hold_if_free))
        if self.store.spans_hosts:
            self._tasks.serve(self._compare_hosts())
        self._tasks.serve(self.forgetting.serve())

    async def _compare_hosts(self) -> None:
        """Compare the settings that must be equal on every host. If they differ, a turn at one host does not extend the
        requests of another one byte for byte."""
        facts = {"lease": f"{self.settings.lease:g} s", "system_prompt": self.settings.system_prompt}
        if self.settings.budgets != BudgetSettings():
            facts["budgets"] = self.settings.budgets.model_dump_json(exclude_none=True)
        for name, profile in self.settings.profiles.items():
            facts[f"profile {name}"] = profile.model_dump_json(exclude_defaults=True)
        try:
            await self._ownership.compare_hosts(facts | await self.backend.facts())
        except ProxyError as exc:  # no CLI: every turn says so, and hosts are not compared
            log.warning("host_not_compared", error=exc.message)

    async def stop(self) -> None:
        """Accept nothing new, let running turns finish (bounded by `drain_timeout`), end every process.

        A CLI has `KILL_AFTER` seconds to end by itself, less than `stop_grace` where that is longer. Idempotent.
        """
        if self._stopped:
            return
        self.ready = False
        self._recovery.resume = None
        for live in [live for live in self._live.values() if live.limit_wait is not None]:
            live.cancel("stopping")  # it stays queued: the next proxy waits for the limit
        running = {live.task for live in self._live.values() if live.task is not None} | self._forwarded
        if running:
            await asyncio.wait(running, timeout=self.settings.drain_timeout)
        for live in list(self._live.values()):
            live.cancel("stopping")
        self._deliveries.stopping.set()
        kill_timer = asyncio.get_running_loop().call_later(KILL_AFTER, self.kill)
        try:
            await self._tasks.stop()
            await asyncio.gather(self.backend.close(), self.aside.close())
        finally:
            kill_timer.cancel()
        try:
            await self._ownership.stop()
        except StoreUnavailable as exc:
            log.warning("leases_not_released", error=exc.message)  # others take them when they have expired
        if self.registry is not None:
            await self.registry.close()
        await self.store.close()
        self._instances.leave(settled=not self._ends.waiting)
        self._stopped = True

    def kill(self) -> None:
        """End every process at once, without a wait. Any thread may ask for it."""
        self.backend.kill()
        self.aside.kill()

    async def state(self) -> State:
        """Whether a turn can be accepted now, tested by a write to the store."""
        return await self.readiness.state()

    # what is going on, for /metrics

    def queued(self) -> int:
        """Turns that wait for an earlier turn, another proxy or a slot; without those that wait for a limit."""
        return self._lanes.total - self._running - self.waiting_for_limit()

    def waiting_for_limit(self) -> int:
        """Turns that wait for the end of a provider's limit."""
        return sum(live.limit_wait is not None for live in self._live.values())

    def running(self) -> int:
        return self._running

    def _lease_lost(self, agent_key: int) -> None:
        """Another proxy was granted this agent's lease: cancel the agent's turns here."""
        for live in list(self._live.values()):
            if live.turn.agent_key == agent_key and (live.lease is not None or live.limit_wait is not None):
                live.cancel("takeover")

    def _cancel_here(self, turn_id: str, by: CancelledBy) -> None:
        """Cancel this turn, as another proxy asks."""
        live = self._live.get(turn_id)
        if live is not None and not live.elsewhere:
            live.cancel(by)

    async def _is_gone(self, instance: str | None) -> bool:
        """Whether that proxy has ended or does not respond."""
        if instance == self.instance_id:
            return False
        return await self._instances.is_gone(instance) or not await self.store.responds(instance or "")

    def _spawned(self, seconds: float) -> None:
        for observer in self.observers:
            observer.spawned(seconds)

    def _run_here(self, turn_id: str) -> LiveTurn | None:
        """The turn with this id, if it runs or waits in this proxy; else None."""
        live = self._live.get(turn_id)
        return live if live is not None and not live.done and not live.elsewhere else None

    def busy(self, agent_key: int) -> bool:
        """Whether a turn of this agent runs or waits in this proxy."""
        return bool(self._lanes.waiting(agent_key))

    # --- 1, 2: place and accept

    async def submit(self, request: TurnRequest, has_left: HasLeft | None = None) -> Answer:
        """Accept a request durably and in order, and start its turn. Raises `ProxyError`.

        Nothing is stored if the client `has_left`, or if another proxy should run it (raises `Elsewhere`).
        """
        if request.agent_id is None and request.continues is None and self.settings.profile_for(request.profile).tools:
            # An unnamed agent is found by its history: two clients with equal histories would share files in a sandbox.
            raise InvalidRequest(
                "the profile turns the CLI's tools on, so the agent needs a name: send X-Agent-Id", param="agent_id"
            )
        # Own task: a disconnect must not orphan a stored turn.
        accepting = self._tasks.own(self._accept_alone(request, has_left))
        try:
            return await asyncio.shield(accepting)
        except Elsewhere as there:
            there.fingerprint = request.fingerprint
            raise
        except asyncio.CancelledError:
            accepting.add_done_callback(leave_accepted)
            raise

    async def _accept_alone(self, request: TurnRequest, has_left: HasLeft | None) -> Answer:
        """Accept equal requests of a named agent one after the other. Accepted at once, a repeated request would not
        find the turn of the first one. This happens when a client leaves the proxy that forwards its request."""
        if request.agent_id is None:  # equal requests are separate questions here
            return await self._accept(request, has_left)
        lock = self._acceptance_locks.setdefault(request.fingerprint, asyncio.Lock())
        try:
            async with asyncio.timeout(ACCEPTED_WITHIN):
                await lock.acquire()
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"an equal request has been waiting for the store for {ACCEPTED_WITHIN:.0f} s: send this again in a "
                "moment",
                retry_after=5.0,
            ) from exc
        try:
            return await self._accept(request, has_left)
        finally:
            lock.release()

    async def _accept(self, request: TurnRequest, has_left: HasLeft | None) -> Answer:
        if not self.ready:
            raise ClaudeUnavailable("the proxy is shutting down: send this again in a moment", retry_after=5.0)
        await _check_awaited()
        passed_over: Turn | None = None
        redirect = None if self.passing is None else partial(self.passing.to_agent, profile=request.profile)
        admit = partial(self._admit, request)
        while True:
            placement = await self._placement.resolve(request, admit=admit, passed_over=passed_over, redirect=redirect)
            if isinstance(placement, Turn):
                answer = await self._repeat(placement.id, request)
                if answer is not None:
                    release()  # the request only waits from now on
                    return answer
                passed_over = placement
                continue
            agent, turn = placement
            # One at a time per agent, so that the lane has the store's order even if the store writes concurrently.
            async with self._acceptance_locks.setdefault(agent.key, asyncio.Lock()):
                place = self._lanes.take(agent.key)
                try:
                    await self._ownership.ensure_heartbeat()
                    await _check_awaited()
                    if has_left is not None and has_left():
                        # The client may have sent the request again to another proxy, without an idempotency key. To
                        # run this one too would double the turn.
                        log.info("client_left_before_acceptance")
                        raise Interrupted(
                            "the client left before its request was accepted: nothing was run", retry_after=0.0
                        )
                    unused = self._ownership.unused(agent.key)
                    # Behind a turn that waits for a limit, this one waits for the same limit.
                    has_prompt = request.compose is None or request.composed is not None
                    if has_prompt and self._lanes.waiting(agent.key) > 1:
                        lives = (live for live in self._live.values() if live.turn.agent_key == agent.key)
                        wait = next((live.limit_wait for live in lives if live.limit_wait is not None), None)
                        turn = replace(turn, limit_wait=wait)
                    turn, state = await self.store.accept(
                        turn,
                        idempotency_key=request.idempotency_key,
                        idempotency_until=turn.created_at + self.settings.idempotency_hours * HOUR,
                        replaces=None if passed_over is None else passed_over.id,
                        durable=turn.in_background or turn.limit_wait is not None,
                        budgets=self.budgets.of(agent.owner, agent.agent_id),
                    )
                except KeyTaken:  # by the same request, sent twice at once: use that turn
                    self._lanes.give_up(place)
                    continue
                except BudgetExceeded as exc:
                    self._lanes.give_up(place)
                    self.budgets.refuse(exc, turn.created_at)
                    raise
                except StoreUnavailable as exc:
                    self._lanes.give_up(place)
                    with contextlib.suppress(StoreUnavailable):
                        if not agent.named and await self.store.agent_by_key(agent.key) is None:
                            continue  # the agent was deleted meanwhile: place the request again
                    if exc.detail.get("in_doubt"):
                        self._ends.never_ran(turn.id)
                    raise not_run(exc) from exc
                except BaseException:
                    self._lanes.give_up(place)
                    raise
                answer = self._launch(turn, agent, place, request, AtAcceptance(state, unused))
                if turn.in_background and has_left is not None and has_left():
                    self._live[turn.id].cancel("left")  # it would run to its end, and nobody knows its id
                return answer

    def _admit(self, request: TurnRequest) -> None:
        self._lanes.admit()
        self._admit_owner(request.owner)
        self.budgets.admit(request.owner, request.agent_id, self._instances.now())

    def _admit_owner(self, owner: str) -> None:
        """Raises `QueueFull` if this owner's turns use the owner's share of the queue already."""
        most = self._slots.limit + math.ceil(OWNERS_SHARE * self.settings.queue_limit)
        if self.settings.has_owners and self._lanes.total >= most:
            owners = [live.requested.owner for live in self._live.values() if live.requested is not None]
            if owners.count(owner) >= most:
                raise QueueFull(
                    f"{most} requests of this key wait or run already: wait for some",
                    retry_after=self._slots.time.value,
                )

    def _launch(
        self, turn: Turn, agent: Agent, place: LanePlace, request: TurnRequest, read: AtAcceptance | None = None
    ) -> Answer:
        live = self._deliveries.live(turn, agent)
        live.compose, live.composed = request.compose, request.composed
        release()  # the request only waits from now on: also for turns that have to read a long path first
        live.requested = Requested(
            agent.owner, agent.agent_id, live.accepted_at, request.request_id, TRACE_CONTEXT.get()
        )
        self._live[turn.id] = live
        if read is not None:
            self.forgetting.accepted(live, request)
        answer = live.attach(timeout=request.timeout)
        if turn.limit_wait is not None:
            live.wait_for(turn.limit_wait)
        live.task = self._tasks.own(self._run(live, place, read))
        return answer

    # --- turns that wait for the end of a limit

    def _resume(self, agent: Agent, turn: Turn, before: int) -> None:
        """Take over a turn that waits for a limit from another proxy. `before`: how many turns of the lane come first.
        Needs the agent's lease."""
        assert turn.limit_wait is not None
        place = self._lanes.take_before(agent.key, before)
        live = self._live[turn.id] = self._deliveries.live(turn, agent)
        live.wait_for(turn.limit_wait)
        live.task = self._tasks.own(self._run(live, place))
        if (by := self._cancelled_elsewhere.get(turn.id)) is not None:
            live.cancel(by)

    # --- repeated requests

    async def _was_left(self, turn: Turn) -> bool:
        """Whether all clients of this turn left without its answer. True also if they may have left: its delivery is
        `uncertain`, or their proxy does not say. Looks at the newest state, not only at `turn`."""
        if turn.id in self._deliveries.arrived:
            return False
        live = self._live.get(turn.id)
        if live is not None and not live.done:
            if None in live.forwarders:
                return False
            if live.abandoned and not turn.in_background:  # else its client may have asked for it by its id
                return True
        settled = await self.settled(turn.id)
        now = await self.store.turn(turn.id)
        if now is not None and now.delivery in ("pending", "uncertain") and now.instance != self.instance_id:
            settled = await self._has_settled(now.instance or "", turn.id, others=True) and settled
            now = await self.store.turn(turn.id)  # its proxy may have noted meanwhile that the answer arrived
        if now is None or not (now.status in ON_PATH or now.status not in FINISHED):
            return False
        return now.delivery in ("undelivered", "uncertain") or (now.delivery == "pending" and not settled)

    async def settled(self, turn_id: str, *, others: bool = True) -> bool:
        """Wait until it is stored which clients of this turn have left this proxy and, with `others`, those that
        forwarded requests of its clients. False if its clients came through others, and none of these responds."""
        proxies = self._deliveries.forwarders(turn_id) if others else set()
        settled = not proxies or None in proxies
        for proxy in proxies if not settled else ():
            settled = await self._has_settled(proxy or "", turn_id, others=False) or settled
        await self._deliveries.stored(turn_id)
        return settled

    async def _has_settled(self, instance: str, turn_id: str, *, others: bool) -> bool:
        """Have another proxy store that its clients left this turn, if they did: they may be faster here than it
        notices. `others`: it asks others in turn, which ask nobody. False without an answer: it may have lost them."""
        proxy = None if await self._is_gone(instance) else await self.store.proxy(instance)
        if proxy is None:
            return False
        if self.passing is None or self.passing.settle is None or proxy.address is None:
            return True
        return await self.passing.settle(proxy.address, turn_id, others)

    async def _repeat(self, turn_id: str, request: TurnRequest) -> Answer | None:
        """The answer for a request that repeats this turn: attach to it while it runs, replay its answer, or run it
        again.

        None if its answer never arrived and the conversation went on without it: the request needs a new turn.
        """
        while True:
            await self._deliveries.stored(turn_id)
            turn = await self.store.turn(turn_id)
            agent = await self.store.agent_by_key(turn.agent_key) if turn else None
            if turn is None or agent is None:
                return None
            if (live := self._run_here(turn_id)) is not None:
                if live.ends_without_clients:
                    await self.ended(turn_id)
                    continue
                return live.attach(replayed=True, timeout=request.timeout)
            if turn.status in ANSWERED:
                if turn.status in ON_PATH and not await self._claims(turn_id):
                    return None
                live = self._deliveries.live(turn, agent)
                replay(live)
                return live.attach(replayed=True)
            if turn.status not in FINISHED:
                return await self._attach_elsewhere(turn, agent, request)
            if self.passing is not None:
                await self.passing.to_agent(agent, turn.profile)
            try:
                turn, place = await self._requeue(turn, agent)
            except StoreUnavailable as exc:
                if "status" not in exc.detail:
                    raise not_run(exc) from exc
                continue  # another request has queued it meanwhile: look again
            return self._launch(turn, agent, place, request)

    async def _requeue(self, turn: Turn, agent: Agent) -> tuple[Turn, LanePlace]:
        """Queue a new attempt, last in its lane. Raises `BudgetExceeded`, and `StoreUnavailable`, with a `status` if
        another request has queued it already."""
        if turn.id in self._ends.waiting:  # the end of the last attempt: stored later, it would end this attempt
            await self._ends.store_all()
        self._admit_owner(agent.owner)
        place = self._lanes.take(turn.agent_key)
        try:
            limits, now = self.budgets.of(agent.owner, agent.agent_id), self._instances.now()
            return await self.store.requeue(turn.id, self.instance_id, limits, now), place
        except BaseException as exc:
            self._lanes.give_up(place)
            if isinstance(exc, BudgetExceeded):
                self.budgets.refuse(exc, now)
            if isinstance(exc, StoreUnavailable) and exc.detail.get("in_doubt"):
                self._ends.never_ran(turn.id, turn.attempts)
            raise

    async def _attach_elsewhere(self, turn: Turn, agent: Agent, request: TurnRequest | None) -> Answer:
        """The answer of a turn that another proxy runs. Raises `Elsewhere` if that proxy can be reached: then that one
        streams it.

        Else the answer comes once the store has it. With a `request` (a retry), the turn is run here if its proxy has
        ended or does not respond.
        """
        if self.passing is not None:
            await self.passing.to_turn(turn)
        live = self._live.get(turn.id)
        if live is None or live.done:
            live = self._live[turn.id] = self._deliveries.live(turn, agent, elsewhere=True)
            live.compose = None if request is None else request.compose
            live.task = self._tasks.own(self._follow(live, run_again=request is not None))
        return live.attach(replayed=True, timeout=None if request is None else request.timeout)

    async def _follow(self, live: LiveTurn, *, run_again: bool) -> None:
        """Wait for a turn that another proxy on this store runs, and publish its answer here.

        With `run_again`, the turn is run here if that proxy has ended or does not respond, or has ended the turn
        because this client was not back yet.
        """
        live.begun = True
        deadline = awake_clock(asyncio.get_running_loop())() + self.settings.turn_timeout
        try:
            await self._deliveries.follow(live)
            while True:
                try:
                    async with TimeLimit(deadline, self._executor.too_long):
                        turn = await self._recovery.finished_elsewhere(
                            live.turn.id, live.agent, self._ownership.hold, live.follow_stored
                        )
                    break
                except TurnTimeout:
                    if live.limit_wait is None:
                        raise
                    deadline += self.settings.turn_timeout
            if turn is None:
                raise NotFound("the agent was deleted while this request waited for its answer")
            live.turn, error = turn, turn.error or {}
            if turn.status in ANSWERED:
                if turn.status in ON_PATH:
                    await self._claim(live)
                replay(live)
            elif run_again and (error.get("code") == Interrupted.code or error.get("detail", {}).get("by") == "left"):
                live.turn, place = await self._requeue(turn, live.agent)
                live.attempts = list(turn.attempts)
                self._deliveries.now_runs_here(live)
                await self._run(live, place)
            else:
                raise errors.from_dict(error)
        except asyncio.CancelledError:
            live.fail(cancelled(live.cancelled_by or "stopping"))
        except ProxyError as exc:
            live.fail(exc)
        finally:
            self._forget(live)

    async def _claim(self, live: LiveTurn) -> None:
        """From now on this proxy delivers the answer. Raises `Interrupted` if the conversation went on without it, or
        if all clients have left: nobody would note that it did not arrive."""
        if live.turn.delivery == "delivered":
            return
        if live.abandoned:
            raise Interrupted("every client has left: send the same again for the answer", retry_after=0.0)
        if not await self._claims(live.turn.id):
            raise Interrupted("the conversation went on without this answer: send it again", retry_after=0.0)
        self._deliveries.now_runs_here(live)

    async def _claims(self, turn_id: str) -> bool:
        """See `Store.claim`. If its result is in doubt, nobody is given the answer, and the same request again gets it:
        it is `uncertain` if it was claimed."""
        try:
            return await self.store.claim(turn_id, self.instance_id)
        except StoreUnavailable as exc:
            if exc.detail.get("in_doubt"):
                doubt = partial(self.store.set_delivery, turn_id, "uncertain", by=self.instance_id)
                self._deliveries.write(turn_id, doubt)
            raise

    # --- for stateful wires: a turn outlives the request that started it

    async def watch(self, turn: Turn) -> Answer | None:
        """A view of a turn that runs or waits in any proxy; None if it has ended. Raises `Elsewhere`."""
        live = self._live.get(turn.id)
        if live is not None and not live.done and not live.elsewhere:
            if not live.ends_without_clients:
                return live.attach(replayed=True)
            await self.ended(turn.id)
        now = await self.store.turn(turn.id)
        agent = None if now is None else await self.store.agent_by_key(now.agent_key)
        if now is None or agent is None or now.status in FINISHED:
            return None
        return await self._attach_elsewhere(now, agent, None)

    async def end(self, turn: Turn, by: CancelledBy) -> None:
        """End a turn, in whichever proxy it waits or runs, and wait until it is stored.

        The turn of a proxy that has ended or does not respond is settled here. Raises `SessionBusy` if it does not end.
        """
        live = self._live.get(turn.id)
        if live is not None and not live.elsewhere:
            live.cancel(by)
            await self.ended(turn.id)
            return
        agent = await self.store.agent_by_key(turn.agent_key)
        if turn.instance is None or agent is None:
            return
        patience = END_ELSEWHERE + self.settings.lease
        self._cancelled_elsewhere[turn.id] = by  # this proxy may take the turn over meanwhile
        try:
            await self.store.cancel(turn.id, turn.instance, by)
            async with asyncio.timeout(patience):
                await self._recovery.finished_elsewhere(turn.id, agent, self._ownership.hold)
        except TimeoutError as exc:
            raise SessionBusy(
                f"the proxy that runs this turn has not ended it within {patience:g} s: check again in a moment"
            ) from exc
        finally:
            self._cancelled_elsewhere.pop(turn.id, None)
            await self.store.forget_cancel(turn.id)

    async def runs_at(self, agent_key: int) -> set[str]:
        """The addresses of the other proxies at which turns of this agent wait or run."""
        if self.passing is None:
            return set()
        addresses = [await self.passing.address_of(turn) for turn in await self.store.unfinished_of(agent_key)]
        return {address for address in addresses if address is not None}

    async def seen_alive(self) -> None:
        """See to it that other proxies know that this one responds. Raises `StoreUnavailable`."""
        await self._ownership.ensure_heartbeat()

    async def delivery_stored(self, turn_id: str) -> None:
        """Wait until it is stored what became of an answer that this proxy has given to its clients."""
        await self._deliveries.stored(turn_id)

    def forwarded(self, stored: asyncio.Event) -> None:
        """A request is answered by another proxy. `stop` waits until it is `stored` what became of the answer, if that
        ends in time: a client that has it may say the same again, as a new turn."""
        waiting = self._tasks.own(stored.wait(), service=True)
        self._forwarded.add(waiting)
        waiting.add_done_callback(self._forwarded.discard)

    def note(self, key: str, note: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Store what became of an answer by this function, which is called again if the store is not available. `key`:
        the id of its turn (`delivery_stored` waits for the note) or, if it is unknown, any other."""
        return self._deliveries.write(key, note)

    async def note_arrival(self, turn_id: str, *, arrived: bool) -> None:
        """Store whether an answer reached a client that asked here.

        That it did not arrive counts only while no other client may have it. Raises `StoreUnavailable`.
        """
        with contextlib.suppress(NotFound):  # the agent was deleted meanwhile
            if arrived:
                await self.store.set_delivery(turn_id, "delivered", soon=True)
            else:
                await self.store.set_delivery(turn_id, "undelivered", by=self.instance_id)

    async def has_been_handed(self, turn_id: str) -> bool:
        """Whether the store says that this proxy delivers the turn's answer. Raises `StoreUnavailable`."""
        turn = await self.store.turn(turn_id)
        return turn is not None and turn.instance == self.instance_id

    async def note_lost(self, agent_key: int, instance: str, turn_id: str | None, fingerprint: str | None) -> None:
        """The connection to the proxy `instance` was lost, and the client was told to send its request again, or has
        left. The other proxy may have handed the answer on, or do so later: it is uncertain from now on. `fingerprint`:
        of the request, whose turn may be unknown (None). Raises `StoreUnavailable`."""
        await self.store.doubt(agent_key, (instance, self.instance_id), turn_id, fingerprint)

    def progress(self, agent_key: int | None = None) -> list[Progress]:
        """The turns that wait or run in this proxy, of one agent or of all, in the order of acceptance."""
        unfinished = [
            live
            for live in self._live.values()
            if not live.done and agent_key in (None, live.turn.agent_key) and not live.elsewhere
        ]
        return [live.progress() for live in sorted(unfinished, key=lambda live: live.turn.seq)]

    async def ended(self, turn_id: str) -> None:
        """Wait until a turn of this proxy is over and stored. Returns at once if it does not run here."""
        live = self._live.get(turn_id)
        if live is not None and live.task is not None:
            await asyncio.wait([live.task])

    async def tip(self, agent: Agent) -> Turn | None:
        """The turn that the agent's next one continues: the head, without answers that never arrived."""
        turn = await self.store.turn(agent.head) if agent.head else None
        while turn is not None and turn.delivery == "undelivered" and not await self._executor.is_awaited(turn):
            turn = await self.store.turn(turn.end_without_it) if turn.end_without_it else None
        return turn if turn is not None and turn.agent_key == agent.key else None

    # --- the lane's turn

    async def _run(self, live: LiveTurn, place: LanePlace, read: AtAcceptance | None = None) -> None:
        live.begun = True
        try:
            if live.cancelled_by is not None:  # before this task began to run
                raise asyncio.CancelledError
            async with self._lanes.turn(place):
                while True:
                    if live.limit_wait is not None:
                        if (left := live.limit_wait.until - self._instances.now()) > 0:
                            await asyncio.sleep(min(left, LONGEST_NAP))
                            continue
                        await place.until_first()
                    try:
                        if await self._try_run(live, place, read):
                            break
                    except StoreUnavailable as exc:
                        # A turn that waits for a limit is tried again if the store is away just when the limit is
                        # over: its clients may have left, to come back for the answer. Not while the proxy stops, and
                        # not if the store did answer: `status` says that another proxy has ended or taken the turn.
                        store_is_away = self.ready and "status" not in exc.detail
                        if live.limit_wait is None or not store_is_away:
                            raise
                        if self._instances.now() - live.limit_wait.since > self.settings.max_limit_wait:
                            raise
                        log.warning("waits_for_store", turn_id=live.turn.id, error=exc.message)
                        await asyncio.sleep(STORE_AWAY)
                    read = None  # no longer valid after a wait
                    await place.until_first()
        except asyncio.CancelledError:
            await self._fail(live, cancelled(live.cancelled_by or "stopping"))
        except ProxyError as exc:
            await self._fail(live, exc)
        except Exception:
            log.exception("turn_crashed", turn_id=live.turn.id)
            await self._fail(live, UpstreamError("the proxy failed in this turn; its log has the traceback"))
        finally:
            self._lanes.give_up(place)
            self._forget(live)

    def _forget(self, live: LiveTurn) -> None:
        """Drop the live turn, unless another one took its place."""
        if self._live.get(live.turn.id) is live:
            del self._live[live.turn.id]

    async def _fail(self, live: LiveTurn, error: ProxyError) -> None:
        """End the turn with an error. Shielded: a cancellation must not keep the error from its clients."""
        if live.done:  # the answer is stored and sent; this is an error after that
            log.exception("failed_behind_its_answer", turn_id=live.turn.id, error=error.message)
            return
        if live.limit_wait is not None and isinstance(error, LeaseLost | Interrupted):
            # The stored turn goes on waiting, at another proxy. Store the delivery before clients are told to retry, so
            # that every proxy recognises their retry as this turn.
            with contextlib.suppress(ProxyError, TimeoutError):
                async with asyncio.timeout(self.settings.lease):
                    await self.store.set_delivery(live.turn.id, live.delivery_if_left, by=self.instance_id)
            why = "this turn waits for a limit, and goes on waiting at another proxy or after a restart"
            live.fail(Interrupted(f"{why}: send the same request again for its answer", retry_after=error.retry_after))
            return
        if isinstance(error, LeaseLost) and await uninterrupted(self._tasks.own(self._committed_by_successor(live))):
            return
        self._ends.failed(live, error)
        await uninterrupted(self._tasks.own(self._ends.tell(live, error)))

    async def _committed_by_successor(self, live: LiveTurn) -> bool:
        """Wait for the proxy that took the agent over. It commits the turn if this proxy's CLI had finished it; then
        publish the answer here.

        False if it committed nothing within `lease` seconds; at once for a turn that had not begun.
        """
        deadline = asyncio.get_running_loop().time() + self.settings.lease
        try:
            while (turn := await self.store.turn(live.turn.id)) is not None and turn.status not in FINISHED:
                if turn.status == "queued" or asyncio.get_running_loop().time() >= deadline:
                    return False
                await asyncio.sleep(REREAD_TURN)
            if turn is None or turn.status not in ON_PATH:
                return False
            live.turn = turn
            await self._claim(live)
        except (StoreUnavailable, Interrupted) as exc:
            log.warning("not_taken_over", turn_id=live.turn.id, error=exc.message)
            return False
        if not live.output_sent:
            replay(live)
        elif live.complete(turn.output):
            live.finish(turn)
        else:
            return False
        return True

    async def _try_run(self, live: LiveTurn, place: LanePlace, read: AtAcceptance | None) -> bool:
        """Run the turn. False if it has to wait for a limit or for earlier turns; it then holds nothing but its place
        in the lane."""
        deadline = awake_clock(asyncio.get_running_loop())() + self.settings.turn_timeout
        # A prompt that another proxy composed keeps the parent that it was composed for.
        composed_there = live.compose is None and "behind" in (live.turn.call or {})
        at_head = live.turn.placed.at_head and not composed_there
        async with AsyncExitStack() as stack:
            async with TimeLimit(deadline, self._executor.too_long):
                try:
                    if self._ends.waiting:
                        await self._ends.store_all()
                        read = None  # an answer that was stored, and is not kept, is off the path only now
                    live.now_doing("lease")
                    unused = None if read is None or read.state is None or read.state.others else read.unused
                    lease = self._ownership.hold(live.agent, live.turn, at_acceptance=unused)
                    live.lease = await stack.enter_async_context(lease)
                    if not place.granted.done():  # earlier turns were taken over from another proxy
                        return False
                    live.now_doing("slot", {"slots": self._slots.limit})
                    waited = self._slots.running >= self._slots.limit
                    await stack.enter_async_context(self._slots.slot())
                    state = None
                    if read is not None and not waited and self._ownership.not_used_since(read.unused):
                        state = read.state
                    if state is None:  # other proxies may have moved the head until a moment ago
                        state = await self.store.agent_state(live.agent.key, live.turn.parent_id, at_head=at_head)
                except StoreUnavailable as exc:
                    raise not_run(exc) from exc
            if state is None:  # the store has no such agent any more
                raise cancelled("deletion")
            wait_with_it: list[LiveTurn] = []

            def waiting_too() -> list[str]:
                """The ids of the lane's turns that will wait for the same limit; the turns are added to `wait_with_it`.
                Not one whose prompt is composed when it runs: it still needs its client."""
                for other in self._live.values():
                    of_lane = other.turn.agent_key == live.agent.key and other is not live and not other.done
                    has_prompt = other.compose is None or other.composed is not None
                    if of_lane and has_prompt and not other.elsewhere:
                        wait_with_it.append(other)
                return [other.turn.id for other in wait_with_it]

            self._running += 1
            try:
                wait = await self._executor.execute(
                    live, state, at_head=at_head, deadline=deadline, waiting_too=waiting_too
                )
            finally:
                self._running -= 1
            if wait is not None:
                for waiting in (live, *wait_with_it):
                    if not waiting.done:
                        waiting.wait_for(wait)
            elif self.passing is not None and self._ownership.holds(live.lease):
                self._tasks.own(self.passing.register_use(live.agent, live.turn.session_id, live.lease))
            return wait is None

    # --- data

    async def agent_named(self, owner: str, agent_id: str) -> Agent:
        """The agent of this name. Raises `NotFound` for an unknown one, like all methods below."""
        agent = await self.store.agent(owner, agent_id)
        if agent is None:
            raise NotFound(f"there is no agent {agent_id!r}: GET /v1/chains lists all", param="agent_id")
        return agent

    async def delete(self, owner: str, agent_id: str, expiry: Expiry | None = None) -> bool:
        """End the agent's process and remove chain, transcripts, sandbox and keys. False when unknown. Raises
        `Elsewhere` for a request if its files are on another host, and `Interrupted` if a forwarded one comes too late.

        With an `expiry`, delete only if it still applies when the chain is removed: a client may have used the agent
        since it was chosen. A running turn is not cancelled: if the agent stays, its files are written again from the
        chain. An archived agent (`expiry.version`) must have nothing outside the chain.
        """
        agent = await self.store.agent(owner, agent_id)
        if agent is None or (expiry is not None and not await self.store.expired_agents(expiry, only=agent.key)):
            return False
        if expiry is None:
            if self.passing is not None:
                await self.passing.to_files(agent)
            await _check_awaited()
            running = [live for live in self._live.values() if live.turn.agent_key == agent.key]
            for live in running:
                live.cancel("deletion")
            for turn in await self.store.unfinished_of(agent.key):
                if turn.instance not in (None, self.instance_id):
                    await self.store.cancel(turn.id, turn.instance or "", "deletion")  # this row goes with the agent
            if tasks := [live.task for live in running if live.task is not None]:
                await asyncio.wait(tasks)
        async with self._ownership.hold(agent):
            if await self.store.agent_by_key(agent.key) is None:  # deleted meanwhile: the files may be the next one's
                return False
            if expiry is not None and not await self.store.expired_agents(expiry, only=agent.key):
                return False
            if expiry is not None and expiry.version is not None and await self._kept_outside(agent) is not None:
                return False
            named = await self.store.named_by(agent.key)
            await self.store.forget_copies(agent)
            await self.backend.forget(agent, named)
            await in_thread_at(self._sandboxes.path(agent.dir), self._sandboxes.remove, agent.dir)
            # Before the agent: if the store's answer is lost, the next request for a deletion finds no agent.
            await asyncio.to_thread(logs.forget, self.settings, agent, named)
            if self.registry is not None:
                await self.registry.forget(agent)
            return await self.store.delete_agent(agent.key, expiry)

    async def version_at_rest(self, agent: Agent) -> str:
        """The chain's version, if the chain is complete. Raises `SessionBusy` if a turn waits or runs, or if something
        of the agent is outside the chain; `NotFound` if the agent was deleted."""
        async with self._ownership.hold(agent) as lease:
            if await self.store.unfinished_of(agent.key):
                raise SessionBusy("a turn of it waits or runs")
            await self._catch_up(agent, lease)
            if (reason := await self._kept_outside(agent)) is not None:
                raise SessionBusy(reason)
            version = await self.store.version(agent.key)
        if version is None:
            raise NotFound(f"there is no agent {agent.agent_id!r}")
        return version

    async def _kept_outside(self, agent: Agent) -> str | None:
        """What the agent has outside its chain and would lose, as a message; None if there is nothing."""
        for key, _ in await self.store.mirrors(agent.key, self.backend.project_of(agent)):
            if await self.store.mirrored(agent.key, key):
                return "an application stored transcript lines that are not a turn yet"
        if self.settings.sandboxes == "own" and self.passing is not None and await self.passing.other_home(agent):
            return "its files are on another host"
        if await in_thread_at(self._sandboxes.path(agent.dir), self._sandboxes.has_files, agent.dir):
            return "there are files in its sandbox, which are not part of a chain: move them away first"
        now = await self.store.agent_by_key(agent.key)
        head = await self.store.turn(now.head) if now is not None and now.head is not None else None
        if head is not None and await self.backend.adoptable(agent, head) is not None:
            return "a person is using its session by hand"
        return None

    async def rewind(self, owner: str, agent_id: str, to: str) -> Rewound:
        """Move the agent's head back along its path; see `rewinding.rewind`. Raises `NotFound` for an unknown agent."""
        agent = await self.agent_named(owner, agent_id)
        # Own task: a disconnect must not leave the rewind half done.
        return await asyncio.shield(self._tasks.own(rewind(self.store, self._ownership, agent, to)))

    async def cancel(self, owner: str, agent_id: str, turn_id: str | None) -> list[str]:
        """Cancel this turn of the agent (None: all its turns), whichever proxy it waits or runs in. Returns the ids of
        the cancelled turns.

        Raises `NotFound` if no such turn waits or runs, `SessionBusy` if one does not end.
        """
        agent = await self.agent_named(owner, agent_id)
        unfinished = [turn for turn in await self.store.unfinished_of(agent.key) if turn_id in (None, turn.id)]
        if not unfinished:
            what = "no turn of this agent waits or runs" if turn_id is None else f"{turn_id!r} does not wait or run"
            raise NotFound(f"{what}: there is nothing to cancel", param="turn")
        # All at once: one by one, the end of a turn would let the next turn of the lane begin.
        await asyncio.gather(*(self.end(turn, "operator") for turn in unfinished))
        # A turn whose commit had begun is completed all the same.
        ended = [await self.store.turn(turn.id) for turn in unfinished]
        return [turn.id for turn in ended if turn is not None and turn.status == "cancelled"]

    async def approve(self, owner: str, agent_id: str, approval_id: str, verdict: Verdict) -> Approval:
        """Give the CLI a person's verdict on a tool call that waits for approval. Returns once the CLI has the verdict.

        Raises `NotFound`, `ApprovalAnswered`, `Elsewhere` if the call waits at another proxy, and `SessionBusy` if that
        proxy cannot be reached from here.
        """
        agent = await self.agent_named(owner, agent_id)
        ended = await self._executor.approvals.answer(agent.key, approval_id, verdict)
        if ended is not None:
            log.info("approval_answered", **agent.named_in_logs, approval=approval_id, outcome=ended.outcome)
            return ended
        for turn in await self.store.unfinished_of(agent.key):
            if turn.status == "running" and approval_id in {approval.id for approval in turn.evidence.approvals}:
                if self.passing is not None:
                    await self.passing.to_turn(turn)
                raise SessionBusy("this waits at another proxy, which cannot be reached from here: answer it there")
        raise NotFound(
            f"no tool of this agent waits under {approval_id!r}: its turn has ended, or its proxy", param="approval"
        )

    def asked(self, owner: str) -> list[Question]:
        """The tools that wait here for this owner's approval, oldest first."""
        return self._executor.approvals.of(owner)

    async def asked_elsewhere(self, owner: str) -> list[tuple[Agent, Turn, Approval]]:
        """The approval requests of this owner that wait at other proxies of this cluster, as stored."""
        if self.passing is None or ORIGIN.get() == "forwarded":
            return []
        requests = []
        async for turn in self.store.unfinished():
            waiting = [approval for approval in turn.evidence.approvals if approval.outcome is None]
            if turn.instance == self.instance_id or not waiting or turn.status != "running":
                continue
            agent = None
            with contextlib.suppress(DamagedRow):  # the log names it; what waits for others is shown all the same
                agent = await self.store.agent_by_key(turn.agent_key)
            if agent is not None and agent.owner == owner:
                now = len(turn.attempts)  # requests of earlier attempts are closed
                requests += [(agent, turn, approval) for approval in waiting if approval.attempt == now]
        return requests

    async def commit(self, owner: str, agent_id: str, order: CommitOrder) -> Committed:
        """Write the agent's attempt at a fix into its git repository; see `committing.commit`."""
        agent = await self.agent_named(owner, agent_id)

        async def work() -> Committed:
            with self.holds.hold(owner):  # until its end, whether the request waits for it or not
                return await commit(
                    self.settings, self.store, agent, order, partial(self._ask_in_temporary_chain, owner)
                )

        return await asyncio.shield(self._tasks.own(work()))

    async def _ask_in_temporary_chain(self, owner: str, last: Turn, messages: Sequence[Message], schema: JSON) -> str:
        """The model's answer to these messages, as JSON, in a temporary chain with the model and system of `last`."""
        profile = self.settings.profile_for(last.profile)
        name = f"beside-{uuid.uuid4()}"
        request = TurnRequest(
            self.settings.model_for(last.model, profile),
            tuple(messages),
            name,
            owner,
            name,
            system=self.settings.system_prompt_for(profile, last.system),
            profile=NO_PROFILE,
            options=TurnOptions(format={"schema": schema}),
            wire="git_memory",
        )
        try:
            with self.holds.hold(owner):  # a submitted request releases its hold; the caller keeps its own
                answer = await self.submit(request)
            try:
                turn = await answer.turn()
                answer.acknowledge()
            finally:
                answer.leave()
        finally:
            await self.delete(owner, name)
        if turn.status == "refused":
            raise UpstreamError("the model refused to summarise the conversation: commit it without the model")
        return answer_text(turn.output)

    async def mirror(self, agent_id: str, key: MirrorKey, lines: Sequence[Record]) -> None:
        """Store lines of a session that an application runs with the Claude Agent SDK; see `mirroring.Mirroring`."""
        # Own task: if the application is cancelled, the lines must not be half stored.
        await asyncio.shield(self._tasks.own(self.mirrors.append(agent_id, key, lines)))

    async def _adopt_changes(self) -> None:
        """Adopt the turns that a person adds to an agent's session, once they are complete and the agent is idle."""
        async with aclosing(self.backend.changes()) as changes:
            async for session_id in changes:
                # If this fails, the session is still verified before its next use.
                with failures_logged("not_adopted", session_id=session_id):
                    session = await self.store.session(session_id)
                    agent = await self.store.agent_by_key(session.agent_key) if session else None
                    if agent is None or self.busy(agent.key):
                        continue
                    async with self._ownership.hold_if_free(agent) as lease:
                        if lease is not None and not await self.store.unfinished_of(agent.key):
                            await self._catch_up(agent, lease)

    async def _before_handover(self, agent: Agent, lease: Lease) -> None:
        """Called before the lease is handed over. Store ends of turns and, if the next proxy may be on another host,
        the turns that a person added to a session. Raises `StoreUnavailable`."""
        if self._ends.waiting:
            await self._ends.store_all()
        if self.store.spans_hosts:
            await self._catch_up(agent, lease)

    async def _catch_up(self, agent: Agent, lease: Lease) -> None:
        """Adopt the turns that a person added to the session after the head, if the last one is complete. A failure is
        only logged."""
        with failures_logged("not_adopted", **agent.named_in_logs):
            now = await self.store.agent_by_key(agent.key)
            head = await self.store.turn(now.head) if now is not None and now.head is not None else None
            adoptable = None
            if head is not None:
                # A program of the agent can hold this up, and turns of others are adopted after it.
                async with asyncio.timeout(LONGEST_LOOK):
                    adoptable = await self.backend.adoptable(agent, head)
            if adoptable is not None and adoptable.ended:
                adopted = await adopt(self.store, lease, adoptable, self.observers)
                log.info(
                    "adopted",
                    **agent.named_in_logs,
                    session_id=adoptable.session.id,
                    turn_id=adopted.id,
                )
