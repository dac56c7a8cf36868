"""Repairs a session that is not equal to the path.

The transcript is compared with the chain's records, and never rewritten while a process of ours has it open. Records
that the chain does not have are adopted, waited for, or backed up: never lost.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ....domain.evidence import NOTHING, Evidence, Note, Repair
from ....domain.models import JSON, Agent, Continuity, FileMark, Link, LinkReason, Record, Session, Turn
from ....errors import SandboxError, SessionBusy
from ....sandbox import remove_any, restore_access
from ....settings import Settings
from ....stores.base import Store
from ....tasks import in_thread_at
from ...base import Job
from .. import transcript
from ..process import running
from ..process.capability import Capability
from ..process.child import Launch, Wrapper
from ..transcript import Entry, FileVerdict, Loading, files, mending
from ..transcript.entries import contents, names_twice
from . import paths, tails
from .exchanges import exchanges, is_prompt

# How often and how long, in seconds, to wait for a person's unfinished exchange.
BUSY_WAIT = 10.0
BUSY_POLL = 0.1


# The folder in `var` for backups of transcripts that were different, made before they were rewritten.
ASIDE = "salvage"


class ForeignExchanges(Exception):
    """Complete exchanges that a person added to the session after its tip."""

    def __init__(self, session: Session, entries: tuple[Entry, ...], note: str) -> None:
        super().__init__(note)
        self.session = session
        self.entries = entries
        self.note = note


@dataclass(frozen=True, slots=True)
class PreparedSession:
    """A session that a CLI can start with: its transcript is the path or, with `resume` False, it is new.

    `continuity`, `links` and `evidence` are what the turn reports of the preparation.
    """

    session: Session
    resume: bool
    continuity: Continuity
    links: tuple[Link, ...] = ()
    evidence: Evidence = NOTHING


@dataclass(frozen=True, slots=True)
class TurnContext:
    """The turn's `job` and the surroundings of its CLI, for all steps of preparing a session.

    `without_parameters`: the turn's parameters are not set, so that the CLI can compact. `wrapper`: confines the CLI.
    `shared`: the turn runs in a shared process.
    """

    job: Job
    cwd: Path
    env: Mapping[str, str]
    capability: Capability
    without_parameters: bool
    wrapper: Wrapper | None = None
    shared: bool = False

    def launch(self, session_id: str, *, resume: bool) -> Launch:
        return Launch(
            capability=self.capability,
            cwd=self.cwd,
            session_id=session_id,
            resume=resume,
            model=self.job.model,
            system_prompt=self.job.system,
            effort=self.job.effort,
            profile=self.job.profile,
            env=tuple(sorted(self.env.items())),
            offers=self.job.offers,
            wrapper=self.wrapper,
        )

    def session(
        self, session_id: str, place: Path | str, mark: FileMark | None, earlier: Session | None = None
    ) -> Session:
        """The session at the path's end. `place`: the folder of its transcript as a Path, or any file there as a str;
        `mark`: of the transcript, None if it was not compared; `earlier`: the session's state before this turn."""
        folder = place if isinstance(place, Path) else Path(place).parent
        return Session(
            id=session_id,
            agent_key=self.job.agent.key,
            tip_turn_id=self.job.parent.id if self.job.parent else None,
            transcript=str(files.in_folder(folder, session_id)),
            cli_version=self.capability.version,
            created_at=earlier.created_at if earlier else time.time(),
            mark=mark,
        )

    def link(self, source: str | None, target: str, reason: LinkReason, detail: JSON) -> Link:
        return Link(source, target, self.job.turn.id, reason, detail, time.time())


