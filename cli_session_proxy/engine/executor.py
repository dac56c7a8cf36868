"""Steps 3 to 6 of a request (see `engine`): one turn on its backend, and once more where nothing was lost by it.

The caller has the agent for itself while this runs. A turn that fails never moves the head, and what the backend knows
of it is put away before the agent's next turn.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from .. import logs
from ..aside.pool import Helpers, OutOfBoundsError
from ..backends.base import (
    Abandoned,
    Adoptable,
    AnswerBlocks,
    Answered,
    Backend,
    Called,
    Compacted,
    Completed,
    Execution,
    Job,
    Lost,
    PermissionAsked,
    PermissionWithdrawn,
    PlanTold,
    Refused,
    Remedy,
    Retried,
    ToolActivity,
    Used,
)
from ..domain import lineage, structured
from ..domain.approvals import Approval
from ..domain.client_tools import BroughtResults, Offers, ToolOptions, answers, calls_of, instruction
from ..domain.evidence import OUTPUT_REFUSED, Evidence, Refusal, StreamCut
from ..domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    ONCE,
    REPAIR_REASONS,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Compose,
    Delivery,
    Fallback,
    LimitWait,
    Link,
    Started,
    Status,
    Turn,
    TurnRequest,
    Usage,
)
from ..domain.stop_sequences import StopCutter
from ..errors import (
    Interrupted,
    InvalidRequest,
    LeaseLost,
    NotFound,
    ProxyError,
    RateLimited,
    StoreUnavailable,
    TurnCancelled,
    UpstreamError,
)
from ..git_memory.recall import Recall, recall
from ..settings import Settings
from ..stores.base import SAID, AgentState, Commit, Home, Lease, PathChanged, Store, Taken, TurnStart
from ..tasks import Limited, LimitedByLife, Tasks, awake_clock, uninterrupted
from . import fallbacks
from .approvals import Approvals, Asking
from .budgets import BudgetsOf
from .live import LiveTurn, Requested, cancelled, said, with_end
from .ownership import Instances, Ownership
from .passing import Passing
from .plan import PlanWatch

log = logs.get(__name__)

# A turn whose exchange is lost before it said anything is run once more by itself; more would hide a broken backend.
ATTEMPTS = 2
# What is kept of one turn: an agent of 1,500 steps has 3,000 entries of tools. A shell that speaks in its CLI's place
# can tell of millions.
MOST_TOOLS, MOST_FAILURES = 100_000, 1_000

# Events that show that no tool runs any more and that the provider answers. A tuple, because a union would be made
# anew for each event.
SIGNS_OF_LIFE = (BlockStart, AnswerBlocks, ToolActivity, Compacted)
# What may take long behind them is not silence.
MAY_TAKE_LONG = (ToolActivity, PermissionAsked)

T = TypeVar("T")


class Observer(Protocol):
    """Receives what the engine did, for metrics and live views. Must not fail or block."""

    def adopted(self, turn: Turn, link: Link) -> None:
        """Turns held outside the proxy were adopted into the chain; `turn` is the last, the link names all."""

    def turn_ended(self, turn: Turn, links: Sequence[Link], requested: Requested | None, at: float, /) -> None:
        """A turn was committed, with these links, or it failed or was cancelled; it was stored `at` (UTC)."""

    def spawned(self, seconds: float) -> None:
        """A process gave its first output this long after its start."""


class Say(Protocol):
    """See `Placement.say`."""

    async def __call__(
        self, agent: Agent, turn: Turn, composed: TurnRequest, before: Turn | None
    ) -> tuple[Turn, tuple[tuple[str, str], ...]]: ...


class Own(Protocol):
    """Makes a task that the engine waits for when it stops."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of one turn, under way. `fault`: why the structured output of the attempt before was refused.

    `remedies`: what attempts before it asked for.
    """

    live: LiveTurn
    lease: Lease
    agent: Agent
    number: int
    at_head: bool
    fault: str | None
    remedies: frozenset[Remedy]
    format: JSON | None
    evidence: Evidence
    frame_uuid: str
    parent: Turn | None = None
    left_off: list[str] = field(default_factory=list)  # turns whose answers never arrived
    takes: tuple[tuple[str, str], ...] | None = None  # see `TurnStart`
    kept_system: str | None = None
    recalled: Recall | None = None  # earlier attempts at the same fix, to be told with the prompt
    uses_tools: bool = False  # of its profile: what they did cannot be done again
    cutter: StopCutter | None = None  # where the request says how its answer ends
    fallback: Fallback | None = None  # who answers in whose place, decided before or by an attempt before
    job: Job | None = None
    exchange: Execution | None = None
    output: list[Block] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)  # which of these were abandoned after a client was given words
    tools: list[JSON] = field(default_factory=list)
    retries: list[JSON] = field(default_factory=list)
    used: Used | None = None  # as far as it is known, and counted nowhere yet
    model: str | None = None  # as the backend was asked for it
    answered_by: str | None = None  # as the backend names the one that answered
    asked: bool = False
    started: bool = False
    committed: bool = False

    def start(self) -> None:
        """Tell the clients where the turn runs, once, before the first piece of the answer."""
        if not self.started and self.exchange is not None:
            self.started = True
            self.live.at("first_block")
            at = self.exchange
            ids = self.agent.agent_id, self.live.turn.id, at.session_id
            stands_in = self.fallback is not None and self.fallback.here
            model = self.fallback.model if self.fallback is not None and stands_in else self.live.turn.model
            told = self.evidence.unmet, self.evidence.told
            self.live.publish(Started(*ids, at.continuity, *told, at.backend, model))

    def check(self) -> None:
        """Raises `UpstreamError` where the backend has told of more than any turn has."""
        failures = len(self.retries) + len(self.evidence.cuts)
        if len(self.tools) > MOST_TOOLS or failures > MOST_FAILURES:
            told = f"{len(self.tools)} calls of tools and {failures} failures of the provider"
            raise UpstreamError(f"the backend told of {told} in one turn: send it again")

    def abandoned(self, blocks: frozenset[int]) -> None:
        """The provider's stream was cut in these blocks. What a client was given of them is part of the answer."""
        self.check()
        shown = self.live.withdraw(blocks)
        self.partial |= set(range(len(self.output), len(self.output) + len(shown)))
        self.output += shown
        text, thinking = (sum(len(str(block.get(kind, ""))) for block in shown) for kind in ("text", "thinking"))
        self.evidence = replace(self.evidence, cuts=(*self.evidence.cuts, StreamCut(text, thinking)))

    def ended(self, status: str, **how: Any) -> tuple[JSON, ...]:
        """All attempts of the turn, this one with its end."""
        if not self.asked:
            how = {"n": self.number, "asked": False, **how}
        self.live.attempts = with_end(self.live.attempts, {"ended_at": self.live.now(), "status": status, **how})
        return tuple(self.live.attempts)

    def answered(self, output: tuple[Block, ...]) -> Turn:
        """The turn with this answer, who gave it and when."""
        return replace(
            lineage.answered(self.live.turn, self.parent, output),
            tools=tuple(self.tools),
            timings=self.live.timings,
            finished_at=self.live.now(),
            backend=None if self.exchange is None else self.exchange.backend,
            answered_by=self.answered_by or self.model,
            fallback=self.fallback,
        )


