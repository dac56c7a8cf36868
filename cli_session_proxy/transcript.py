"""The CLI's own JSONL file of a session: where it lies, what it says, how to write it again.

A line with a `uuid` is part of the conversation (user, assistant, attachment, system records, chained by
`parentUuid`); a line without one is a note of the CLI's own (queue, cost, request log). Sidechain records
belong to sub-agents. Source: facts measured on 1.0.120 and 2.1.329, section "Transcripts".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .models import Block, FileMark, Message, Record

# The API wants a user message first; a history that opens with the assistant gets this one before it.
OPENED_BY_ASSISTANT = "[The assistant opened the conversation.]"

# What an assistant message without content is given, because the API refuses an empty one.
NO_CONTENT = "(no content)"

_SESSION_ID = re.compile(r'"sessionId":"([0-9a-fA-F-]{36})"')
_TIMESTAMP = re.compile(r'"timestamp":"([^"]+)"')


# --- where ------------------------------------------------------------------------------------------------


def project_dir(config_dir: Path, cwd: Path) -> Path:
    """The folder in which the CLI keeps the sessions of this working directory."""
    return config_dir / "projects" / re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(cwd))


def path_of(config_dir: Path, cwd: Path, session_id: str) -> Path:
    return project_dir(config_dir, cwd) / f"{session_id}.jsonl"


def find_elsewhere(config_dir: Path, session_id: str, expected: Path) -> list[Path]:
    """The same session's file under other working directories' folders (moved sandbox, doubled prefix)."""
    found = (config_dir / "projects").glob(f"*/{session_id}.jsonl")
    return sorted(path for path in found if path != expected)


# --- what it says -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One line, parsed as far as the chain needs it. `data` is the whole object."""

    line: str
    data: dict[str, Any] = field(repr=False)

    @property
    def uuid(self) -> str | None:
        value = self.data.get("uuid")
        return value if isinstance(value, str) and "parentUuid" in self.data else None

    @property
    def parent(self) -> str | None:
        return self.data.get("parentUuid")

    @property
    def kind(self) -> str:
        return str(self.data.get("type", ""))

    @property
    def on_path(self) -> bool:
        return self.uuid is not None and not self.data.get("isSidechain")

    @property
    def content(self) -> list[Block]:
        """The message's blocks; the CLI writes a lone text as a string and rewrites it as a list."""
        message = self.data.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []

    def says(self) -> tuple[Any, ...]:
        """What must be equal for two records to be the same to the model, whoever copied the file."""
        what = self.content if "message" in self.data else self.data.get("attachment")
        return (self.uuid, self.parent, self.kind, json.dumps(what, sort_keys=True))

    def record(self) -> Record:
        return Record(self.line, self.uuid)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A transcript, or its tail. `broken` counts lines that are not JSON (a cut last line among them)."""

    entries: tuple[Entry, ...]
    broken: int = 0

    @property
    def path(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.on_path]

    @property
    def leaf(self) -> str | None:
        path = self.path
        return path[-1].uuid if path else None


def parse(data: bytes) -> Parsed:
    entries: list[Entry] = []
    broken = 0
    for raw in data.split(b"\n"):
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8").rstrip("\r")
            value = json.loads(line)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict):
            entries.append(Entry(line, value))
        else:
            broken += 1
    return Parsed(tuple(entries), broken)


def parse_records(records: Iterable[Record]) -> Parsed:
    return Parsed(tuple(Entry(record.line, json.loads(record.line)) for record in records))


def unbroken(entries: Sequence[Entry], start: str | None) -> bool:
    """Does each record on the path hang on the one before it, the first one on `start`?

    A compaction boundary starts anew (`parentUuid` null) by the CLI's own will.
    """
    at = start
    for entry in entries:
        if entry.parent != at and not (entry.parent is None and entry.data.get("subtype") == "compact_boundary"):
            return False
        at = entry.uuid
    return True


def is_complete(entries: Sequence[Entry]) -> bool:
    """Do these records end with an answer, and not in the middle of an exchange?"""
    spoken = [entry for entry in entries if entry.kind in ("user", "assistant")]
    if not spoken or spoken[-1].kind != "assistant":
        return False
    called = {block.get("id") for entry in spoken for block in entry.content if block.get("type") == "tool_use"}
    answered = {
        block.get("tool_use_id") for entry in spoken for block in entry.content if block.get("type") == "tool_result"
    }
    return called <= answered


def messages_of(entries: Sequence[Entry]) -> list[Message]:
    """What these records say, as messages: consecutive records of one role are one message."""
    merged: list[tuple[Literal["user", "assistant"], list[Block]]] = []
    for entry in entries:
        if entry.kind not in ("user", "assistant") or entry.data.get("isMeta"):
            continue
        role: Literal["user", "assistant"] = "assistant" if entry.kind == "assistant" else "user"
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(entry.content)
        else:
            merged.append((role, list(entry.content)))
    return [Message(role, tuple(content)) for role, content in merged]


# --- is it what we know? ----------------------------------------------------------------------------------

Found = Literal["equal", "tail", "missing", "unreadable", "different"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a transcript compares with the chain's path.

    `tail`: the path is there whole, and records that the chain does not know follow it. `note` is evidence for
    a person. `mark` describes the file where it is `equal`; `read` is how many bytes had to be read.
    """

    found: Found
    note: str
    tail: tuple[Entry, ...] = ()
    mark: FileMark | None = None
    read: int = 0
    cut: bool = False


