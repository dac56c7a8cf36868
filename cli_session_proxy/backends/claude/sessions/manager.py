"""Step 3 of a request: make a session equal to the path, and capture the turn's records afterwards.

A session is a cache of one path. To continue turn P there is a warm process with P's path, or a transcript that is
verified to be P's path, or one that is written again from the chain's records (under the same id; for a branch under a
new one). A transcript is never rewritten while a process of ours has it open.

The verified file must be the loaded one: a process that is started for a session gets no prompt before the file's whole
content was checked again, after the process has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from .... import logs
from ....domain import client_tools
from ....domain.client_tools import Offers
from ....domain.evidence import NOTHING, Evidence, Note, NoteCode, Repair
from ....domain.forms import replace
from ....domain.limits import is_session_id
from ....domain.models import JSON, Agent, Block, Link, Record, Session, Turn
from ....domain.options import ParameterName
from ....errors import ClaudeUnavailable, InvalidRequest, SandboxError, SessionBusy
from ....sandbox import Sandboxes
from ....settings import Profile, Settings
from ....stores.base import Facts, KeptTurn, Store
from ....tasks import in_thread_at
from ...base import Job
from .. import transcript
from ..process import capability as cli
from ..process import confine, environment, failures, frames, parameters
from ..process.child import Wrapper
from ..process.events import AssistantMessage, ProcessDied, Result, WrongTranscript
from ..process.login import Logins
from ..process.pool import Pool
from ..process.process import ClaudeProcess
from ..transcript import Scribe, files, mending
from . import composing, paths, rewinding, summaries
from .capture import CapturedRecords, Captures, LiveSession, TurnOutcome
from .decisions import Decided, Decisions, opening
from .repair import ForeignExchanges, PreparedSession, Repairs, TurnContext
from .rewinding import FailedTurn, RewindPoint, WarmPath, can_rewind
from .sharing import SharedUse, Sharing

log = logs.get(__name__)

# How often a process is started again because it loaded something else than the verified transcript, and the
# Retry-After in seconds if that did not help.
LOADS = 3
RETRY_AFTER = 1.0

# With less free bytes, a turn's records may not fit on the disk.
NO_ROOM = 1024 * 1024
UNCHANGED = Evidence(verified="unchanged since the last turn")

__all__ = ["FailedTurn", "ForeignExchanges", "LiveSession", "Sessions", "TurnOutcome"]


class Sessions:
    """Prepares sessions and captures their turns. One per engine."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        pool: Pool,
        sandboxes: Sandboxes,
        projects: transcript.Projects,
        doubts: cli.Doubts,
    ) -> None:
        self._doubts = doubts
        # Keys of confined agents of which a tool ran without the required approval.
        self.without_approval: set[int] = set()
        self._settings = settings
        self._store = store
        self._pool = pool
        self._sandboxes = sandboxes
        self._projects = projects
        self._config_dir = projects.config_dir
        self._env = environment.common(settings, self._config_dir)
        self._logins = Logins(self._config_dir, settings.var)
        self._repairs = Repairs(settings, store, projects)
        self.captures = Captures(store)
        self._warm_paths: dict[str, WarmPath] = {}  # by session: the memory of its warm process
        # By confined agent's key: how many characters of files beside its transcripts are stored with its turns.
        self._stored_beside: dict[int, int] = {}
        self.decisions = Decisions(settings, store)
        self.sharing = Sharing(settings, pool, sandboxes, projects)

    # --- before the turn

    async def facts(self) -> Facts:
        """The CLI's version, its directory and the agents' directories: the CLI tells the model all three."""
        cwd, tmpdir = await asyncio.to_thread(self._sandboxes.agentless, "ahead")
        capability = await cli.probe(cli.find(self._settings), self._env | {environment.TMPDIR: str(tmpdir)}, cwd)
        return {
            "CLI version": capability.version,
            "claude_config_dir": str(self._config_dir),
            "sandbox_root": str(self._sandboxes.prefix.parent),
        }

    async def ready(self, job: Job, *, without_parameters: bool) -> LiveSession:
        """A process that is ready to continue the parent. `without_parameters`: see `TurnContext`.

        Raises `ForeignExchanges` if the job says `adopt` and a person has continued the session, `SessionBusy` if the
        transcript changes each time a process loads it.
        """
        agent, parent, session = job.agent, job.parent, job.session
        shared = self.sharing.is_for(job)
        profile = job.profile
        has_programs = profile.tools or profile.mcp_config or profile.add_dirs or profile.setting_sources
        was_confined = not profile.confined and not shared and self._sandboxes.was_confined(agent.dir)
        if was_confined and not has_programs:
            # A CLI in the agent's directory may run programs from there (2.1.71: by the repository's settings).
            profile = profile.model_copy(update={"confined": True})
            job = replace(job, profile=profile)
        elif was_confined:
            await self._end_confined(agent)
        directories = self.sharing.place() if shared else self._sandboxes.prepared(agent.dir)
        sandbox_was_lost = False
        if directories is None:
            had_sandbox = parent is not None and parent.session_id is not None and not parent.evidence.shared
            sandbox_was_lost = had_sandbox and not self._sandboxes.has(agent.dir)
            cwd = self._sandboxes.path(agent.dir)
            await in_thread_at(cwd, self._sandboxes.prepare, agent.dir, self._projects.own)
            directories = cwd, self._sandboxes.tmpdir(agent.dir)
        cwd, tmpdir = directories
        env = environment.of_profile(self._env, profile) | {environment.TMPDIR: str(tmpdir)}
        probed_in = self._sandboxes.agentless("ahead") if profile.confined else directories  # not inside the sandbox
        probe_env = env | {environment.TMPDIR: str(probed_in[1])}
        capability = await cli.probe(cli.find(self._settings), probe_env, probed_in[0])
        if profile.approve and not capability.was_seen("can_use_tool"):
            raise capability.not_seen_asking()
        if profile.approve and agent.key in self.without_approval:
            raise ClaudeUnavailable("a tool of this agent ran without asking, which `approve` forbids: use another one")
        if job.offers and not capability.takes_tools:
            why = capability.cannot("mcp_set_servers", "offer the client's own")
            raise InvalidRequest(f"tools: {why}", param="tools")
        unsafe = None
        if job.prompt or not job.results:
            unsafe = frames.unsafe_prompt(capability, job.prompt)
        elif not capability.takes_tools:
            unsafe = capability.cannot("mcp_set_servers", "take results of tools")
        if unsafe is not None:
            raise InvalidRequest(unsafe, param="messages")
        wrapper = await self._confine(job, cwd, tmpdir, capability, env) if profile.confined else None
        if parent is not None and parent.parent_id is None and not agent.named:
            self.sharing.record_second_turn(job)
        # A CLI makes the images of a prompt smaller, but not those of a result, nor those of a transcript that it
        # loads. A confined agent's transcript is made of what was sent.
        changed: Counter[NoteCode] = Counter()
        results = zip(job.results, await job.fit(tuple(job.results.values()), changed), strict=True)
        prompt = await job.fit(job.prompt, changed) if profile.confined else job.prompt
        job = replace(job, prompt=prompt, results=dict(results))
        context = TurnContext(job, cwd, env, capability, without_parameters, wrapper, shared)
        imported = []
        if parent is not None and (session is None or session.mark is None):
            # Perhaps the first turn after an imported history, of which no session was ever written.
            imported = mending.mended_at_import(await self._store.records(parent.id))
        # The path's newest turn that the CLI answered.
        own = parent if parent is None or parent.backend in paths.OWN else await paths.own_above(self._store, parent)
        before = await self.decisions.head_at(own)
        opened = opening(before, job.system, job.offers, self._settings.system_prompt_changes, asks=bool(job.prompt))
        decided = await self.decisions.before(context, own, opened, partial(self._summary, context))
        prompt = job.prompt if opened.reminder is None else (opened.reminder, *job.prompt)
        if (opened.head.system, opened.offers) != (job.system, job.offers) or prompt is not job.prompt:
            context = replace(context, job=replace(job, system=opened.head.system, offers=opened.offers, prompt=prompt))
        fitted = [Note(code, number) for code, number in changed.items()]
        notes = (*imported, *fitted, *opened.notes, *decided.notes)
        reloads: list[str] = []  # why another transcript was loaded
        while len(reloads) < LOADS:
            last = len(reloads) == LOADS - 1
            try:
                ready = await self._checked_out(context, decided, last=last)
            except WrongTranscript as wrong:
                reloads.append(wrong.how)
                continue
            head, decisions = opened.head, decided.records
            if head != before and (before is not None or head.tools or head.known_system != head.system):
                decisions = (*decisions, head.as_record())  # else it follows from the turn
            lost = str(cwd) if sandbox_was_lost else None
            notes = (*ready.evidence.notes, *notes)
            evidence = ready.evidence.plus(Evidence(sandbox=lost, notes=notes, reloaded=tuple(reloads)))
            rewritten = bool(decided.records)
            return replace(ready, evidence=evidence, decisions=decisions, prompt=prompt, head=head, rewritten=rewritten)
        raise SessionBusy(
            f"the session's transcript was changed {len(reloads)} times while {capability.name} was loading it "
            f"({', '.join(reloads)}): stop what else writes to {self._config_dir}, and send this again",
            retry_after=RETRY_AFTER,
        )

    async def _end_confined(self, agent: Agent) -> None:
        """End the agent's confined CLIs: programs there could hold up the event loop, which looks into the folders of
        an agent that is not confined."""
        for session_id in self._pool.sessions_in(self._sandboxes.path(agent.dir)):
            process = self._pool.peek(session_id)
            if process is not None and process.launch.confined:
                await self._end(session_id)

    async def _confine(
        self, job: Job, cwd: Path, tmpdir: Path, capability: cli.Capability, env: Mapping[str, str]
    ) -> Wrapper:
        """Prepare a sandbox for this agent's CLI: it gets a copy of the user's login, unless `env` has one. Renewed
        logins of confined agents are copied back. Raises SandboxError."""
        self._sandboxes.note_confined(job.agent.dir)
        # In the sandbox the CLI's naming rule holds. A noted folder may be another agent's, and must not be mounted.
        self._projects.forget(cwd)
        project = self._projects.folder(cwd)  # before anything is awaited, in which a folder could be noted again
        private = self._private(job.agent.dir, job.profile)
        try:
            await self._logins.exchange(private, project, give=not environment.has_login(env))
        except OSError as exc:
            raise SandboxError(f"the login cannot be copied for a confined agent ({exc}): see {private}") from exc
        place = confine.ConfinedPlace(cwd, tmpdir, self._config_dir, project, private)
        settings = confine.as_read_by(capability, self._settings)
        return partial(confine.wrapper, settings, job.profile, capability.path, place, env)

    def _private(self, agent_dir: str, profile: Profile) -> Path:
        return self._sandboxes.private(agent_dir, shows_settings="user" in profile.setting_sources)

    async def _checked_out(self, context: TurnContext, decided: Decided, *, last: bool) -> LiveSession:
        """A process with the path. Ends it and raises WrongTranscript if it loaded something else."""
        job, parent = context.job, context.job.parent
        prewritten: list[Record] = []
        no_prompt = False
        called = parent is not None and any(block.get("type") == "tool_use" for block in parent.output)
        if parent is not None and called:
            waiting = None if decided.records else await self._waiting_process(context, parent)
            if waiting is not None:
                return waiting
            prepared, prewritten = await self._reopened(context, parent, decided.records)
            no_prompt = not job.prompt
            if no_prompt and not context.capability.takes_parameters:  # set for the whole process, not for one turn
                context = replace(context, env={**context.env, **environment.NO_COMPACTION})
        elif context.shared:
            return await self._shared_process(context)
        elif parent is None or job.session is None:
            back = None if decided.records else await self._rewound_process(context, parent)
            if back is not None:
                return back
            if parent is None:
                folder = self._projects.folder(context.cwd)
                await in_thread_at(folder, files.make_project, folder)
            prepared = self._start(context) if parent is None else await self._repairs.branch(context, parent)
        else:
            prepared = await self._verify(context, parent, job.session)
        if decided.records and parent is not None and not called:
            await self._end(prepared.session.id)
            path = await paths.shown(self._store, parent.id, decided.records)
            prepared = await self._repairs.rewrite(context, prepared, path, decided.why)
        launch = context.launch(prepared.session.id, resume=prepared.resume)
        try:
            process, warm = await self._pool.checkout(launch)
        except ProcessDied:
            await self._confirmed(prepared.session, lenient=last)
            raise
        # How the last process of the path's session ended. The prepared session may be another one.
        ended = None if warm else self._pool.take_end(launch.session_id if job.session is None else job.session.id)
        if process.session_id != launch.session_id:  # a spare with its own session id
            prepared = self._start(context, process.session_id)
        session = prepared.session
        try:
            if prepared.resume and not warm:
                session = await self._loaded(session, process, lenient=last)
            # The CLI's total cost in USD before this turn. A resumed process continues the total that the last one
            # wrote into the transcript at its end (2.1.329).
            cost_before = 0.0
            warm_path = self._warm_paths.get(session.id) if warm else None
            if warm_path is not None:
                cost_before = warm_path.total
            elif context.capability.keeps_session_id:
                written = Path(session.transcript)
                cost_before = await in_thread_at(written.parent, transcript.total_cost, written)
            unmet: tuple[ParameterName, ...] = ()
            if process.env_set or job.results or parameters.has_parameters(job.turn.options):
                unmet = await parameters.apply(process, job, skip=context.without_parameters, compacts=not no_prompt)
        except BaseException:  # nobody else would give the process back
            process.kill()
            await self._pool.checkin(process)
            await self._end(session.id)
            if any(link.to_session == session.id != link.from_session for link in prepared.links):
                await _removed(Path(session.transcript))
            raise
        evidence = prepared.evidence
        if ended is not None:
            unwritten = (Note("session_not_written"),) if ended.lost else ()
            evidence = evidence.plus(Evidence(exit_code=ended.exit_code, notes=unwritten))
        return LiveSession(
            process=process,
            session=session,
            continuity="warm" if warm else prepared.continuity,
            leaf=session.mark.leaf if session.mark else None,
            links=prepared.links,
            evidence=evidence,
            prewritten=tuple(prewritten),
            no_prompt=no_prompt,
            fresh=not warm and process.session_id == launch.session_id,
            cost_before=cost_before,
            unmet=unmet,
            rewound=frozenset() if warm_path is None else warm_path.rewound,
        )

    async def _loaded(self, session: Session, process: ClaudeProcess, *, lenient: bool) -> Session:
        """The session as the process loaded it. Raises ProcessDied; WrongTranscript if it loaded something else.

        If a process dies while it loads a changed transcript, that may be the cause: also WrongTranscript.
        """

        async def confirm() -> None:
            nonlocal session
            try:
                session = await self._confirmed(session, lenient=lenient)
            except WrongTranscript:
                process.kill()  # it may have got its prompt already
                raise

        try:
            await process.loaded(confirm)
        except WrongTranscript:
            raise
        except ProcessDied:
            await self._confirmed(session, lenient=lenient)
            raise
        return session

    async def _confirmed(self, session: Session, *, lenient: bool) -> Session:
        """The session, if its transcript still matches its mark and was not touched. Raises WrongTranscript.

        `lenient`: equal content is enough. If the file's times change at every load, the CLI or the file system does
        it.
        """
        if session.mark is None:  # a new session without a transcript
            return session
        try:
            path = Path(session.transcript)
            reread = partial(transcript.reread, path, session.mark, lenient=lenient)
            reader, mark = await in_thread_at(path.parent, reread)
        except transcript.TranscriptChanged as changed:
            raise WrongTranscript(changed.how) from changed
        self.captures.follow(session.id, reader)
        return replace(session, mark=mark)

    # calls of the client's tools

    async def _waiting_process(self, context: TurnContext, parent: Turn) -> LiveSession | None:
        """The process that made these calls and waits for their results; None if there is none."""
        job, session = context.job, context.job.session
        results = client_tools.for_waiting(job.results, job.prompt)
        warm_path = None if session is None else self._warm_paths.get(session.id)
        if session is None or warm_path is None or warm_path.turn_id != parent.id or results is None:
            return None
        process = await self._pool.take_waiting(context.launch(session.id, resume=True))
        if process is None:
            return None
        leaf = session.mark.leaf if session.mark else None
        try:
            unmet = await parameters.apply(process, job, skip=context.without_parameters)
        except BaseException:
            process.kill()
            await self._pool.checkin(process)
            raise
        return LiveSession(
            process, session, "warm", leaf, (), Evidence(waited=True), results,
            no_prompt=True, fresh=False, cost_before=warm_path.total, unmet=unmet,
        )  # fmt: skip

    async def _shared_process(self, context: TurnContext) -> LiveSession:
        """A shared process. The agent's own session gets an id, and has no file yet."""
        shared = await self.sharing.take(context.job, partial(context.launch, resume=False))
        use = SharedUse(shared, str(uuid.uuid4()))
        process = shared.process
        try:
            unmet = await parameters.apply(process, context.job, skip=context.without_parameters)
        except BaseException:
            process.kill()
            await self.sharing.end(use)
            raise
        session = context.session(process.session_id, shared.path, None)
        link = context.link(None, use.session_id, "started", {})
        return LiveSession(
            process, session, "started", None, (link,), Evidence(shared=True),
            fresh=not shared.uses, cost_before=shared.total, unmet=unmet, shared=use,
        )  # fmt: skip

    # rewinding

    async def _rewound_process(self, context: TurnContext, parent: Turn | None) -> LiveSession | None:
        """A process of the agent with more than the path, rewound to the parent; None if there is none. Its session
        continues as this branch, under its id."""
        job = context.job
        if job.turn.placed.side or not can_rewind(context.capability, job.profile):
            return None
        parent_id = None if parent is None else parent.id
        for session_id in self._pool.sessions_in(context.cwd):
            warm_path, session = self._warm_paths.get(session_id), await self._store.session(session_id)
            if warm_path is None or session is None or not self._has_only_notes_added(job, session, warm_path):
                continue  # its memory is unknown, or a person has continued there
            point: RewindPoint | None = None  # None: its memory is the path already
            if warm_path.turn_id != parent_id:
                if warm_path.turn_id is not None:
                    point = await rewinding.point(self._store, warm_path.turn_id, parent)
                if point is None:
                    continue
            process = await self._pool.take_warm(context.launch(session_id, resume=True))
            if process is None:
                continue
            try:
                if point is not None:
                    if not await process.rewind(point.to, point.newest):
                        await self._pool.checkin(process)
                        continue
                    mark, rewound = replace(warm_path.mark, leaf=point.leaf), warm_path.rewound | {point.to}
                    warm_path = replace(warm_path, turn_id=parent_id, mark=mark, rewound=rewound)
                    self._warm_paths[session_id] = warm_path
                unmet = await parameters.apply(process, job, skip=context.without_parameters)
            except BaseException:
                process.kill()
                await self._pool.checkin(process)
                await self._end(session_id)
                raise
            session = context.session(session_id, session.transcript, warm_path.mark, session)
            done = Repair("taken_back", from_turn=parent_id, turns=point.turns if point else None)
            link = context.link(session_id, session_id, "branched", done.as_json())
            return LiveSession(
                process, session, "branched", warm_path.mark.leaf, (link,), Evidence(written=done),
                fresh=False, cost_before=warm_path.total, unmet=unmet, rewound=warm_path.rewound,
            )  # fmt: skip
        return None

    async def _reopened(
        self, context: TurnContext, parent: Turn, decisions: Sequence[Record]
    ) -> tuple[PreparedSession, list[Record]]:
        """Write a session of the path with the results of its last calls."""
        job = context.job
        session_id = job.session.id if job.session else str(uuid.uuid4())
        await self._end(session_id)
        known = await paths.shown(self._store, parent.id, decisions)
        scribe = Scribe(session_id, context.cwd, context.capability.version, time.time())
        closing_uuid = None if job.prompt else job.frame_uuid
        closed = context.capability.takes_tools
        results = await asyncio.to_thread(
            composing.result_records, known, parent, job.results, scribe, closed=closed, uuid=closing_uuid
        )
        prepared = await self._repairs.write_with_results(context, session_id, [*known, *results], job.session)
        return prepared, results

    async def _summary(self, context: TurnContext, path: Sequence[Record]) -> Decided:
        """Ask the model for a summary, in temporary sessions."""
        job, parent = context.job, context.job.parent
        assert parent is not None

        async def ask(question: str) -> str:
            session_id = str(uuid.uuid4())
            asking = replace(job, system=summaries.SYSTEM, effort=None, profile=Profile(), offers=Offers())
            alone = replace(context, job=asking, env={**context.env, **environment.NO_COMPACTION})
            launch = alone.launch(session_id, resume=False)
            process, _ = await self._pool.checkout(launch)
            prompt: tuple[Block, ...] = ({"type": "text", "text": question},)
            answer: list[str] = []
            try:
                async with aclosing(process.turn(str(uuid.uuid4()), prompt)) as events:
                    async for event in events:
                        match event:
                            case AssistantMessage():
                                answer += [str(block["text"]) for block in event.blocks if block.get("type") == "text"]
                            case Result() if event.is_error:
                                raise failures.error_for(event, model=job.model)
                            case Result() if event.empty:
                                raise failures.no_words(event, context.capability)
                            case _:
                                pass
            finally:
                await self._pool.checkin(process)
                answered = {session_id, process.session_id}
                if await self._store.session(process.session_id) is not None:
                    answered = {session_id}  # an agent's program has named another one
                await self._end(*answered)
                for ended in answered:
                    await _removed(self._projects.path(context.cwd, ended))
            return "\n\n".join(answer)

        summary = await summaries.summarised(path, ask, open_calls=bool(client_tools.calls_of(parent.output)))
        if summary is None:
            return Decided()
        mark = mending.summary(summary.text, summary.kept_from, job.model, transcript.timestamp(time.time()))
        notes = [Note("summarised", summary.exchanges)]
        notes += [Note("not_summarised", summary.left_out)] if summary.left_out else []
        return Decided((mark,), tuple(notes))

    def _start(self, context: TurnContext, session_id: str | None = None) -> PreparedSession:
        session = context.session(session_id or str(uuid.uuid4()), self._projects.folder(context.cwd), None)
        return PreparedSession(session, False, "started", (context.link(None, session.id, "started", {}),))

    async def _verify(self, context: TurnContext, parent: Turn, session: Session) -> PreparedSession:
        """Check the transcript's whole content, unless a warm process does not need to load it."""
        if session.cli_version != context.capability.version:
            session = replace(session, cli_version=context.capability.version)
        warm, warm_path = self._pool.peek(session.id), self._warm_paths.get(session.id)
        if warm_path is None or warm_path.turn_id != parent.id:
            # The session continued without this process (another proxy, a failed turn): its memory is outdated.
            await self._pool.discard(session.id)
        elif warm is not None and self._has_only_notes_added(context.job, session, warm_path) and warm.usable:
            # Its memory is the path. The file's content does not matter now: it is checked when a process loads it.
            seen = NOTHING if warm.launch.confined else UNCHANGED
            return PreparedSession(replace(session, mark=warm_path.mark), True, "resumed", (), seen)
        path = self._projects.path(context.cwd, session.id)
        if parent.evidence.shared and not session.transcript:
            return await self._repairs.write_first(context, parent, session, path)
        session = replace(session, transcript=str(path))
        verdict = await self._repairs.check(path, session, parent)
        if verdict.found == "equal" and not paths.may_be_forged(self._sandboxes, context.job.agent, parent):
            seen = Evidence(verified=verdict.note)
            if self._pool.peek(session.id) is None:
                return await self._repairs.as_it_is(context, parent, session, verdict.mark, seen)
            session = context.session(session.id, session.transcript, verdict.mark, session)
            return PreparedSession(session, True, "resumed", (), seen)
        await self._end(session.id)
        return await self._repairs.mend(context, parent, session, path)

    def _has_only_notes_added(self, job: Job, session: Session, warm_path: WarmPath) -> bool:
        """See `Captures`. Nothing counts that is added to a confined agent's."""
        confined = self._sandboxes.was_confined(job.agent.dir)
        return confined or self.captures.has_only_notes_added(session, warm_path)

    async def foreign(self, agent: Agent, parent: Turn) -> ForeignExchanges | None:
        """Complete exchanges that a person added after `parent`, if nothing else changed. Read only."""
        session = await self._store.session_at(agent.key, parent.id)
        if session is None:
            return None
        path = self.transcript_of(agent, session.id)
        unchanged = partial(transcript.is_unchanged, path)
        if session.mark is not None and await in_thread_at(path.parent, unchanged, session.mark):
            return None
        return await self._repairs.foreign(agent, parent, session, path)

    # --- after the turn

    @contextlib.asynccontextmanager
    async def end_of_turn(self, process: ClaudeProcess) -> AsyncIterator[None]:
        """Run the body, then copy the login back if a confined CLI has renewed it. The agent's programs
        can hold up both. After `idle_timeout` its confined CLIs are killed."""
        if not process.launch.confined:
            yield
            return

        def kill() -> None:
            log.warning("transcript_held", cwd=str(process.cwd), seconds=self._settings.idle_timeout)
            for session_id in self._pool.sessions_in(process.cwd):
                if (one := self._pool.peek(session_id)) is not None and one.launch.confined:
                    one.kill()

        timer = asyncio.get_running_loop().call_later(self._settings.idle_timeout, kill)
        try:
            yield
            await self._logins.take_back(self._private(process.cwd.name, process.launch.profile))
        finally:
            timer.cancel()

    async def capture(self, ready: LiveSession, turn: Turn, outcome: TurnOutcome) -> tuple[KeptTurn, Evidence]:
        """Capture the turn's records from the transcript; if they cannot be read, make them from the frames."""
        before, session_id = ready.session, outcome.session_id
        forked = session_id != before.id
        path = before.transcript
        if forked:
            path = str(files.in_folder(Path(path).parent, session_id))
        # Not for a confined agent: its CLI only writes in its own folder, and its programs may forge a session id.
        if not ready.process.launch.confined and not os.access(path, os.F_OK):
            written = self._projects.written
            look = partial(written, ready.process.cwd, Path(path), turn.started_at or time.time())
            path = str(await in_thread_at(Path(path).parent, look))
        if outcome.stopped:
            await self._end(before.id, session_id)
        program, runs_others = ready.process.launch.capability, ready.process.runs_others
        try:
            taken = await self.captures.capture(ready, turn, path, outcome)
        except WrongTranscript:
            if not runs_others:
                self._doubts.failed(program, "round_trip", f"it went on from something else than {path}")
            raise
        if taken.source == "unlinked" and not taken.more and not runs_others:
            self._doubts.failed(program, "records", f"two turns in {path} do not hang on what was before them")
        elif taken.source in ("frames", "unlinked") and not runs_others and self._has_room():
            self._doubts.failed(program, "place", f"nothing of its answers in {path}")
        elif taken.source in ("transcript", "copy"):
            self._doubts.worked(program, "place", "records", "round_trip")
        invalid = 0  # blocks of thinking
        if not program.heals_thinking and any('"thinking"' in record.line for record in taken.records):
            marked, invalid = await asyncio.to_thread(composing.without_invalid_thinking, taken.records)
            if invalid:
                await self._end(before.id, session_id)
                taken = await self.captures.marked(ready, path, outcome, taken, marked)
        if outcome.partial and composing.partial_texts(outcome.output, outcome.partial):
            if outcome.calls:
                ready.process.kill()  # a gentle end would make it invent results
            await self._end(before.id, session_id)
            taken = await self.captures.completed(ready, turn, path, outcome, taken)
        records = [*ready.decisions, *ready.prewritten, *taken.records]
        notes = await self.decisions.seen(ready, taken.records)
        notes = (*notes, Note("cut_thinking_left_out", invalid)) if invalid else notes
        if taken.beside:
            notes = (*notes, Note("said_beside", taken.beside))
            if program.form.whole_records:  # 1.0.120 does not load it
                records.append(_dropped_prompts_notice(ready, taken))
        since = before.mark.mtime_ns if before.mark is not None and not forked else None
        if ready.process.launch.confined or files.has_beside(path):
            kept = self._stored_beside.get(before.agent_key, 0)
            stored = await in_thread_at(Path(path).parent, files.gather, Path(path), since, kept)
            if stored and ready.process.launch.confined:
                self._stored_beside[before.agent_key] = kept + sum(len(record.line) for record in stored)
            records += stored
        session = replace(before, id=session_id, tip_turn_id=turn.id, transcript=path, mark=taken.mark)
        links: tuple[Link, ...] = ()
        if forked and ready.continuity != "started":
            detail: JSON = {"asked": before.id, "answered": session_id, "cli": before.cli_version}
            links = (Link(before.id, session_id, turn.id, "forked_by_cli", detail, time.time()),)
        if taken.mark is not None and (ready.process.usable or ready.process.waiting):
            # The process's memory is now the path to this turn. Drop entries of dead processes.
            total = ready.cost_before if outcome.cost_total is None else outcome.cost_total
            self._warm_paths[session_id] = WarmPath(turn.id, taken.mark, total)
            if len(self._warm_paths) > 2 * self._settings.max_processes:
                for gone in [known for known in self._warm_paths if self._pool.peek(known) is None]:
                    del self._warm_paths[gone]
        if ready.head is not None:
            self.decisions.remember(turn.id, ready.head)
        if (use := ready.shared) is not None:
            use.clean = taken.mark is not None and taken.source == "transcript" and not forked
            use.shared.total = ready.cost_before if outcome.cost_total is None else outcome.cost_total
            self._warm_paths.pop(session_id, None)
            self.captures.forget(session_id)
            # Lines without a uuid may be others'; the turn's messages are in connected records.
            records = [*ready.decisions, *(record for record in taken.records if record.uuid is not None)]
            session, links = replace(session, id=use.session_id, transcript="", mark=None), ()
        return KeptTurn(tuple(records), session, links), Evidence(records=taken.source, notes=notes)

    def _has_room(self) -> bool:
        """Whether the disk has room for transcripts. If not, missing records are not the CLI's fault."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._config_dir)
            return disk.f_bavail * disk.f_frsize > NO_ROOM and os.access(self._config_dir, os.W_OK)
        return False

    async def spoil(self, ready: LiveSession, failed: FailedTurn, *, owned: bool) -> None:
        """A turn failed: the process's memory is not the path, and a new session's file is useless.

        Without `owned` the files stay: another proxy has the agent, and may use them.
        """
        answered = failed.answered
        if ready.shared is not None:
            await self.sharing.end(ready.shared)
            return
        if owned and failed.reusable:
            try:
                if await self._rewound(ready, failed):
                    return
            except BaseException:  # the process is still ours to end
                await self._end(ready.session.id)
                raise
        await self._end(ready.session.id, answered or ready.session.id)
        if not owned:
            return
        anew = any(link.to_session == ready.session.id != link.from_session for link in ready.links)
        if ready.continuity == "started" or anew:
            await _removed(Path(ready.session.transcript))
        elif ready.rewritten and (parent := ready.session.tip_turn_id) is not None:
            # This turn's decisions are not in the chain: the session is the path to the parent again.
            path = await paths.shown(self._store, parent)
            form = ready.process.launch.capability.form
            file = Path(ready.session.transcript)
            await in_thread_at(file.parent, partial(transcript.write, file, path, ready.session.id, form=form))
        if answered is not None and answered != ready.session.id:
            await _removed(files.in_folder(Path(ready.session.transcript).parent, answered))

    async def _rewound(self, ready: LiveSession, failed: FailedTurn) -> bool:
        """Whether the process could be rewound to before the failed turn, so that its memory is the path again."""
        process, session = ready.process, ready.session
        same = failed.answered in (None, session.id) and all(link.from_session == session.id for link in ready.links)
        rebuilt = ready.continuity == "rebuilt" or ready.rewritten
        if session.mark is None or not same or rebuilt or ready.prewritten or ready.decisions or ready.results:
            return False
        if not can_rewind(process.launch.capability, process.launch.profile):
            return False
        if not (process.usable or await process.stopped()) or not await process.rewind(failed.frame, failed.frame):
            return False
        total = ready.cost_before if failed.cost_total is None else failed.cost_total
        rewound = ready.rewound | {failed.frame}
        self._warm_paths[session.id] = WarmPath(session.tip_turn_id, session.mark, total, rewound)
        await self._pool.checkin(process)
        return True

    async def _end(self, *session_ids: str) -> None:
        """End the processes of these sessions, and forget what is known of them."""
        for session_id in dict.fromkeys(session_ids):
            self._warm_paths.pop(session_id, None)
            self.captures.forget(session_id)
            await self._pool.discard(session_id)

    async def retire(self, agent: Agent) -> None:
        """End the processes of this agent's sessions, before another proxy writes them."""
        cwd = self._sandboxes.path(agent.dir)
        await self._end(*self._pool.sessions_in(cwd))
        await self.sharing.forget(agent.key)

    async def forget(self, agent: Agent, named: Sequence[str]) -> None:
        """End the agent's processes, and remove its transcripts with files beside them and backups.

        `named`: ids of its turns and sessions. Invalid session ids that an earlier version imported have no files.
        """
        await self.sharing.forget(agent.key)
        self._stored_beside.pop(agent.key, None)
        cwd = self._sandboxes.path(agent.dir)
        folders = self._projects.folders(cwd)
        # All of them, before the first file: a program of one could hold up the removal for as long as it lives.
        await self._end(*self._pool.sessions_in(cwd), *filter(is_session_id, named))
        for session_id in filter(is_session_id, named):
            for folder in folders:
                await _removed(files.in_folder(folder, session_id))
            await asyncio.to_thread(self._repairs.forget_aside, session_id)
        # A confined agent may have written any files into its own folder. Another folder, in which a CLI was found to
        # write its transcripts, may have other agents' sessions.
        confined, own = self._sandboxes.was_confined(agent.dir), transcript.project_dir(self._projects.config_dir, cwd)
        if not confined:  # its own lists went with its process, and it may have named others' sessions
            await asyncio.to_thread(self._projects.remove_lists, cwd, {*filter(is_session_id, named)})
        for folder in folders:
            args = (self._projects.is_others_own, cwd) if folder == own else (self._projects.is_others, folder, cwd)
            if not await in_thread_at(folder, *args):
                whole = confined and folder == own
                await in_thread_at(folder, partial(files.remove_project, folder, whole=whole))
        self._projects.forget(cwd)
        await in_thread_at(cwd, self._projects.disown, cwd)

    def not_found(self, agent: Agent) -> None:
        """A CLI did not find a session of this agent: forget where an earlier CLI was found to write transcripts."""
        self._projects.forget(self._sandboxes.path(agent.dir))

    def scribe(self, agent: Agent, exchanges: int, parent: str | None) -> Scribe:
        """A writer of records for exchanges that the CLI has never seen.

        Their times are a millisecond apart and end now, so that they are before those of the next turn.
        """
        at = time.time() - 0.002 * exchanges
        return Scribe(str(uuid.uuid4()), self._sandboxes.path(agent.dir), "", at, parent)

    def transcript_of(self, agent: Agent, session_id: str) -> Path:
        """The path of this session's transcript."""
        return self._projects.path(self._sandboxes.path(agent.dir), session_id)


async def _removed(path: Path) -> None:
    await in_thread_at(path.parent, files.remove, path)


def _dropped_prompts_notice(ready: LiveSession, taken: CapturedRecords) -> Record:
    """A notice for a person who used the session during the turn: their prompts are on no path. Their CLI shows it."""
    leaf = transcript.parse_records(taken.records).leaf
    scribe = ready.scribe(ready.session.id)
    scribe.parent = leaf
    return scribe.notice(
        "cli-session-proxy: while the turn above ran, somebody said something else in this session. It is no part of "
        "this conversation, and the model is not shown it. It is kept in <var>/salvage; say it again to have it here."
    )
