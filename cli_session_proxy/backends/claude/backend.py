"""The Claude CLI as a backend: a process whose memory is the path, one frame in, events out."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

from ... import logs
from ...domain.client_tools import ToolPolicy, as_cli, calls_of
from ...domain.evidence import Evidence
from ...domain.limits import is_model
from ...domain.lineage import Past
from ...domain.models import (
    JSON,
    ONCE,
    Agent,
    BlockDelta,
    BlockStart,
    BlockStop,
    Continuity,
    Link,
    Record,
    Session,
    Turn,
    Usage,
)
from ...domain.options import ParameterName
from ...errors import ClaudeNotLoggedIn, ClaudeUnavailable, ContextTooLong, ProxyError
from ...sandbox import Sandboxes
from ...settings import Settings
from ...stores.base import Facts, KeptTurn, Store
from .. import base
from ..base import Adoptable, Answered, Backend, Counts, Event, Execution, Job, Lost, Remedy
from . import transcript
from .process import capability, environment, events, failures, logged_in, observed, permissions
from .process.child import end_stray
from .process.pool import STALE, Pool
from .sessions import adoption, composing, history, paths, seeing, settling
from .sessions.capture import LiveSession, TurnOutcome
from .sessions.manager import FailedTurn, ForeignExchanges, Sessions
from .sessions.verifying import Verifier, compare
from .sessions.watcher import Watcher
from .transcript import Projects, mending

log = logs.get(__name__)


class ClaudeBackend(Backend):
    """See `base.Backend`. The hooks note the processes, so that others can end them after a crash."""

    name = paths.NAME

    def __init__(
        self,
        settings: Settings,
        store: Store,
        sandboxes: Sandboxes,
        hooks: base.ProcessHooks = base.NO_HOOKS,
    ) -> None:
        self._settings = settings
        self._store = store
        self._sandboxes = sandboxes
        self.pool = Pool(settings, hooks, ahead=partial(sandboxes.agentless, "ahead"))
        projects = Projects(settings, sandboxes, environment.config_dir(settings))
        self._doubts = capability.Doubts()
        self.sessions = Sessions(settings, store, self.pool, sandboxes, projects, self._doubts)
        self._restarts = Restarts()
        # The ids of turns whose context was full: the CLI has to compact, so their next attempt sets no parameters.
        self._context_full: set[str] = set()
        self._verifier = Verifier(settings, store)
        self._watcher = Watcher(self.sessions, projects)

    # --- a turn

    async def prepare(self, job: Job) -> Execution | Adoptable:
        self._restarts.check(job.agent.key)
        try:
            ready = await self.sessions.ready(job, without_parameters=job.turn.id in self._context_full)
        except ForeignExchanges as foreign:
            assert job.parent is not None
            return adoption.adoptable(job.agent, job.parent, foreign)
        except events.ProcessDied as died:
            raise self._error_for(job.agent, died) from died
        return _ClaudeExecution(self, job, ready)

    def _error_for(self, agent: Agent, died: events.ProcessDied) -> Lost | ProxyError:
        """What the death of a process is raised as: `Lost` if another attempt may succeed. It is noted here."""
        self._restarts.died(agent.key, died)
        if died.no_conversation:
            self.sessions.not_found(agent)
        error = failures.error_for_death(died)
        return Lost(died.why, error) if died.retry else error

    async def adoptable(self, agent: Agent, parent: Turn) -> Adoptable | None:
        foreign = await self.sessions.foreign(agent, parent)
        return None if foreign is None else adoption.adoptable(agent, parent, foreign)

    def history_records(
        self, agent: Agent, parent: Turn | None, path: Sequence[Record], exchanges: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        leaf = next((record.uuid for record in reversed(path) if record.uuid), None)
        scribe = self.sessions.scribe(agent, len(exchanges), leaf)
        open_calls: dict[str, str] = {}
        if parent is not None and calls_of(parent.output):
            unanswered = composing.open_calls(transcript.parse_records(path).path)
            open_calls = composing.ids_in_records(parent, unanswered)
        mender = history.Mender(open_calls)
        for exchange in exchanges:
            yield tuple(history.records(scribe, mender, exchange.input, as_cli(exchange.output), model, exchange.notes))

    async def facts(self) -> Facts:
        return await self.sessions.facts()

    def project_of(self, agent: Agent) -> str:
        any_session = str(uuid.UUID(int=0))  # the folder is the same for all of the agent's sessions
        return self.sessions.transcript_of(agent, any_session).parent.name

    async def lines_of(self, session: Session, waiting: Sequence[Record]) -> Sequence[str]:
        return await adoption.lines_of(self._store, session, waiting)

    def is_sound(self, record: Record) -> bool:
        return mending.is_sound(record)

    def has_end_of_answer(self, records: Sequence[Record]) -> bool:
        return any(transcript.has_ended([entry]) for entry in transcript.parse_records(records).entries)

    async def turns_from_sdk(
        self, agent: Agent, parent: Turn | None, session: Session, lines: Sequence[Record]
    ) -> Adoptable | None:
        last = await base.last_records(self._store, parent)
        return await asyncio.to_thread(adoption.turns_from_sdk, agent, parent, last, session, lines)

    def changes(self) -> AsyncGenerator[str, None]:
        return self._watcher.changes()

    # --- after another proxy has ended

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        if not self._sandboxes.was_confined(agent.dir):
            with suppress(ContextTooLong):  # its path cannot be read, so nothing can be recovered
                return await settling.recover_turn(self._store, self.sessions.transcript_of, agent, turn)
        return None

    async def compare(self, agent: Agent, turn: Turn) -> base.Comparison:
        return await compare(self._verifier, self._store, agent, turn)

    async def request_of(self, turn: Turn) -> base.RequestSeen | None:
        with suppress(ContextTooLong):  # its path cannot be read, so nothing can be shown
            return await seeing.seen(self._store, turn)
        return None

    async def end_strays(self, strays: Sequence[tuple[int, str]]) -> bool:
        ended = await asyncio.gather(*(asyncio.to_thread(end_stray, pid, started) for pid, started in strays))
        for (pid, _), has_ended in zip(strays, ended, strict=True):
            if not has_ended:
                log.warning("orphan_left", pid=pid)
        await self.sessions.sharing.sweep()  # a shared process that ended has left its files
        return all(ended)

    # --- ending

    async def retire(self, agent: Agent) -> None:
        await self.sessions.retire(agent)

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        await self.sessions.forget(agent, session_ids)

    async def close(self) -> None:
        await self.pool.close()
        self.sessions.sharing.close()

    def kill(self) -> None:
        self.pool.kill()

    def counts(self) -> Counts:
        return self.pool.counts()

    def processes(self) -> Sequence[base.Process]:
        return self.pool.table.each()

    def program(self) -> base.Program | None:
        try:
            found = capability.known(capability.find(self._settings))
        except ClaudeUnavailable:
            return None
        if found is None:
            return None
        cli, runs = found
        return observed.program(cli.version, str(cli.path), runs.version, cli.observed, cli.version_tuple)


class _ClaudeExecution:
    """One turn on one process. `base.Execution`."""

    backend = ClaudeBackend.name
    keeps_path = False  # the CLI has it

    def __init__(self, backend: ClaudeBackend, job: Job, ready: LiveSession) -> None:
        self._backend = backend
        self._job = job
        self._ready = ready
        self.who = ready.process.launch.capability.name
        # Later the session id that the CLI answered with.
        self.session_id = ready.session.id if ready.shared is None else ready.shared.session_id
        self.continuity: Continuity = ready.continuity
        self.links: Sequence[Link] = ready.links
        self.evidence: Evidence = ready.evidence
        self.unmet: Sequence[ParameterName] = ready.unmet
        self._answered: str | None = None  # the session that the CLI answered in
        self._total: float | None = None  # the session's cost, as the CLI reports it
        self._interrupted = False
        self._truncated: events.Truncated | None = None
        self._approved_tools = permissions.listed(job.profile)  # each call of these needs approval
        self._needs_approval: set[str] = set()  # ids of calls
        self._approval_requested: set[str | None] = set()  # ids of calls
        self._without_parameters = job.turn.id in backend._context_full
        self._reusable = not self._without_parameters  # the process, if this turn fails

    async def say(self) -> AsyncGenerator[Event, None]:
        job, process = self._job, self._ready.process
        policy = ToolPolicy(job.offers, job.turn.options.tool_choice, job.check) if job.offers else None
        cli_events = process.turn(job.frame_uuid, self._ready.prompt, policy, self._ready.results)
        retries: list[JSON] = []
        try:
            async with aclosing(cli_events):
                async for event in cli_events:
                    if self._truncated is not None and not isinstance(event, base.Called | events.Result):
                        yield base.Activity(type(event).__name__)  # the CLI goes on until it is interrupted
                        continue
                    match event:
                        case base.ToolActivity():
                            self._check_approval(event.entry)
                            yield event
                        case events.PermissionRequest():
                            self._approval_requested.add(event.call)
                            yield base.PermissionAsked(
                                event.request_id, event.tool, event.input, event.call, event.agent,
                                partial(process.permit, event),
                            )  # fmt: skip
                        case BlockStart() | BlockDelta() | BlockStop() | base.Abandoned() | base.PermissionWithdrawn():
                            if isinstance(event, BlockStart):  # the provider has accepted the prompt
                                yield base.Used(process.used)
                            yield event
                        case events.AssistantMessage():
                            yield base.Used(process.used)
                            yield base.AnswerBlocks(event.blocks, event.model if is_model(event.model) else None)
                        case events.SessionFrame():
                            await self._answered_in(event.session_id)
                            yield base.SessionSeen(self.session_id)
                        case base.Retried():
                            retries.append(event.detail)
                            yield event
                        case base.PlanTold():
                            yield event
                        case base.Compacted():
                            self._reusable = False  # the process cannot be rewound past a summary
                            # A CLI that compacts before a turn does not summarise the turn's prompt.
                            if not self._ready.process.launch.capability.does("keeps_prompt"):
                                error = ContextTooLong(
                                    "the context is full, and this CLI cannot compact it without losing the prompt: "
                                    "start a new chain or send less"
                                )
                                remedy = await self._remedy(error)
                                raise error if remedy is None else Lost(error.message, error, remedy)
                            yield event
                        case events.Truncated():
                            self._truncated = event
                            await self.interrupt()
                        case base.Called() if self._truncated is not None:  # these calls were cut off
                            yield base.Completed("max_tokens", self._truncated.usage)
                            return
                        case base.Called():
                            yield event
                            return
                        case events.Declined():
                            yield base.Refused(event.category, event.explanation, event.usage)
                            return
                        case events.Result():
                            cost = self._cost_of_turn(event)
                            yield base.Used(event.usage, cost)
                            yield await self._completed(event, cost, retries)
                            return
                        case base.Activity():
                            yield event
                        case _:
                            yield base.Activity(type(event).__name__)
        except events.ProcessDied as died:
            died.cli = process.launch.capability.name
            if not self._interrupted or died.no_conversation or isinstance(died, events.WrongTranscript):
                raise self._backend._error_for(job.agent, died) from died
            # The answer was complete; only the CLI did not end the turn when it was told to.
            reason = None if self._truncated is None else "max_tokens"
            yield base.Completed(reason, died.used or Usage())
            return
        ended = self._ready.process.died_of("it ended the turn without a result")
        raise self._backend._error_for(job.agent, ended)

    def _cost_of_turn(self, result: events.Result) -> float | None:
        """The turn's share of the session's total, which begins again at 0 if the CLI did not restore it."""
        self._total = result.cost_total_usd if result.cost_total_usd is not None else self._total
        before, total = self._ready.cost_before, result.cost_total_usd
        return total - before if total is not None and total >= before else total

    async def _completed(self, result: events.Result, cost: float | None, retries: Sequence[JSON]) -> base.Completed:
        """The end of the answer. Raises `ProxyError`, or `Lost` if another attempt may succeed."""
        process = self._ready.process
        cli = process.launch.capability
        if result.is_error and not self._interrupted:
            failed = failures.error_for(result, retries=retries, model=self._job.model, cli=cli.name)
            billed_by_use = logged_in.billed_by_use(dict(process.launch.env))
            if isinstance(failed, ClaudeNotLoggedIn) and not cli.does("login") and not billed_by_use:
                # This CLI cannot use an existing login: it is the problem.
                problem = cli.cannot("login", "use a subscription's login")
                failed = ClaudeNotLoggedIn(problem, detail=failed.detail)
            forbidden = process.forbidden_to_compact and not self._ready.no_prompt
            if isinstance(failed, ContextTooLong) and forbidden:
                # Compaction was off in this turn: another attempt may allow it.
                self._backend._context_full.add(self._job.turn.id)
                raise Lost("the context is full, and the CLI may compact it", failed)
            remedy = await self._remedy(failed)
            self._reusable = remedy is None and not isinstance(failed, ClaudeNotLoggedIn)
            raise failed if remedy is None else Lost(failed.message, failed, remedy)
        if result.empty and not self._interrupted:
            self._reusable = False
            if not process.runs_others:
                tokens = result.usage.output_tokens
                self._backend._doubts.failed(cli, "frames", f"{tokens} tokens, and no words, again")
            raise failures.no_words(result, cli)
        self._backend._doubts.worked(cli, "frames")
        if result.session_id:
            await self._answered_in(result.session_id)
        if self._truncated is not None:
            return base.Completed("max_tokens", self._truncated.usage, cost)
        return base.Completed(result.stop_reason, result.usage, cost, result.stop_sequence, result.cache_miss)

    async def _answered_in(self, session_id: str) -> None:
        """The CLI answers in this session. Raises `ProcessDied` if it is another agent's: then an agent's program named
        it in its CLI's place, and the process of that session must not be ended if this turn fails."""
        if session_id not in (self._ready.session.id, self._answered):
            known = await self._backend._store.session(session_id)
            if known is not None and known.agent_key != self._job.agent.key:
                self._reusable = False
                raise self._ready.process.died_of("it named another agent's session as its own", retry=False)
        self._answered = session_id
        if self._ready.shared is None:
            self.session_id = session_id

    def _check_approval(self, entry: JSON) -> None:
        """Raises ClaudeUnavailable if a tool ran without the required approval. From the next turn on this CLI is not
        used for such tools; if a confined agent's programs may have forged this, only for this agent."""
        if entry.get("name") in self._approved_tools:
            self._needs_approval.add(str(entry.get("id")))
        call = entry.get("tool_use_id")
        if call not in self._needs_approval or call in self._approval_requested or entry.get("is_error"):
            return
        cli = self._ready.process.launch.capability
        if self._job.profile.confined:
            self._backend.sessions.without_approval.add(self._job.agent.key)
        else:
            capability.failed(cli, "can_use_tool", "it ran a tool without asking")
        raise ClaudeUnavailable(f"{cli.name} ran a tool without asking, which `approve` forbids: use another version")

    async def _remedy(self, error: ProxyError) -> Remedy | None:
        """A change that may help after the provider refused the request, and was not tried yet."""
        if isinstance(error, ClaudeNotLoggedIn):
            return None if self._ready.fresh else "login"
        return await self._backend.sessions.decisions.remedy(self._job.parent, error, tried=self._job.remedies)

    async def interrupt(self) -> None:
        self._interrupted = True
        await self._ready.process.interrupt()

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        job = self._job
        outcome = TurnOutcome(
            output=answered.output,
            calls=answered.calls,
            stopped=answered.stopped or self._truncated is not None,
            partial=answered.partial,
            frame_uuid=job.frame_uuid,
            session_id=self._answered or self._ready.session.id,
            cost_total=self._total,
            told=self._ready.process.told,
        )
        self._ready.process.told = []
        try:
            async with self._backend.sessions.end_of_turn(self._ready.process):
                kept = await self._backend.sessions.capture(self._ready, job.turn, outcome)
        except events.ProcessDied as died:
            died.cli = self._ready.process.launch.capability.name
            raise self._backend._error_for(job.agent, died) from died
        self._backend._restarts.lived(job.agent.key)
        return kept

    async def release(self) -> None:
        self._backend._context_full.discard(self._job.turn.id)
        job, use = self._job, self._ready.shared
        if use is not None:
            once = job.agent.agent_id.startswith(f"{ONCE}_") or (job.turn.call or {}).get("store") is False
            await self._backend.sessions.sharing.give_back(use, job.frame_uuid, at_once=once)
        else:
            await self._backend.pool.checkin(self._ready.process, stays=STALE if job.turn.placed.side else None)

    async def discard(self, *, owned: bool) -> None:
        if self._without_parameters:
            self._backend._context_full.discard(self._job.turn.id)
        self._ready.process.told = []
        failed = FailedTurn(self._job.frame_uuid, self._answered, self._total, self._reusable)
        async with self._backend.sessions.end_of_turn(self._ready.process):
            await self._backend.sessions.spoil(self._ready, failed, owned=owned)