def quick_check(path: Path, mark: FileMark) -> Verdict | None:
    """`equal` without reading, when the file is the very one that the mark describes; else None."""
    try:
        stat = path.stat()
    except OSError:
        return None
    same = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) == (
        mark.device,
        mark.inode,
        mark.size,
        mark.mtime_ns,
    )
    return Verdict("equal", "unchanged since the last turn", mark=mark) if same else None


def check(path: Path, mark: FileMark | None, known: Sequence[Record] | None) -> Verdict | None:
    """Compare a transcript with the path: by the mark's hash first, then record by record with `known`.

    Returns None when the hash does not decide and `known` was not given: load the records and call again.
    """
    try:
        data = path.read_bytes()
        stat = path.stat()
    except FileNotFoundError:
        return Verdict("missing", f"no transcript at {path}")
    except OSError as exc:
        return Verdict("unreadable", f"{path}: {exc.strerror}")
    if mark is not None and len(data) >= mark.size and _sha(data[: mark.size]) == mark.sha256:
        added = parse(data[mark.size :])
        return _judge(added, stat, data, mark.leaf, "what the last turn left is unchanged")
    if known is None:
        return None
    parsed, wanted = parse(data), parse_records(known).path
    have = parsed.path
    if len(have) < len(wanted):
        return Verdict("different", f"{len(have)} records instead of {len(wanted)}", read=len(data))
    for at, (mine, theirs) in enumerate(zip(wanted, have, strict=False)):
        if mine.says() != theirs.says():
            return Verdict("different", f"record {at + 1} of {len(wanted)} is not the chain's", read=len(data))
    leaf = wanted[-1].uuid if wanted else None
    rest = Parsed(tuple(have[len(wanted) :]), parsed.broken)
    return _judge(rest, stat, data, leaf, f"all {len(wanted)} records are the chain's")


def _judge(added: Parsed, stat: os.stat_result, data: bytes, leaf: str | None, note: str) -> Verdict:
    tail = tuple(added.path)
    if tail or added.broken:
        more = f"{note}; {len(tail)} unknown records follow" + (", the last line is cut" if added.broken else "")
        return Verdict("tail", more, tail=tail, read=len(data), cut=bool(added.broken))
    return Verdict("equal", note, mark=_mark(stat, data, leaf), read=len(data))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _mark(stat: os.stat_result, data: bytes, leaf: str | None) -> FileMark:
    return FileMark(stat.st_dev, stat.st_ino, len(data), stat.st_mtime_ns, _sha(data), leaf)


# --- what a turn added ------------------------------------------------------------------------------------


