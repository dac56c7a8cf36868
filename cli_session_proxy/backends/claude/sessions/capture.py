"""Captures a turn's records: the lines that it added to its transcript, once they are complete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ....domain import client_tools
from ....domain.evidence import Evidence, RecordsFrom
from ....domain.forms import replace
from ....domain.limits import is_dense
from ....domain.models import JSON, Block, Continuity, FileMark, Link, Message, Record, Session, Turn
from ....domain.options import ParameterName
from ....errors import SessionBusy
from ....stores.base import Store
from ....tasks import in_thread_at
from ...base import Answered
from .. import transcript
from ..process.events import WrongTranscript
from ..process.frames import printable
from ..process.process import ClaudeProcess
from ..process.turn_reader import SYNTHETIC_MODEL
from ..transcript import Entry, Parsed, Reader, Scribe, mending
from ..transcript.entries import MAX_BYTES, TooMuchAppended, parse_file
from ..transcript.mending import Head
from ..transcript.writing import NO_CONTENT
from . import composing, paths
from .exchanges import exchanges, is_prompt
from .rewinding import WarmPath
from .sharing import SharedUse

T = TypeVar("T")

# How many transcripts are followed incrementally. Others are read as a whole at their next turn.
READERS = 1024

# Up to so many bytes are read on the event loop: 64 KB are read, hashed and parsed in about 1 ms.
SMALL = 64 * 1024

# Seconds to wait for the end of a transcript. The CLI flushes it before the result, but a loaded machine may be late.
# With CLI 2.1.150 to 2.1.260 a new session's file may appear some milliseconds after its first result (under load in 6
# of 7 runs). Between two looks at most FLUSH_STEP is counted: this process may have been paused, or be busy.
FLUSH_WAIT = 3.0
FLUSH_POLL = 0.02
FLUSH_STEP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome(Answered):
    """The end of a turn from the CLI's side. `stopped`: also if the answer reached its token limit, where the CLI would
    go on."""

    frame_uuid: str
    session_id: str
    cost_total: float | None = None
    told: Sequence[JSON] | None = ()  # the messages in a confined CLI's frames; None: too many

    @property
    def as_cli_has_it(self) -> tuple[Block, ...]:
        """The answer without the blocks that the provider cut: the CLI does not keep them."""
        return tuple(block for at, block in enumerate(self.output) if at not in self.partial)


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A session that is equal to the path, with the process that will continue it."""

    process: ClaudeProcess
    session: Session
    continuity: Continuity
    leaf: str | None  # the uuid of the path's last record
    links: tuple[Link, ...]  # how the session was obtained
    evidence: Evidence
    results: Mapping[str, JSON] = field(default_factory=dict)  # as MCP results, for a process that waits for them
    prewritten: tuple[Record, ...] = ()  # records of this turn that were written before its frame
    decisions: tuple[Record, ...] = ()  # marks for the chain (`transcript.mending`)
    prompt: tuple[Block, ...] = ()  # the new blocks
    head: Head | None = None  # what the request has before its messages
    no_prompt: bool = False  # the transcript gets no prompt of this turn
    fresh: bool = True  # the process was started for this turn
    rewritten: bool = False  # the session was written again because of `decisions`
    cost_before: float = 0.0  # the CLI's total cost (USD) before the turn
    unmet: tuple[ParameterName, ...] = ()  # see `base.Execution`
    rewound: frozenset[str] = frozenset()  # see `rewinding.WarmPath`
    shared: SharedUse | None = None  # the process also serves others, and has a session of its own (`sharing`)

    def scribe(self, session_id: str) -> Scribe:
        """A writer of records that follow the path."""
        return Scribe(session_id, self.process.cwd, self.process.version, time.time(), self.leaf)


@dataclass(frozen=True, slots=True)
class CapturedRecords:
    """Records that a turn added to the transcript."""

    records: list[Record]
    mark: FileMark | None  # the state of the transcript after them, by which a later change is noticed
    source: RecordsFrom
    more: bool = False  # the end may not be written yet
    beside: int = 0  # prompts of a person during the turn that do not follow its answer: they are on no path


