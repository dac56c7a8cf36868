"""Which of a path's records the model is shown. Pure.

The chain stores every record unchanged. Parts that the model's API would refuse are left out when records are written
for a CLI. Such decisions are stored in the path as records of our own (marks), at the turn that took them. So a
decision holds for every path through that turn and no other, and always gives the same records: the transcript is
compared with these (`comparing`), and the next request extends the last one byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from ....domain import limits
from ....domain.evidence import Note, NoteCode
from ....domain.models import JSON, THINKING, Block, Record, Tool
from . import files

KIND = "cli-session-proxy/mark"
_OPENING = f'{{"type":"{KIND}"'
# What a mark can leave out of all records before it, as types of blocks.
LeftOut = Literal["thinking", "images", "documents", "calls"]
_TYPES: dict[LeftOut, frozenset[str]] = {
    "thinking": THINKING,
    "images": frozenset({"image"}),
    "documents": frozenset({"document"}),
}
_KINDS: dict[str, LeftOut] = {block_type: kind for kind, types in _TYPES.items() for block_type in types}
# The texts that replace them. Thinking is just removed.
_PLACES: dict[LeftOut, str] = {
    "images": "[An image stood here. It is left out: the request would have been refused with it.]",
    "documents": "[A document stood here. It is left out: the request would have been refused with it.]",
    "calls": "[A tool was called here. It is left out: the request would have been refused with it.]",
}
RESULT = "[The result of that call:]"  # before the words of a result, which stay
SUMMARY = (
    "This conversation was longer than what fits into one request. This is a summary of what came before the messages "
    "that follow:\n\n"
)
GOES_ON = "I go on from this summary."
NO_TOKENS: Mapping[str, int] = {"input_tokens": 0, "output_tokens": 0}


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a path's requests, before the messages.

    `known_system`: the system prompt as known to the model by now, with later changes that were sent with prompts.
    `tools`: the client's (`Tool.as_json`), in the order and spelling of their first use.
    """

    system: str | None
    known_system: str | None
    tools: tuple[JSON, ...] = ()

    def as_record(self) -> Record:
        changed = {} if self.known_system == self.system else {"told": self.known_system}
        return _mark("head", system=self.system, tools=list(self.tools), **changed)


def leave_out(what: LeftOut, since: str | None = None, *, refused: bool = False) -> Record:
    """A mark: blocks of this kind before it are no longer shown, from the record `since` (None: the first) on.
    `refused`: the provider had refused them."""
    return _mark("leave_out", what=what, since=since, refused=refused)


def was_refused(records: Sequence[Record], what: LeftOut) -> bool:
    """Whether the provider refused a request on this path because of blocks of this kind."""
    marks = (json.loads(record.line) for record in records if is_mark(record))
    return any(mark.get("what") == what and mark.get("refused") for mark in marks)


def summary(text: str, kept_from: str | None, model: str, at: str) -> Record:
    """A mark: this summary replaces all records before `kept_from` (None: before the mark).

    `model`: the one that continues from it; `at`: a timestamp.
    """
    uuids = [str(uuid.uuid4()), str(uuid.uuid4())]
    return _mark("summary", text=text, kept_from=kept_from, uuids=uuids, model=model, at=at)


def fitted(instead: Mapping[str, Block]) -> Record:
    """A mark: before it these blocks replace images and documents, which are named by the sha256 of their base64."""
    return _mark("fitted", instead=dict(instead))


def media_of(records: Iterable[Record]) -> Iterator[tuple[str, str, Block]]:
    """Each unreplaced image and document in these records: its record's uuid, the sha256 of its base64, the block."""
    records = list(records)
    known: dict[str, Block] = {}
    for record in records:
        if is_mark(record) and (mark := json.loads(record.line))["mark"] == "fitted":
            known |= mark["instead"]
    for record in records:
        if record.uuid is not None and (_may_hold(record, "images") or _may_hold(record, "documents")):
            data = json.loads(record.line)
            if not data.get("isSidechain"):
                for block in _blocks(blocks_of(data)):
                    sha256 = _sha256(block)
                    if sha256 is not None and sha256 not in known:
                        yield record.uuid, sha256, block


def window(kept_from: str | None) -> Record:
    """A mark: records before `kept_from` are not shown (None: all are shown again)."""
    return _mark("window", kept_from=kept_from)


