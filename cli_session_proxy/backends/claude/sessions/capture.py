"""What a turn added to a transcript: which of its lines are the turn's own, and whether they are all there."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....domain import client_tools
from ....domain.models import JSON, Block, Continuity, FileMark, Link, Message, Record, Session, Turn
from ....stores.base import Store
from .. import transcript
from ..process.process import ClaudeProcess
from ..transcript import Reader, Scribe
from . import stopping

# How many transcripts are followed without reading them again; beyond it one is re-hashed at its next turn.
READERS = 1024

# What a turn added is read on the event loop up to this size (bytes): 64 KB are read, hashed and parsed in about 1 ms.
SMALL = 64 * 1024

# The CLI flushes its transcript before the result (facts, "Failures"); a loaded disk may be later. Seconds.
FLUSH_WAIT = 3.0
FLUSH_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Said:
    """How the CLI's side of a turn ended, as far as it concerns the session.

    `calls` are the client's that wait for results; `stopped`: the answer was cut at a stop sequence.
    """

    frame_uuid: str
    output: tuple[Block, ...]
    session_id: str
    cost_total: float | None = None
    calls: frozenset[str] = frozenset()
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A session that is equal to the path, with the process that will continue it.

    `leaf` is the uuid of the path's last record; `links` explain how the session came to be what it is. `results` are
    MCP's, for a process that waits for them; `lead` are records of this turn that were written before its frame.
    `quiet`: the turn has no prompt of its own in the transcript.
    """

    process: ClaudeProcess
    session: Session
    continuity: Continuity
    leaf: str | None
    links: tuple[Link, ...]
    reason: JSON
    results: Mapping[str, JSON] = field(default_factory=dict)
    lead: tuple[Record, ...] = ()
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What a turn was seen to add to the transcript. `more`: the end of it may not be written yet."""

    records: list[Record]
    mark: FileMark | None
    note: str
    more: bool = False


class Captures:
    """Takes over what turns added to their transcripts, which it follows from turn to turn. One per engine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def forget(self, session_id: str) -> None:
        """Read it anew the next time."""
        self._readers.pop(session_id, None)

    def is_as_known(self, session_id: str) -> bool:
        """Nothing was added to its transcript since our last turn there; False where that is not known."""
        reader = self._readers.get(session_id)
        return reader is not None and reader.is_at_end()

    async def taken(self, ready: Ready, turn: Turn, path: Path, said: Said) -> Taken:
        """What the turn added. What cannot be read is made from the frames. After a cut, its process is dead."""
        taken = await self._cut(ready, turn, path, said) if said.stopped else await self._read(ready, path, said)
        if not taken.records and said.session_id != ready.session.id:
            copied = await asyncio.to_thread(self._from_copy, ready, path, said, await self._path(ready))
            taken = copied or taken
        return taken if taken.records else replace(taken, records=_made(ready, turn, said))

    async def _read(self, ready: Ready, path: Path, said: Said) -> Taken:
        """It is written in batches: the last one is waited for, bounded."""
        give_up = time.monotonic() + FLUSH_WAIT
        while True:
            if self._is_small(ready, path, said.session_id):
                taken = self._take(ready, path, said)
            else:
                taken = await asyncio.to_thread(self._take, ready, path, said)
            if not taken.more or time.monotonic() >= give_up:
                return taken
            await asyncio.sleep(FLUSH_POLL)

    def _is_small(self, ready: Ready, path: Path, session_id: str) -> bool:
        """So little was added to a transcript that we follow that a thread would cost more than to read it."""
        mark, reader = ready.session.mark, self._readers.get(session_id)
        if mark is None or reader is None or session_id != ready.session.id or not reader.holds(mark):
            return False
        try:
            return os.stat(path).st_size - mark.size <= SMALL
        except OSError:
            return False

    def _take(self, ready: Ready, path: Path, said: Said) -> Taken:
        session_id = said.session_id
        reader = self._reader(ready, path, session_id)
        got = reader.appended()
        if got is None:
            self._readers.pop(session_id, None)
            reader = Reader(path, None)
            got = reader.appended()
            if got is None:
                # At calls there is no result yet that the CLI flushes its transcript before.
                note = "the transcript is gone; records made from the frames"
                return Taken([], None, note, more=bool(said.calls))
            parsed, _ = got
            records = sound(after(parsed.entries, ready.leaf), ready.leaf, said, quiet=ready.quiet)
            return Taken(records, None, "the transcript was replaced during the turn")
        parsed, mark = got
        entries = after(parsed.entries, ready.leaf)
        records = sound(entries, ready.leaf, said, quiet=ready.quiet)
        if not records or parsed.broken:
            self._readers.pop(session_id, None)
            more = parsed.broken > 0 or not is_whole([entry for entry in entries if entry.on_path], said)
            return Taken(records, None, "the transcript does not continue the path", more)
        self._remember(session_id, reader)
        return Taken(records, mark, "read from the transcript")

    def _from_copy(self, ready: Ready, path: Path, said: Said, known: Sequence[Record]) -> Taken | None:
        """A CLI that answers under a new id has copied the session, perhaps under other names."""
        reader = Reader(path, None)
        got = reader.appended()
        if got is None or got[0].broken:
            return None
        parsed, mark = got
        start = transcript.copied_up_to(transcript.parse_records(known).path, parsed.path)
        if start is None or start == len(parsed.path):
            return None
        first = parsed.path[start]
        own = parsed.entries[parsed.entries.index(first) :]
        records = sound([first.hung_on(ready.leaf), *own[1:]], ready.leaf, said, quiet=ready.quiet)
        if not records:
            return None
        self._remember(said.session_id, reader)
        return Taken(records, mark, "read from the CLI's copy of the session")

    async def _path(self, ready: Ready) -> list[Record]:
        """The records before the turn's own frame."""
        parent = ready.session.tip_turn_id
        return [*(await self._store.records(parent) if parent else []), *ready.lead]

    async def _cut(self, ready: Ready, turn: Turn, path: Path, said: Said) -> Taken:
        """The answer was cut at a stop sequence: so are its records, and the transcript with them."""
        added = await asyncio.to_thread(read_after, path, ready.leaf)
        scribe = Scribe(said.session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
        if any(entry.kind == "user" for entry in added) or ready.quiet:
            unseen = ready.process.launch.capability.takes_tools
            records = stopping.cut(added, said.output, scribe, turn.model, unseen=unseen)
        else:
            records = _made(ready, turn, said)
        path_records = [*await self._path(ready), *records]
        strict = not ready.process.launch.capability.keeps_session_id
        mark = await asyncio.to_thread(transcript.write, path, path_records, said.session_id, strict_order=strict)
        return Taken(records, mark, "cut at a stop sequence")

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


def _made(ready: Ready, turn: Turn, said: Said) -> list[Record]:
    scribe = Scribe(said.session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
    content = tuple(block for message in turn.input for block in message.content)
    if ready.lead:  # the results are there already
        content = tuple(block for block in content if block.get("type") != "tool_result")
    asked = [scribe.record(Message("user", content), turn.model, record_uuid=said.frame_uuid)] if content else []
    return [*asked, scribe.record(Message("assistant", client_tools.as_cli(said.output)), turn.model)]


def after(entries: Sequence[transcript.Entry], leaf: str | None) -> list[transcript.Entry]:
    """The lines behind the path's last record; all of them when it is not among these lines."""
    if leaf is not None:
        for at, entry in enumerate(entries):
            if entry.uuid == leaf:
                return list(entries[at + 1 :])
    return list(entries)


def sound(entries: Sequence[transcript.Entry], leaf: str | None, said: Said, *, quiet: bool) -> list[Record]:
    """These lines as records, if they are this turn's whole exchange hanging on the path; else none."""
    path = [entry for entry in entries if entry.on_path]
    ours = [entry for entry in path if entry.kind == "user"]
    if not is_whole(path, said) or not transcript.unbroken(path, leaf):
        return []
    tagged = any(entry.uuid == said.frame_uuid for entry in ours)
    if not quiet and (not ours or (not tagged and any(entry.data.get("promptSource") for entry in ours))):
        return []
    return [entry.record() for entry in entries]


def is_whole(path: Sequence[transcript.Entry], said: Said) -> bool:
    """Does it hold all that was said: the calls that wait, or an exchange with its end?"""
    if said.calls:
        return said.calls <= set(client_tools.calls_of(block for entry in path for block in entry.content))
    return transcript.is_complete(path)


def read_after(path: Path, leaf: str | None) -> list[transcript.Entry]:
    try:
        return after(transcript.parse(path.read_bytes()).entries, leaf)
    except OSError:
        return []
