"""What a turn added to a transcript: which of its lines are the turn's own, and whether they are all there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....domain import client_tools
from ....domain.evidence import Evidence, RecordsFrom
from ....domain.models import JSON, Block, Continuity, FileMark, Link, Message, Record, Session, Turn
from ....domain.parameters import Name
from ....stores.base import Store
from ...base import Answered
from .. import transcript
from ..process.events import WrongTranscript
from ..process.frames import printable
from ..process.process import ClaudeProcess
from ..transcript import Entry, Head, Parsed, Reader, Scribe
from ..transcript.entries import MAX_BYTES, MuchMore, contents
from . import partials, paths, stopping
from .exchanges import exchanges, is_prompt
from .reopening import SYNTHETIC_MODEL, closing
from .rewinding import Held
from .sharing import SharedUse

# How many transcripts are followed without reading them again; beyond it one is re-hashed at its next turn.
READERS = 1024

# What a turn added is read on the event loop up to this size (bytes): 64 KB are read, hashed and parsed in about 1 ms.
SMALL = 64 * 1024

# The CLI flushes its transcript before the result; a loaded disk, or a busy machine, may be later. With CLI 2.1.150 to
# 2.1.260 the file of a new session may appear some milliseconds after its first result (under load in 6 of 7 runs).
# Seconds. From one look to the next no more than FLUSH_STEP counts, however long this process was paused in between.
FLUSH_WAIT = 3.0
FLUSH_POLL = 0.02
FLUSH_STEP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome(Answered):
    """How the CLI's side of a turn ended, as far as it concerns the session.

    `stopped` also where the answer reached its limit of tokens, and the CLI would go on. The CLI does not know the
    `partial` blocks: the provider cut them off.
    """

    frame_uuid: str
    session_id: str
    cost_total: float | None = None

    @property
    def finished(self) -> tuple[Block, ...]:
        """The answer as the CLI knows it."""
        return tuple(block for at, block in enumerate(self.output) if at not in self.partial)


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A session that is equal to the path, with the process that will continue it.

    `leaf` is the uuid of the path's last record; `links` explain how the session came to be what it is. `results`
    are MCP's, for a process that waits for them; `prewritten` are records of this turn that were written before its
    frame. `decisions` are records of what was decided about the path before it (`transcript.mending`). `prompt` is
    what is said, `head` what stands before the messages. `quiet`: the turn has no prompt of its own in the
    transcript. `fresh`: the process was started for this turn. `rewritten`: the session was written anew by such
    decisions. `spent` is the CLI's own total (USD) before it. `unmet`: see `base.Execution`. `taken_back`: see
    `rewinding.Held`. `shared`: the process serves others too, and `session` is none of the agent's (`sharing`).
    """

    process: ClaudeProcess
    session: Session
    continuity: Continuity
    leaf: str | None
    links: tuple[Link, ...]
    evidence: Evidence
    results: Mapping[str, JSON] = field(default_factory=dict)
    prewritten: tuple[Record, ...] = ()
    decisions: tuple[Record, ...] = ()
    prompt: tuple[Block, ...] = ()
    head: Head | None = None
    quiet: bool = False
    fresh: bool = True
    rewritten: bool = False
    spent: float = 0.0
    unmet: tuple[Name, ...] = ()
    taken_back: frozenset[str] = frozenset()
    shared: SharedUse | None = None


