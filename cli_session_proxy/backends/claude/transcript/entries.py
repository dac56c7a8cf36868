"""Reads a transcript: parses its lines and checks their connection; opens and marks its file; reads what was
appended."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from ....domain import limits
from ....domain.models import Block, FileMark, Record
from ....errors import DamagedRow, SessionBusy
from .at_once import MANY_VALUES, Place
from .shapes import MESSAGE, RECORD

if TYPE_CHECKING:
    from hashlib import _Hash as Hash


# The beginning of our own lines, which are in the chain and in no transcript: a mark (`mending`), a stored file
# (`files`).
OWN_LINE = '{"type":"cli-session-proxy/'

# Part of the CLI's note of a rewind (`Entry.rewinds`). Inside a text its quotes would be escaped.
REWOUND = b'"rewound":true'


@dataclass(slots=True)
class Entry:
    """One parsed line. `data`: the whole object. Immutable.

    `in_conversation`: part of the conversation, not of a sub-agent's (whose records also have a `uuid`). `content`: the
    message's blocks; the CLI writes a single text as a string, and rewrites it as a list. `sound`: valid by `shapes`,
    and none of our own lines, which no CLI writes. An invalid line counts as no record: no uuid, in no conversation, no
    content.
    """

    line: str
    data: dict[str, Any] = field(repr=False)
    piece_of: str | None = field(default=None, compare=False)  # the uuid of the record that was split
    sound: bool = field(init=False, compare=False, repr=False)
    uuid: str | None = field(init=False, compare=False)
    parent: str | None = field(init=False, compare=False)
    kind: str = field(init=False, compare=False)
    in_conversation: bool = field(init=False, compare=False)
    content: list[Block] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        data = self.data
        named = "uuid" in data
        self.kind = str(data.get("type", ""))
        shape = MESSAGE if self.kind in ("user", "assistant") else RECORD
        self.sound = not self.line.startswith(OWN_LINE) and (not named or shape.isinstance_python(data))
        is_record = named and self.sound
        self.uuid = data["uuid"] if is_record else None
        self.parent = data["parentUuid"] if is_record else None
        self.in_conversation = is_record and not data.get("isSidechain")
        message = data.get("message") if is_record else None
        content = None if message is None else message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        self.content = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []

    def comparable(self) -> tuple[Any, ...]:
        """A key that is equal for records that are the same for the model, also in a copy of the file."""
        what = self.content if "message" in self.data else self.data.get("attachment")
        return (self.uuid, self.parent, self.kind, json.dumps(what, sort_keys=True))

    def without_uuids(self) -> tuple[Any, ...]:
        """The same key for a record that was copied under another uuid."""
        return self.comparable()[2:]

    def message_blocks(self) -> list[tuple[str, Block]]:
        """Its blocks as the model gets them, each with its role; none if it is no message of the conversation."""
        if not self.in_conversation or self.kind not in ("user", "assistant") or self.data.get("isMeta"):
            return []
        return [(self.kind, block) for block in self.content]

    def with_parent(self, parent: str | None) -> Entry:
        """The same record with another parent."""
        data = self.data | {"parentUuid": parent}
        return Entry(json.dumps(data, separators=(",", ":")), data)

    def pieces(self) -> Iterator[Entry]:
        """Split into records of one block. The last one keeps the uuid, so it is the parent of the record's children.
        Each has all other fields of the record."""
        if not self.in_conversation or len(self.content) < 2:
            yield self
            return
        message: dict[str, Any] = self.data["message"]
        parent = self.parent
        for number, block in enumerate(self.content, 1):
            last = number == len(self.content)
            name = self.uuid if last else str(uuid5(NAMESPACE_OID, f"{self.uuid}/{number}"))
            data = self.data | {"uuid": name, "parentUuid": parent, "message": message | {"content": [block]}}
            yield Entry(json.dumps(data, separators=(",", ":")), data, self.uuid)
            parent = name

    def record(self) -> Record:
        return Record(self.line, self.uuid)

    @property
    def rewinds(self) -> bool:
        """Whether it is the CLI's note of a rewind to the record `leafUuid` (null: to the beginning).

        The CLI writes it up to 100 ms after the rewind, and follows it when it loads the file (run on 2.1.330). A note
        with `explicit` instead of `rewound` is followed, too (run on 2.1.332).
        """
        says_so = self.data.get("rewound") is True or self.data.get("explicit") is True
        return self.kind == _REWIND_NOTE and says_so and "leafUuid" in self.data


_REWIND_NOTE = "last-prompt"


def conversation_of(entries: Iterable[Entry]) -> list[Entry]:
    """The records of the conversation, without those of sub-agents."""
    return [entry for entry in entries if entry.in_conversation]


class Cut(NamedTuple):
    """A rewind in a tail, to the record `leaf` before the tail; None: to the beginning."""

    leaf: str | None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed transcript, or a tail of one. `entries`: without rewound ones. `path`: those of them on the path.
    `broken`: how many lines are no JSON (e.g. a cut last line), too deep, invalid, or have the uuid of one before.
    `cut`: a rewind to a record before these lines."""

    entries: tuple[Entry, ...]
    path: list[Entry]
    broken: int = 0
    cut: Cut | None = None
    place: Place | None = field(default=None, compare=False, repr=False)  # held for as long as this object is used

    @property
    def leaf(self) -> str | None:
        return self.path[-1].uuid if self.path else None

    def leaf_after(self, previous: str | None) -> str | None:
        """The path's last record; `previous`: the last one before these lines."""
        return self.leaf or (previous if self.cut is None else self.cut.leaf)

    def follows(self, leaf: str | None) -> bool:
        """Whether these lines continue this record, or at least no other record before them."""
        return self.cut is None or self.cut.leaf == leaf