# --- Backoff for an agent whose CLI keeps dying: after a few deaths in a row its next start is refused for a while

# Counted per agent, not per session: if a session's first turn dies, the next one has another id.

# So many deaths in a row are allowed: a turn is repeated once, so this is more than one bad turn.
LIMIT = 3
# Seconds for which the next start is refused then, doubled at each further death.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
# How many agents are remembered. Beyond it the one that died longest ago is dropped.
KNOWN = 1024


@dataclass(slots=True)
class _Deaths:
    count: int
    until: float
    last: str


class Restarts:
    """Counts deaths in a row of each agent's processes. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[int, _Deaths] = OrderedDict()

    def check(self, agent_key: int) -> None:
        """Raises `ClaudeUnavailable` while this agent's CLI must not be started."""
        deaths = self._deaths.get(agent_key)
        if deaths is None or (left := deaths.until - self._clock()) <= 0:
            return
        raise ClaudeUnavailable(
            f"the Claude CLI of this agent has died {deaths.count} times in a row; it is not started again for "
            f"{math.ceil(left)} s. The last time: {deaths.last}. See `doctor` and the proxy's log",
            retry_after=left,
            detail={"deaths": deaths.count},
        )

    def died(self, agent_key: int, how: events.ProcessDied) -> None:
        """A process ended without a result."""
        deaths = self._deaths.setdefault(agent_key, _Deaths(0, 0.0, ""))
        deaths.count += 1
        deaths.last = failures.error_for_death(how).message
        if deaths.count >= LIMIT:
            doubled = min(deaths.count - LIMIT, 32)  # floats are bounded
            deaths.until = self._clock() + min(LONGEST_WAIT, FIRST_WAIT * 2.0**doubled)
        self._deaths.move_to_end(agent_key)
        if len(self._deaths) > KNOWN:
            self._deaths.popitem(last=False)

    def lived(self, agent_key: int) -> None:
        """A turn of this agent was answered."""
        self._deaths.pop(agent_key, None)
