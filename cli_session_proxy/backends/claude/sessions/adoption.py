"""Adoption: makes turns of exchanges that the proxy did not run.

    adoptable       the tail that a person added to a session of ours (`claude --resume` in the sandbox)
    turns_from_sdk  the exchanges of a session that an application runs with the Claude Agent SDK
    adopt_session   all exchanges of a session that the proxy has never seen, as the chain of a new agent

The records of these exchanges are stored unchanged, followed by marks for images that the model would refuse. The
transcript that they come from is only read.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ....domain import lineage
from ....domain.client_tools import calls_of
from ....domain.evidence import Evidence, ExternalOrigin, Note, NoteCode
from ....domain.limits import is_model, is_session_id, is_version
from ....domain.models import JSON, Agent, Block, Link, Placed, Record, Session, Turn
from ....errors import InvalidRequest, NotFound, printable
from ....sandbox import Sandboxes, directory_name
from ....settings import Settings
from ....stores.base import ChainPart, NewChain, Store, WholeTurn
from ...base import Adoptable
from .. import transcript
from ..process import environment
from ..process.turn_reader import SYNTHETIC_MODEL
from ..transcript import Entry, files, mending
from ..transcript.entries import opened
from . import paths
from .exchanges import TranscriptExchange, exchanges, is_compaction, is_prompt, time_of
from .manager import ForeignExchanges

# Called with the number of bytes read so far, and of all bytes.
Progress = Callable[[int, int], None]
# Returns what replaces this image or document, with the code of the note; None: it can stay. Called on a thread.
Replacement = Callable[[Block], tuple[NoteCode, Block] | None]

# Lines that are read before a file without records is refused.
FIRST_LINES = 200


@dataclass(slots=True)
class Adopter:
    """Makes turns of exchanges, each the child of the one before.

    `session_id`: the session that the exchanges come from; `note`: evidence of that, for a person. `parent`: the parent
    of the next turn. `model`: the model of the last turn, for an exchange that names none.
    """

    agent_key: int
    session_id: str
    note: str
    parent: Turn | None = None
    model: str = "default"

    def adopt(self, exchange: TranscriptExchange) -> WholeTurn:
        parent = self.parent
        self.model = exchange.model if is_model(exchange.model) else self.model
        at = exchange.at or time.time()
        self.parent = Turn(
            id=f"turn_{uuid.uuid4().hex}",
            seq=0,
            agent_key=self.agent_key,
            parent_id=parent.id if parent else None,
            status="completed",
            model=self.model,
            input=exchange.input,
            output=exchange.output,
            created_at=at,
            finished_at=at,
            delivery="delivered",
            path_hash=lineage.path_hash(parent.path_hash if parent else None, exchange.input, exchange.output),
            depth=(parent.depth if parent else 0) + 1,
            origin="adopted",
            placed=Placed("adopted"),
            evidence=Evidence(ExternalOrigin("adoption", self.session_id, self.note), compacted=exchange.compacted),
            session_id=self.session_id,
            usage=exchange.usage,
            tools=exchange.tools,
        )
        return WholeTurn(self.parent, tuple(entry.record() for entry in exchange.entries))


def adoptable(agent: Agent, parent: Turn, foreign: ForeignExchanges) -> Adoptable:
    """Exchanges that a person added to the session, as turns after `parent`."""
    adopter = Adopter(agent.key, foreign.session.id, foreign.note, parent, parent.model)
    turns = tuple(adopter.adopt(exchange) for exchange in exchanges(foreign.entries))
    # Without a mark the transcript is verified before its next use.
    session = replace(foreign.session, tip_turn_id=turns[-1].turn.id, mark=None)
    return Adoptable(turns, session, {"note": foreign.note}, transcript.has_ended(foreign.entries))


# --- a session that an application runs with the Claude Agent SDK

SDK_NOTE = "said with the Claude Agent SDK"


async def lines_of(store: Store, session: Session, waiting: Sequence[Record]) -> list[str]:
    """The transcript of the path to the session's tip, under the session's id. The lines that are not turns yet follow.
    They are linked to it, because a CLI follows the links from the last line."""
    records = [record for record in await paths.shown(store, session.tip_turn_id) if not files.is_file(record)]

    def lines() -> list[str]:
        leaf = next((leaf for one in reversed(records) if (leaf := transcript.parse_records([one]).leaf)), None)
        known = {record.uuid for record in records} - {None}  # some may have become turns since they were read
        linked = _linked(transcript.parse_records(one for one in waiting if one.uuid not in known).entries, leaf)
        return [
            *(transcript.with_session_id(record.line, session.id) for record in records),
            *(entry.line for entry in linked),
        ]

    return await asyncio.to_thread(lines)


def turns_from_sdk(
    agent: Agent, parent: Turn | None, last_records: Sequence[Record], session: Session, lines: Sequence[Record]
) -> Adoptable | None:
    """The complete exchanges of these lines, as turns that follow `parent`. `last_records`: the path's last ones."""
    complete = list(exchanges(transcript.parse_records(lines).entries))
    while complete and not (complete[-1].complete and transcript.has_ended(complete[-1].entries)):
        complete.pop()
    if not complete:
        return None
    leaf = transcript.parse_records(last_records).leaf
    linked = iter(_linked([entry for exchange in complete for entry in exchange.entries], leaf))
    complete = [TranscriptExchange(tuple(islice(linked, len(exchange.entries)))) for exchange in complete]
    adopter = Adopter(agent.key, session.id, SDK_NOTE, parent, parent.model if parent else "default")
    turns = []
    for exchange in complete:
        whole = adopter.adopt(exchange)
        if not _has_results_behind_calls(exchange.path):  # they are shown as words
            first = next(record.uuid for record in whole.records if record.uuid is not None)
            whole = replace(whole, records=(*whole.records, mending.leave_out("calls", first)))
        turns.append(whole)
    session = replace(session, tip_turn_id=turns[-1].turn.id, mark=None)
    lines_taken = sum(len(exchange.entries) for exchange in complete)
    return Adoptable(tuple(turns), session, {"note": SDK_NOTE}, ended=True, lines=lines_taken)