class Reader:
    """Follows one transcript from turn to turn, reading only what was appended.

    It keeps a running hash, so that a mark costs the new bytes only, however long the file is.
    """

    def __init__(self, path: Path, leaf: str | None) -> None:
        self.path = path
        self.leaf = leaf
        self._hash = hashlib.sha256()
        self._size = 0
        self._identity: tuple[int, int] | None = None

    def skip_to(self, mark: FileMark) -> None:
        """Take what the mark describes as read (it was checked); the hash is caught up from the file."""
        with self.path.open("rb") as file:
            self._hash = hashlib.sha256(file.read(mark.size))
        self._size, self.leaf = mark.size, mark.leaf
        self._identity = (mark.device, mark.inode)

    def holds(self, mark: FileMark) -> bool:
        return self._size == mark.size and self._identity == (mark.device, mark.inode)

    def appended(self) -> tuple[Parsed, FileMark] | None:
        """What was added since the last call, and the file's new mark. None when it is not the same file."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if self._identity not in (None, identity) or stat.st_size < self._size:
                    return None
                file.seek(self._size)
                data = file.read()
        except OSError:
            return None
        self._identity = identity
        self._hash.update(data)
        self._size += len(data)
        parsed = parse(data)
        self.leaf = parsed.leaf or self.leaf
        mark = FileMark(*identity, self._size, stat.st_mtime_ns, self._hash.hexdigest(), self.leaf)
        return parsed, mark


# --- how to write it again --------------------------------------------------------------------------------


def with_session_id(line: str, session_id: str) -> str:
    """The line under another session's id. Left alone where the field is not unmistakably the record's own."""
    if len(_SESSION_ID.findall(line)) != 1:
        return line
    return _SESSION_ID.sub(f'"sessionId":"{session_id}"', line, count=1)


def in_strict_order(lines: Iterable[str]) -> list[str]:
    """Distinct, increasing timestamps: CLI 1.0.120 picks the leaf by time and loses what shares one."""
    out: list[str] = []
    last = 0
    for line in lines:
        match = _TIMESTAMP.search(line)
        if match is None or json.loads(line).get("timestamp") != match[1]:
            out.append(line)
            continue
        now = _millis(match[1])
        last = now if now > last else last + 1
        out.append(line if now == last else f"{line[: match.start(1)]}{timestamp(last / 1000)}{line[match.end(1) :]}")
    return out


def _millis(text: str) -> int:
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)


def write(path: Path, records: Sequence[Record], session_id: str, *, strict_order: bool) -> FileMark:
    """Replace the transcript atomically by these records, under this id. Nobody may have it open."""
    lines = [with_session_id(record.line, session_id) for record in records]
    if strict_order:
        lines = in_strict_order(lines)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{session_id[:8]}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            stat = os.fstat(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    uuids = [record.uuid for record in records if record.uuid and not _is_sidechain(record.line)]
    return _mark(stat, data, uuids[-1] if uuids else None)


def remove(path: Path) -> None:
    """Remove a transcript and the folder of the same name beside it (large tool results, sub-agents)."""
    path.unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def _is_sidechain(line: str) -> bool:
    return '"isSidechain":true' in line and bool(json.loads(line).get("isSidechain"))


# --- records made by us -----------------------------------------------------------------------------------


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Scribe:
    """Makes records where the CLI left none: of a client's history, or of a turn's frames.

    `at` (seconds) advances by a millisecond a record, so that no two share a timestamp.
    """

    session_id: str
    cwd: Path
    version: str
    at: float
    parent: str | None = None

    def record(self, message: Message, model: str, *, record_uuid: str | None = None) -> Record:
        record_uuid = record_uuid or str(uuid.uuid4())
        body: dict[str, Any] = {"role": message.role, "content": list(message.content)}
        if message.role == "assistant":
            # Equal message ids would be merged by the CLI; usage is trusted (990k triggered a compaction): write 0.
            body = {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "model": model,
                "content": list(message.content) or [{"type": "text", "text": NO_CONTENT}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
        line = {
            "parentUuid": self.parent,
            "isSidechain": False,
            "userType": "external",
            "cwd": str(self.cwd),
            "sessionId": self.session_id,
            "version": self.version,
            "gitBranch": "",
            "type": message.role,
            "message": body,
            "uuid": record_uuid,
            "timestamp": timestamp(self.at),
        }
        self.parent = record_uuid
        self.at += 0.001
        return Record(json.dumps(line, separators=(",", ":")), record_uuid, synthetic=True)
