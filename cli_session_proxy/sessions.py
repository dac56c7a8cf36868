"""Step 3 of a request: make a session equal to the path, and after the turn take over what it added.

A session is a cache of one path. To continue turn P there is a warm process that is in step with P, or a
transcript that is verified to be P's path, or one that is written again from the chain's records (under the
same id; under a new one where the path leaves the session's, a branch). Nobody rewrites a transcript while a
process of ours has it open.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import transcript
from .claude import capability as cli
from .claude import environment
from .claude.capability import Capability
from .claude.pool import Pool
from .claude.process import ClaudeProcess, Launch
from .errors import SessionBusy
from .models import JSON, Agent, Block, Continuity, FileMark, Link, LinkReason, Message, Record, Session, Turn
from .sandbox import Sandboxes
from .settings import Profile, Settings
from .stores.base import Store
from .transcript import Reader, Scribe, Verdict

# How many transcripts are followed without reading them again; beyond it one is re-hashed at its next turn.
READERS = 1024

# How often and how long a session that somebody else is just writing is looked at again, in seconds.
BUSY_WAIT = 10.0
BUSY_POLL = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn wants of its process."""

    model: str
    system: str | None
    effort: str | None
    profile: Profile


@dataclass(frozen=True, slots=True)
class Ready:
    """A session that is equal to the path, with the process that will continue it.

    `leaf` is the uuid of the path's last record; `links` explain how the session came to be what it is.
    """

    process: ClaudeProcess
    session: Session
    continuity: Continuity
    leaf: str | None
    links: tuple[Link, ...]
    reason: JSON


@dataclass(frozen=True, slots=True)
class Captured:
    """What a turn left: its records, its session as it is now, and the links that the CLI's ids call for."""

    records: tuple[Record, ...]
    session: Session
    links: tuple[Link, ...]
    note: str


@dataclass(frozen=True, slots=True)
class _Prepared:
    session: Session
    resume: bool
    continuity: Continuity
    links: tuple[Link, ...] = ()
    reason: JSON = field(default_factory=dict)


class Foreign(Exception):  # noqa: N818 - not an error: somebody else continued the session, and the chain should know
    """Complete exchanges that someone else added to the session after its tip."""

    def __init__(self, session: Session, entries: tuple[transcript.Entry, ...], note: str) -> None:
        super().__init__(note)
        self.session = session
        self.entries = entries
        self.note = note