def _has_results_behind_calls(path: Sequence[Entry]) -> bool:
    """Whether the results of a message's calls directly follow it, as the model's API wants it. Not so if another
    application said something in between, or if the exchange has one without the other."""
    message: object = None
    waiting: set[str] = set()  # calls
    for entry in path:
        is_answer = entry.kind == "assistant" and not entry.data.get("isApiErrorMessage")  # an error is never sent
        own_id = entry.data["message"].get("id") if is_answer else None
        if waiting and (is_prompt(entry) or own_id not in (None, message)):
            return False
        message = own_id or message
        answered = {str(block.get("tool_use_id")) for block in entry.content if block.get("type") == "tool_result"}
        if not answered <= waiting:
            return False
        waiting = waiting - answered | set(calls_of(entry.content))
    return not waiting


def _linked(entries: Sequence[Entry], leaf: str | None) -> list[Entry]:
    """The entries, linked so that all are on the path. `leaf`: the uuid of the path's last record.

    The path may have grown since the application loaded it. Or two applications continue one session at once. Then
    their lines alternate, and the second one's CLI may have answered the first one's prompt itself.
    """
    since, mixed = {leaf}, False  # the uuids since the last prompt, and whether others' lines are among these
    linked: list[Entry] = []
    for entry in entries:
        if entry.in_conversation:
            if is_prompt(entry):
                since, mixed = set(), False
            starts_again = entry.parent is None and transcript.unbroken([entry], leaf)
            # Beside the last record are results of parallel calls, and what replaces a broken answer.
            is_own = not mixed and entry.data.get("message", {}).get("model") != SYNTHETIC_MODEL
            if entry.parent != leaf and not starts_again and not (is_own and entry.parent in since):
                mixed = bool(since)
                entry = entry.with_parent(leaf)  # noqa: PLW2901
            leaf = entry.uuid
            since.add(leaf)
        linked.append(entry)
    return linked


# --- a whole session