class Executor:
    """Runs turns, one an agent at a time. One per engine."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        backend: Backend,
        instances: Instances,
        ownership: Ownership,
        own: Own,
        observers: Sequence[Observer],
        checks: Checks,
        passing: Passing | None = None,
        *,
        say: Say,
        budgets: BudgetsOf,
        plan: PlanWatch,
    ) -> None:
        self.settings = settings
        self.store = store
        self._backend = backend
        self._instances = instances
        self._ownership = ownership
        self._own = own
        self._observers = observers
        self._checks = checks
        self._passing = passing
        self._say = say
        self._budgets = budgets
        self._plan = plan
        # Why a turn ends at its deadline.
        patience = f"{settings.turn_timeout:g} s"
        self.approvals = Approvals()
        self.too_long = f"the turn took longer than {patience}; send it again, or raise turn_timeout"

    async def execute(
        self,
        live: LiveTurn,
        state: AgentState,
        *,
        at_head: bool,
        deadline: float,
        behind: Callable[[], Sequence[str]] = tuple,
    ) -> LimitWait | None:
        """Run the turn and tell its clients; or tell how long it waits for a limit, as the store has it by then.

        `deadline` is by the awake clock; `behind`: turns that wait as long. Raises `ProxyError`.
        """
        lease = live.lease
        assert lease is not None
        fault: str | None = None
        remedies: frozenset[Remedy] = frozenset()
        number, again = 1, False
        tries = 1  # of the model that is asked now
        fallback: Fallback | None = None
        first: ProxyError | None = None  # why the model that was asked for could not answer
        while True:
            failed: ProxyError | None = None
            noted = False  # how the attempt ended
            if live.cancelled_by is not None:  # while what the attempt before left was put away
                raise asyncio.CancelledError
            live.at("queued")
            evidence = live.evidence
            if live.attempts:  # what an earlier one left off the path its client may have come for since
                refused = fault or evidence.output_refused
                evidence = replace(evidence, left_off=None, output_refused=refused, notes=(), recalled=None)
            attempt = Attempt(
                live,
                lease,
                state.agent,
                number,
                at_head,
                fault,
                remedies,
                format=live.turn.options.format,
                evidence=evidence,
                frame_uuid=str(uuid.uuid4()),
                fallback=fallback,
            )
            try:
                async with Limited(deadline, self.too_long):
                    if again:  # what the attempt before left of the session is read anew
                        state = await self._state(lease, live.turn.parent_id, at_head=at_head)
                    end = await self._answered(attempt, state, deadline)
                ending = self._refused(attempt, end) if isinstance(end, Refused) else self._commit(attempt, end)
                await uninterrupted(self._own(ending))
                return None
            except Lost as lost:
                attempt.ended("failed", why=lost.why)
                noted = True
                if lost.remedy is not None and lost.remedy not in remedies:
                    remedies |= {lost.remedy}
                    spent = bool(attempt.tools)  # what has been done cannot be done again
                else:
                    spent = tries >= ATTEMPTS + len(remedies) or attempt.uses_tools
                if spent or live.spoke:
                    failed = lost.error
                else:
                    log.warning("turn_repeated", turn_id=live.turn.id, why=lost.why)
                    number, tries = number + 1, tries + 1
            except ProxyError as error:
                failed = error
            except PathChanged:
                log.info("path_changed", turn_id=live.turn.id)  # nothing was sent: it begins anew on the path as it is
            except structured.InvalidOutput as invalid:
                if tries == ATTEMPTS or attempt.uses_tools:
                    raise invalid.as_error() from invalid
                fault = invalid.fault
                attempt.ended("failed", code=OUTPUT_REFUSED, why=fault)
                log.warning("turn_repeated", turn_id=live.turn.id, why="invalid structured output")
                number, tries = number + 1, tries + 1
            finally:
                again = True
                if attempt.exchange is not None and not attempt.committed:
                    # It knows a prompt that is not on the path: it must be gone before the agent's next turn.
                    owned = self._ownership.holds(lease)
                    try:
                        await uninterrupted(self._own(attempt.exchange.discard(owned=owned)))
                    except (ProxyError, asyncio.CancelledError):
                        raise
                    except Exception:  # how the turn ended is for its client; a file that stays is used by nobody
                        log.exception("not_discarded", turn_id=live.turn.id)
                    finally:
                        if owned and attempt.used is not None:  # else who has the agent counts it
                            await uninterrupted(self._own(self._count(attempt, attempt.used)))
            if failed is None:
                continue
            # Where another proxy has taken the agent over, it ended our CLI: that says more than how the CLI ended.
            with suppress(StoreUnavailable):
                await self._ownership.verify(lease)
            if live.cancelled_by is not None:  # while what the attempt left was put away
                raise asyncio.CancelledError
            instead = first is not None and not isinstance(failed, fallbacks.OWN)  # who stood in cannot take it either
            if not (instead or fallbacks.helps(failed)):
                raise failed
            stands_in = attempt.fallback is not None and attempt.fallback.here
            if first is None and not stands_in and isinstance(failed, RateLimited) and attempt.job is not None:
                on_limit = self.settings.on_limit_for(attempt.job.profile)
                wait = self._waits(attempt, failed) if on_limit == "wait" else None
                if wait is not None:
                    if not noted:
                        attempt.ended("failed", code=failed.code, why=failed.message)
                    told = live.attempts, live.timings
                    live.turn = await self.store.postpone(lease, live.turn.id, wait, *told, behind=behind())
                    log.warning("waits_for_limit", turn_id=live.turn.id, until=wait.until, why=failed.message)
                    return wait
                if on_limit == "error":
                    raise failed
            first = first or failed
            async with Limited(deadline, self.too_long):
                fallback = await self._elsewhere(attempt, first)
            if fallback is None:
                raise first
            if not noted:
                attempt.ended("failed", code=failed.code, why=failed.message)
            by = {"asked": fallback.asked, "model": fallback.model, "why": fallback.why, "until": fallback.until}
            log.warning("asked_elsewhere", turn_id=live.turn.id, **by)
            number, tries, remedies, fault = number + 1, 1, frozenset(), None

    async def _count(self, attempt: Attempt, used: Used) -> None:
        """Count what a failed attempt used: the provider bills it all the same."""
        budgets = self._budgets(attempt.agent.owner, attempt.agent.agent_id)
        if not budgets or used.usage == Usage():
            return
        try:
            await self.store.spend(budgets, used.usage, used.cost_usd, attempt.live.now())
        except StoreUnavailable as exc:
            log.warning("spending_not_noted", turn_id=attempt.live.turn.id, error=exc.message)

    def _waits(self, attempt: Attempt, error: ProxyError) -> LimitWait | None:
        """How long the turn may wait for the end of the limit that it met.

        One that has called tools, or of which a client was given words, is not repeated; one that is to be forgotten is
        not kept for later.
        """
        once = attempt.agent.agent_id.startswith(f"{ONCE}_")
        if attempt.tools or attempt.live.spoke or once:
            return None
        before = attempt.live.waited
        return fallbacks.wait_for(error, before, attempt.live.now(), self.settings.max_limit_wait)

    async def _elsewhere(self, attempt: Attempt, first: ProxyError) -> Fallback | None:
        """Who may answer this turn in the place of the model that could not; None: nobody, and the turn fails.

        A turn that has called tools, or of which a client was given words, is not repeated elsewhere.
        """
        job = attempt.job
        if job is None or attempt.tools or attempt.live.spoke:
            return None
        asked = self.settings.model_for(attempt.live.turn.model, job.profile)
        names = self.settings.fallbacks_for(asked, job.profile)
        before = attempt.fallback
        # In order, each once: the ones up to the model that has just failed have had their turn.
        left = names[names.index(job.model) + 1 :] if job.model in names else names
        for name in left:
            window = self.settings.window_for(name, job.profile, attempt.live.turn.options.window)
            if await self._backend.can_take(replace(job, model=name, window=window)):
                if before is not None and before.here:
                    return replace(before, model=name)
                return fallbacks.begun(asked, name, first, time.time())
        return None

    # --- 3: an exchange that is about to continue the path

    async def _answered(self, attempt: Attempt, state: AgentState, deadline: float) -> Completed | Called | Refused:
        """The backend's answer, whole and checked. Raises `Lost`, `PathChanged`, `InvalidOutput` and `ProxyError`."""
        live, lease = attempt.live, attempt.lease
        try:
            # A proxy that was paused must not touch the sessions of an agent that another one writes by now.
            await self._ownership.verify(lease)

            # The turn to continue: decided by the request, or the head as it is now, less what never arrived.
            while attempt.at_head and (before := state.parent) is not None and before.delivery == "undelivered":
                if await self.is_awaited(before):
                    break
                attempt.left_off.append(before.id)
                attempt.evidence = replace(attempt.evidence, left_off=before.id)
                state = await self._state(lease, before.behind, at_head=False)
            parent = attempt.parent = state.parent
            behind = live.promised and parent is not None and parent.delivery == "uncertain"
            if parent is not None and parent.delivery in ("undelivered", "uncertain") and not behind:
                # Continuing past an answer settles its delivery: from now on the same words are said anew. Not where
                # both waited for the same limit: then this one was asked before there was an answer.
                await self.store.set_delivery(parent.id, "delivered")
            if live.compose is not None:
                state = await self._composed(attempt, live.compose, state)
                parent = attempt.parent

            memory = self.settings.profile_for(live.turn.profile).git_memory
            if memory is not None:
                # An attempt begins where no turn of its path was run here: there is none, or its client brought it.
                brought = parent is not None and parent.evidence.brought is not None
                path = await self.store.path(parent.id) if parent is not None and brought else []
                if parent is None or (brought and all(turn.evidence.brought is not None for turn in path)):
                    attempt.recalled = await recall(memory, attempt.agent)
            job = self._job(attempt, state)
            attempt.job, attempt.uses_tools, attempt.model = job, bool(job.profile.tools), job.model
            home: Home | None = None
            if self._passing is not None and self._passing.keeps_files(live.turn.profile):
                home = self._passing.home
                missing = await self._passing.missing(attempt.agent)
                if missing is not None:
                    attempt.evidence = replace(attempt.evidence, files_at=missing.address)
            tools = job.wants.offers.tools
            if attempt.format is not None or (tools and any(tool.strict for tool in tools)):
                self._checks.expect()  # the process that checks starts while the model thinks
            ready = await self._backend.prepare(job)
            if isinstance(ready, Adoptable):
                parent = attempt.parent = await adopt(self.store, lease, ready, self._observers)
                session = await self.store.session_at(attempt.agent.key, parent.id)
                ready = await self._backend.prepare(replace(job, parent=parent, session=session, adopt=False))
                assert not isinstance(ready, Adoptable)
            exchange = attempt.exchange = ready
            unmet = list(exchange.unmet)
            tokens: int | None = None
            if "max_tokens" in unmet:  # then the core honours it
                unmet.remove("max_tokens")
                tokens = job.wants.parameters.max_tokens
            if job.wants.stop or tokens is not None:
                attempt.cutter = StopCutter(job.wants.stop, tokens)
            attempt.evidence = attempt.evidence.plus(exchange.evidence)
            if unmet or attempt.evidence.unmet:
                attempt.evidence = replace(attempt.evidence, unmet=tuple(unmet))
            live.evidence = attempt.evidence
            live.at("session_ready")
            now = live.now()
            entry: JSON = {
                "n": attempt.number,
                "session_id": exchange.session_id,
                "frame_uuid": attempt.frame_uuid,
                "started_at": now,
            }
            if exchange.evidence.repaired is not None:  # an attempt that fails stores this, but not its links
                entry["repaired"] = exchange.evidence.repaired.as_json()
            live.attempts.append(entry)
            attempt.asked = True
            await self.store.begin(
                TurnStart(
                    lease,
                    replace(
                        live.turn,
                        parent_id=parent.id if parent else None,
                        session_id=exchange.session_id,
                        frame_uuid=attempt.frame_uuid,
                        continuity=exchange.continuity,
                        evidence=attempt.evidence,
                        started_at=now,
                        instance=self._instances.id,
                    ),
                    attempt=dict(entry),
                    system=attempt.kept_system,
                    left_off=tuple(attempt.left_off),
                    home=home,
                    takes=attempt.takes,
                )
            )
            live.goes_out()
        except StoreUnavailable as exc:
            raise not_run(exc) from exc
        end = await self._heard(attempt, exchange, deadline)
        if isinstance(end, Completed) and attempt.format is not None:
            attempt.output = await self._checks.answer(attempt.format, attempt.output)
        return end

    async def is_awaited(self, turn: Turn) -> bool:
        """A client at some proxy waits for this answer, so that an undelivered one stays on the path."""
        return await self._instances.any_waits(await self.store.followers(turn.id))

    async def _composed(self, attempt: Attempt, compose: Compose, state: AgentState) -> AgentState:
        """Decide what the turn says, now that the path before it moves no more, and where it goes on from."""
        live, before = attempt.live, state.parent
        composed = await compose(before)
        if live.said is None and composed == live.composed:  # the turn was stored so
            attempt.parent = before
            return state
        if live.said is None or live.said[0] != composed:  # else its exchanges are stored already
            live.said = (composed, *await self._say(attempt.agent, live.turn, composed, before))
        _, said, attempt.takes = live.said
        live.turn = replace(live.turn, **{name: getattr(said, name) for name in SAID})
        if said.parent_id != (before.id if before else None):
            attempt.at_head = False
            if before is not None and before.delivery != "delivered":
                # What it said stands on the path from now on, told anew.
                await self.store.set_delivery(before.id, "delivered")
            state = await self._state(attempt.lease, said.parent_id, at_head=False)
        attempt.parent = state.parent
        return state

    async def _state(self, lease: Lease, parent_id: str | None, *, at_head: bool) -> AgentState:
        state = await self.store.agent_state(lease.agent_key, parent_id, at_head=at_head)
        if state is None:
            raise cancelled("deletion")
        return state

    def _job(self, attempt: Attempt, state: AgentState) -> Job:
        turn, parent = attempt.live.turn, state.parent
        profile = self.settings.profile_for(turn.profile)
        if turn.system is None and turn.placed.delta and parent is not None:
            # A delta without a system prompt keeps its parent's. It is stored with this turn for the next one.
            attempt.kept_system = parent.system
        brought = BroughtResults(rest=tuple(block for message in turn.input for block in message.content))
        tools = turn.options.tools
        if any(block.get("type") == "tool_result" for block in brought.rest):
            brought = answers(parent.output if parent else (), turn.input)
            if not tools and parent and turn.placed.delta:
                tools = parent.options.tools  # the answered calls use these
        offers = Offers.of(tools) if tools else Offers()
        wants = ToolOptions(offers, turn.options.tool_choice, turn.options.stop, turn.options.parameters)
        prompt: tuple[Block, ...] = ()
        if brought.rest or not brought.results or attempt.fault is not None:  # results alone go out as they are
            prompt = brought.rest
            if attempt.format is not None:
                prompt = (*prompt, structured.instruction(attempt.format, attempt.fault))
            if wants.choice.mode == "required":
                prompt = (*prompt, instruction(wants.choice, [tool.name for tool in wants.offers.tools]))
        if attempt.recalled is not None and any(str(block.get("text", "-")).strip() for block in prompt):
            # Part of the prompt, and of its record: the next request extends it, after a repair too.
            prompt = (attempt.recalled.block, *prompt)
            attempt.evidence = replace(attempt.evidence, recalled=attempt.recalled.evidence)
        by_name = self.settings.model_for(turn.model, profile)
        if attempt.fallback is None and parent is not None and parent.fallback is not None:
            names = self.settings.fallbacks_for(by_name, profile)
            attempt.fallback = fallbacks.going_on(parent.fallback, by_name, names, time.time())
        model = attempt.fallback.model if attempt.fallback is not None and attempt.fallback.here else by_name
        return Job(
            agent=state.agent,
            parent=parent,
            # A side call leaves the conversation's own session and its process alone: it runs in a branch.
            session=None if turn.placed.side else state.session,
            turn=turn,
            frame_uuid=attempt.frame_uuid,
            model=model,
            system=self.settings.system_prompt_for(profile, turn.system or attempt.kept_system),
            effort=turn.effort,
            profile=profile,
            prompt=prompt,
            wants=wants,
            answers=brought,
            check=self._checks.arguments,
            adopt=attempt.at_head,
            remedies=attempt.remedies,
            window=self.settings.window_for(model, profile, turn.options.window),
        )

    # --- 4: the prompt goes out, the answer comes back

    async def _heard(self, attempt: Attempt, exchange: Execution, deadline: float) -> Completed | Called | Refused:
        """Pass the events on. Give up after `idle_timeout` without one, unless a tool runs."""
        clock_of = awake_clock(asyncio.get_running_loop())
        idle = self.settings.idle_timeout
        cutter, cut = attempt.cutter, False
        silent = f"nothing came from {exchange.who} for {idle:g} s; send it again, or raise idle_timeout"
        asking = Asking(
            self.approvals,
            attempt.live,
            attempt.agent,
            note=partial(self._note_approval, attempt),
            own=self._own,
            earlier=attempt.evidence.approvals,
            timeout=self.settings.approval_timeout,
        )
        async with aclosing(exchange.say()) as heard, LimitedByLife(clock_of() + idle, silent) as limit, asking:
            async for event in heard:
                waits = isinstance(event, MAY_TAKE_LONG) or asking.is_open
                limit.move(deadline if waits else clock_of() + idle)
                if isinstance(event, SIGNS_OF_LIFE):
                    attempt.live.goes_on()
                match event:
                    case Completed() | Called() | Refused():
                        cost = None if isinstance(event, Refused) else event.cost_usd
                        attempt.used = Used(event.usage, cost)
                        attempt.live.at("result")
                        return event
                    case Used():
                        attempt.used, attempt.live.used = event, event.usage
                    case BlockStart() | BlockDelta() | BlockStop() if not cut:
                        for told in [event] if cutter is None else cutter.feed(event):
                            if attempt.format is None:  # else told when it is known to be valid
                                if not attempt.started:
                                    attempt.start()
                                attempt.live.publish(told)
                        if cutter is not None and cutter.ended is not None:
                            cut = True
                            attempt.output.append(cutter.last)
                            await exchange.interrupt()
                    case AnswerBlocks() if not cut:
                        attempt.output.extend(event.blocks)
                        attempt.answered_by = event.model or attempt.answered_by
                    case Abandoned() if not cut:
                        attempt.abandoned(event.blocks)
                    case ToolActivity():
                        attempt.check()
                        attempt.tools.append({**event.entry, "at": attempt.live.now()})
                        if event.entry.get("type") == "tool_use":
                            attempt.live.does("tool", {"name": event.entry.get("name")})
                    case PermissionAsked() if not cut:
                        asking.ask(event)
                    case PermissionWithdrawn():
                        asking.withdraw(event.id)
                    case Retried():
                        attempt.check()
                        attempt.retries.append({**event.detail, "at": attempt.live.now()})
                        attempt.live.does("retry", event.detail)
                    case PlanTold():
                        if attempt.job is not None and attempt.job.profile.login_env is None:  # else another plan
                            self._plan.told(event.detail)
                    case Compacted():
                        is_first = attempt.evidence.compacted is None
                        attempt.evidence = replace(attempt.evidence, compacted=event.detail)
                        with suppress(StoreUnavailable):  # for a turn that fails: the commit stores it anyway
                            if is_first:
                                await self.store.note(attempt.lease, attempt.live.turn.id, attempt.evidence)
                    case _:
                        pass
        raise Lost("the answer has no end", UpstreamError("the model's answer has no end; send it again"))

    async def _note_approval(self, attempt: Attempt, approval: Approval) -> None:
        """Store a request with its turn, in the place of what was stored of it before. Raises `StoreUnavailable` and
        `LeaseLost`."""
        others = [one for one in attempt.evidence.approvals if one.id != approval.id]
        attempt.evidence = replace(attempt.evidence, approvals=(*others, approval))
        attempt.live.evidence = attempt.evidence
        await self.store.note(attempt.lease, attempt.live.turn.id, attempt.evidence)

    # --- 5, 6: commit and acknowledge

    async def _commit(self, attempt: Attempt, end: Completed | Called) -> None:
        live, turn, exchange = attempt.live, attempt.live.turn, attempt.exchange
        assert exchange is not None
        ended_by, hit = (None, None) if attempt.cutter is None else (attempt.cutter.ended, attempt.cutter.hit)
        stopped = ended_by is not None
        called = isinstance(end, Called) and not stopped
        calls = frozenset(calls_of(end.calls)) if isinstance(end, Called) and called else frozenset()
        answer: list[Block] = []
        partial: set[int] = set()
        for at, block in enumerate(attempt.output):
            if block.get("type") == "tool_use" and block.get("id") not in calls:
                continue  # a message that the provider cut, and that was asked for again, may have left it: never made
            if at in attempt.partial:
                partial.add(len(answer))
            answer.append(block)
        output = tuple(answer)
        kept = await exchange.keep(Answered(output, calls, stopped, frozenset(partial)))
        status: Status = "requires_action" if called else "completed"
        stop_reason = ended_by or (end.stop_reason if isinstance(end, Completed) else "tool_use")
        sequence = hit or (end.stop_sequence if isinstance(end, Completed) else None)
        live.at("committed")
        commit = Commit(
            lease=attempt.lease,
            turn=replace(
                attempt.answered(output),
                status=status,
                stop_reason=stop_reason,
                stop_sequence=sequence,
                usage=end.usage,
                cost_usd=end.cost_usd,
                attempts=attempt.ended(status, session_id=exchange.session_id),
                delivery=live.left_as if live.abandoned else "pending",
                evidence=replace(
                    attempt.evidence,
                    retries=tuple(attempt.retries) or attempt.evidence.retries,
                    notes=(*attempt.evidence.notes, *kept.notes),
                    records=kept.source,
                    cache_miss=end.cache_miss if isinstance(end, Completed) else None,
                ),
            ),
            records=kept.records,
            session=kept.session,
            links=(*exchange.links, *kept.links),
            move_head=attempt.agent.moves_head_to(turn),
            budgets=self._budgets(attempt.agent.owner, attempt.agent.agent_id),
        )
        committed = await self._stored(commit)
        # From here on the turn stands: what fails is logged, and its clients get their answer.
        attempt.committed = True
        delivery = committed.delivery
        wanted: Delivery
        while delivery != (wanted := live.left_as if live.abandoned else "pending"):
            # Its clients left, or came back, meanwhile: the commit may have overwritten what was noted of that.
            delivery = wanted
            try:
                await self.store.set_delivery(turn.id, delivery)
                committed = replace(committed, delivery=delivery)  # else it is as the store has it
            except Exception as exc:  # ProxyError: of a turn that was deleted meanwhile, too
                trace = not isinstance(exc, ProxyError)
                log.warning("delivery_not_noted", turn_id=turn.id, error=str(exc), exc_info=trace)
        try:
            # The clients first: the observers' turn comes when the answers have been handed over.
            attempt.start()
            if attempt.format is not None:
                for event in said(committed.output):
                    live.publish(event)
        finally:
            self._finish(live, committed, commit.links)
            try:
                await exchange.release()
            except Exception:
                log.exception("not_released", turn_id=turn.id)
        for link in commit.links:
            if link.reason in REPAIR_REASONS:
                log.info("repaired", agent=attempt.agent.agent_id, turn_id=turn.id, reason=link.reason)

    async def _refused(self, attempt: Attempt, end: Refused) -> None:
        """The model refused. Its client gets what was said as an answer; the head, the session and the path stay.

        What the exchange knows of it is discarded by the caller.
        """
        live, turn = attempt.live, attempt.live.turn
        output = [block for block in attempt.output if block.get("type") != "tool_use"]
        behind = await self._refused_before(turn, attempt.parent)
        refusal = Refusal(end.category, end.explanation, behind)
        added: list[Block] = []
        if not any(str(block.get("text", "")).strip() for block in output):
            # Every wire has words then, and every client sends them back: an answer without any would be lost.
            added.append({"type": "text", "text": refusal.words})
        commit = Commit(
            lease=attempt.lease,
            turn=replace(
                attempt.answered((*output, *added)),
                status="refused",
                stop_reason="refusal",
                stop_sequence=None,
                usage=end.usage,
                cost_usd=None,
                delivery="pending",
                attempts=attempt.ended("refused"),
                evidence=replace(
                    attempt.evidence, retries=tuple(attempt.retries) or attempt.evidence.retries, refusal=refusal
                ),
            ),
            records=(),
            session=None,
            links=(),
            move_head=False,
            budgets=self._budgets(attempt.agent.owner, attempt.agent.agent_id),
        )
        refused = await self._stored(commit)
        attempt.used = None
        attempt.start()
        for event in said(added if attempt.format is None else refused.output, live.next_block):
            live.publish(event)
        log.info("refused", turn_id=turn.id, category=end.category)
        self._finish(live, refused, ())

    async def _refused_before(self, turn: Turn, parent: Turn | None) -> int:
        """How many turns in a row before this one were refused behind the same parent: what all of them share may be
        what is refused."""
        if parent is None:
            return 0
        count = 0
        for other in reversed(await self.store.children(parent.id)):
            if other.id == turn.id or other.status not in ANSWERED:
                continue
            if other.status != "refused":
                break
            count += 1
        return count

    async def _stored(self, commit: Commit) -> Turn:
        try:
            return await self.store.commit(commit)
        except StoreUnavailable as exc:
            raise StoreUnavailable(
                f"this turn was run, and its answer was not kept ({exc.message}); the conversation is as before: "
                "send it again",
                retry_after=exc.retry_after,
            ) from exc

    def _finish(self, live: LiveTurn, turn: Turn, links: Sequence[Link]) -> None:
        live.finish(turn)
        loop, now = asyncio.get_running_loop(), live.now()
        for observer in self._observers:
            loop.call_soon(loop.call_soon, observer.turn_ended, turn, links, live.requested, now)