# Limits for data beyond the known records. Others may write anything there, and parsing blocks the interpreter and
# takes twenty times as many bytes in memory: a larger file is not read. A prompt of 64 MiB fits, which the CLI writes
# twice; so do ordinary records of 20,000 turns.
MORE_BYTES = 160 * 1024 * 1024
MORE_LINES, BYTES_A_LINE = 200_000, 256
MORE_VALUES, BYTES_A_VALUE = 2_000_000, 16


def most_bytes(known: int) -> int:
    """The largest size of a transcript that is read, in bytes. `known`: how many bytes of it the chain has."""
    return min(MAX_BYTES, MORE_BYTES + known)


def parse_file(path: Path | str, known: int = 0) -> Parsed:
    """Parse a whole file, as `parse` does. Raises OSError before it reads a file that is too large."""
    return parse(contents(path, most=most_bytes(4 * known)), known)


def parse(data: bytes, known: int = 0, rewound: Collection[str] = ()) -> Parsed:
    """Parse a transcript, or a tail of one. `known`: how many characters of it the chain has. `rewound`: uuids of
    records to skip with their descendants, even if the CLI has not noted the rewind yet. Raises OSError if there is
    much more data than `known`, `SessionBusy` if others are being read for long (see `at_once`)."""
    if len(data) > most_bytes(4 * known):  # up to four bytes per character
        raise too_much(f"than {MORE_BYTES:,} bytes that the chain does not know")
    lines, values = MORE_LINES + len(data) // BYTES_A_LINE, MORE_VALUES + len(data) // BYTES_A_VALUE
    most_values = limits.most_values(data)
    dense = most_values > values
    place = Place() if most_values > MANY_VALUES else None
    entries: list[Entry] = []
    uuids: set[str] = set()
    broken = 0
    for raw in io.BytesIO(data):
        lines -= 1
        if dense:
            values -= limits.values_in(raw)
        if limits.is_dense(raw):
            raise too_much(f"than {limits.LINE_VALUES:,} values in one line")
        if lines < 0 or values < 0:
            raise too_much("lines, or values in them, than a CLI writes")
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
            value = limits.loads(line, limits.CLI_DEPTH, strict=True)
        except ValueError:
            broken += 1
            continue
        if not isinstance(value, dict) or not (entry := Entry(line, value)).sound or entry.uuid in uuids:
            broken += 1
            continue
        entries.append(entry)
        if entry.uuid is not None:
            uuids.add(entry.uuid)
    cut: Cut | None = None
    if rewound or any(entry.rewinds for entry in entries if entry.kind == _REWIND_NOTE):
        entries, cut = _without_rewound(entries, rewound)
    return Parsed(tuple(entries), conversation_of(entries), broken, cut, place)