@dataclass(frozen=True, slots=True)
class Adopted:
    """What `adopt_session` did. `from_session`: the session that was copied; `session_id`: its copy, whose file the
    agent's next turn writes. `files`: how many files beside the transcript came along. `notes`: for a person."""

    agent_id: str
    source: Path
    from_session: str
    session_id: str
    turns: int
    records: int
    files: int
    notes: tuple[str, ...]


async def adopt_session(
    settings: Settings,
    store: Store,
    owner: str,
    agent_id: str | None,
    source: str,
    replacement: Replacement,
    progress: Progress,
) -> Adopted:
    """Adopt a session as a new agent (named after the session if `agent_id` is None).

    `source`: a session id in the CLI's own directory, or the path of a transcript. Raises `NotFound` (with the places
    that were searched) and `InvalidRequest` (no transcript, a session of an agent, an agent with turns).
    `replacement`: see `Replacement`, `progress`: see `Progress`.
    """
    sandboxes = Sandboxes(settings)
    projects = transcript.Projects(settings, sandboxes, environment.config_dir(settings))
    path = await asyncio.to_thread(find_source, projects.root, source)
    foreign = await asyncio.to_thread(ForeignTranscript, path)
    agent_id = agent_id or foreign.session_id
    # Refuse known sessions and agents before the long work. The store checks the agent again.
    known = await store.session(foreign.session_id)
    owning = await store.agent_by_key(known.agent_key) if known else None
    if owning is not None:
        raise InvalidRequest(
            f"session {foreign.session_id} is agent {owning.agent_id!r}'s already: use that agent, or copy it with "
            "export and import"
        )
    agent = await store.agent(owner, agent_id)
    if agent is not None:
        async for _ in store.turns(agent.key):
            advice = "choose another --agent-id, or `delete` it first"
            raise InvalidRequest(f"agent {agent_id!r} has turns already: {advice}", param="agent_id")
    directory = directory_name(owner, agent_id)
    session_id = str(uuid.uuid4())
    target = projects.path(sandboxes.path(directory), session_id)
    copied, left_out = await asyncio.to_thread(files.copy_beside, path, target)
    adoption = _Adoption(foreign, session_id, copied, left_out, ImportFitting(replacement), progress)
    created = foreign.started or time.time()
    new = NewChain(owner, agent_id, directory, True, created, time.time(), lambda: adoption.head)
    try:
        await store.import_chain(new, adoption.parts())
    except BaseException:
        await asyncio.to_thread(files.remove, target)
        raise
    notes = tuple(adoption.notes())
    return Adopted(agent_id, path, foreign.session_id, session_id, adoption.turns, adoption.records, copied, notes)


def find_source(projects: Path, source: str) -> Path:
    """The transcript that a person means: a path, or the session id of a file in the CLI's directory."""
    if source.endswith(".jsonl") or os.sep in source:
        path = Path(source)
        with suppress(OSError, RuntimeError):  # a too long name, an unknown home
            path = path.expanduser()
            if path.is_file():
                return path.resolve()
        raise NotFound(f"there is no file {path}: give a session id or the path of its .jsonl file")
    # No link, now or later: a confined agent's program may put it there, to what it cannot read itself.
    found = files.find_elsewhere(projects.parent, source, ()) if is_session_id(source) else []
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise InvalidRequest(f"session {source} has several files: name the one to adopt ({listed})")
    if not found:
        raise NotFound(
            f"no session {source!r}: looked for {projects}/*/<session id>.jsonl; name the file itself, or another "
            "directory of the CLI with --claude-config-dir"
        )
    return found[0]