class Captures:
    """Captures turns' records, and follows transcripts from turn to turn. One per engine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def forget(self, session_id: str) -> None:
        """Read the session's transcript as a whole the next time."""
        self._readers.pop(session_id, None)

    def is_unchanged_since_turn(self, session_id: str) -> bool:
        """Whether nothing was added to its transcript since our last turn; False if unknown."""
        reader = self._readers.get(session_id)
        return reader is not None and reader.is_at_end()

    def has_only_notes_added(self, session: Session, warm_path: WarmPath) -> bool:
        """Whether only notes of the CLI and rewound turns were added to its transcript since our last turn."""
        if transcript.is_unchanged(session.transcript, warm_path.mark):
            return True
        reader = self._readers.get(session.id)
        if reader is None or not reader.holds(warm_path.mark):
            return False
        with contextlib.suppress(TooMuchAppended):
            appended = reader.appended(SMALL, warm_path.rewound)
            if appended is not None:
                added = appended[0]
                return not added.path and not added.broken and added.follows(warm_path.mark.leaf)
        return False

    def follow(self, session_id: str, reader: Reader) -> None:
        """Follow the session from this reader on, which has just read the whole file."""
        self._readers.pop(session_id, None)
        self._readers[session_id] = reader
        while len(self._readers) > READERS:
            self._readers.popitem(last=False)

    async def capture(self, ready: LiveSession, turn: Turn, path: str, outcome: TurnOutcome) -> CapturedRecords:
        """The turn's records; if they cannot be read, made from the frames. Ends the process if the answer was cut.

        Raises WrongTranscript if the records show that the process continued another conversation.
        """
        if ready.process.launch.confined:
            return await asyncio.to_thread(_reported, ready, turn, outcome)
        copied = outcome.session_id != ready.session.id
        known = (await paths.parsed(await self._path(ready))).path if copied or outcome.stopped else []
        if outcome.stopped:
            captured = await self._from_cut_answer(ready, turn, path, outcome, known)
        else:
            # The CLI writes in batches: wait for the last one, bounded.
            waited, looked = 0.0, time.monotonic()
            while True:
                if copied:
                    captured = await _read(path, self._from_copy, ready, path, outcome, known)
                else:
                    captured = await self._from_file(ready, path, outcome)
                now = time.monotonic()
                waited, looked = waited + min(now - looked, FLUSH_STEP), now
                if not captured.more or waited >= FLUSH_WAIT:
                    break
                await asyncio.sleep(FLUSH_POLL)
        if captured.records:
            return captured
        if not copied:
            known = (await paths.parsed(await self._path(ready))).path
        if not await _read(path, _continued_path, path, ready, known, outcome):
            raise WrongTranscript("conversation")
        return replace(captured, records=_composed(ready, turn, outcome))

    async def _from_file(self, ready: LiveSession, path: str, outcome: TurnOutcome) -> CapturedRecords:
        """From the session's own file: the records that the turn appended or, if the file was replaced, those in the
        new one."""
        session_id, mark = ready.session.id, ready.session.mark
        reader: Reader | None = self._readers.pop(session_id, None)
        captured = None
        if mark is None:
            reader = Reader(path)
        elif reader is not None and reader.holds(mark):
            with contextlib.suppress(TooMuchAppended):
                captured, reader = self._from_appended(reader, ready, outcome, most=SMALL), None
        else:
            try:
                reader = await _read(path, Reader.after, path, mark)
            except transcript.TranscriptChanged:
                reader = None
        if reader is not None:
            captured = await _read(path, self._from_appended, reader, ready, outcome)
        if captured is None and mark is None:  # no file yet: if it appears, it must not count as a replacement
            return CapturedRecords([], None, "frames", more=True)
        return await _read(path, self._from_replaced, ready, path, outcome) if captured is None else captured

    def _from_appended(
        self, reader: Reader, ready: LiveSession, outcome: TurnOutcome, *, most: int = MAX_BYTES
    ) -> CapturedRecords | None:
        """The records that were appended. None if this is no longer the reader's file. Raises `TooMuchAppended` if more
        than `most` bytes follow."""
        appended = reader.appended(most, ready.rewound)
        if appended is None:
            return None
        parsed, at_end = appended
        own = up_to_end_of_turn(parsed.entries, outcome.frame_uuid, outcome.calls)
        records = connected_records(own, ready, outcome)
        if not records or parsed.broken:
            self.follow(ready.session.id, reader)  # read again when it is longer
            more = parsed.broken > 0 or not is_complete_turn(own, ready, outcome)
            return CapturedRecords(records, None, "unlinked", more)
        if len(own) < len(parsed.entries):  # a person has continued it: the next turn adopts that
            leaf = transcript.conversation_of(own)[-1].uuid
            own_ids = set(map(id, own))
            others = [entry for entry in parsed.entries if entry.in_conversation and id(entry) not in own_ids]
            on_no_path = sum(map(is_prompt, others)) if others and others[0].parent != leaf else 0
            return CapturedRecords(records, None, "transcript", beside=on_no_path)
        self.follow(ready.session.id, at_end)
        return CapturedRecords(records, at_end.mark, "transcript")

    def _from_replaced(self, ready: LiveSession, path: str, outcome: TurnOutcome) -> CapturedRecords:
        """The records that the turn added to a file that has replaced the original one."""
        read = Reader(path).appended()
        if read is None:
            # The CLI flushes its transcript before a result. A turn that ends with calls has none: the file may follow.
            return CapturedRecords([], None, "frames", more=bool(outcome.calls))
        own = up_to_end_of_turn(
            records_after(read[0].entries, ready.leaf, ready.results), outcome.frame_uuid, outcome.calls
        )
        # A file that has appeared since the last look is still being written.
        more = bool(outcome.calls) and not is_complete_turn(own, ready, outcome)
        return CapturedRecords(connected_records(own, ready, outcome), None, "replaced", more)

    def _from_copy(
        self, ready: LiveSession, path: str, outcome: TurnOutcome, known: Sequence[Entry]
    ) -> CapturedRecords:
        """A CLI that answers with a new id has copied the session: the copy shows what it had loaded.

        It becomes the session's file only if it is a copy of the path. CLI 1.0.120 gives new uuids to records that it
        shortens, and to all that follow.
        """
        read = Reader(path).appended()
        if read is None:
            return CapturedRecords([], None, "frames", more=True)
        parsed, reader = read
        added = records_after_copy(known, parsed, ready.leaf)
        own = up_to_end_of_turn(added, outcome.frame_uuid, outcome.calls)
        records = connected_records(own, ready, outcome)
        if not records or parsed.broken:
            more = parsed.broken > 0 or not is_complete_turn(own, ready, outcome)
            return CapturedRecords(records, None, "unlinked", more)
        if len(own) < len(added):
            return CapturedRecords(records, None, "copy")
        self.follow(outcome.session_id, reader)
        return CapturedRecords(records, reader.mark, "copy")

    async def _path(self, ready: LiveSession) -> list[Record]:
        """The records before the turn's frame."""
        parent = ready.session.tip_turn_id
        return [*await paths.shown(self._store, parent, ready.decisions), *ready.prewritten]

    async def _from_cut_answer(
        self, ready: LiveSession, turn: Turn, path: str, outcome: TurnOutcome, known: Sequence[Entry]
    ) -> CapturedRecords:
        """The answer was cut at a stop sequence or a token limit: cut its records, and rewrite the transcript."""
        added = await _read(path, _added, path, ready, outcome, known)
        scribe = ready.scribe(outcome.session_id)
        if any(entry.kind == "user" for entry in added) or (added and ready.no_prompt):
            unseen = ready.process.launch.capability.takes_tools
            records = composing.cut_answer(
                added, outcome.as_cli_has_it, scribe, turn.model, unseen=unseen, no_prompt=ready.no_prompt
            )
        elif await _read(path, _continued_path, path, ready, known, outcome):
            records = _composed(ready, turn, outcome)
        else:
            return CapturedRecords([], None, "unlinked")
        mark = await self._written(ready, path, outcome.session_id, records)
        return CapturedRecords(records, mark, "cut")

    async def marked(
        self, ready: LiveSession, path: str, outcome: TurnOutcome, captured: CapturedRecords, records: Sequence[Record]
    ) -> CapturedRecords:
        """Add the marks among these records, and rewrite the transcript accordingly. Its process is dead."""
        mark = await self._written(ready, path, outcome.session_id, records)
        return replace(captured, records=list(records), mark=mark, more=False)

    async def completed(
        self, ready: LiveSession, turn: Turn, path: str, outcome: TurnOutcome, captured: CapturedRecords
    ) -> CapturedRecords:
        """Add the text that a client received of a cut stream, and rewrite the transcript. Its process is dead."""
        missing = composing.partial_texts(outcome.output, outcome.partial)
        scribe = ready.scribe(outcome.session_id)
        records = await asyncio.to_thread(
            composing.with_partial_texts, captured.records, missing, outcome.calls, scribe, turn.model
        )
        mark = await self._written(ready, path, outcome.session_id, records)
        return replace(captured, records=records, mark=mark, more=False)

    async def _written(self, ready: LiveSession, path: str, session_id: str, records: Sequence[Record]) -> FileMark:
        if ready.process.launch.confined:
            return _never_equal(ready, records)
        path_records = await asyncio.to_thread(mending.shown, [*await self._path(ready), *records])
        form = ready.process.launch.capability.form
        return await _read(path, partial(transcript.write, Path(path), path_records, session_id, form=form))