# A uuid as a CLI writes it, or only the key; and an escaped ASCII character, which no CLI writes in a key or a uuid.
_NAME, _ESCAPED = re.compile(rb'"uuid"(:"[^"\\]*")?'), re.compile(rb"\\u00[2-7]")
_MOST_BACKSLASHES = 64  # an even number
_NAME_SIZE = 2048  # bytes of the longest valid key and uuid, with every character escaped


def names_twice(data: bytes) -> bool:
    """Whether two records of a transcript have one uuid. Each CLI then loads the last of them, also one that says that
    it is a sub-agent's (run on 1.0.120 and 2.1.332). Parses only what may be such a transcript. True, too, if it holds
    too much to be parsed."""
    names: set[bytes] = set()
    # A search in a whole line of a hundred megabytes would block the interpreter for seconds.
    pieces = ((line, at, at + CHUNK + _NAME_SIZE) for line in io.BytesIO(data) for at in range(0, len(line), CHUNK))
    for piece in pieces:
        found = _NAME.findall(*piece)
        if b"" in found or not names.isdisjoint(found) or _has_escaped(*piece):
            try:
                return parse(data, len(data)).broken > 0
            except OSError:
                return True
        names.update(found)
    return False


def _has_escaped(line: bytes, start: int, end: int) -> bool:
    """Whether this piece of a line has an escaped ASCII character. A backslash that is escaped itself escapes nothing.
    True, too, behind more backslashes than are counted."""
    for found in _ESCAPED.finditer(line, start, end):
        before = line[max(0, found.start() - _MOST_BACKSLASHES) : found.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return True
    return False


def _without_rewound(entries: Sequence[Entry], rewound: Collection[str]) -> tuple[list[Entry], Cut | None]:
    """The entries without rewound records and the notes of rewinds. Other notes of the CLI stay.

    A compaction and its records stay: a CLI that loads the file continues from its summary (run on 2.1.330).
    """
    remaining: list[Entry | None] = []
    places: dict[str, list[int]] = {}  # by uuid: indices in `remaining`
    stack: list[int] = []  # the same indices in order: each record is removed at most once
    removed: set[str | None] = set(rewound)
    cut: Cut | None = None
    last_compaction = -1
    for entry in entries:
        if entry.rewinds:
            leaf = entry.data["leafUuid"]
            at = next(reversed(places.get(leaf, ())), -1) if isinstance(leaf, str) else -1
            if last_compaction > at:
                continue
            while stack and stack[-1] > at:
                later = remaining[stack[-1]]
                assert later is not None
                assert later.uuid is not None
                removed.add(later.uuid)
                places[later.uuid].pop()
                remaining[stack.pop()] = None
            cut = Cut(leaf) if at < 0 else cut
        elif entry.uuid is not None and (entry.uuid in removed or entry.parent in removed):
            removed.add(entry.uuid)
        else:
            if entry.uuid is not None:
                places.setdefault(entry.uuid, []).append(len(remaining))
                stack.append(len(remaining))
            if entry.data.get("subtype") == "compact_boundary":
                last_compaction = len(remaining)
            remaining.append(entry)
    return [entry for entry in remaining if entry is not None], cut


def too_much(what: str) -> OSError:
    return OSError(errno.EFBIG, f"it holds more {what}")


@contextmanager
def stored() -> Iterator[None]:
    """Raises `DamagedRow` if a stored record is read that no version of this program wrote."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise DamagedRow(
            f"a record of this conversation cannot be read ({type(exc).__name__}): correct its row in the store, or "
            "restore it from a backup"
        ) from exc


def parse_records(records: Iterable[Record]) -> Parsed:
    with stored():
        entries = tuple(Entry(record.line, json.loads(record.line)) for record in records)
    return Parsed(entries, conversation_of(entries))


def unbroken(entries: Sequence[Entry], start: str | None) -> bool:
    """Whether each record on the path has the one before as parent, and the first one `start`.

    Exceptions: a compaction boundary has no parent, and results of parallel calls have their call's record as parent
    (run on 2.1.329).
    """
    previous = start
    for entry in entries:
        starts_again = entry.parent is None and entry.data.get("subtype") == "compact_boundary"
        answers_its_call = entry.parent is not None and entry.data.get("sourceToolAssistantUUID") == entry.parent
        if entry.parent != previous and not starts_again and not answers_its_call:
            return False
        previous = entry.uuid
    return True


def is_complete(entries: Sequence[Entry]) -> bool:
    """Whether these records end with an answer."""
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
    """Whether the last answer is finished. Without a stop reason more was to follow (run on 1.0.120)."""
    answers = [entry for entry in entries if entry.in_conversation and entry.kind == "assistant"]
    if not answers or answers[-1].data.get("isApiErrorMessage"):
        return False
    return answers[-1].data["message"].get("stop_reason") not in (None, "tool_use", "max_tokens", "refusal")


def end_of_copy(known: Sequence[Entry], copy: Sequence[Entry]) -> int | None:
    """The index in `copy` behind the copies of all `known` records; None if it is no copy of them.

    Compares messages block by block: CLI 1.0.120 copies the session at every resume, splits prompts with several
    blocks, and gives new uuids to these and all later records.
    """
    expected = [block for entry in known for block in entry.message_blocks()]
    at = 0
    for index, entry in enumerate(copy):
        blocks = entry.message_blocks()
        if at == len(expected) and blocks:
            return index
        if expected[at : at + len(blocks)] != blocks:
            return None
        at += len(blocks)
    return len(copy) if at == len(expected) else None


# --- Opening and marking files in the CLI's directories

# Others write there, and may replace a file by anything. Opening a pipe blocks, reading a device never ends, and a
# sparse file has any size: these are refused with an OSError, like other unreadable files.
#
# The mark of a transcript has the file's state when its content was known. An equal stat does not prove that nothing
# was written: two writes within one tick of the file system's clock look alike. So before a file is loaded, its hash is
# compared, too.

# The largest file in bytes. A transcript of 20,000 turns has about 60 MB, and is read into memory as a whole.
MAX_BYTES = 512 * 1024 * 1024

# CLI 2.1.330 sets the times of a resumed transcript to now (to protect it from clean-up), in whole ms. In nanoseconds:
# a millisecond; the rounding of its float; the file system's clock, which may be behind (5 ms were seen); and the delay
# on a loaded machine.
_MS = 1_000_000
_ROUNDING = 1_000
_TICK = 20_000_000
_SLACK = 2_000_000_000


def opened(path: Path | str, *, most: int = MAX_BYTES) -> BinaryIO:
    """Open a regular file of at most `most` bytes for reading. Links are refused: an agent's shell could link to
    another's transcript, or to an open file of this process (/proc/self/fd). Raises OSError."""
    fd, _ = descriptor(path, most=most)
    return os.fdopen(fd, "rb")


def descriptor(path: Path | str, *, most: int = MAX_BYTES) -> tuple[int, os.stat_result]:
    """The same as a descriptor, with its stat."""
    _check(os.lstat(path), path, most)  # a device must not even be opened
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        _check(found, path, most)  # it may have been replaced since
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def contents(path: Path | str, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of such a file. Raises OSError, also if it has grown too large meanwhile."""
    with opened(path, most=most) as file:
        return read_whole(file, path, most=most)


def read_whole(file: BinaryIO, path: Path | str, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of this open file. Raises OSError if it is too large, or grows too large meanwhile: an agent could let
    it grow while it is read, until there is no more memory."""
    _check(os.fstat(file.fileno()), path, most)
    data = file.read(most + 1)
    if len(data) > most:
        raise _too_large(path, most)
    return data


def _check(found: os.stat_result, path: Path | str, most: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        link = "a link, " if stat.S_ISLNK(found.st_mode) else ""
        raise OSError(errno.EINVAL, f"it is {link}no regular file", str(path))
    if found.st_size > most:
        raise _too_large(path, most)


def _too_large(path: Path | str, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))


def mark_of(seen: os.stat_result, size: int, sha256: str, leaf: str | None) -> FileMark:
    """The mark of a file with exactly these bytes. Take the stat before reading them."""
    return FileMark(seen.st_dev, seen.st_ino, size, seen.st_mtime_ns, sha256, leaf, seen.st_ctime_ns)


def is_touched_by_cli(now: FileMark, mark: FileMark) -> bool:
    """Whether it is the same file, with no changes but the times that a CLI sets when it resumes."""
    whole_ms = (now.mtime_ns + _ROUNDING) % _MS <= 2 * _ROUNDING
    at_once = -_TICK <= now.ctime_ns - now.mtime_ns <= _SLACK
    same = (now.device, now.inode, now.size) == (mark.device, mark.inode, mark.size)
    return same and whole_ms and at_once and mark.mtime_ns < now.mtime_ns


def is_unchanged(path: Path | str, mark: FileMark) -> bool:
    """Whether the file at this path has not changed, by its stat only. Enough for a process that does not load it."""
    try:
        # Never the target of a link: it may be on a file system that does not answer.
        seen = os.lstat(path)
    except OSError:
        return False
    # Renaming the file away and back changes its ctime.
    return mark_of(seen, seen.st_size, mark.sha256, mark.leaf) == mark


# --- Reading appended lines, and re-reading a whole file

# Bytes that are hashed at a time.
CHUNK = 1024 * 1024

How = Literal["gone", "another_file", "content", "records", "touched"]


class TranscriptChanged(Exception):
    """The file does not match its mark.

    `how`: it is missing (or unreadable), it is another file, its content differs, records follow, or it was touched or
    moved with equal content.
    """

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.how = how


class TooMuchAppended(Exception):
    """More was appended to a transcript than may be read at once."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A position in a transcript: the mark of what was read so far, None before the first byte. Reading the appended
    bytes returns the next reader.

    The hash is continued, so a mark takes only the new bytes however long the file is. It covers the bytes as they were
    read: later damage to them is not noticed.
    """

    path: Path | str
    mark: FileMark | None = None
    _hash: Hash = field(default_factory=hashlib.sha256, repr=False, compare=False)

    @staticmethod
    def after(path: Path | str, mark: FileMark) -> Reader:
        """A reader at the end of what the mark describes. Raises `TranscriptChanged` if the file begins differently."""
        try:
            with opened(path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != (mark.device, mark.inode):
                    raise TranscriptChanged("another_file")
                read, left = hashlib.sha256(), mark.size
                while chunk := file.read(min(CHUNK, left)):
                    read.update(chunk)
                    left -= len(chunk)
        except OSError as exc:
            raise TranscriptChanged("gone") from exc
        if left or read.hexdigest() != mark.sha256:
            raise TranscriptChanged("content")
        return Reader(path, mark, read)

    def holds(self, mark: FileMark) -> bool:
        """Whether it is at the end of what this mark describes."""
        mine = self.mark
        return mine is not None and (mine.size, mine.device, mine.inode) == (mark.size, mark.device, mark.inode)

    def is_at_end(self) -> bool:
        """Whether the file has the size and identity of the last read."""
        try:
            now = os.lstat(self.path)
        except OSError:
            return False
        mine = self.mark
        return mine is not None and (mine.size, mine.device, mine.inode) == (now.st_size, now.st_dev, now.st_ino)

    def appended(self, most: int = MAX_BYTES, rewound: Collection[str] = ()) -> tuple[Parsed, Reader] | None:
        """The appended records, and the next reader. None if it is another file, too much was appended to be read at
        all, or very much, while others are being read. `rewound`: see `parse`.

        Raises `TooMuchAppended` if more than `most` bytes were appended.
        """
        size, identity = (0, None) if self.mark is None else (self.mark.size, (self.mark.device, self.mark.inode))
        try:
            fd, status = descriptor(self.path)
            try:
                if identity not in (None, (status.st_dev, status.st_ino)) or status.st_size < size:
                    return None
                if status.st_size - size > most:
                    raise TooMuchAppended
                if status.st_size - size > MORE_BYTES:
                    return None
                data = os.pread(fd, status.st_size - size, size)  # only up to the size in the stat
            finally:
                os.close(fd)
            parsed = parse(data, rewound=rewound)
        except (OSError, SessionBusy):
            return None
        read = self._hash.copy()
        read.update(data)
        leaf = parsed.leaf_after(None if self.mark is None else self.mark.leaf)
        return parsed, Reader(self.path, mark_of(status, size + len(data), read.hexdigest(), leaf), read)


def reread(path: Path, mark: FileMark, *, lenient: bool = False) -> tuple[Reader, FileMark]:
    """Read the whole file again after a process has loaded it: a reader at its end, and its present mark.

    Raises `TranscriptChanged` if the process may have loaded something else than the mark describes; unless `lenient`,
    also if the content is equal but the file was touched. Notes that the CLI appended and times that it set are
    allowed.
    """
    got = Reader.after(path, mark).appended()
    if got is None or (now := got[1].mark) is None:
        raise TranscriptChanged("another_file")
    added, reader = got
    has_names = any(entry.uuid is not None for entry in added.entries)
    try:
        if has_names or added.broken or not added.follows(mark.leaf) or names_twice(contents(path)):
            raise TranscriptChanged("records")
    except OSError as exc:
        raise TranscriptChanged("gone") from exc
    same_file_state = replace(now, sha256=mark.sha256, leaf=mark.leaf) == mark  # its size, times and identity
    if now.size == mark.size and not lenient and not same_file_state and not is_touched_by_cli(now, mark):
        raise TranscriptChanged("touched")
    return reader, now


_COST_NOTE = b'{"type":"cost-state",'  # the beginning of the CLI's note of a session's cost
_COST_NOTE_SIZE = 64 * 1024  # bytes of the longest such note


def total_cost(path: Path) -> float:
    """The cost in US dollars from which the CLI continues when it resumes this transcript: its last note, else 0.

    Read backwards in pieces, not mapped: others may truncate the file, and access to a lost page would kill us.
    """
    line = b"{}"
    try:
        with opened(path) as file:
            fd, start, piece = file.fileno(), min(os.fstat(file.fileno()).st_size, MAX_BYTES), b""
            while start > 0:
                size = min(CHUNK, start)
                start -= size
                piece = os.pread(fd, size, start) + piece[: len(_COST_NOTE) - 1]
                if (at := piece.rfind(_COST_NOTE)) >= 0:  # in a text its quotes would be escaped
                    line = os.pread(fd, _COST_NOTE_SIZE, start + at).partition(b"\n")[0]
                    break
        total = limits.loads(line, limits.CLI_DEPTH).get("totalCostUSD")
    except (OSError, ValueError):  # no file, or a cut line
        return 0.0
    return float(total) if isinstance(total, int | float) and 0 <= total <= limits.MOST_USD else 0.0