@dataclass(slots=True)
class _Adoption:
    """Reads the file while the store imports it. Runs on the store's thread."""

    foreign: ForeignTranscript
    session_id: str
    files: int
    left_out: Sequence[str]  # names of files beside the transcript
    fitting: ImportFitting
    progress: Progress
    head: str | None = None
    turns: int = 0
    records: int = 0
    compactions: int = 0
    records_left_out: int = 0  # of an exchange that has not ended

    def parts(self) -> Iterator[ChainPart]:
        adopter = Adopter(0, self.foreign.session_id, f"adopted from {self.foreign.path}")
        reading = exchanges(self.foreign.entries(self.progress))
        following = next(reading, None)
        while (exchange := following) is not None:
            following = next(reading, None)
            if following is None and not exchange.complete:
                self.records_left_out = len(exchange.entries)
                break
            whole = adopter.adopt(exchange)
            self.head = whole.turn.id
            self.turns += 1
            self.records += len(whole.records)
            self.compactions += exchange.compacted is not None
            yield replace(whole, records=self.fitting.records(whole.turn.id, whole.turn.parent_id, whole.records))
        if self.head is None:
            raise InvalidRequest(f"{self.foreign.path} holds no finished exchange: there is nothing to adopt yet")
        now = time.time()
        yield Session(self.session_id, 0, self.head, "", self.foreign.version, now)
        detail: JSON = {"source": str(self.foreign.path), "turns": self.turns, "records": self.records}
        detail |= {"files": self.files, "notes": list(self.notes())}
        yield Link(self.foreign.session_id, self.session_id, self.head, "adopted", detail, now)

    def notes(self) -> Iterator[str]:
        if self.records_left_out:
            yield f"the last exchange was still open: its {self.records_left_out} records were left out"
        if self.left_out:
            names = ", ".join(map(printable, self.left_out[:3]))
            others = " and others" if len(self.left_out) > 3 else ""
            yield f"this user may not read {names}{others} beside the transcript, or it is too much: left out"
        if self.compactions:
            yield f"compacted by the CLI {self.compactions} times: the model knows what is before only by the summary"
        yield from self.foreign.notes()


# --- transcripts from elsewhere

# A real session's file is a tree: an edited prompt or a second try leaves a dead branch, and results of parallel tools
# are beside the path. The file is read twice, so that only an index of it is in memory.


@dataclass(slots=True)
class _IndexEntry:
    """One record of the conversation. `previous`: the uuid of the record before it in the file; `message`: the id of
    the model's message."""

    parent: str | None
    previous: str | None
    message: str | None
    is_prompt: bool
    is_compaction: bool