def window_of(records: Sequence[Record]) -> str | None:
    """The first shown record, by the newest window on the path; None: the path's first."""
    for record in reversed(records):
        if is_mark(record) and (mark := json.loads(record.line)).get("mark") == "window":
            return str(mark["kept_from"]) if mark["kept_from"] is not None else None
    return None


def imported(notes: Iterable[Note]) -> Record:
    """A mark: what was repaired in an imported history."""
    return _mark("imported", notes=[note.as_json() for note in notes])


def mended_at_import(records: Iterable[Record]) -> list[Note]:
    """The repairs in the imported history at the end of this path."""
    found: Counter[NoteCode] = Counter()
    for record in records:
        if record.uuid is not None and not record.synthetic:
            found.clear()  # a turn of ours: it has reported earlier ones
        elif is_mark(record) and (mark := json.loads(record.line))["mark"] == "imported":
            for note in mark["notes"]:
                found[note["code"]] += note["count"]
    return [Note(code, number) for code, number in found.items()]


def is_mark(record: Record) -> bool:
    return record.uuid is None and record.line.startswith(_OPENING)


def is_sound(record: Record) -> bool:
    """Whether an import takes this record: a line of a transcript, or a file or a mark of ours."""
    if is_mark(record):
        return limits.is_record(record.line) and _is_sound_mark(record)
    return limits.is_record(record.line) and (not files.is_file(record) or files.is_sound(record))