async def adopt(
    store: Store, lease: Lease, found: Adoptable, observers: Sequence[Observer], taken: Taken | None = None
) -> Turn:
    """Add turns held outside the proxy to the chain, and move the head to the last of them."""
    session, last = found.session, found.turns[-1].turn.id
    detail: JSON = {**found.detail, "turns": [whole.turn.id for whole in found.turns]}
    link = Link(session.id, session.id, last, "adopted", detail, time.time())
    adopted = await store.adopt(lease, found.turns, session, [link], taken)
    for observer in observers:
        observer.adopted(adopted, link)
    return adopted


def not_run(exc: StoreUnavailable) -> StoreUnavailable:
    return StoreUnavailable(f"this turn was not run: {exc.message}", retry_after=exc.retry_after, detail=exc.detail)


# --- How turns end that are not completed

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
    requested: Requested | None = None


class Ends:
    """One per engine. Until an end is stored its turn seems to run, and other proxies wait for it."""

    def __init__(self, store: Store, instances: Instances, tasks: Tasks, observers: Sequence[Observer]) -> None:
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._observers = observers
        self.waiting: dict[str, _End] = {}  # those that are not stored yet, by turn
        self._one_at_a_time = asyncio.Lock()

    def failed(self, live: LiveTurn, error: ProxyError) -> None:
        """It waits to be stored from now on (`tell`): the agent's lease is not handed over before."""
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
        """Nobody knows whether it waits in the store, and its client was told that it does not: where it does, it ends
        as soon as the store can be told. Others would wait for it."""
        error = Interrupted("the store was lost while this turn was accepted; send it again")
        now = self._instances.now()
        self.waiting[turn_id] = _End(turn_id, "cancelled", error.as_dict(), list(attempts), {}, now, None)
        self._tasks.serve(self._keep_trying())

    def told(self, turn: Turn) -> Turn:
        """As it ended, where the store has it as running because that is not stored yet."""
        end = self.waiting.get(turn.id)
        if end is None or turn.status in FINISHED:
            return turn
        return replace(
            turn, status=end.status, error=end.error, attempts=tuple(end.attempts), timings=end.timings,
            finished_at=end.at,
        )  # fmt: skip

    async def store_all(self) -> None:
        """Store every end, also those that failed to be stored before. Raises `StoreUnavailable`."""
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
                # One that waits is left to its proxy, which we are. The holder of the lease settles all others.
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
                # The commit was kept after all, and its client was told that it was not.
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