class ForeignTranscript:
    """The first pass over a transcript, and the path that the CLI would load of it.

    `kept`: the uuids of the path. `mended`: new parents for records whose parent is missing. `started`: the first
    record's time; `size`: bytes; `broken`, `dropped`: how many lines and records are left out. Raises `InvalidRequest`
    if the file is no transcript with a message.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = ""
        self.started: float | None = None
        self.broken = 0
        self._index: dict[str, _IndexEntry] = {}
        self._last: str | None = None  # the uuid of the last record: the leaf
        self._messages = 0
        # Not trusted: its ids become parts of file names and command lines.
        session_id = path.stem if is_session_id(path.stem) else None
        lines = 0
        try:
            with opened(path) as file:
                self.size = os.fstat(file.fileno()).st_size
            for entry, _ in self._lines():
                lines += 1
                if entry is None:
                    self.broken += 1
                    if not self._messages and self.broken > FIRST_LINES:
                        break
                elif entry.in_conversation:
                    self._add(entry)
                    if is_session_id(entry.data.get("sessionId")):
                        session_id = entry.data["sessionId"]
        except OSError as exc:
            raise InvalidRequest(f"{path} cannot be read ({exc.strerror}): name one that this user may read") from exc
        if not self._messages:
            raise InvalidRequest(
                f"{path} is not a transcript of the Claude CLI: none of its {lines} lines is a message "
                f"({self.broken} are not JSON)"
            )
        if session_id is None:
            raise InvalidRequest(
                f"{path} names no session: neither its records nor its name hold a UUID; rename it to <UUID>.jsonl"
            )
        self.session_id: str = session_id
        self.kept, self.mended = self._path()
        messages = {self._index[kept].message for kept in self.kept} - {None}
        for record_uuid, indexed in self._index.items():
            # Parallel tools: calls of one message and their results are beside the path.
            is_call = indexed.message in messages
            is_result = indexed.message is None and indexed.parent in self.kept and not indexed.is_prompt
            if is_call or is_result:
                self.kept.add(record_uuid)
        self.dropped = len(self._index) - len(self.kept)
        self._index.clear()

    def _add(self, entry: Entry) -> None:
        assert entry.uuid is not None
        message = entry.data.get("message")
        if entry.kind in ("user", "assistant") and isinstance(message, dict):
            self._messages += 1
        if is_version(entry.data.get("version")):
            self.version = entry.data["version"]
        self.started = self.started or time_of(entry)
        parent = entry.parent
        if parent is None and is_compaction(entry):
            parent = entry.data.get("logicalParentUuid")
        message_id = (message.get("id") or None) if isinstance(message, dict) and entry.kind == "assistant" else None
        self._index[entry.uuid] = _IndexEntry(parent, self._last, message_id, is_prompt(entry), is_compaction(entry))
        self._last = entry.uuid

    def _path(self) -> tuple[set[str], dict[str, str | None]]:
        """`kept` and `mended` for the way from the leaf to the root. If a parent is missing, go to the record before it
        in the file."""
        kept: set[str] = set()
        mended: dict[str, str | None] = {}
        at = self._last
        while at is not None and at not in kept:
            kept.add(at)
            entry = self._index[at]
            if entry.parent is None and not entry.is_compaction:
                break
            if entry.parent in self._index and entry.parent not in kept:
                at = entry.parent
                continue
            if not entry.is_compaction:
                mended[at] = entry.previous
            at = entry.previous
        return kept, mended

    def _lines(self) -> Iterator[tuple[Entry | None, int]]:
        """Each line of the first `size` bytes (the file may grow), parsed, with the bytes read; None: broken."""
        done = 0
        with opened(self.path) as file:
            while done < self.size and (raw := file.readline(self.size - done)):
                done += len(raw)
                if raw.strip():
                    entries = transcript.parse(raw).entries
                    yield entries[0] if entries else None, done

    def entries(self, progress: Progress) -> Iterator[Entry]:
        """The second pass: the path's records with sub-agents' and notes between them, in the order of the file."""
        for entry, done in self._lines():
            progress(done, self.size)
            if entry is None or (entry.in_conversation and entry.uuid not in self.kept):
                continue
            is_mended = entry.in_conversation and entry.uuid in self.mended
            yield entry.with_parent(self.mended[entry.uuid or ""]) if is_mended else entry

    def notes(self) -> Iterator[str]:
        """Notes for a person on what was left out."""
        if self.dropped:
            yield f"{self.dropped} records of branches that nobody continued (edited prompts) were left out"
        if self.broken:
            yield f"{self.broken} lines are no JSON or no record of a CLI's (a cut last line is one) and were left out"
        if self.mended:
            yield f"{len(self.mended)} records named a parent that is missing: linked to the record before"


class ImportFitting:
    """Fits images of adopted and imported turns to the model's limits. One per chain; parents before children.

    The records stay unchanged; marks name the replacements, and thinking that becomes invalid.
    """

    def __init__(self, replacement: Replacement) -> None:
        self._replacement = replacement
        # For turns after the first change on their path: counts of changes.
        self._changed: dict[str, Counter[NoteCode]] = {}

    def records(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        """The turn's records, with marks for its images."""
        changed = Counter(self._changed.get(parent_id or ""))
        instead: dict[str, Block] = {}
        since = next((record.uuid for record in records if record.uuid is not None), None) if changed else None
        for record_uuid, sha256, block in mending.media_of(records):
            if sha256 not in instead and (new := self._replacement(block)) is not None:
                instead[sha256] = new[1]
                changed[new[0]] += 1
                since = since or record_uuid
        if not changed:
            return tuple(records)
        self._changed[turn_id] = changed
        marks = [mending.fitted(instead)] if instead else []
        # Thinking after a changed image is invalid: its signature covers the original.
        uuids = [record.uuid for record in records]
        invalid = records[uuids.index(since) :] if since is not None else ()
        if thoughts := mending.count(invalid, "thinking"):
            changed["thinking_left_out"] += thoughts
            marks.append(mending.leave_out("thinking", since))
        marks.append(mending.imported(Note(code, number) for code, number in changed.items()))
        return (*records, *marks)