async def _read(path: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads or writes this transcript."""
    return await in_thread_at(Path(path).parent, function, *arguments)


def _composed(ready: LiveSession, turn: Turn, outcome: TurnOutcome) -> list[Record]:
    scribe = ready.scribe(outcome.session_id)
    content = ready.prompt or tuple(block for message in turn.input for block in message.content)
    if ready.prewritten:  # the results are already written
        content = tuple(block for block in content if block.get("type") != "tool_result")
    elif ready.results:
        # The CLI sends results from MCP in this form: texts as blocks, an error as one text (run on 2.1.330). Any other
        # form would break the provider's cache.
        sent: list[Block] = []
        for block in content:
            result: str | list[Block] | None = block.get("content")
            texts: list[Block] = [{"type": "text", "text": result}] if isinstance(result, str) else list(result or ())
            if any(part["text"].strip() for part in texts):  # else the CLI adds a text of its own
                result = "\n".join(part["text"] for part in texts).strip() if block.get("is_error") else texts
            sent.append({**block, "content": result})
        content = tuple({block["tool_use_id"]: block for block in sent}.values())
    if told := answer_of(outcome.told or (), content, scribe, turn.model, outcome.frame_uuid):
        if _is_answer(transcript.parse_records(told), ready, outcome):
            return told
        scribe.parent = ready.leaf
    prompt = [scribe.record(Message("user", content), turn.model, record_uuid=outcome.frame_uuid)] if content else []
    if not outcome.as_cli_has_it and ready.process.launch.capability.takes_tools:
        # A CLI drops an empty answer when it loads it, and adds a message of its own after the prompt.
        return [*prompt, composing.closing_record(scribe)]
    return [*prompt, scribe.record(Message("assistant", client_tools.as_cli(outcome.as_cli_has_it)), turn.model)]


def _reported(ready: LiveSession, turn: Turn, outcome: TurnOutcome) -> CapturedRecords:
    """A confined agent's turn: what was sent, and what the CLI reported.

    Programs of the agent can write to its transcript, so nothing in it counts: not words, nor the CLI's notes, by which
    it would forget or replace what was said before. It is written anew before another process loads it.
    """
    records = _composed(ready, turn, outcome)
    if outcome.stopped:
        entries = transcript.parse_records(records).entries
        scribe, unseen = ready.scribe(outcome.session_id), ready.process.launch.capability.takes_tools
        records = composing.cut_answer(
            entries, outcome.as_cli_has_it, scribe, turn.model, unseen=unseen, no_prompt=ready.no_prompt
        )
    return CapturedRecords(records, _never_equal(ready, records), "cut" if outcome.stopped else "reported")


def _never_equal(ready: LiveSession, records: Sequence[Record]) -> FileMark:
    """The mark of a transcript that is not read: no file is equal to it. Its time is the one from which on files beside
    the transcript are new; file systems have coarse clocks."""
    leaf = next((record.uuid for record in reversed(records) if record.uuid is not None), ready.leaf)
    return FileMark(0, 0, 0, time.time_ns() - 10_000_000, "", leaf)


def answer_of(
    told: Sequence[JSON], sent: Sequence[Block], scribe: Scribe, model: str, frame_uuid: str | None
) -> list[Record]:
    """Records of what was sent to a CLI, and of the messages that it reported; none if it reported none.

    A client's result is as it was sent, at its place. What the CLI has added in a user's name becomes a part of the
    result before it: programs can imitate the CLI, and may say whatever they like in their results.
    """
    left = {block["tool_use_id"]: block for block in sent if block.get("type") == "tool_result"}
    clients, answered = frozenset(left), set[object]()
    messages: list[JSON] = []
    for message in told:
        content: list[Block] = message["content"]
        if message["role"] == "user":
            results: list[Block] = []
            for block in content:
                call = block.get("tool_use_id")
                if block.get("type") == "tool_result" and call not in answered:  # a call has one result
                    answered.add(call)
                    results.append(left.pop(call, block))
            added = [block for block in content if block.get("type") != "tool_result"]
            if not results and added and messages and messages[-1]["role"] == "user":
                results = messages.pop()["content"]
            if results and added and results[-1].get("tool_use_id") not in clients:
                said = results[-1].get("content")
                blocks = said if isinstance(said, list) else [{"type": "text", "text": str(said or NO_CONTENT)}]
                results[-1] = {**results[-1], "content": [*blocks, *added]}
            content = results
        if content:
            messages.append({**message, "content": content})
    rest = tuple(block for block in sent if block.get("type") != "tool_result" or block["tool_use_id"] in left)
    prompt = [scribe.record(Message("user", rest), model, record_uuid=frame_uuid)] if rest and messages else []
    return [*prompt, *scribe.told(messages, model)]


def _is_answer(told: Parsed, ready: LiveSession, outcome: TurnOutcome) -> bool:
    """Whether these records are valid, and have the turn's whole answer; of one that was cut they may have more or
    less."""
    blocks = [block for entry in told.path if entry.kind == "assistant" for block in entry.content]
    said, expected = (
        "".join(b["text"] for b in of if b.get("type") == "text") for of in (blocks, outcome.as_cli_has_it)
    )
    # A program may have printed so much that no import would take it.
    if not all(entry.sound and not is_dense(entry.line.encode()) for entry in told.entries):
        return False
    if outcome.stopped:
        return said.startswith(expected) or expected.startswith(said)
    return said == expected and is_complete_turn(told.path, ready, outcome)


def records_after(entries: Sequence[Entry], leaf: str | None, results: Collection[str] = ()) -> list[Entry]:
    """The lines after the path's last record. If that is missing: lines whose parent it is, or with one of `results`
    (the results of parallel calls have their call as parent). Only these belong to the turn."""
    if leaf is None:
        return list(entries)
    for at, entry in enumerate(entries):
        if entry.uuid == leaf:
            return list(entries[at + 1 :])
    for at, entry in enumerate(entries):
        if entry.in_conversation and (entry.parent == leaf or not _results_of([entry]).isdisjoint(results)):
            return list(entries[at:])
    return []


def records_after_copy(known: Sequence[Entry], parsed: Parsed, leaf: str | None) -> list[Entry]:
    """The lines after a copy of the path, with the path's last record as parent; none if it is no copy."""
    path = parsed.path
    start = transcript.end_of_copy(known, path)
    if start is None:
        return []
    if leaf is None or any(entry.uuid == leaf for entry in path):
        return records_after(parsed.entries, leaf)
    at = next((at for at, entry in enumerate(parsed.entries) if start < len(path) and entry is path[start]), None)
    return [] if at is None else [parsed.entries[at].with_parent(leaf), *parsed.entries[at + 1 :]]


def _added(path: str, ready: LiveSession, outcome: TurnOutcome, known: Sequence[Entry]) -> list[Entry]:
    """The records that the turn added, read from the whole file."""
    try:
        parsed = parse_file(path)
    except (OSError, SessionBusy):  # the answer is complete: its records are made from the frames
        return []
    if outcome.session_id != ready.session.id:
        return records_after_copy(known, parsed, ready.leaf)
    return records_after(parsed.entries, ready.leaf, ready.results)


def _continued_path(path: str, ready: LiveSession, known: Sequence[Entry], outcome: TurnOutcome) -> bool:
    """Whether the process continued these records. False only if its file shows another conversation.

    A CLI writes records whose parent is the last one that it loaded, or a copy of everything that it loaded.
    """
    try:
        parsed = parse_file(path)
    except (OSError, SessionBusy):
        return True
    if not known:
        return True
    if outcome.session_id != ready.session.id:
        if lacks_prompts(known, parsed.path, ready.prompt):
            return False
        # If its loading was confirmed, the copy was changed later.
        return is_copied(known, parsed.path, wholly=not ready.process.launch.capability.tells_when_loaded)
    return continues(known, parsed.path, outcome.frame_uuid)


def continues(known: Sequence[Entry], path: Sequence[Entry], frame_uuid: str) -> bool:
    """Whether the turn's frame descends from a known record. Also True if the frame is not on the path."""
    ours = {entry.uuid for entry in known}
    by_uuid = {entry.uuid: entry for entry in path}
    at = by_uuid.get(frame_uuid)
    if at is None:
        return True
    while at is not None and at.uuid not in ours:
        del by_uuid[at.uuid]  # so that cycles end
        above = at.parent or at.data.get("logicalParentUuid")
        if above in ours:
            return True
        at = by_uuid.get(above)
    return at is not None


def is_copied(known: Sequence[Entry], copy: Sequence[Entry], *, wholly: bool) -> bool:
    """Whether everything in the copy before its last prompt is in these records, in this order; unless `wholly`, a part
    is enough.

    A copying CLI may leave out records, and add answers in the model's place or a summary, but no other messages. Also
    True if the turn is not in the copy.
    """
    prompts = [at for at, entry in enumerate(copy) if is_prompt(entry)]
    if not prompts or any(entry.data.get("isCompactSummary") for entry in copy):
        return True
    real = (entry for entry in copy[: prompts[-1]] if entry.data.get("message", {}).get("model") != SYNTHETIC_MODEL)
    copied = [block for entry in real for block in entry.message_blocks()]
    ours = [block for entry in known for block in entry.message_blocks()]
    if not wholly:
        return not _keys(copied).isdisjoint(_keys(ours))
    rest = iter(ours)
    return bool(copied) and all(block in rest for block in copied)


def lacks_prompts(known: Sequence[Entry], copy: Sequence[Entry], prompt: Sequence[Block]) -> bool:
    """Whether the CLI had loaded an incomplete file of the session: its copy ends with this prompt, has no messages
    that our records lack, but lacks one of their prompts. (It may leave out other records when it copies.)"""
    prompts = [at for at, entry in enumerate(copy) if is_prompt(entry)]
    if not prompts or any(entry.data.get("isCompactSummary") for entry in copy):
        return False
    last_prompt = [block for _, block in copy[prompts[-1]].message_blocks()]
    copied = _keys(block for entry in copy[: prompts[-1]] for block in entry.message_blocks())
    ours = [block for entry in known for block in entry.message_blocks()]
    our_prompts = [(role, block) for role, block in ours if role == "user" and str(block.get("text", "")).strip()]
    return last_prompt == list(prompt) and copied <= _keys(ours) and not _keys(our_prompts) <= copied


def _keys(blocks: Iterable[tuple[str, Block]]) -> set[str]:
    """The blocks with their roles as texts, for fast lookup: there may be very many."""
    return {json.dumps(block, sort_keys=True) for block in blocks}


def up_to_end_of_turn(entries: Sequence[Entry], frame_uuid: str, calls: Collection[str] = ()) -> Sequence[Entry]:
    """The lines up to the end of the exchange with this prompt or, if it is not found (CLI 1.x changes its uuid), of
    the first exchange. Later lines are a person's, or from a CLI that ended at its calls and invented results."""
    if calls:
        results = (at for at, entry in enumerate(entries) if not _results_of([entry]).isdisjoint(calls))
        entries = entries[: next(results, len(entries))]
    if sum(entry.in_conversation and entry.kind == "user" for entry in entries) > 1:
        entries = _without_others(entries, frame_uuid)
    kinds = [entry.kind for entry in transcript.conversation_of(entries)]
    if "assistant" not in kinds or "user" not in kinds[kinds.index("assistant") :]:
        return entries
    found: list[Entry] = []
    first: list[Entry] = []
    for exchange in exchanges(entries):
        found += exchange.entries
        if any(entry.uuid == frame_uuid for entry in exchange.entries):
            return found
        first = first or list(found)
    return first


def _without_others(entries: Sequence[Entry], frame_uuid: str) -> Sequence[Entry]:
    """The lines without those that a person's CLI wrote between the turn's own, before its answer was written.

    That CLI loads a prompt without an answer, adds "No response requested.", and its own prompt has that as parent; the
    turn's answer has the turn's prompt as parent (run on 2.1.330). Lines after the turn's own stay.
    """
    by_uuid = {entry.uuid: entry for entry in transcript.conversation_of(entries)}
    if frame_uuid not in by_uuid:
        return entries
    others: set[str | None] = set()
    has_invented_answer = False
    for uuid, entry in by_uuid.items():
        if uuid != frame_uuid and is_prompt(entry):
            others.add(uuid)
            above = by_uuid.get(entry.parent)
            while above is not None and above.data.get("message", {}).get("model") == SYNTHETIC_MODEL:
                has_invented_answer = True
                if above.uuid in others:  # then so are its ancestors
                    break
                others.add(above.uuid)
                above = by_uuid.get(above.parent)
        elif entry.parent in others:
            others.add(uuid)
    is_others = [uuid in others for uuid in by_uuid]
    all_at_the_end = is_others == sorted(is_others)
    if not has_invented_answer and all_at_the_end:
        return entries
    return [entry for entry in entries if entry.uuid not in others]


def connected_records(entries: Sequence[Entry], ready: LiveSession, outcome: TurnOutcome) -> list[Record]:
    """The lines as records, if they are this turn's complete exchange, connected to the path; else none."""
    conversation = transcript.conversation_of(entries)
    users = [entry for entry in conversation if entry.kind == "user"]
    if not is_complete_turn(entries, ready, outcome) or not transcript.unbroken(conversation, ready.leaf):
        return []
    if is_damaged(conversation, [*ready.prompt, *ready.results.values(), *outcome.as_cli_has_it]):
        return []
    is_ours = any(entry.uuid == outcome.frame_uuid for entry in users)
    if not is_ours and users:  # CLI 1.x gives our prompt another uuid; it does not write `promptSource`
        is_ours = not any(entry.data.get("promptSource") for entry in users)
    return [entry.record() for entry in entries] if is_ours or ready.no_prompt else []


def is_complete_turn(entries: Sequence[Entry], ready: LiveSession, outcome: TurnOutcome) -> bool:
    """Whether the exchange is complete: the results that were sent, then the open calls or the end of the answer."""
    conversation = transcript.conversation_of(entries)
    if ready.results and not ready.results.keys() <= _results_of(conversation):
        return False
    if outcome.calls:
        return outcome.calls <= set(client_tools.calls_of(block for entry in conversation for block in entry.content))
    return transcript.is_complete(conversation)


def is_damaged(entries: Sequence[Entry], blocks: Sequence[JSON]) -> bool:
    """Whether an expected text is missing and another of equal length present: it was overwritten in place. Changes by
    a CLI (it cuts, trims, adds notes) also change the length."""
    expected, found = _texts(blocks), _texts([block for entry in entries for block in entry.content])
    if expected <= found:
        return False
    expected = set(map(printable, expected))
    missing = set(map(len, expected - found))
    return not missing.isdisjoint(map(len, found - expected))


_TEXT_FIELDS = frozenset({"text", "thinking", "signature", "content"})


def _texts(blocks: Sequence[JSON]) -> set[str]:
    """The texts in these blocks and in nested ones."""
    found: set[str] = set()
    for block in blocks:
        for name, value in block.items():
            if name not in _TEXT_FIELDS:
                continue
            if isinstance(value, str):
                found.add(value)
            elif name == "content" and isinstance(value, list):
                found |= _texts([inner for inner in value if isinstance(inner, dict)])
    return found


def _results_of(path: Sequence[Entry]) -> set[str]:
    """The ids of calls with a result in these lines."""
    blocks = (block for entry in path for block in entry.content)
    return {str(block.get("tool_use_id")) for block in blocks if block.get("type") == "tool_result"}
