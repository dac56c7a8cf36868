"""What a transcript says: its lines as data, whether they hang together, and what was added since the last look."""

from __future__ import annotations

import copy
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ....domain import limits
from ....domain.models import Block, FileMark, Record
from .files import is_touched_by_cli, is_untouched, mark_of, opened


@dataclass(slots=True)
class Entry:
    """One line, parsed as far as the chain needs it. `data` is the whole object. Never changed after it is made.

    `on_path`: part of the conversation, and not of a sub-agent's. A record of a sub-agent has a `uuid`, too.
    """

    line: str
    data: dict[str, Any] = field(repr=False)
    uuid: str | None = field(init=False, compare=False)
    parent: str | None = field(init=False, compare=False)
    kind: str = field(init=False, compare=False)
    on_path: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        data = self.data
        named = data.get("uuid")
        self.uuid = named if isinstance(named, str) and "parentUuid" in data else None
        self.parent = data.get("parentUuid")
        self.kind = str(data.get("type", ""))
        self.on_path = self.uuid is not None and not data.get("isSidechain")

    @property
    def content(self) -> list[Block]:
        """The message's blocks; the CLI writes a lone text as a string and rewrites it as a list."""
        message = self.data.get("message")
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []

    def says(self) -> tuple[Any, ...]:
        """What must be equal for two records to be the same to the model, also in a copy of the file."""
        what = self.content if "message" in self.data else self.data.get("attachment")
        return (self.uuid, self.parent, self.kind, json.dumps(what, sort_keys=True))

    def spoken(self) -> list[tuple[str, Block]]:
        """Its blocks as the model reads them, each with its role; none for what is no message."""
        if not self.on_path or self.kind not in ("user", "assistant") or self.data.get("isMeta"):
            return []
        return [(self.kind, block) for block in self.content]

    def hung_on(self, parent: str | None) -> Entry:
        """The same record behind another one."""
        data = self.data | {"parentUuid": parent}
        return Entry(json.dumps(data, separators=(",", ":")), data)

    def record(self) -> Record:
        return Record(self.line, self.uuid)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A transcript, or its tail, and of its entries those on the path. `broken` counts lines that are not JSON, or too
    deep (a cut last line among them)."""

    entries: tuple[Entry, ...]
    path: list[Entry]
    broken: int = 0

    @property
    def leaf(self) -> str | None:
        return self.path[-1].uuid if self.path else None


def parse(data: bytes) -> Parsed:
    entries: list[Entry] = []
    broken = 0
    for raw in data.split(b"\n"):
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8").rstrip("\r")
            value = limits.loads(line, limits.CLI_DEPTH)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict):
            entries.append(Entry(line, value))
        else:
            broken += 1
    return Parsed(tuple(entries), [entry for entry in entries if entry.on_path], broken)


def parse_records(records: Iterable[Record]) -> Parsed:
    entries = tuple(Entry(record.line, json.loads(record.line)) for record in records)
    return Parsed(entries, [entry for entry in entries if entry.on_path])


def unbroken(entries: Sequence[Entry], start: str | None) -> bool:
    """Does each record on the path hang on the one before it, the first one on `start`?

    A compaction boundary starts anew (`parentUuid` null) by the CLI's own will, and the results of parallel calls
    each hang on the record of their call (run on 2.1.329).
    """
    at = start
    for entry in entries:
        anew = entry.parent is None and entry.data.get("subtype") == "compact_boundary"
        answers_its_call = entry.parent is not None and entry.data.get("sourceToolAssistantUUID") == entry.parent
        if entry.parent != at and not anew and not answers_its_call:
            return False
        at = entry.uuid
    return True


def is_complete(entries: Sequence[Entry]) -> bool:
    """Do these records end with an answer, and not in the middle of an exchange?"""
    last = ""
    called: set[object] = set()
    answered: set[object] = set()
    for entry in entries:
        if entry.kind in ("user", "assistant"):
            last = entry.kind
            for block in entry.content:
                if block.get("type") == "tool_use":
                    called.add(block.get("id"))
                elif block.get("type") == "tool_result":
                    answered.add(block.get("tool_use_id"))
    return last == "assistant" and called <= answered


def has_ended(entries: Sequence[Entry]) -> bool:
    """Did the last answer come to its own end? Without a reason to stop, more of it was to follow (run on 1.0.120)."""
    answers = [entry for entry in entries if entry.on_path and entry.kind == "assistant"]
    if not answers or answers[-1].data.get("isApiErrorMessage"):
        return False
    return answers[-1].data.get("message", {}).get("stop_reason") not in (None, "tool_use", "max_tokens", "refusal")


def copied_up_to(known: Sequence[Entry], copy: Sequence[Entry]) -> int | None:
    """Where in a copy of these records what is not theirs begins; None when it is no copy of them.

    Compared is what they say to the model, block by block: CLI 1.0.120 copies the session at every resume, and
    where a prompt has several blocks it makes a record of each and gives new uuids to it and to all that follow.
    """
    wanted = [said for entry in known for said in entry.spoken()]
    at = 0
    for index, entry in enumerate(copy):
        said = entry.spoken()
        if at == len(wanted) and said:
            return index
        if wanted[at : at + len(said)] != said:
            return None
        at += len(said)
    return len(copy) if at == len(wanted) else None


# --- From turn to turn: what was added, without reading the rest again; and the whole of it once more

# Bytes hashed at a time.
CHUNK = 1024 * 1024

How = Literal["gone", "another_file", "content", "records", "touched"]


class Changed(Exception):
    """The file does not hold what its mark describes.

    `how`: it is gone (or cannot be read), another file lies there, its content is another, records follow, or it was
    written to or moved although its content is the same.
    """

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.how = how


class Reader:
    """Follows one transcript from turn to turn, reading only what was appended.

    It keeps a running hash, so that a mark costs the new bytes only, however long the file is. The hash is of what
    was read when it was appended: damage to those bytes since then is never part of it.
    """

    def __init__(self, path: Path, leaf: str | None) -> None:
        self.path = path
        self.leaf = leaf
        self._hash = hashlib.sha256()
        self._size = 0
        self._identity: tuple[int, int] | None = None

    @staticmethod
    def behind(path: Path, mark: FileMark) -> Reader:
        """One that has read what the mark describes. Raises `Changed` where the file does not begin with that."""
        try:
            with opened(path) as file:
                return Reader._behind(file, path, mark)
        except OSError as exc:
            raise Changed("gone") from exc

    @staticmethod
    def _behind(file: BinaryIO, path: Path, mark: FileMark) -> Reader:
        stat = os.fstat(file.fileno())
        if (stat.st_dev, stat.st_ino) != (mark.device, mark.inode):
            raise Changed("another_file")
        reader = Reader(path, mark.leaf)
        while chunk := file.read(min(CHUNK, mark.size - reader._size)):
            reader._hash.update(chunk)
            reader._size += len(chunk)
        if reader._size != mark.size or reader._hash.hexdigest() != mark.sha256:
            raise Changed("content")
        reader._identity = (mark.device, mark.inode)
        return reader

    def copy(self) -> Reader:
        """One that stays where this one is now."""
        other = copy.copy(self)
        other._hash = self._hash.copy()
        return other

    def holds(self, mark: FileMark) -> bool:
        return self._size == mark.size and self._identity == (mark.device, mark.inode)

    def is_at_end(self) -> bool:
        """The file is as it was when it was last read, by size and identity."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return self._size == stat.st_size and self._identity == (stat.st_dev, stat.st_ino)

    def appended(self) -> tuple[Parsed, FileMark] | None:
        """What was added since the last call, and the file's new mark. None when it is not the same file."""
        try:
            with opened(self.path) as file:
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
        return parsed, mark_of(stat, self._size, self._hash.hexdigest(), self.leaf)