class Sessions:
    """Makes sessions ready and takes over their turns. One per engine."""

    def __init__(self, settings: Settings, store: Store, pool: Pool, sandboxes: Sandboxes) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._sandboxes = sandboxes
        self._config_dir = environment.config_dir(settings)
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._in_step: dict[str, str] = {}  # warm session -> the turn its process's memory ends with

    # --- before the turn

    async def ready(self, agent: Agent, parent: Turn | None, plan: Plan, turn_id: str, *, adopt: bool) -> Ready:
        """A process that is about to continue `parent`. Raises `Foreign` when `adopt` and somebody else wrote."""
        cwd = await asyncio.to_thread(self._sandboxes.prepare, agent.dir)
        env = environment.build(self._settings, tmpdir=self._sandboxes.tmpdir(agent.dir), config_dir=self._config_dir)
        capability = await cli.probe(cli.find(self._settings), env)
        now = _Now(agent, parent, turn_id, cwd, capability, adopt)
        prepared = await self._prepare(now)
        launch = Launch(
            capability=capability,
            cwd=cwd,
            session_id=prepared.session.id,
            resume=prepared.resume,
            model=plan.model,
            system_prompt=plan.system,
            effort=plan.effort,
            profile=plan.profile,
            env=tuple(sorted(env.items())),
        )
        process, warm = await self._pool.checkout(launch)
        mark = prepared.session.mark
        return Ready(
            process=process,
            session=prepared.session,
            continuity="warm" if warm else prepared.continuity,
            leaf=mark.leaf if mark else None,
            links=prepared.links,
            reason=prepared.reason,
        )

    async def _prepare(self, now: _Now) -> _Prepared:
        if now.parent is None:
            return self._start(now)
        session = await self._store.session_at(now.agent.key, now.parent.id)
        if session is None:
            return await self._branch(now, now.parent)
        return await self._verify(now, now.parent, session)

    def _start(self, now: _Now) -> _Prepared:
        session = now.session(str(uuid.uuid4()), self._path(now.cwd), None)
        return _Prepared(session, False, "started", (now.link(None, session.id, "started", {}),))

    async def _branch(self, now: _Now, parent: Turn) -> _Prepared:
        """No session ends at the parent: write its path as a new one, and leave the others alone."""
        session_id = str(uuid.uuid4())
        mark, count = await self._write(now, parent, session_id)
        session = now.session(session_id, self._path(now.cwd), mark)
        if parent.session_id is None:
            detail: JSON = {"why": "the client's history was imported", "records": count}
            link = now.link(None, session_id, "rebuilt", detail)
            return _Prepared(session, True, "rebuilt", (link,), {"session": detail})
        detail = {"why": "the path leaves the session's", "from_turn": parent.id, "records": count}
        link = now.link(parent.session_id, session_id, "branched", detail)
        return _Prepared(session, True, "branched", (link,), {"session": detail})

    async def _verify(self, now: _Now, parent: Turn, session: Session) -> _Prepared:
        """Is the transcript what the CLI must load? The cheap answer first."""
        path = transcript.path_of(self._config_dir, now.cwd, session.id)
        session = now.session(session.id, self._path(now.cwd), session.mark, session)
        if self._in_step.get(session.id) != parent.id:
            # Another proxy, or a failed turn, has gone on without this process: its memory is not the path.
            await self._pool.discard(session.id)
        if session.mark is not None:
            quick = transcript.quick_check(path, session.mark)
            if quick is not None:
                return _Prepared(session, True, "resumed", (), {"verified": quick.note})
        verdict = await self._check(path, session, parent)
        if verdict.found == "equal":
            assert verdict.mark is not None
            session = now.session(session.id, session.transcript, verdict.mark, session)
            return _Prepared(session, True, "resumed", (), {"verified": verdict.note})
        await self._pool.discard(session.id)
        return await self._repair(now, parent, session, path)

    async def _check(self, path: Path, session: Session, parent: Turn) -> Verdict:
        verdict = await asyncio.to_thread(transcript.check, path, session.mark, None)
        if verdict is None:
            known = await self._store.records(parent.id)
            verdict = await asyncio.to_thread(transcript.check, path, None, known)
        assert verdict is not None
        return verdict

    async def _repair(self, now: _Now, parent: Turn, session: Session, path: Path) -> _Prepared:
        """The file is not the path: find out why, now that no process of ours has it, and mend it."""
        verdict = await self._check(path, session, parent)
        if verdict.found == "missing":
            moved = await self._move_back(now, parent, session, path)
            if moved is not None:
                return moved
        if verdict.found == "tail":
            foreign, verdict = await self._foreign(now, parent, session, path, verdict)
            if foreign and not now.adopt:
                return await self._branch(now, parent)
            if foreign:
                raise Foreign(session, verdict.tail, verdict.note)
        return await self._rebuild(now, parent, session, path, verdict)

    async def _foreign(
        self, now: _Now, parent: Turn, session: Session, path: Path, verdict: Verdict
    ) -> tuple[bool, Verdict]:
        """Did somebody else continue this session? Waits, bounded, for an exchange that is still open."""
        give_up = time.monotonic() + BUSY_WAIT
        while True:
            uuids = [entry.uuid for entry in verdict.tail if entry.uuid and entry.kind == "user"]
            ours = await self._store.own_frames(now.agent.key, uuids)
            theirs = [entry for entry in verdict.tail if entry.kind in ("user", "assistant")]
            if verdict.found != "tail" or ours or not theirs:
                return False, verdict
            if transcript.is_complete(verdict.tail) and not verdict.cut:
                return True, verdict
            if time.monotonic() >= give_up or not now.adopt:
                raise SessionBusy(
                    f"somebody else is in the middle of a turn of session {session.id}; send this again after it",
                    retry_after=BUSY_WAIT,
                )
            await asyncio.sleep(BUSY_POLL)
            verdict = await self._check(path, session, parent)

    async def _move_back(self, now: _Now, parent: Turn, session: Session, path: Path) -> _Prepared | None:
        """The file lies under another folder (moved sandbox, doubled prefix): bring it to where the CLI looks."""
        places = await asyncio.to_thread(transcript.find_elsewhere, self._config_dir, session.id, path)
        for place in places:
            verdict = await self._check(place, session, parent)
            if verdict.found != "equal":
                continue
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            await asyncio.to_thread(os.replace, place, path)
            detail: JSON = {"looked_for": str(path), "found_at": str(place), "done": "moved back"}
            session = now.session(session.id, session.transcript, verdict.mark, session)
            link = now.link(session.id, session.id, "moved", detail)
            return _Prepared(session, True, "resumed", (link,), {"repaired": detail})
        return None

    async def _rebuild(self, now: _Now, parent: Turn, session: Session, path: Path, verdict: Verdict) -> _Prepared:
        """Write the path again under the same id. What the chain does not know is kept aside, never lost."""
        detail: JSON = {"found": verdict.found, "why": verdict.note}
        if verdict.found in ("different", "unreadable"):
            kept = await asyncio.to_thread(self._keep_aside, path)
            detail |= {"kept": str(kept)} if kept else {}
        mark, count = await self._write(now, parent, session.id)
        detail |= {"done": "written again from the chain's records", "records": count}
        rebuilt = now.session(session.id, session.transcript, mark, session)
        link = now.link(session.id, session.id, "rebuilt", detail)
        return _Prepared(rebuilt, True, "rebuilt", (link,), {"repaired": detail})

    def _keep_aside(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        aside = self._settings.var / "salvage" / f"{path.stem}-{time.time_ns()}.jsonl"
        aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.replace(path, aside)
        return aside

    async def _write(self, now: _Now, parent: Turn, session_id: str) -> tuple[FileMark, int]:
        records = await self._store.records(parent.id)
        path = transcript.path_of(self._config_dir, now.cwd, session_id)
        strict = not now.capability.keeps_session_id
        mark = await asyncio.to_thread(transcript.write, path, records, session_id, strict_order=strict)
        self._readers.pop(session_id, None)
        return mark, len(records)

    # --- after the turn

    async def capture(
        self,
        ready: Ready,
        turn: Turn,
        frame_uuid: str,
        output: Sequence[Block],
        session_id: str,
        cost_total: float | None,
    ) -> Captured:
        """Take over what the turn added to the transcript. What cannot be read is made from the frames."""
        before = ready.session
        forked = session_id != before.id
        path = Path(before.transcript).with_name(f"{session_id}.jsonl") if forked else Path(before.transcript)
        records, mark, note = await asyncio.to_thread(self._take, ready, path, session_id, frame_uuid)
        if not records:
            records = self._synthesise(ready, turn, frame_uuid, output, session_id)
        total = before.cost_total_usd if cost_total is None else cost_total
        session = Session(
            session_id, before.agent_key, turn.id, str(path), ready.process.version, before.created_at, mark, total
        )
        links: tuple[Link, ...] = ()
        if forked and ready.continuity != "started":
            detail: JSON = {"asked": before.id, "answered": session_id}
            links = (Link(before.id, session_id, turn.id, "forked_by_cli", detail, time.time()),)
        if mark is not None and ready.process.usable:
            self._in_step[session_id] = turn.id
        return Captured(tuple(records), session, links, note)

    def _take(
        self, ready: Ready, path: Path, session_id: str, frame_uuid: str
    ) -> tuple[list[Record], FileMark | None, str]:
        reader = self._reader(ready, path, session_id)
        got = reader.appended()
        if got is None:
            self._readers.pop(session_id, None)
            reader = Reader(path, None)
            got = reader.appended()
            if got is None:
                return [], None, "the transcript is gone; records made from the frames"
            parsed, _ = got
            entries = _after(parsed.entries, ready.leaf)
            return _sound(entries, ready.leaf, frame_uuid), None, "the transcript was replaced during the turn"
        parsed, mark = got
        entries = _after(parsed.entries, ready.leaf)
        records = _sound(entries, ready.leaf, frame_uuid)
        if not records or parsed.broken:
            self._readers.pop(session_id, None)
            return records, None, "the transcript does not continue the path"
        self._remember(session_id, reader)
        return records, mark, "read from the transcript"

    def _reader(self, ready: Ready, path: Path, session_id: str) -> Reader:
        mark = ready.session.mark
        reader = self._readers.pop(session_id, None)
        if session_id != ready.session.id or mark is None:
            return Reader(path, None)
        if reader is None or not reader.holds(mark):
            reader = Reader(path, ready.leaf)
            try:
                reader.skip_to(mark)
            except OSError:
                return Reader(path, None)
        return reader

    def _remember(self, session_id: str, reader: Reader) -> None:
        self._readers[session_id] = reader
        while len(self._readers) > READERS:
            self._readers.popitem(last=False)

    def _synthesise(
        self, ready: Ready, turn: Turn, frame_uuid: str, output: Sequence[Block], session_id: str
    ) -> list[Record]:
        scribe = Scribe(session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
        content = tuple(block for message in turn.input for block in message.content)
        asked = scribe.record(Message("user", content), turn.model, record_uuid=frame_uuid)
        return [asked, scribe.record(Message("assistant", tuple(output)), turn.model)]

    async def spoil(self, ready: Ready, answered: str | None) -> None:
        """A turn failed here: the process's memory holds what the path does not, and a new file is of no use."""
        for session_id in {ready.session.id, answered or ready.session.id}:
            await self._end(session_id)
        if ready.continuity in ("started", "branched"):
            await asyncio.to_thread(transcript.remove, Path(ready.session.transcript))
        if answered is not None and answered != ready.session.id:
            fork = Path(ready.session.transcript).with_name(f"{answered}.jsonl")
            await asyncio.to_thread(transcript.remove, fork)

    async def _end(self, session_id: str) -> None:
        self._in_step.pop(session_id, None)
        self._readers.pop(session_id, None)
        await self._pool.discard(session_id)

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        """End the agent's processes and remove its transcripts and what lies beside them."""
        cwd = self._sandboxes.path(agent.dir)
        for session_id in session_ids:
            await self._end(session_id)
            path = transcript.path_of(self._config_dir, cwd, session_id)
            await asyncio.to_thread(transcript.remove, path)

    def scribe(self, agent: Agent, at: float, parent: str | None) -> Scribe:
        """A writer of records for history that the CLI has never seen."""
        return Scribe(str(uuid.uuid4()), self._sandboxes.path(agent.dir), "", at, parent)

    def _path(self, cwd: Path) -> Path:
        return transcript.project_dir(self._config_dir, cwd)


@dataclass(frozen=True, slots=True)
class _Now:
    """What every step of making a session ready needs to know of the turn."""

    agent: Agent
    parent: Turn | None
    turn_id: str
    cwd: Path
    capability: Capability
    adopt: bool

    def session(
        self, session_id: str, project: Path | str, mark: FileMark | None, was: Session | None = None
    ) -> Session:
        folder = project if isinstance(project, Path) else Path(project).parent
        return Session(
            id=session_id,
            agent_key=self.agent.key,
            tip_turn_id=self.parent.id if self.parent else None,
            transcript=str(folder / f"{session_id}.jsonl"),
            cli_version=self.capability.version,
            created_at=was.created_at if was else time.time(),
            mark=mark,
            cost_total_usd=was.cost_total_usd if was else 0.0,
        )

    def link(self, source: str | None, target: str, reason: LinkReason, detail: JSON) -> Link:
        return Link(source, target, self.turn_id, reason, detail, time.time())


def _after(entries: Sequence[transcript.Entry], leaf: str | None) -> list[transcript.Entry]:
    """The lines behind the path's last record; all of them when it is not among these lines."""
    if leaf is not None:
        for at, entry in enumerate(entries):
            if entry.uuid == leaf:
                return list(entries[at + 1 :])
    return list(entries)


def _sound(entries: Sequence[transcript.Entry], leaf: str | None, frame_uuid: str) -> list[Record]:
    """These lines as records, if they are this turn's whole exchange hanging on the path; else none."""
    path = [entry for entry in entries if entry.on_path]
    ours = [entry for entry in path if entry.kind == "user"]
    if not ours or not transcript.is_complete(path) or not transcript.unbroken(path, leaf):
        return []
    tagged = any(entry.uuid == frame_uuid for entry in ours)
    if not tagged and any(entry.data.get("promptSource") for entry in ours):
        return []
    return [entry.record() for entry in entries]