def _is_sound_mark(record: Record) -> bool:
    try:
        mark = json.loads(record.line)
        match mark.get("mark"):
            case "head":
                tools = [Tool.from_json(tool) for tool in mark["tools"]]
                texts = [mark["system"], mark.get("told")]
                return all(isinstance(one, str | None) for one in texts) and all(
                    isinstance(t.schema, dict) for t in tools
                )
            case "leave_out":
                known = mark["what"] in get_args(LeftOut) and isinstance(mark["since"], str | None)
                return known and isinstance(mark["refused"], bool)
            case "fitted":
                for block in mark["instead"].values():  # a short text, or a smaller image
                    names = {"text": ("text",), "image": ("media_type", "data")}[block["type"]]
                    holder = block if block["type"] == "text" else block["source"]
                    if not all(isinstance(holder[name], str) for name in names):
                        return False
                return True
            case "imported":
                return all(isinstance(note["count"], int) and Note.from_json(note).code for note in mark["notes"])
            case "window":
                return isinstance(mark["kept_from"], str | None)
            case "summary":
                texts = [*(mark[name] for name in ("text", "at", "model")), *mark["uuids"]]
                whole = len(mark["uuids"]) == 2 and isinstance(mark["kept_from"], str | None)
                return whole and all(isinstance(one, str) for one in texts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return False


def head_of(records: Sequence[Record]) -> Head | None:
    """The newest head mark on the path; None if the heads follow from the turns."""
    for record in reversed(records):
        if is_mark(record) and (mark := json.loads(record.line)).get("mark") == "head":
            return Head(mark["system"], mark.get("told", mark["system"]), tuple(mark["tools"]))
    return None


def shown(records: Sequence[Record]) -> list[Record]:
    """The records for a CLI, with all marks applied and removed."""
    marks = [(at, json.loads(record.line)) for at, record in enumerate(records) if is_mark(record)]
    if not marks:
        return list(records)
    shorter = ("summary", "images", "documents")
    # Earlier requests were longer. The CLI uses their recorded size, and would compact too early.
    old_usage_before = max((at for at, mark in marks if mark.get("what", mark["mark"]) in shorter), default=0)
    instead: dict[str, Block] = {}
    fitted_before = 0  # records before this one may have replaced blocks
    for at, mark in marks:
        if mark["mark"] == "fitted":
            instead.update(mark["instead"])
            fitted_before = at
    ranges = _left_out(records, marks)
    out: list[Record] = []
    start = _at(records, window_of(records))
    summary_start = 0
    if newest := [(at, mark) for at, mark in marks if mark["mark"] == "summary"][-1:]:
        summary_start, mark = newest[0]
        summary_start = summary_start if mark["kept_from"] is None else _at(records, mark["kept_from"])
    if start > summary_start:  # the summary is outside the window, too
        out += [record for record in records[:start] if record.uuid is None and not is_mark(record)]
    elif newest:
        start = summary_start
        # Files beside the transcript stay: shown messages may mention them.
        out += [record for record in records[:start] if record.uuid is None and not is_mark(record)]
        like = next((record for record in reversed(records[: start + 1]) if record.uuid is not None), None)
        out += _summary_records(mark, like)
    relinks_first = start > 0  # the first shown record gets another parent or none
    first = out[-1].uuid if start and out else None
    new_parents: dict[str, str | None] = {}  # by uuid of a removed record: the new parent of its children
    previous: str | None = None  # the message before, where calls are left out
    next_mark = sum(at < start for at, _ in marks)  # the next mark
    for at, record in enumerate(records[start:], start):
        if is_mark(record):
            next_mark += 1
            continue
        kinds = {what for what, since in ranges[next_mark].items() if since <= at and _may_hold(record, what)}
        fits = at < fitted_before and (_may_hold(record, "images") or _may_hold(record, "documents"))
        has_old_usage = at < old_usage_before and '"usage"' in record.line
        previous = previous if record.uuid is None or "calls" in kinds else None
        if record.uuid is None or not (kinds or new_parents or relinks_first or fits or has_old_usage):
            out.append(record)
            continue
        original: JSON = json.loads(record.line)
        data = dict(original)
        if fits and not data.get("isSidechain") and (content := blocks_of(data)):
            fitted_content = _with_replaced(content, lambda block: [instead.get(_sha256(block) or "", block)])
            data["message"] = {**data["message"], "content": fitted_content}
        if has_old_usage and isinstance(data.get("message"), dict) and "usage" in data["message"]:
            data["message"] = {**data["message"], "usage": dict(NO_TOKENS)}
        if relinks_first:
            data["parentUuid"], relinks_first = first, False
        for name in ("parentUuid", "logicalParentUuid", "sourceToolAssistantUUID"):
            # The chain may hold records of any object: an earlier version's import did not check them.
            if isinstance(data.get(name), str) and data[name] in new_parents:
                data[name] = _remaining_ancestor(data[name], new_parents)
        emptied = False
        if kinds and not data.get("isSidechain") and (content := blocks_of(data)):
            left = _with_replaced(content, partial(_without, kinds))
            emptied = not left
            data["message"] = {**data["message"], "content": left}
        if "calls" in kinds and not data.get("isSidechain"):
            # Results of parallel calls are beside the path: a CLI finds them there only as results.
            if previous is not None and data.get("parentUuid") is not None:
                data["parentUuid"] = previous
            previous = previous if emptied else record.uuid
        if emptied:
            parent = data.get("parentUuid")
            new_parents[record.uuid] = None if parent == record.uuid else parent  # so that a cycle ends
        elif data == original:
            out.append(record)
        else:
            out.append(Record(json.dumps(data, separators=(",", ":")), record.uuid, record.synthetic))
    return out


def _remaining_ancestor(uuid: str | None, new_parents: dict[str, str | None]) -> str | None:
    """The nearest ancestor that is not removed. Noted for all records on the way, so that the next search is short."""
    passed: list[str] = []
    while uuid in new_parents:
        passed.append(uuid)
        uuid = new_parents[uuid]
    new_parents.update(dict.fromkeys(passed, uuid))
    return uuid


def _left_out(records: Sequence[Record], marks: Sequence[tuple[int, JSON]]) -> list[dict[LeftOut, int]]:
    """For the records before each mark, and after the last: from which record on each kind is left out."""
    places = {record.uuid: at for at, record in reversed([*enumerate(records)])}
    found: list[dict[LeftOut, int]] = [{}]
    for at, mark in reversed(marks):
        since = dict(found[-1])
        if mark["mark"] == "leave_out":
            named = 0 if mark["since"] is None else places.get(mark["since"], 0)
            since[mark["what"]] = min(named, since.get(mark["what"], at))
        found.append(since)
    return found[::-1]


def _at(records: Sequence[Record], uuid: str | None) -> int:
    """The index of this record; 0 where it is missing."""
    return next((at for at, record in enumerate(records) if uuid is not None and record.uuid == uuid), 0)


def since_first(records: Sequence[Record], what: Collection[LeftOut]) -> Sequence[Record]:
    """The records from the first one with a block of these kinds on; none where there is no such block."""
    first = (at for at, record in enumerate(records) if any(count([record], one) for one in what))
    return records[next(first, len(records)) :]


def count(records: Iterable[Record], what: LeftOut) -> int:
    """How many blocks of this kind the model is shown in these (shown) records."""
    found = 0
    for record in records:
        if record.uuid is not None and _may_hold(record, what):
            data = json.loads(record.line)
            if not data.get("isSidechain"):
                found += sum(_kind(block) == what for block in _blocks(blocks_of(data)))
    return found


def weight(records: Iterable[Record], what: LeftOut) -> int:
    """How many characters of these records' lines are blocks of this kind."""
    return sum(len(record.line) for record in records if record.uuid is not None and _may_hold(record, what))


def _may_hold(record: Record, what: LeftOut) -> bool:
    """A quick check of the line's text: most need not be parsed."""
    return what == "calls" or any(f'"{one}"' in record.line for one in _TYPES[what])


def _kind(block: Block) -> LeftOut | None:
    """The kind that the block belongs to; None for a text. A block of an unknown type counts as a call. Either a tool
    of the provider made it, or a program of the agent forged it."""
    return None if block.get("type") == "text" else _KINDS.get(str(block.get("type")), "calls")


def _without(kinds: Collection[LeftOut], block: Block) -> Sequence[Block]:
    """The blocks to show in place of this one, if blocks of these kinds are left out."""
    kind = _kind(block)
    if kind is None or kind not in kinds:
        return (block,)
    if block.get("type") == "tool_result":
        return without_call(block)
    return ({"type": "text", "text": _PLACES[kind]},) if kind in _PLACES else ()


def without_call(result: Block) -> tuple[Block, ...]:
    """The words and images of a tool's result, for a prompt: its call is left out."""
    said = result.get("content")
    blocks = said if isinstance(said, list) else [{"type": "text", "text": str(said or "")}]
    words = (one for one in blocks if one.get("type") != "text" or str(one.get("text", "")).strip())
    return ({"type": "text", "text": RESULT}, *words)


def _blocks(content: Iterable[Block]) -> Iterator[Block]:
    """These blocks, and those in results of tools."""
    for block in content:
        yield block
        if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
            yield from _blocks(one for one in block["content"] if isinstance(one, dict))


def _with_replaced(content: Iterable[Block], replaced: Callable[[Block], Sequence[Block]]) -> list[Block]:
    """The content with what takes the place of each block; in results of tools, too."""
    out: list[Block] = []
    for block in content:
        inner = block.get("content")
        if block.get("type") == "tool_result" and isinstance(inner, list):
            blocks = _with_replaced((one for one in inner if isinstance(one, dict)), replaced)
            out += replaced({**block, "content": blocks})
        else:
            out += replaced(block)
    return out


def _sha256(block: Block) -> str | None:
    """The sha256 of the base64 of an image or document; None for other blocks."""
    source = block.get("source")
    if block.get("type") not in ("image", "document") or not isinstance(source, dict) or source.get("type") != "base64":
        return None
    return hashlib.sha256(str(source.get("data", "")).encode("utf-8", "surrogatepass")).hexdigest()


def blocks_of(data: JSON) -> list[Block]:
    """The blocks of a record's message."""
    message = data.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _summary_records(mark: JSON, like: Record | None) -> Iterator[Record]:
    """A prompt with the summary and, if nothing follows, an answer, because a CLI invents one at the end of a
    transcript. Other fields are those of the record `like`."""
    known: JSON = json.loads(like.line) if like is not None else {}
    fields: JSON = {
        name: known[name] for name in ("userType", "cwd", "sessionId", "version", "gitBranch") if name in known
    }
    asked, answered = mark["uuids"]
    data: JSON = {**fields, "isSidechain": False, "timestamp": mark["at"]}
    content = [{"type": "text", "text": SUMMARY + mark["text"]}]
    prompt: JSON = {"parentUuid": None, **data, "type": "user", "message": {"role": "user", "content": content}}
    yield Record(json.dumps(prompt | {"uuid": asked}, separators=(",", ":")), asked, synthetic=True)
    if mark["kept_from"] is None:
        message: JSON = {
            "id": f"msg_{answered.replace('-', '')}",
            "type": "message",
            "role": "assistant",
            "model": mark["model"],
            "content": [{"type": "text", "text": GOES_ON}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        answer: JSON = {"parentUuid": asked, **data, "type": "assistant", "message": message, "uuid": answered}
        yield Record(json.dumps(answer, separators=(",", ":")), answered, synthetic=True)


def _mark(mark: str, **fields: Any) -> Record:
    return Record(json.dumps({"type": KIND, "mark": mark, **fields}, separators=(",", ":")))