class Repairs:
    """Compares and repairs transcripts. One per engine."""

    def __init__(self, settings: Settings, store: Store, projects: transcript.Projects) -> None:
        self._settings = settings
        self._store = store
        self._projects = projects
        self._config_dir = projects.config_dir

    async def check(self, path: Path, session: Session, parent: Turn) -> FileVerdict:
        """Compare the file with the path that ends at `parent`: by the mark's hash, then by the records."""
        verdict = await in_thread_at(path.parent, transcript.check, path, session.mark, None)
        if verdict is None:
            known = await paths.shown(self._store, parent.id)
            verdict = await in_thread_at(path.parent, transcript.check, path, None, known)
        assert verdict is not None
        return verdict

    async def as_it_is(
        self, context: TurnContext, parent: Turn, session: Session, mark: FileMark | None, evidence: Evidence
    ) -> PreparedSession:
        """Use a session whose transcript is the path and which no process has. It is rewritten if this CLI would lose
        or rename some of its records."""
        path = Path(session.transcript)
        if not await in_thread_at(path.parent, _is_loaded_whole, path, context.capability.form):
            mark, _, _ = await self._write(context, parent, path)
            rewritten = f"written in the form that CLI {context.capability.version} loads, without what was taken back"
            evidence = replace(evidence, verified="; ".join(filter(None, (evidence.verified, rewritten))))
        session = context.session(session.id, session.transcript, mark, session)
        return PreparedSession(session, True, "resumed", (), evidence)

    async def branch(self, context: TurnContext, parent: Turn) -> PreparedSession:
        """No session ends at the parent: write its path as a new session."""
        session_id = str(uuid.uuid4())
        path = self._projects.path(context.cwd, session_id)
        mark, count, notes = await self._write(context, parent, path)
        session = context.session(session_id, path.parent, mark)
        if parent.session_id is None:
            done = Repair("client_history", records=count)
            link = context.link(None, session_id, "rebuilt", done.as_json())
            return PreparedSession(session, True, "rebuilt", (link,), Evidence(written=done, notes=notes))
        done = Repair("left_path", records=count, from_turn=parent.id)
        link = context.link(parent.session_id, session_id, "branched", done.as_json())
        return PreparedSession(session, True, "branched", (link,), Evidence(written=done, notes=notes))

    async def write_first(self, context: TurnContext, parent: Turn, session: Session, path: Path) -> PreparedSession:
        """Write the first session of a conversation whose first turn ran in a shared process."""
        mark, count, notes = await self._write(context, parent, path)
        session = context.session(session.id, path.parent, mark, session)
        evidence = Evidence(written=Repair("first_written", records=count), notes=notes)
        return PreparedSession(session, True, "resumed", (), evidence)

    async def rewrite(
        self,
        context: TurnContext,
        prepared: PreparedSession,
        records: Sequence[Record],
        why: Literal["left_out", "window"],
    ) -> PreparedSession:
        """Write the prepared session again from these records. `why`: `left_out`, they lack parts that the model's API
        would refuse; `window`, they lack turns outside the window, which is no repair and gets no link."""
        mark, _ = await self._write_records(context, records, Path(prepared.session.transcript))
        session = replace(prepared.session, mark=mark)
        if prepared.continuity in ("rebuilt", "branched"):  # it was just written, and has a link that says so
            return replace(prepared, session=session)
        done = Repair(why, records=len(records))
        if why == "window":
            return replace(prepared, session=session, evidence=prepared.evidence.plus(Evidence(written=done)))
        link = context.link(session.id, session.id, "rebuilt", done.as_json())
        links = (*prepared.links, link)
        return PreparedSession(session, True, "rebuilt", links, prepared.evidence.plus(Evidence(written=done)))

    async def write_with_results(
        self, context: TurnContext, session_id: str, records: Sequence[Record], earlier: Session | None
    ) -> PreparedSession:
        """Write a session of these records: the path and the results of its last calls. `earlier`: the session's state
        before this turn, None for a new session."""
        path = self._projects.path(context.cwd, session_id)
        done = Repair("open_calls", records=len(records))
        if earlier is not None and context.job.parent is not None:
            verdict = await self.check(path, earlier, context.job.parent)
            if await tails.lacks_other_models(self._store, context.job.agent, context.job.parent, earlier, verdict):
                # Nothing is lost or repaired: the CLI has not seen the other models' turns yet.
                mark, notes = await self._write_records(context, records, path)
                session = context.session(session_id, path.parent, mark, earlier)
                written = Evidence(written=Repair("other_model", records=len(records)), notes=notes)
                return PreparedSession(session, True, "resumed", (), written)
            origin = await tails.origin(self._store, context.job.agent, verdict)
            if origin in ("theirs", "theirs_behind_ours"):  # a person has continued this file: back it up
                done = replace(done, kept=await in_thread_at(path.parent, self._move_aside, path))
        moved = earlier is not None and await self._may_lie_elsewhere(earlier)
        if moved:  # under a new id the CLI finds no other file
            path = self._projects.path(context.cwd, str(uuid.uuid4()))
        mark, notes = await self._write_records(context, records, path)
        session_id = path.stem
        session = context.session(session_id, path.parent, mark, None if moved else earlier)
        source = earlier.id if earlier else context.job.parent.session_id if context.job.parent else None
        continuity: Literal["rebuilt", "branched"] = "rebuilt" if earlier else "branched"
        link = context.link(source, session_id, continuity, done.as_json())
        return PreparedSession(session, True, continuity, (link,), Evidence(written=done, notes=notes))

    async def mend(self, context: TurnContext, parent: Turn, session: Session, path: Path) -> PreparedSession:
        """Repair a transcript that is not the path and that no process of ours has.

        Raises `ForeignExchanges` if a person's exchanges have to be adopted first, `SessionBusy` while a person's
        exchange is unfinished.
        """
        verdict = await self.check(path, session, parent)
        if paths.may_be_forged(self._projects.sandboxes, context.job.agent, parent):
            # Its programs may have written there what a CLI loads, and we do not read. It is written anew in any case.
            others = context.capability.tags and await tails.has_others(self._store, context.job.agent, verdict)
            if others or verdict.found in ("missing", "unreadable"):
                return await self._rebuild(context, parent, session, path, verdict)
            mark, count, notes = await self._write(context, parent, path)
            session = context.session(session.id, session.transcript, mark, session)
            anew = f"written anew from the chain's {count} records: programs of the agent can write to it"
            return PreparedSession(session, True, "resumed", (), Evidence(verified=anew, notes=notes))
        if verdict.found == "equal":  # the last process had not finished writing it
            return await self.as_it_is(context, parent, session, verdict.mark, Evidence(verified=verdict.note))
        if verdict.found == "missing":
            moved = await self._move_back(context, parent, session, path)
            if moved is not None:
                return moved
            verdict = await self.check(path, session, parent)
        # A damaged path may have a tail, too.
        if verdict.found == "tail" or verdict.tail:
            verdict = await self._wait_for_person(context, parent, session, path, verdict)
            entries = await tails.adoptable(self._store, context.job.agent, parent, verdict)
            if entries and not context.job.adopt:  # not at the head: the turn continues the path without them
                return await self.branch(context, parent)
            if entries:
                raise ForeignExchanges(session, entries, verdict.note)
        return await self._rebuild(context, parent, session, path, verdict)

    async def foreign(self, agent: Agent, parent: Turn, session: Session, path: Path) -> ForeignExchanges | None:
        """Complete exchanges that a person added after `parent`, if nothing else changed. Read only."""
        if paths.may_be_forged(self._projects.sandboxes, agent, parent):  # its programs can write the same
            return None
        verdict = await self.check(path, session, parent)
        if verdict.found != "tail" or verdict.broken or not transcript.is_complete(verdict.tail):
            return None
        entries = await tails.adoptable(self._store, agent, parent, verdict)
        return ForeignExchanges(session, entries, verdict.note) if entries else None

    # --- a person's exchanges

    async def _wait_for_person(
        self, context: TurnContext, parent: Turn, session: Session, path: Path, verdict: FileVerdict
    ) -> FileVerdict:
        """Wait for a person's exchange that has no answer yet, at most `BUSY_WAIT`; not if its CLI has ended.

        Returns the newest verdict. Raises `SessionBusy`.
        """
        give_up = time.monotonic() + BUSY_WAIT
        while True:
            *_, last = exchanges(verdict.tail) if verdict.tail else (None,)
            if last is None or (last.complete and not verdict.broken):
                return verdict
            agent = context.job.agent
            is_persons = any(map(is_prompt, last.entries)) and not await tails.has_own_frame(
                self._store, agent, last.entries
            )
            if not is_persons or not await self._is_in_use(session, path):
                return verdict
            if time.monotonic() >= give_up or not context.job.adopt:
                raise SessionBusy(
                    f"another program is in the middle of a turn of session {session.id}; send this again after it",
                    retry_after=BUSY_WAIT,
                )
            await asyncio.sleep(BUSY_POLL)
            verdict = await self.check(path, session, parent)

    async def _is_in_use(self, session: Session, path: Path) -> bool:
        """Whether a live CLI has the session. Without a register of CLIs, whether the file was written to just now."""
        if await running.holder(self._config_dir, session.id) is not None:
            return True
        if running.has_register(self._config_dir):
            return False
        try:
            written = (await in_thread_at(path.parent, os.lstat, path)).st_mtime
        except OSError:  # deleted: counts as old
            return False
        return time.time() - written < self._settings.idle_timeout

    # --- repairs

    async def _move_back(
        self, context: TurnContext, parent: Turn, session: Session, path: Path
    ) -> PreparedSession | None:
        """If the file is in another folder (moved sandbox, doubled prefix), move it and the files beside it to where
        the CLI looks. Then write it anew from the chain."""
        places = await in_thread_at(path.parent, self._projects.elsewhere, path)
        for place in places:
            verdict = await self.check(place, session, parent)
            if verdict.found != "equal":
                continue
            await in_thread_at(path.parent, files.move, place, path)
            # The comparison does not see everything. The agent may have been confined under another `var`: then its
            # programs may have changed the rest.
            mark, _, notes = await self._write(context, parent, path)
            done = Repair("moved", looked_for=str(path), found_at=str(place))
            link = context.link(session.id, session.id, "moved", done.as_json())
            session = context.session(session.id, session.transcript, mark, session)
            return PreparedSession(session, True, "resumed", (link,), Evidence(repaired=done, notes=notes))
        return None

    async def _rebuild(
        self, context: TurnContext, parent: Turn, session: Session, path: Path, verdict: FileVerdict
    ) -> PreparedSession:
        """Write the path again under the same id. A file with records that the chain does not have is backed up."""
        if await tails.lacks_other_models(self._store, context.job.agent, parent, session, verdict):
            mark, count, notes = await self._write(context, parent, path)
            resumed = context.session(session.id, session.transcript, mark, session)
            evidence = Evidence(written=Repair("other_model", records=count), notes=notes)
            return PreparedSession(resumed, True, "resumed", (), evidence)
        origin = await tails.origin(self._store, context.job.agent, verdict)
        done = Repair("rewritten", found=verdict.found, note=verdict.note, behind=origin)
        if verdict.found == "missing":
            copies = await in_thread_at(path.parent, self._projects.elsewhere, path)
            done = replace(done, also_at=tuple(map(str, copies)))
        # An outdated file, as on a host to which the agent returns, has nothing that the chain lacks.
        changed = verdict.found in ("different", "unreadable") and not verdict.is_prefix
        if changed or origin in ("theirs", "theirs_behind_ours"):
            done = replace(done, kept=await in_thread_at(path.parent, self._move_aside, path))
        moved = await self._may_lie_elsewhere(session)
        if moved:
            path = self._projects.path(context.cwd, str(uuid.uuid4()))
        mark, count, notes = await self._write(context, parent, path)
        done = replace(done, records=count)
        rebuilt = context.session(path.stem, path.parent, mark, None if moved else session)
        link = context.link(session.id, rebuilt.id, "rebuilt", done.as_json())
        return PreparedSession(rebuilt, True, "rebuilt", (link,), Evidence(repaired=done, notes=notes))

    async def _may_lie_elsewhere(self, session: Session) -> bool:
        """Whether the CLI may keep this session in another place: it answered the last turn without writing its
        transcript.

        Then it would load that file under this id instead of ours.
        """
        if session.mark is not None or session.tip_turn_id is None or not session.transcript:
            return False
        turn = await self._store.turn(session.tip_turn_id)
        if turn is None or turn.backend not in paths.OWN:  # another model answered: the CLI did not have to write
            return False
        own = [record for record in await self._store.own_records(session.tip_turn_id) if record.uuid is not None]
        return bool(own) and all(record.synthetic for record in own)

    def _move_aside(self, path: Path) -> str | None:
        """Back up a file. Returns the new path; None without a file."""
        if not os.path.lexists(path):
            return None
        aside = self._settings.var / ASIDE / f"{path.stem}-{time.time_ns()}.jsonl"
        aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # A rename takes a lock of the whole file system, which a confined agent's program can hold for minutes.
            os.link(path, aside, follow_symlinks=False)
        except OSError:  # a folder, or on another disk
            restore_access(path)  # a folder that is closed cannot be moved
        else:
            path.unlink()
            return str(aside)
        try:
            path.rename(aside)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            # The CLI's folder is on another disk, so the file has to be copied. Too large or irregular files are only
            # renamed instead.
            try:
                data = contents(path)
            except OSError:
                aside = path.with_name(f"{path.stem}{files.ASIDE}{time.time_ns()}")
                path.rename(aside)
            else:
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)  # under a name that `forget_aside` knows: we may be killed here
                    file.flush()
                    os.fsync(file.fileno())
                remove_any(path)
        return str(aside)

    def forget_aside(self, session_id: str) -> None:
        """Remove this session's backups."""
        for backup in (self._settings.var / ASIDE).glob(f"{session_id}-*.jsonl"):
            remove_any(backup)

    async def _write(self, context: TurnContext, parent: Turn, path: Path) -> tuple[FileMark, int, tuple[Note, ...]]:
        """The file's mark, the number of the path's records, and what it lacks of them."""
        records = await paths.shown(self._store, parent.id)
        mark, notes = await self._write_records(context, records, path)
        return mark, len(records), notes

    async def _write_records(
        self, context: TurnContext, records: Sequence[Record], path: Path
    ) -> tuple[FileMark, tuple[Note, ...]]:
        """The file's mark, and what it lacks.

        A confined agent's records have no notes of the CLI, and signatures of thinking cover these. A provider would
        refuse such thinking; a CLI that then leaves it out says so only in its transcript.
        """
        form, notes = context.capability.form, list[Note]()
        if context.capability.heals_thinking and self._projects.sandboxes.was_confined(context.job.agent.dir):
            count = await asyncio.to_thread(mending.count, records, "thinking")
            if count:
                records = await asyncio.to_thread(mending.shown, [*records, mending.leave_out("thinking")])
                notes.append(Note("thinking_left_out", count))
        try:
            mark = await in_thread_at(path.parent, partial(transcript.write, path, records, path.stem, form=form))
            return mark, tuple(notes)
        except OSError as exc:
            raise SandboxError(f"the transcript {path} cannot be written ({exc.strerror}): see `doctor`") from exc


def _is_loaded_whole(path: Path, form: Loading) -> bool:
    """Whether a CLI loads this transcript, which was just read, completely as it is.

    False if two records have one uuid. False after a rewind: 2.1.330 follows its own note, unless a turn that was
    rewound was compacted. False with records of unknown types: 2.1.330 skips them between turns that are close in
    time, and stops at them between others.
    """
    data = contents(path)
    if transcript.REWOUND in data or names_twice(data):
        return False
    if any(map(transcript.is_of_unknown_kind, data.decode("latin-1").split("\n"))):
        return False
    return form == transcript.NEWEST or form.takes(transcript.parse(data).path)