# --- Answers and arguments against the client's JSON Schemas: strangers' programs, run where they can be ended


class Checks:
    """One per engine."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers

    def expect(self) -> None:
        """Start the process that checks, while the model thinks."""
        self._helpers.expect()

    async def answer(self, format: JSON, output: Sequence[Block]) -> list[Block]:
        """The answer with one text block that is the JSON. Raises `InvalidOutput`, `InvalidRequest`."""
        text = "".join(block["text"] for block in output if block.get("type") == "text")
        try:
            text = await self._helpers.call(structured.checked, format, text)
        except OutOfBoundsError as exc:
            raise _too_much("the answer", exc) from exc
        return [*(block for block in output if block.get("type") != "text"), {"type": "text", "text": text}]

    async def arguments(self, value: object, schema: JSON) -> str | None:
        """What is wrong with the arguments of a call (`client_tools.Check`). Raises `InvalidRequest`."""
        try:
            return await self._helpers.call(structured.fault_of, value, schema)
        except OutOfBoundsError as exc:
            raise _too_much("the arguments of a call", exc) from exc


def _too_much(what: str, why: OutOfBoundsError) -> InvalidRequest:
    return InvalidRequest(f"{what} cannot be held against the JSON Schema: {why}; send a simpler one", param="schema")
