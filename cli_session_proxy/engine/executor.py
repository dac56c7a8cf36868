"""Steps 3 to 6 of a request (see `engine`): one turn on its backend, in several attempts if one fails harmlessly.

The caller holds the agent's lease meanwhile. A turn that fails never moves the head, and its exchange is discarded at
the backend before the agent's next turn.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from .. import logs
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
    Retried,
    ToolActivity,
    Used,
)
from ..domain import structured
from ..domain.approvals import Approval
from ..domain.client_tools import Offers, answers, calls_of, instruction
from ..domain.evidence import OUTPUT_REFUSED, Recalled, Refusal
from ..domain.forms import replace
from ..domain.models import (
    ANSWERED,
    JSON,
    NO_USAGE,
    ONCE,
    REPAIR_REASONS,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Compose,
    Fallback,
    LimitWait,
    Link,
    Status,
    Turn,
    TurnRequest,
)
from ..domain.stop_sequences import StopCutter
from ..errors import (
    ProxyError,
    RateLimited,
    StoreUnavailable,
    UpstreamError,
)
from ..git_memory.attempts import recall
from ..settings import Settings
from ..stores import held
from ..stores.base import COMPOSED_FIELDS, AgentState, Home, KeptTurn, Lease, MirroredLines, PathChanged, Store
from ..tasks import IdleLimit, TimeLimit, awake_clock, uninterrupted
from . import fallbacks
from .approvals import Approvals, Asking
from .attempt import Attempt, RetryState
from .budgets import BudgetsOf
from .checks import Checks
from .live import ComposedTurn, LiveTurn, Observer, answer_events, cancelled
from .ownership import Instances, Ownership
from .passing import Passing
from .plan import PlanWatch

log = logs.get(__name__)

# A turn whose exchange is lost before any output is run a second time. A third attempt would hide a broken backend.
ATTEMPTS = 2

# Events after which no tool runs and the provider answers.
SIGNS_OF_LIFE = (BlockStart, AnswerBlocks, ToolActivity, Compacted)
# After these events a long silence is normal.
MAY_TAKE_LONG = (ToolActivity, PermissionAsked)

T = TypeVar("T")


# See `Placement.place_composed`.
PlaceComposed = Callable[[Agent, Turn, TurnRequest, Turn | None], Awaitable[ComposedTurn]]


class Own(Protocol):
    """Starts a task that the engine waits for when it stops."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...


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
        place_composed: PlaceComposed,
        budgets: BudgetsOf,
        plan: PlanWatch,
        holds: held.Holds,
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
        self._place_composed = place_composed
        self._budgets = budgets
        self._plan = plan
        self._holds = holds
        self.approvals = Approvals()
        limit = f"{settings.turn_timeout:g} s"
        self.too_long = f"the turn took longer than {limit}; send it again, or raise turn_timeout"

    async def execute(
        self,
        live: LiveTurn,
        state: AgentState,
        *,
        at_head: bool,
        deadline: float,
        waiting_too: Callable[[], Sequence[str]] = tuple,
    ) -> LimitWait | None:
        """Run the turn, and publish its answer to its clients. Returns a `LimitWait`, stored already, if the turn has
        to wait for a limit instead. Raises `ProxyError`.

        `deadline` is by the awake clock. `waiting_too`: called if the turn has to wait; the ids of the turns that wait
        for the same limit.
        """
        lease = live.lease
        assert lease is not None
        retrying = RetryState()
        state_is_old = False
        while True:
            if live.cancelled_by is not None:  # while the last attempt was discarded
                raise asyncio.CancelledError
            live.reached("queued")
            live.used = NO_USAGE
            attempt = Attempt.of(live, lease, state.agent, retrying, at_head=at_head)
            failed: ProxyError | None = None
            try:
                async with TimeLimit(deadline, self.too_long):
                    if state_is_old:
                        state = await self._state(lease, live.turn.parent_id, at_head=at_head)
                    with self._holds.hold(state.agent.owner):
                        end = await self._get_answer(attempt, state, deadline)
                storing = self._store_refusal(attempt, end) if isinstance(end, Refused) else self._commit(attempt, end)
                await uninterrupted(self._own(storing))
                return None
            except Lost as lost:
                failed = self._after_loss(attempt, lost)
            except ProxyError as error:
                failed = error
            except PathChanged:  # nothing was sent: start over on the new path
                log.info("path_changed", turn_id=live.turn.id)
            except structured.InvalidOutput as invalid:
                if retrying.tries == ATTEMPTS or attempt.uses_tools:
                    raise invalid.as_error() from invalid
                retrying.fault = invalid.fault
                attempt.record_end("failed", code=OUTPUT_REFUSED, why=invalid.fault)
                log.warning("turn_repeated", turn_id=live.turn.id, why="invalid structured output")
                retrying.repeat()
            finally:
                state_is_old = True  # this attempt may have changed the session
                await self._discard(attempt)
            if failed is not None and (wait := await self._recover(attempt, failed, deadline, waiting_too)) is not None:
                return wait

    def _after_loss(self, attempt: Attempt, lost: Lost) -> ProxyError | None:
        """The exchange was lost. Returns the turn's error, or None if the turn is to be run once more."""
        retrying = attempt.retrying
        attempt.record_end("failed", why=lost.why)
        attempt.end_recorded = True
        if lost.remedy is not None and lost.remedy not in retrying.remedies:
            retrying.remedies |= {lost.remedy}
            may_repeat = not attempt.tools  # tool calls must not be repeated
        else:
            may_repeat = retrying.tries < ATTEMPTS + len(retrying.remedies) and not attempt.uses_tools
        if not may_repeat or attempt.live.output_sent:
            return lost.error
        log.warning("turn_repeated", turn_id=attempt.live.turn.id, why=lost.why)
        retrying.repeat()
        return None

    async def _discard(self, attempt: Attempt) -> None:
        """Discard the exchange of an attempt that was not committed: its session holds a prompt that is not on the
        path."""
        if attempt.exchange is None or attempt.committed:
            return
        owned = self._ownership.holds(attempt.lease)
        try:
            await uninterrupted(self._own(attempt.exchange.discard(owned=owned)))
        except (ProxyError, asyncio.CancelledError):
            raise
        except Exception:  # the client gets the turn's own error; a file that stays is never used
            log.exception("not_discarded", turn_id=attempt.live.turn.id)
        finally:
            if owned and attempt.used is not None:  # else the new holder of the lease counts it
                await uninterrupted(self._own(self._count(attempt, attempt.used)))

    async def _recover(
        self, attempt: Attempt, failed: ProxyError, deadline: float, waiting_too: Callable[[], Sequence[str]]
    ) -> LimitWait | None:
        """The attempt failed. Returns the limit that the turn has to wait for (already stored), or None if the next
        attempt is to ask another model. Raises the error if the turn fails."""
        live, retrying = attempt.live, attempt.retrying
        # If another proxy took the agent over, it killed our CLI: `LeaseLost` explains more than the CLI's end.
        with suppress(StoreUnavailable):  # then the attempt's own error is all that is known
            await self._ownership.verify(attempt.lease)
        if live.cancelled_by is not None:  # while the attempt was discarded
            raise asyncio.CancelledError
        is_first = retrying.first_error is None
        # Once a fallback model was asked, any error of a model leads to the next one; before, only some errors do.
        fallback_failed = not is_first and not isinstance(failed, fallbacks.NOT_OF_A_MODEL)
        if not (fallback_failed or fallbacks.may_help(failed)):
            raise failed
        if is_first and not attempt.uses_fallback and isinstance(failed, RateLimited) and attempt.job is not None:
            on_limit = attempt.job.profile.on_limit or self.settings.on_limit
            # A turn that has called tools, or whose answer a client has in part, cannot be run again. A request that
            # asked not to be stored is not kept for later.
            may_wait = not (attempt.tools or live.output_sent or attempt.agent.agent_id.startswith(f"{ONCE}_"))
            wait = None
            if on_limit == "wait" and may_wait:
                wait = fallbacks.wait_for(failed, live.last_limit_wait, live.now(), self.settings.max_limit_wait)
            if wait is not None:
                if not attempt.end_recorded:
                    attempt.record_end("failed", code=failed.code, why=failed.message)
                live.turn = await self.store.postpone(
                    attempt.lease, live.turn.id, wait, live.attempts, live.timings, behind=waiting_too()
                )
                log.warning("waits_for_limit", turn_id=live.turn.id, until=wait.until, why=failed.message)
                return wait
            if on_limit == "error":
                raise failed
        first = retrying.first_error = retrying.first_error or failed
        async with TimeLimit(deadline, self.too_long):
            with self._holds.hold(attempt.agent.owner):  # whether a model can take the path is read from the path
                fallback = await self._next_fallback(attempt, first)
        if fallback is None:
            raise first
        if not attempt.end_recorded:
            attempt.record_end("failed", code=failed.code, why=failed.message)
        logged = {"asked": fallback.asked, "model": fallback.model, "why": fallback.why, "until": fallback.until}
        log.warning("asked_elsewhere", turn_id=live.turn.id, **logged)
        retrying.fall_back(fallback)
        return None

    async def _count(self, attempt: Attempt, used: Used) -> None:
        """Count the usage of a failed attempt in the budgets: the provider bills it, too."""
        budgets = self._budgets(attempt.agent.owner, attempt.agent.agent_id)
        if not budgets or used.usage == NO_USAGE:
            return
        try:
            await self.store.spend(budgets, used.usage, used.cost_usd, attempt.live.now())
        except StoreUnavailable as exc:
            log.warning("spending_not_noted", turn_id=attempt.live.turn.id, error=exc.message)

    async def _next_fallback(self, attempt: Attempt, first: ProxyError) -> Fallback | None:
        """The model to ask next; None: there is none, and the turn fails.

        A turn cannot be run again once it has called tools or a client has a part of its answer.
        """
        job = attempt.job
        if job is None or attempt.tools or attempt.live.output_sent:
            return None
        asked = self.settings.model_for(attempt.live.turn.model, job.profile)
        names = self.settings.fallbacks_for(asked, job.profile)
        previous = attempt.fallback
        # Each model is asked once, in order: skip those up to the model that has just failed.
        left = names[names.index(job.model) + 1 :] if job.model in names else names
        for name in left:
            window = self.settings.window_for(name, job.profile, attempt.live.turn.options.window)
            if await self._backend.can_take(replace(job, model=name, window=window)):
                if previous is not None and attempt.uses_fallback:  # it keeps which model failed first, and why
                    return replace(previous, model=name)
                return fallbacks.new(asked, name, first, time.time())
        return None

    # --- 3: an exchange that is about to continue the path

    async def _get_answer(self, attempt: Attempt, state: AgentState, deadline: float) -> Completed | Called | Refused:
        """The backend's answer, whole and checked. Raises `Lost`, `PathChanged`, `InvalidOutput` and `ProxyError`."""
        try:
            # This proxy may have been paused, and replaced meanwhile: then it must not touch the agent's sessions.
            await self._ownership.verify(attempt.lease)
            state = await self._find_path(attempt, state)
            if attempt.live.compose is not None:
                state = await self._compose(attempt, attempt.live.compose, state)
            job = attempt.job = self._make_job(attempt, state, await self._recalled(attempt))
            home = None
            if self._passing is not None and self._passing.keeps_files(attempt.live.turn.profile):
                home = self._passing.home
                if (other_host := await self._passing.other_home(attempt.agent)) is not None:
                    attempt.evidence = replace(attempt.evidence, files_at=other_host.address)
            if attempt.format is not None or any(tool.strict for tool in job.offers.tools):
                self._checks.expect()  # the process that checks starts while the model thinks
            exchange = attempt.exchange = await self._prepare(attempt, job)
            await self._begin(attempt, job, exchange, home)
            attempt.live.limit_over()
            if not exchange.keeps_path:
                held.release()
        except StoreUnavailable as exc:
            raise not_run(exc) from exc
        end = await self._receive(attempt, exchange, deadline)
        if isinstance(end, Completed) and attempt.format is not None:
            attempt.output = await self._checks.answer(attempt.format, attempt.output)
        return end

    async def _find_path(self, attempt: Attempt, state: AgentState) -> AgentState:
        """The turn to continue: the one that the request names, or the head, without answers that never arrived."""
        while attempt.at_head and (before := state.parent) is not None and before.delivery == "undelivered":
            if await self.is_awaited(before):
                break
            attempt.left_off.append(before.id)
            attempt.evidence = replace(attempt.evidence, left_off=before.id)
            state = await self._state(attempt.lease, before.end_without_it, at_head=False)
        parent = attempt.parent = state.parent
        # Two turns that waited for the same limit: this request was sent before its parent had an answer.
        waited_together = attempt.live.runs_unattended and parent is not None and parent.delivery == "uncertain"
        if parent is not None and parent.delivery in ("undelivered", "uncertain") and not waited_together:
            # A client that continues an answer has it: from now on a repeat of the parent's request is a new turn.
            await self.store.set_delivery(parent.id, "delivered")
        return state

    async def _recalled(self, attempt: Attempt) -> Recalled | None:
        """Earlier attempts at the same fix, from the git repository. They go into the first prompt of this agent: no
        turn of its path was run here, as the path is empty or a client brought all of it."""
        memory, parent = self.settings.profile_for(attempt.live.turn.profile).git_memory, attempt.parent
        if memory is None:
            return None
        if parent is not None:
            if parent.evidence.brought is None:
                return None
            if not all(turn.evidence.brought is not None for turn in await self.store.path_texts(parent.id)):
                return None
        return await recall(memory, attempt.agent, self.settings.written_inside())

    async def _prepare(self, attempt: Attempt, job: Job) -> Execution:
        """The exchange, ready to send. Turns that a person added to the session meanwhile are adopted first."""
        ready = await self._backend.prepare(job)
        if isinstance(ready, Adoptable):
            parent = attempt.parent = await adopt(self.store, attempt.lease, ready, self._observers)
            session = await self.store.session_at(attempt.agent.key, parent.id)
            ready = await self._backend.prepare(replace(job, parent=parent, session=session, adopt=False))
            assert not isinstance(ready, Adoptable)  # `adopt` is False
        return ready

    async def _begin(self, attempt: Attempt, job: Job, exchange: Execution, home: Home | None) -> None:
        """Store that this attempt's frame is about to be sent, and to which session. `home`: the host with the files of
        the turn's tools."""
        live, options = attempt.live, job.turn.options
        unmet = list(exchange.unmet)
        tokens: int | None = None
        if "max_tokens" in unmet:  # the backend cannot limit it: the cutter does
            unmet.remove("max_tokens")
            tokens = options.parameters.max_tokens
        if options.stop or tokens is not None:
            attempt.cutter = StopCutter(options.stop, tokens)
        attempt.evidence = attempt.evidence.plus(exchange.evidence)
        if unmet or attempt.evidence.unmet:
            attempt.evidence = replace(attempt.evidence, unmet=tuple(unmet))
        live.evidence = attempt.evidence
        live.reached("session_ready")
        now = live.now()
        attempt_entry: JSON = {
            "n": attempt.retrying.number,
            "session_id": exchange.session_id,
            "frame_uuid": job.frame_uuid,
            "started_at": now,
        }
        if exchange.evidence.repaired is not None:  # links are only stored with an answer
            attempt_entry["repaired"] = exchange.evidence.repaired.as_json()
        live.attempts.append(attempt_entry)
        attempt.begun = True
        await self.store.begin(
            attempt.lease,
            replace(
                live.turn,
                parent_id=attempt.parent.id if attempt.parent else None,
                session_id=exchange.session_id,
                frame_uuid=job.frame_uuid,
                continuity=exchange.continuity,
                evidence=attempt.evidence,
                started_at=now,
                instance=self._instances.id,
            ),
            dict(attempt_entry),
            system=attempt.kept_system,
            left_off=tuple(attempt.left_off),
            home=home,
            takes=attempt.takes,
        )

    async def is_awaited(self, turn: Turn) -> bool:
        """Whether a client at any proxy waits for this answer. Then the answer stays on the path though it is
        undelivered."""
        return await self._instances.any_waits(await self.store.followers(turn.id))

    async def _compose(self, attempt: Attempt, compose: Compose, state: AgentState) -> AgentState:
        """Compose the turn's prompt, now that the path before it is final, and decide which turn it continues."""
        live, before = attempt.live, state.parent
        composed = await compose(before)
        if live.recomposed is None and composed == live.composed:  # as stored at acceptance
            attempt.parent = before
            return state
        if live.recomposed is None or live.recomposed.composed != composed:
            live.recomposed = await self._place_composed(attempt.agent, live.turn, composed, before)
        # Else an earlier attempt has placed this prompt, and stored the exchanges before it.
        _, placed, attempt.takes = live.recomposed
        live.turn = replace(live.turn, **{name: getattr(placed, name) for name in COMPOSED_FIELDS})
        if placed.parent_id != (before.id if before else None):
            attempt.at_head = False
            if before is not None and before.delivery != "delivered":
                # The client sent this answer back as part of its prompt, so it has it.
                await self.store.set_delivery(before.id, "delivered")
            state = await self._state(attempt.lease, placed.parent_id, at_head=False)
        attempt.parent = state.parent
        return state

    async def _state(self, lease: Lease, parent_id: str | None, *, at_head: bool) -> AgentState:
        state = await self.store.agent_state(lease.agent_key, parent_id, at_head=at_head)
        if state is None:
            raise cancelled("deletion")
        return state

    def _make_job(self, attempt: Attempt, state: AgentState, recalled: Recalled | None) -> Job:
        turn, parent = attempt.live.turn, state.parent
        profile = self.settings.profile_for(turn.profile)
        if turn.system is None and turn.placed.delta and parent is not None:
            # A request with only the new message keeps its parent's system prompt. It is stored with this turn, too.
            attempt.kept_system = parent.system
        results: dict[str, Block] = {}
        prompt = tuple(block for message in turn.input for block in message.content)
        tools, choice = turn.options.tools, turn.options.tool_choice
        if any(block.get("type") == "tool_result" for block in prompt):
            results, prompt = answers(parent.output if parent else (), turn.input)
            if not tools and parent and turn.placed.delta:
                tools = parent.options.tools  # the answered calls use these
        fault = attempt.retrying.fault
        if prompt or not results or fault is not None:  # results alone go out as they are
            if attempt.format is not None:
                prompt = (*prompt, structured.instruction(attempt.format, fault))
            if choice.mode == "required":
                prompt = (*prompt, instruction(choice, [tool.name for tool in tools]))
        says_something = any(block.get("type") != "text" or str(block["text"]).strip() for block in prompt)
        if recalled is not None and says_something:
            # It becomes part of the recorded prompt, so that later requests extend this one byte for byte.
            prompt = (recalled.block, *prompt)
            attempt.evidence = replace(attempt.evidence, recalled=recalled)
        # What the model is shown follows this attempt, not what an earlier attempt has stored.
        if turn.evidence.recalled != attempt.evidence.recalled:
            turn = replace(turn, evidence=replace(turn.evidence, recalled=attempt.evidence.recalled))
        asked_model = self.settings.model_for(turn.model, profile)
        if attempt.fallback is None and parent is not None and parent.fallback is not None:
            names = self.settings.fallbacks_for(asked_model, profile)
            attempt.fallback = fallbacks.inherited(parent.fallback, asked_model, names, time.time())
        model = attempt.fallback.model if attempt.fallback is not None and attempt.uses_fallback else asked_model
        return Job(
            agent=state.agent,
            parent=parent,
            # A side call runs in a branch: the conversation's session and process stay as they are.
            session=None if turn.placed.side else state.session,
            turn=turn,
            frame_uuid=str(uuid.uuid4()),
            model=model,
            system=self.settings.system_prompt_for(profile, turn.system or attempt.kept_system),
            effort=turn.effort,
            profile=profile,
            prompt=prompt,
            offers=Offers.of(tools) if tools else Offers(),
            results=results,
            check=self._checks.arguments,
            fit=self._checks.media,
            adopt=attempt.at_head,
            remedies=attempt.retrying.remedies,
            window=self.settings.window_for(model, profile, turn.options.window),
        )

    # --- 4: the prompt goes out, the answer comes back

    async def _receive(self, attempt: Attempt, exchange: Execution, deadline: float) -> Completed | Called | Refused:
        """Publish the events. Give up after `idle_timeout` without one, unless a tool runs."""
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
        async with aclosing(exchange.say()) as events, IdleLimit(clock_of() + idle, silent) as limit, asking:
            async for event in events:
                waits = type(event) in MAY_TAKE_LONG or bool(attempt.live.asking)
                limit.move(deadline if waits else clock_of() + idle)
                if type(event) in SIGNS_OF_LIFE:
                    attempt.live.backend_spoke()
                match event:
                    case Completed() | Called() | Refused():
                        cost = None if isinstance(event, Refused) else event.cost_usd
                        attempt.used = Used(event.usage, cost)
                        attempt.live.reached("result")
                        return event
                    case Used():
                        attempt.used, attempt.live.used = event, event.usage
                    case BlockStart() | BlockDelta() | BlockStop() if not cut:
                        for part in [event] if cutter is None else cutter.feed(event):
                            if attempt.format is None:  # a structured answer is published once it is validated
                                if not attempt.announced:
                                    attempt.announce()
                                attempt.live.publish(part)
                        if cutter is not None and cutter.ended is not None:
                            cut = True
                            attempt.output.append(cutter.last)
                            await exchange.interrupt()
                    case AnswerBlocks() if not cut:
                        attempt.add_output(event.blocks)
                        attempt.answered_by = event.model or attempt.answered_by
                    case Abandoned() if not cut:
                        attempt.cut(event.blocks)
                    case ToolActivity():
                        attempt.add_tool_entry(event.entry)
                        if event.entry.get("type") == "tool_use":
                            attempt.live.now_doing("tool", {"name": event.entry.get("name")})
                    case PermissionAsked() if not cut:
                        asking.ask(event)
                    case PermissionWithdrawn():
                        asking.withdraw(event.id)
                    case Retried():
                        attempt.check()
                        attempt.retries.append({**event.detail, "at": attempt.live.now()})
                        attempt.live.now_doing("retry", event.detail)
                    case PlanTold():
                        if attempt.job is not None and attempt.job.profile.login_env is None:  # not its own plan
                            self._plan.report(event.detail)
                    case Compacted():
                        is_first = attempt.evidence.compacted is None
                        attempt.evidence = replace(attempt.evidence, compacted=event.detail)
                        with suppress(StoreUnavailable):  # only a failed turn needs it: a commit stores it, too
                            if is_first:
                                await self.store.note(attempt.lease, attempt.live.turn.id, attempt.evidence)
                    case _:
                        pass
        raise Lost("the answer has no end", UpstreamError("the model's answer has no end; send it again"))

    async def _note_approval(self, attempt: Attempt, approval: Approval) -> None:
        """Store an approval request with its turn, in place of its former state. Raises `StoreUnavailable`,
        `LeaseLost`."""
        others = [one for one in attempt.evidence.approvals if one.id != approval.id]
        attempt.evidence = replace(attempt.evidence, approvals=(*others, approval))
        attempt.live.evidence = attempt.evidence
        await self.store.note(attempt.lease, attempt.live.turn.id, attempt.evidence)

    # --- 5, 6: commit and acknowledge

    async def _commit(self, attempt: Attempt, end: Completed | Called) -> None:
        live, turn, exchange = attempt.live, attempt.live.turn, attempt.exchange
        assert exchange is not None
        cutter = attempt.cutter
        cut_reason, cut_sequence = (None, None) if cutter is None else (cutter.ended, cutter.hit)
        stopped = cut_reason is not None
        called = isinstance(end, Called) and not stopped
        calls = frozenset(calls_of(end.calls)) if isinstance(end, Called) and called else frozenset()
        answer: list[Block] = []
        broken_off: set[int] = set()
        for at, block in enumerate(attempt.output):
            if block.get("type") == "tool_use" and block.get("id") not in calls:
                continue  # a call from a message that the provider cut and sent again: it was never made
            if at in attempt.partial:
                broken_off.add(len(answer))
            answer.append(block)
        output = tuple(answer)
        kept, kept_evidence = await exchange.keep(Answered(output, calls, stopped, frozenset(broken_off)))
        kept = replace(kept, links=(*exchange.links, *kept.links))
        status: Status = "requires_action" if called else "completed"
        stop_reason = cut_reason or (end.stop_reason if isinstance(end, Completed) else "tool_use")
        sequence = cut_sequence or (end.stop_sequence if isinstance(end, Completed) else None)
        live.reached("committed")
        live.committing = True
        answered = attempt.answered(
            output,
            status=status,
            stop_reason=stop_reason,
            stop_sequence=sequence,
            usage=end.usage,
            cost_usd=end.cost_usd,
            attempts=attempt.record_end(status, session_id=exchange.session_id),
            delivery=live.delivery,
            evidence=replace(
                attempt.evidence,
                retries=tuple(attempt.retries) or attempt.evidence.retries,
                notes=(*attempt.evidence.notes, *kept_evidence.notes),
                records=kept_evidence.records,
                cache_miss=end.cache_miss if isinstance(end, Completed) else None,
            ),
        )
        committed = await self._store_turn(attempt, answered, kept)
        # The turn is committed: later errors are only logged, and its clients get their answer.
        attempt.committed = True
        if live.abandoned and committed.delivery == "pending":
            # Clients left during the commit, which may have overwritten the delivery stored then.
            try:
                await self.store.set_delivery(turn.id, live.delivery_if_left, by=self._instances.id)
                committed = replace(committed, delivery=live.delivery_if_left)  # on an error keep what the store has
            except Exception as exc:  # ProxyError: e.g. the turn was deleted meanwhile
                trace = not isinstance(exc, ProxyError)
                log.warning("delivery_not_noted", turn_id=turn.id, error=str(exc), exc_info=trace)
        try:
            # Clients first; observers are notified after the answers were handed over.
            attempt.announce()
            if attempt.format is not None:
                for event in answer_events(committed.output):
                    live.publish(event)
        finally:
            self._finish(live, committed, kept.links)
            try:
                await exchange.release()
            except Exception:
                log.exception("not_released", turn_id=turn.id)
        for link in kept.links:
            if link.reason in REPAIR_REASONS:
                log.info(
                    "repaired",
                    **attempt.agent.named_in_logs,
                    turn_id=turn.id,
                    reason=link.reason,
                )

    async def _store_refusal(self, attempt: Attempt, end: Refused) -> None:
        """Store a refusal of the model, and publish its words as the answer. Head, session and path do not change.

        The caller discards the exchange.
        """
        live, turn = attempt.live, attempt.live.turn
        output = [block for block in attempt.output if block.get("type") != "tool_use"]
        # Siblings in a row before this turn that were refused: several suggest that the path itself is refused.
        refused_before = 0
        siblings = await self.store.children(attempt.parent.id) if attempt.parent is not None else []
        for sibling, status in reversed(siblings):
            if sibling == turn.id or status not in ANSWERED:
                continue
            if status != "refused":
                break
            refused_before += 1
        refusal = Refusal(end.category, end.explanation, refused_before)
        added: list[Block] = []
        if not any(str(block.get("text", "")).strip() for block in output):
            # A client cannot send an empty answer back in its history: give it words.
            added.append({"type": "text", "text": refusal.words})
        answered = attempt.answered(
            (*output, *added),
            status="refused",
            stop_reason="refusal",
            stop_sequence=None,
            usage=end.usage,
            cost_usd=None,
            delivery="pending",
            attempts=attempt.record_end("refused"),
            evidence=replace(
                attempt.evidence, retries=tuple(attempt.retries) or attempt.evidence.retries, refusal=refusal
            ),
        )
        refused = await self._store_turn(attempt, answered, None)
        attempt.used = None
        attempt.announce()
        for event in answer_events(added if attempt.format is None else refused.output, live.next_block):
            live.publish(event)
        log.info("refused", turn_id=turn.id, category=end.category)
        self._finish(live, refused, ())

    async def _store_turn(self, attempt: Attempt, turn: Turn, kept: KeptTurn | None) -> Turn:
        moves_head = kept is not None and attempt.agent.moves_head_to(turn)
        budgets = self._budgets(attempt.agent.owner, attempt.agent.agent_id)
        try:
            return await self.store.commit(attempt.lease, turn, kept, move_head=moves_head, budgets=budgets)
        except StoreUnavailable as exc:
            raise StoreUnavailable(
                f"this turn was run, and its answer was not kept ({exc.message}); the conversation is as before: "
                "send it again",
                retry_after=exc.retry_after,
                detail=exc.detail,
            ) from exc

    def _finish(self, live: LiveTurn, turn: Turn, links: Sequence[Link]) -> None:
        live.finish(turn)
        loop, now = asyncio.get_running_loop(), live.now()
        # Observers are called two rounds of the loop later: the clients' tasks come first.
        for observer in self._observers:
            loop.call_soon(loop.call_soon, observer.turn_ended, turn, links, live.requested, now)


async def adopt(
    store: Store,
    lease: Lease,
    adoptable: Adoptable,
    observers: Sequence[Observer],
    became_turns: MirroredLines | None = None,
) -> Turn:
    """Add turns that were run outside the proxy to the chain, and move the head to the last of them. `became_turns`:
    the lines of an application's session that these turns are made of."""
    session, last = adoptable.session, adoptable.turns[-1].turn.id
    detail: JSON = {**adoptable.detail, "turns": [whole.turn.id for whole in adoptable.turns]}
    link = Link(session.id, session.id, last, "adopted", detail, time.time())
    adopted = await store.adopt(lease, adoptable.turns, session, [link], became_turns)
    for observer in observers:
        observer.adopted(adopted, link)
    return adopted


def not_run(exc: StoreUnavailable) -> StoreUnavailable:
    return StoreUnavailable(f"this turn was not run: {exc.message}", retry_after=exc.retry_after, detail=exc.detail)