def reread(path: Path, mark: FileMark, *, lenient: bool = False) -> tuple[Reader, FileMark]:
    """The whole file once more, after a process has loaded it: a reader behind its end, and its mark now.

    Raises `Changed` where the process may have loaded anything else than what the mark describes: also where the
    content is the same, but somebody had the file in hands meanwhile; unless `lenient`. The CLI's own notes may have
    followed, and it may have set the file's times.
    """
    reader = Reader.behind(path, mark)
    got = reader.appended()
    if got is None:
        raise Changed("another_file")
    added, now = got
    if added.path or added.broken:
        raise Changed("records")
    if not added.entries and not lenient and not is_untouched(now, mark) and not is_touched_by_cli(now, mark):
        raise Changed("touched")
    return reader, now


_TOTAL = b'{"type":"cost-state",'


def total_cost(path: Path) -> float:
    """US dollars that the CLI takes as spent when it resumes this transcript: its last note of it, else 0."""
    try:
        with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.rfind(_TOTAL)  # inside a record's text its quotes would be escaped
            end = data.find(b"\n", at)
            line = data[at : end if end >= 0 else len(data)] if at >= 0 else b"{}"
        total = json.loads(line).get("totalCostUSD")
    except (OSError, ValueError):  # no file, an empty one, or a cut line
        return 0.0
    return float(total) if isinstance(total, int | float) else 0.0