@dataclass(frozen=True, slots=True)
class CapturedRecords:
    """What a turn was seen to add to the transcript. `more`: the end of it may not be written yet. `beside`: prompts
    of somebody else in this session meanwhile, which do not follow the turn's answer: they are on no path."""

    records: list[Record]
    mark: FileMark | None
    source: RecordsFrom
    more: bool = False
    beside: int = 0


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

    def is_as_left(self, session: Session, held: Held) -> bool:
        """Nothing was added to its transcript since our last turn there but notes of the CLI's own, and what was taken
        back."""
        if transcript.is_unchanged(session.transcript, held.mark):
            return True
        reader = self._readers.get(session.id)
        if reader is None or not reader.holds(held.mark):
            return False
        with contextlib.suppress(MuchMore):
            got = reader.appended(SMALL, held.taken_back)
            return got is not None and not (got[0].path or got[0].broken) and got[0].follows(held.mark.leaf)
        return False

    def follow(self, session_id: str, reader: Reader) -> None:
        """Go on from where this reader is: its file was read as a whole just now."""
        self._readers.pop(session_id, None)
        self._readers[session_id] = reader
        while len(self._readers) > READERS:
            self._readers.popitem(last=False)

    async def taken(self, ready: LiveSession, turn: Turn, path: str, said: TurnOutcome) -> CapturedRecords:
        """What the turn added. What cannot be read is made from the frames. After a cut, its process is dead.

        Raises WrongTranscript where what was written shows that the process went on from another conversation.
        """
        copied = said.session_id != ready.session.id
        known = (await paths.parsed(await self._path(ready))).path if copied or said.stopped else []
        if said.stopped:
            taken = await self._cut(ready, turn, path, said, known)
        else:
            # It is written in batches: the last one is waited for, bounded.
            waited, looked = 0.0, time.monotonic()
            while True:
                if copied:
                    taken = await asyncio.to_thread(self._take_copy, ready, path, said, known)
                else:
                    taken = await self._take(ready, path, said)
                now = time.monotonic()
                waited, looked = waited + min(now - looked, FLUSH_STEP), now
                if not taken.more or waited >= FLUSH_WAIT:
                    break
                await asyncio.sleep(FLUSH_POLL)
        if taken.records:
            return taken
        if not copied:
            known = (await paths.parsed(await self._path(ready))).path
        if not await asyncio.to_thread(_goes_on, path, ready, known, said):
            raise WrongTranscript("conversation")
        return replace(taken, records=_made(ready, turn, said))

    async def _take(self, ready: LiveSession, path: str, said: TurnOutcome) -> CapturedRecords:
        """What was appended to the session's own file; where another lies there, what the turn added to that."""
        session_id, mark = ready.session.id, ready.session.mark
        reader: Reader | None = self._readers.pop(session_id, None)
        taken = None
        if mark is None:
            reader = Reader(path)
        elif reader is not None and reader.holds(mark):
            with contextlib.suppress(MuchMore):
                taken, reader = self._take_behind(reader, ready, said, most=SMALL), None
        else:
            try:
                reader = await asyncio.to_thread(Reader.behind, path, mark)
            except transcript.TranscriptChanged:
                reader = None
        if reader is not None:
            taken = await asyncio.to_thread(self._take_behind, reader, ready, said)
        if taken is None and mark is None:  # no file yet; looked at anew it may be one, which would pass for another
            return CapturedRecords([], None, "frames", more=True)
        return await asyncio.to_thread(self._take_anew, ready, path, said) if taken is None else taken

    def _take_behind(
        self, reader: Reader, ready: LiveSession, said: TurnOutcome, *, most: int = MAX_BYTES
    ) -> CapturedRecords | None:
        """None where it is not the reader's file any more. Raises `MuchMore` where more than `most` bytes follow."""
        got = reader.appended(most, ready.taken_back)
        if got is None:
            return None
        parsed, now = got
        own = up_to_own(parsed.entries, said.frame_uuid, said.calls)
        records = sound(own, ready, said)
        if not records or parsed.broken:
            self.follow(ready.session.id, reader)  # to be read again, when more of it is there
            more = parsed.broken > 0 or not is_whole([entry for entry in own if entry.on_path], ready, said)
            return CapturedRecords(records, None, "unlinked", more)
        if len(own) < len(parsed.entries):  # somebody went on in it already: the next turn compares, and adopts that
            leaf = [entry.uuid for entry in own if entry.on_path][-1]
            ours = set(map(id, own))
            theirs = [entry for entry in parsed.entries if entry.on_path and id(entry) not in ours]
            on_no_path = sum(map(is_prompt, theirs)) if theirs and theirs[0].parent != leaf else 0
            return CapturedRecords(records, None, "transcript", beside=on_no_path)
        self.follow(ready.session.id, now)
        return CapturedRecords(records, now.mark, "transcript")

    def _take_anew(self, ready: LiveSession, path: str, said: TurnOutcome) -> CapturedRecords:
        """What the turn added to a file that is not the one that it began with."""
        got = Reader(path).appended()
        if got is None:
            # At calls there is no result yet that the CLI flushes its transcript before.
            return CapturedRecords([], None, "frames", more=bool(said.calls))
        own = up_to_own(behind(got[0].entries, ready.leaf, ready.results), said.frame_uuid, said.calls)
        # A file that has only come to be since the last look is still being written.
        more = bool(said.calls) and not is_whole([entry for entry in own if entry.on_path], ready, said)
        return CapturedRecords(sound(own, ready, said), None, "replaced", more)

    def _take_copy(self, ready: LiveSession, path: str, said: TurnOutcome, known: Sequence[Entry]) -> CapturedRecords:
        """A CLI that answers under a new id has copied the session: the copy shows what it had loaded.

        It is taken as the session's file only where it is a copy of the path. CLI 1.0.120 gives new names to records
        that it cuts, and to all that follow.
        """
        got = Reader(path).appended()
        if got is None:
            return CapturedRecords([], None, "frames", more=True)
        parsed, reader = got
        added = behind_copy(known, parsed, ready.leaf)
        own = up_to_own(added, said.frame_uuid, said.calls)
        records = sound(own, ready, said)
        if not records or parsed.broken:
            more = parsed.broken > 0 or not is_whole([entry for entry in own if entry.on_path], ready, said)
            return CapturedRecords(records, None, "unlinked", more)
        if len(own) < len(added):
            return CapturedRecords(records, None, "copy")
        self.follow(said.session_id, reader)
        return CapturedRecords(records, reader.mark, "copy")

    async def _path(self, ready: LiveSession) -> list[Record]:
        """The records before the turn's own frame."""
        parent = ready.session.tip_turn_id
        return [*await paths.shown(self._store, parent, ready.decisions), *ready.prewritten]

    async def _cut(
        self, ready: LiveSession, turn: Turn, path: str, said: TurnOutcome, known: Sequence[Entry]
    ) -> CapturedRecords:
        """The answer was cut: so are its records, and the transcript with them."""
        added = await asyncio.to_thread(_added, path, ready, said, known)
        scribe = Scribe(said.session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
        if any(entry.kind == "user" for entry in added) or (added and ready.quiet):
            unseen = ready.process.launch.capability.takes_tools
            records = stopping.cut(added, said.finished, scribe, turn.model, unseen=unseen, quiet=ready.quiet)
        elif await asyncio.to_thread(_goes_on, path, ready, known, said):
            records = _made(ready, turn, said)
        else:
            return CapturedRecords([], None, "unlinked")
        mark = await self._written(ready, path, said.session_id, records)
        return CapturedRecords(records, mark, "cut")

    async def marked(
        self, ready: LiveSession, path: str, said: TurnOutcome, taken: CapturedRecords, records: Sequence[Record]
    ) -> CapturedRecords:
        """The same with the marks among these records, and the transcript as they have it. Its process is dead."""
        mark = await self._written(ready, path, said.session_id, records)
        return replace(taken, records=list(records), mark=mark, more=False)

    async def completed(
        self, ready: LiveSession, turn: Turn, path: str, said: TurnOutcome, taken: CapturedRecords
    ) -> CapturedRecords:
        """The same with the words that a client was given of a stream that was cut. Its process is dead."""
        missing = partials.words(said.output, said.partial)
        scribe = Scribe(said.session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
        records = await asyncio.to_thread(partials.placed, taken.records, missing, said.calls, scribe, turn.model)
        mark = await self._written(ready, path, said.session_id, records)
        return replace(taken, records=records, mark=mark, more=False)

    async def _written(self, ready: LiveSession, path: str, session_id: str, records: Sequence[Record]) -> FileMark:
        path_records = await asyncio.to_thread(transcript.shown, [*await self._path(ready), *records])
        form = ready.process.launch.capability.form
        return await asyncio.to_thread(transcript.write, Path(path), path_records, session_id, form=form)


def _made(ready: LiveSession, turn: Turn, said: TurnOutcome) -> list[Record]:
    scribe = Scribe(said.session_id, ready.process.cwd, ready.process.version, time.time(), ready.leaf)
    content = ready.prompt or tuple(block for message in turn.input for block in message.content)
    if ready.prewritten:  # they are there already
        content = tuple(block for block in content if block.get("type") != "tool_result")
    elif ready.results:
        content = tuple({**block, "content": _as_sent(block)} for block in content)
    asked = [scribe.record(Message("user", content), turn.model, record_uuid=said.frame_uuid)] if content else []
    if not said.finished and ready.process.launch.capability.takes_tools:
        # An empty answer is dropped by a CLI that loads it, which then puts words of its own behind the prompt.
        return [*asked, closing(scribe)]
    return [*asked, scribe.record(Message("assistant", client_tools.as_cli(said.finished)), turn.model)]


def _as_sent(result: Block) -> str | list[Block] | None:
    """The content of a client's result as the CLI sends it from MCP: texts as blocks, an error as one text (run on
    2.1.330). With other content than it was sent with first, the provider's cache ends there."""
    content: str | list[Block] | None = result.get("content")
    texts: list[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    if not any(part["text"].strip() for part in texts):
        return content  # the CLI puts words of its own
    return "\n".join(part["text"] for part in texts).strip() if result.get("is_error") else texts


def behind(entries: Sequence[Entry], leaf: str | None, results: Collection[str] = ()) -> list[Entry]:
    """The lines behind the path's last record; where that is gone, those that hang on it, or give one of `results` to
    its call: those of parallel calls hang on their own. No others are the turn's."""
    if leaf is None:
        return list(entries)
    for at, entry in enumerate(entries):
        if entry.uuid == leaf:
            return list(entries[at + 1 :])
    for at, entry in enumerate(entries):
        if entry.on_path and (entry.parent == leaf or not _results_of([entry]).isdisjoint(results)):
            return list(entries[at:])
    return []


def behind_copy(known: Sequence[Entry], parsed: Parsed, leaf: str | None) -> list[Entry]:
    """The lines behind a copy of the path, hung on its last record; none where it is no copy of these records."""
    path = parsed.path
    start = transcript.copied_up_to(known, path)
    if start is None:
        return []
    if leaf is None or any(entry.uuid == leaf for entry in path):
        return behind(parsed.entries, leaf)
    at = next((at for at, entry in enumerate(parsed.entries) if start < len(path) and entry is path[start]), None)
    return [] if at is None else [parsed.entries[at].hung_on(leaf), *parsed.entries[at + 1 :]]


def _added(path: str, ready: LiveSession, said: TurnOutcome, known: Sequence[Entry]) -> list[Entry]:
    """What the turn added, read from the whole file."""
    try:
        parsed = transcript.parse(contents(path))
    except OSError:
        return []
    copied = said.session_id != ready.session.id
    return behind_copy(known, parsed, ready.leaf) if copied else behind(parsed.entries, ready.leaf, ready.results)


def _goes_on(path: str, ready: LiveSession, known: Sequence[Entry], said: TurnOutcome) -> bool:
    """Whether the process continued these records. False only where its file shows another conversation.

    A CLI hangs what it writes on the last record that it loaded, or writes a copy of all that it loaded.
    """
    try:
        parsed = transcript.parse(contents(path))
    except OSError:
        return True
    if not known:
        return True
    if said.session_id != ready.session.id:
        if lacks_prompts(known, parsed.path, ready.prompt):
            return False
        # Where it was known what it loads, what differs in parts was done to the copy.
        return is_copied(known, parsed.path, wholly=not ready.process.launch.capability.tells_when_loaded)
    return is_behind(known, parsed.path, said.frame_uuid)


def is_behind(known: Sequence[Entry], path: Sequence[Entry], frame_uuid: str) -> bool:
    """Whether the turn's frame descends from a known record. True where the frame is not on the path."""
    ours = {entry.uuid for entry in known}
    there = {entry.uuid: entry for entry in path}
    at = there.get(frame_uuid)
    if at is None:
        return True
    while at is not None and at.uuid not in ours:
        del there[at.uuid]  # so that it ends, whatever hangs on whatever
        above = at.parent or at.data.get("logicalParentUuid")
        if above in ours:
            return True
        at = there.get(above)
    return at is not None


def is_copied(known: Sequence[Entry], copy: Sequence[Entry], *, wholly: bool) -> bool:
    """Whether all that the copy says before its last prompt is in these records, in this order; unless `wholly`, any of
    it.

    A CLI may leave out records when it copies, and answers in the model's place. It does not add anybody's words but a
    summary. True where the turn itself is not in the copy.
    """
    prompts = [at for at, entry in enumerate(copy) if is_prompt(entry)]
    if not prompts or any(entry.data.get("isCompactSummary") for entry in copy):
        return True
    real = (entry for entry in copy[: prompts[-1]] if entry.data.get("message", {}).get("model") != SYNTHETIC_MODEL)
    said = [spoken for entry in real for spoken in entry.spoken()]
    ours = [spoken for entry in known for spoken in entry.spoken()]
    if not wholly:
        return not _texts_of(said).isdisjoint(_texts_of(ours))
    rest = iter(ours)
    return bool(said) and all(spoken in rest for spoken in said)


def lacks_prompts(known: Sequence[Entry], copy: Sequence[Entry], prompt: Sequence[Block]) -> bool:
    """Whether the CLI had loaded another file of the same session: its copy ends with this prompt, says nothing that
    our records do not say, and lacks one of their prompts. Other records it may leave out when it copies."""
    prompts = [at for at, entry in enumerate(copy) if is_prompt(entry)]
    if not prompts or any(entry.data.get("isCompactSummary") for entry in copy):
        return False
    asked = [block for _, block in copy[prompts[-1]].spoken()]
    said = [spoken for entry in copy[: prompts[-1]] for spoken in entry.spoken()]
    ours = [spoken for entry in known for spoken in entry.spoken()]
    asks = [spoken for spoken in ours if spoken[0] == "user" and str(spoken[1].get("text", "")).strip()]
    there = _texts_of(said)
    return asked == list(prompt) and there <= _texts_of(ours) and not _texts_of(asks) <= there


def _texts_of(said: Iterable[tuple[str, Block]]) -> set[str]:
    """To look for one among many: others may write any number of them."""
    return {json.dumps(spoken, sort_keys=True) for spoken in said}


def up_to_own(entries: Sequence[Entry], frame_uuid: str, calls: Collection[str] = ()) -> Sequence[Entry]:
    """These lines up to the end of the exchange with this prompt; of the first one, where it is in none (CLI 1.x gives
    it another name). What follows was said by somebody else meanwhile, or by a CLI that ended at its calls: it makes up
    results for them, where the client's are still to come."""
    if calls:
        given = (at for at, entry in enumerate(entries) if not _results_of([entry]).isdisjoint(calls))
        entries = entries[: next(given, len(entries))]
    if sum(entry.on_path and entry.kind == "user" for entry in entries) > 1:
        entries = _without_others(entries, frame_uuid)
    spoken = [entry.kind for entry in entries if entry.on_path]
    if "assistant" not in spoken or "user" not in spoken[spoken.index("assistant") :]:
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
    """These lines without what a CLI of somebody else wrote among the turn's own, before its answer was there.

    That CLI loads a prompt without an answer, puts "No response requested." behind it, and hangs its own prompt on
    that; the answer hangs on the turn's prompt (run on 2.1.330). What only follows the turn's lines stays.
    """
    there = {entry.uuid: entry for entry in entries if entry.on_path}
    if frame_uuid not in there:
        return entries
    others: set[str | None] = set()
    made_up = False
    for uuid, entry in there.items():
        if uuid != frame_uuid and is_prompt(entry):
            others.add(uuid)
            above = there.get(entry.parent)
            while above is not None and above.data.get("message", {}).get("model") == SYNTHETIC_MODEL:
                made_up = True
                if above.uuid in others:  # and all above it
                    break
                others.add(above.uuid)
                above = there.get(above.parent)
        elif entry.parent in others:
            others.add(uuid)
    among = [uuid in others for uuid in there]
    if not made_up and among == sorted(among):
        return entries
    return [entry for entry in entries if entry.uuid not in others]


def sound(entries: Sequence[Entry], ready: LiveSession, said: TurnOutcome) -> list[Record]:
    """These lines as records, if they are this turn's whole exchange hanging on the path; else none."""
    path = [entry for entry in entries if entry.on_path]
    ours = [entry for entry in path if entry.kind == "user"]
    if not is_whole(path, ready, said) or not transcript.unbroken(path, ready.leaf):
        return []
    if is_damaged(path, [*ready.prompt, *ready.results.values(), *said.finished]):
        return []
    tagged = any(entry.uuid == said.frame_uuid for entry in ours)
    if not ready.quiet and (not ours or (not tagged and any(entry.data.get("promptSource") for entry in ours))):
        return []
    return [entry.record() for entry in entries]


def is_whole(path: Sequence[Entry], ready: LiveSession, said: TurnOutcome) -> bool:
    """Whether the path holds the whole exchange: the results sent, then the open calls or the end of the answer."""
    if ready.results and not ready.results.keys() <= _results_of(path):
        return False
    if said.calls:
        return said.calls <= set(client_tools.calls_of(block for entry in path for block in entry.content))
    return transcript.is_complete(path)


def is_damaged(path: Sequence[Entry], said: Sequence[JSON]) -> bool:
    """An expected text is missing and another of equal length present: it was overwritten in place. What a CLI changes
    itself (it cuts, trims, adds notes) changes the length."""
    expected, found = _texts(said), _texts([block for entry in path for block in entry.content])
    if expected <= found:
        return False
    expected = set(map(printable, expected))
    missing = set(map(len, expected - found))
    return not missing.isdisjoint(map(len, found - expected))


def _texts(blocks: Sequence[JSON]) -> set[str]:
    """What is said, thought and signed in these blocks, and in those within."""
    found: set[str] = set()
    for block in blocks:
        for name in ("text", "thinking", "signature", "content"):
            value = block.get(name)
            if isinstance(value, str):
                found.add(value)
            elif name == "content" and isinstance(value, list):
                found |= _texts([inner for inner in value if isinstance(inner, dict)])
    return found


def _results_of(path: Sequence[Entry]) -> set[str]:
    """The calls to which these lines give a result."""
    blocks = (block for entry in path for block in entry.content)
    return {str(block.get("tool_use_id")) for block in blocks if block.get("type") == "tool_result"}
