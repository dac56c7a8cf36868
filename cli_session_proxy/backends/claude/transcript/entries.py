"""What a transcript says: its lines as data, and whether they hang together; how its file is opened and marked, and
what was added since.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from ....domain import limits
from ....domain.models import Block, FileMark, Record
from .shapes import RECORD, SPOKEN

if TYPE_CHECKING:
    from hashlib import _Hash as Hash


# How a line of ours begins that is in the chain and in no transcript: a mark (`mending`), a kept file (`files`).
OWN = '{"type":"cli-session-proxy/'

# What stands in the CLI's note that it took the conversation back (`Entry.rewinds`). In a text the quotes are escaped.
REWOUND = b'"rewound":true'


@dataclass(slots=True)
class Entry:
    """One line, parsed as far as the chain needs it. `data` is the whole object. Never changed after it is made.

    `on_path`: part of the conversation, and not of a sub-agent's. A record of a sub-agent has a `uuid`, too. `content`:
    the message's blocks; the CLI writes a lone text as a string and rewrites it as a list. `sound`: of the shape that
    its readers rely on (`shapes`), and none of our own lines, which no CLI writes. Another one is no record: it has no
    uuid here, is on no path and has no content.
    """

    line: str
    data: dict[str, Any] = field(repr=False)
    piece_of: str | None = field(default=None, compare=False)  # the record's uuid, where this is a piece of one
    sound: bool = field(init=False, compare=False, repr=False)
    uuid: str | None = field(init=False, compare=False)
    parent: str | None = field(init=False, compare=False)
    kind: str = field(init=False, compare=False)
    on_path: bool = field(init=False, compare=False)
    content: list[Block] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        data = self.data
        named = "uuid" in data and "parentUuid" in data
        self.kind = str(data.get("type", ""))
        shape = SPOKEN if self.kind in ("user", "assistant") else RECORD
        self.sound = not self.line.startswith(OWN) and (not named or shape.isinstance_python(data))
        is_record = named and self.sound
        self.uuid = data["uuid"] if is_record else None
        self.parent = data["parentUuid"] if is_record else None
        self.on_path = is_record and not data.get("isSidechain")
        message = data.get("message") if is_record else None
        said = None if message is None else message.get("content")
        blocks = [{"type": "text", "text": said}] if isinstance(said, str) else said if isinstance(said, list) else ()
        self.content = [block for block in blocks if isinstance(block, dict)]

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

    def pieces(self) -> Iterator[Entry]:
        """The same with one block a record. The last piece keeps the uuid: what hangs on the record hangs on that. Each
        holds all that stands beside the message."""
        if not self.on_path or len(self.content) < 2:
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
        """The CLI's note that it took the conversation back to the record `leafUuid`, null for its beginning. Written
        up to 100 ms after it did, and heeded by a CLI that loads the file (run on 2.1.330)."""
        return self.kind == "last-prompt" and self.data.get("rewound") is True and "leafUuid" in self.data


class Cut(NamedTuple):
    """The lines behind this take the conversation back to this record of the lines before them; None: to nothing."""

    leaf: str | None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A transcript, or its tail, and of its entries those on the path. `broken` counts lines that are not JSON, too
    deep (a cut last line among them) or of no sound shape. What the CLI took back is not among the entries; `cut` is
    there where it took back records that stand before these lines."""

    entries: tuple[Entry, ...]
    path: list[Entry]
    broken: int = 0
    cut: Cut | None = None

    @property
    def leaf(self) -> str | None:
        return self.path[-1].uuid if self.path else None

    def leaf_behind(self, before: str | None) -> str | None:
        """The path's last record; `before` is that of what stands before these lines."""
        return self.leaf or (before if self.cut is None else self.cut.leaf)

    def follows(self, leaf: str | None) -> bool:
        """These lines go on from this record, or from nothing else that stands before them."""
        return self.cut is None or self.cut.leaf == leaf


# How much is read beyond what the chain knows. Others may write anything there, and one call of json.loads holds the
# interpreter, and with it the event loop, while what it makes takes twenty times its bytes: a file of more than this
# cannot be read. The prompt of a body of 64 MiB fits, which the CLI notes twice; so do lines and values as close as in
# its own records, of 20,000 turns too.
MORE_BYTES = 160 * 1024 * 1024
MORE_LINES, BYTES_A_LINE = 200_000, 256
MORE_VALUES, BYTES_A_VALUE = 2_000_000, 16
# Objects, lists, texts and numbers in one line: what a body may hold (`limits`), and more than twice that.
LINE_VALUES = 500_000
BEFORE_VALUES = (b",", b"[", b"{")


def parse(data: bytes, known: int = 0, without: Collection[str] = ()) -> Parsed:
    """`known`: how many characters of it the chain knows. `without`: records that were taken back, with all that hangs
    on them, whether the CLI has noted that yet or not. Raises OSError for much more than what is known."""
    if len(data) > MORE_BYTES + 4 * known:  # a character has four bytes at most
        raise too_much(f"than {MORE_BYTES:,} bytes that the chain does not know")
    lines, values = MORE_LINES + len(data) // BYTES_A_LINE, MORE_VALUES + len(data) // BYTES_A_VALUE
    dense = sum(map(data.count, BEFORE_VALUES)) > values  # hardly ever: in texts, too
    entries: list[Entry] = []
    broken = 0
    for raw in io.BytesIO(data):
        lines -= 1
        if dense or (len(raw) > LINE_VALUES and sum(map(raw.count, BEFORE_VALUES)) > LINE_VALUES):
            here = values_in(raw)
            values -= here
            if here > LINE_VALUES:
                raise too_much(f"than {LINE_VALUES:,} values in one line")
        if lines < 0 or values < 0:
            raise too_much("lines, or values in them, than a CLI writes")
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
            value = limits.loads(line, limits.CLI_DEPTH)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict) and (entry := Entry(line, value)).sound:
            entries.append(entry)
        else:
            broken += 1
    cut: Cut | None = None
    if without or any(entry.rewinds for entry in entries):
        entries, cut = _without_taken_back(entries, without)
    return Parsed(tuple(entries), [entry for entry in entries if entry.on_path], broken, cut)


def _without_taken_back(entries: Sequence[Entry], without: Collection[str]) -> tuple[list[Entry], Cut | None]:
    """The entries that are left: notes of the CLI's own stay, but for those that say what was taken back.

    A compaction stays, and all around it: a CLI that loads the file goes on from its summary (run on 2.1.330).
    """
    kept: list[Entry | None] = []
    at_of: dict[str, list[int]] = {}  # where the records stand in `kept`
    stack: list[int] = []  # the same in their order: each is taken back once, whatever the notes say
    gone: set[str | None] = set(without)
    cut: Cut | None = None
    compacted = -1
    for entry in entries:
        if entry.rewinds:
            leaf = entry.data["leafUuid"]
            at = next(reversed(at_of.get(leaf, ())), -1) if isinstance(leaf, str) else -1
            if compacted > at:
                continue
            while stack and stack[-1] > at:
                later = kept[stack[-1]]
                assert later is not None
                assert later.uuid is not None
                gone.add(later.uuid)
                at_of[later.uuid].pop()
                kept[stack.pop()] = None
            cut = Cut(leaf) if at < 0 else cut
        elif entry.uuid is not None and (entry.uuid in gone or entry.parent in gone):
            gone.add(entry.uuid)
        else:
            if entry.uuid is not None:
                at_of.setdefault(entry.uuid, []).append(len(kept))
                stack.append(len(kept))
            if entry.data.get("subtype") == "compact_boundary":
                compacted = len(kept)
            kept.append(entry)
    return [entry for entry in kept if entry is not None], cut


def values_in(raw: bytes) -> int:
    """No fewer than the objects, lists, texts and numbers in a line of JSON, without reading it: what stands before one
    outside of texts."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts > 2 * LINE_VALUES:  # half of them are names, at most
        return texts // 2
    outside = b"".join(bare.split(b'"')[::2])
    return 1 + sum(map(outside.count, BEFORE_VALUES))


def is_dense(raw: bytes) -> bool:
    """More than `LINE_VALUES` values are in this line."""
    few = len(raw) <= LINE_VALUES or sum(map(raw.count, BEFORE_VALUES)) <= LINE_VALUES
    return not few and values_in(raw) > LINE_VALUES


def too_much(what: str) -> OSError:
    return OSError(errno.EFBIG, f"it holds more {what}")


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
    """Whether these records end with an answer, not in the middle of an exchange."""
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
    return answers[-1].data["message"].get("stop_reason") not in (None, "tool_use", "max_tokens", "refusal")


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


# --- How a file in the CLI's directories is opened and marked

# Others write there, and may put anything in a file's place. Opening a pipe waits for a writer, reading a device never
# ends, and a sparse file has any size: of such a thing nothing is read. What is refused is an OSError with words, as
# for a file that cannot be read for other reasons.
#
# The mark of a transcript is what the file looked like when its content was known, taken and compared. A stat proves
# that nothing was written since only as far as the file system's clock goes: two writes within one tick look like one.
# So it is never proof of content by itself: before a file is loaded, its hash is compared as well.

# Bytes. A transcript of 20,000 turns has about 60 MB; one is read into memory as a whole.
MAX_BYTES = 512 * 1024 * 1024

# CLI 2.1.330 sets the times of a transcript that it resumes to now (so that no clean-up takes it), in whole ms. What is
# left of that after a conversion from a float; the file system's own clock, whose tick may be behind that (5 ms were
# seen); and how long a loaded machine may take over it. Nanoseconds.
_MS = 1_000_000
_ROUNDING = 1_000
_TICK = 20_000_000
_SLACK = 2_000_000_000


def opened(path: Path | str, *, most: int = MAX_BYTES) -> BinaryIO:
    """A regular file of at most `most` bytes, open to read. A link is none: an agent's shell makes them, to another's
    transcript or to what this process has open (/proc/self/fd). Raises OSError."""
    fd, _ = descriptor(path, most=most)
    return os.fdopen(fd, "rb")


def descriptor(path: Path | str, *, most: int = MAX_BYTES) -> tuple[int, os.stat_result]:
    """Such a file's descriptor, and what it is like."""
    _check(os.lstat(path), path, most)  # a device must not even be opened
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        there = os.fstat(fd)
        _check(there, path, most)  # it may have been replaced since
    except BaseException:
        os.close(fd)
        raise
    return fd, there


def contents(path: Path | str, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of such a file. Raises OSError, also where it has grown too large meanwhile."""
    with opened(path, most=most) as file:
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
    """The mark of a file that holds exactly these bytes. Take the stat before the bytes are read."""
    return FileMark(seen.st_dev, seen.st_ino, size, seen.st_mtime_ns, sha256, leaf, seen.st_ctime_ns)


def is_untouched(now: FileMark, mark: FileMark) -> bool:
    """The very file, and nothing was written to it since. Renaming it away and back changes its ctime, too."""
    return (now.device, now.inode, now.size, now.mtime_ns, now.ctime_ns) == (
        mark.device, mark.inode, mark.size, mark.mtime_ns, mark.ctime_ns,
    )  # fmt: skip


def is_touched_by_cli(now: FileMark, mark: FileMark) -> bool:
    """The very file, with no new times but those that a CLI sets when it resumes."""
    whole = (now.mtime_ns + _ROUNDING) % _MS <= 2 * _ROUNDING
    at_once = -_TICK <= now.ctime_ns - now.mtime_ns <= _SLACK
    same = (now.device, now.inode, now.size) == (mark.device, mark.inode, mark.size)
    return same and whole and at_once and mark.mtime_ns < now.mtime_ns


def is_unchanged(path: Path | str, mark: FileMark) -> bool:
    """The same of what lies there now, without reading it. Enough for a process that does not load it."""
    try:
        seen = os.stat(path)
    except OSError:
        return False
    return (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) == (
        mark.device, mark.inode, mark.size, mark.mtime_ns, mark.ctime_ns,
    )  # fmt: skip


# --- From turn to turn: what was added, without reading the rest again; and the whole of it once more

# Bytes hashed at a time.
CHUNK = 1024 * 1024

How = Literal["gone", "another_file", "content", "records", "touched"]


class TranscriptChanged(Exception):
    """The file does not hold what its mark describes.

    `how`: it is gone (or cannot be read), another file lies there, its content is another, records follow, or it was
    written to or moved although its content is the same.
    """

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.how = how


class MuchMore(Exception):
    """More was appended to a transcript than is read at once."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How far a transcript was read: its mark at that time, None before the first byte. Only what was appended is read
    by the next one.

    The hash runs on, so that a mark costs the new bytes only, however long the file is. It is of what was read when it
    was appended: damage to those bytes since then is never part of it.
    """

    path: Path | str
    mark: FileMark | None = None
    _hash: Hash = field(default_factory=hashlib.sha256, repr=False, compare=False)

    @staticmethod
    def behind(path: Path | str, mark: FileMark) -> Reader:
        """One that has read what the mark describes. Raises `TranscriptChanged` where the file begins otherwise."""
        try:
            with opened(path) as file:
                there = os.fstat(file.fileno())
                if (there.st_dev, there.st_ino) != (mark.device, mark.inode):
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
        """It has read just what this mark describes."""
        mine = self.mark
        return mine is not None and (mine.size, mine.device, mine.inode) == (mark.size, mark.device, mark.inode)

    def is_at_end(self) -> bool:
        """The file is as it was when it was last read, by size and identity."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        mine = self.mark
        return mine is not None and (mine.size, mine.device, mine.inode) == (there.st_size, there.st_dev, there.st_ino)

    def appended(self, most: int = MAX_BYTES, without: Collection[str] = ()) -> tuple[Parsed, Reader] | None:
        """What was added behind this one, and a reader that has read it. None when it is not the same file, or when
        more was added than can be read. `without`: see `parse`.

        Raises `MuchMore` where that is more than `most` bytes.
        """
        size, identity = (0, None) if self.mark is None else (self.mark.size, (self.mark.device, self.mark.inode))
        try:
            fd, there = descriptor(self.path)
            try:
                if identity not in (None, (there.st_dev, there.st_ino)) or there.st_size < size:
                    return None
                if there.st_size - size > most:
                    raise MuchMore
                if there.st_size - size > MORE_BYTES:
                    return None
                data = os.pread(fd, there.st_size - size, size)  # no more than the mark's stat knows of
            finally:
                os.close(fd)
            parsed = parse(data, without=without)
        except OSError:
            return None
        read = self._hash.copy()
        read.update(data)
        leaf = parsed.leaf_behind(None if self.mark is None else self.mark.leaf)
        return parsed, Reader(self.path, mark_of(there, size + len(data), read.hexdigest(), leaf), read)


def reread(path: Path, mark: FileMark, *, lenient: bool = False) -> tuple[Reader, FileMark]:
    """The whole file once more, after a process has loaded it: a reader behind its end, and its mark now.

    Raises `TranscriptChanged` where the process may have loaded something else than the mark describes. Unless
    `lenient`, also where the content is the same, but somebody touched the file meanwhile. The CLI's own notes may have
    followed, and it may have set the file's times.
    """
    got = Reader.behind(path, mark).appended()
    if got is None or (now := got[1].mark) is None:
        raise TranscriptChanged("another_file")
    added, reader = got
    if added.path or added.broken or not added.follows(mark.leaf):
        raise TranscriptChanged("records")
    if now.size == mark.size and not lenient and not is_untouched(now, mark) and not is_touched_by_cli(now, mark):
        raise TranscriptChanged("touched")
    return reader, now


_TOTAL = b'{"type":"cost-state",'
_NOTE = 64 * 1024  # bytes of such a note, at most


def total_cost(path: Path) -> float:
    """US dollars that the CLI takes as spent when it resumes this transcript: its last note of it, else 0.

    Read from its end, piece by piece: others may cut the file meanwhile, and a mapped page that is gone kills.
    """
    line = b"{}"
    try:
        with opened(path) as file:
            fd, start, piece = file.fileno(), os.fstat(file.fileno()).st_size, b""
            while start > 0:
                size = min(CHUNK, start)
                start -= size
                piece = os.pread(fd, size, start) + piece[: len(_TOTAL) - 1]
                if (at := piece.rfind(_TOTAL)) >= 0:  # inside a record's text its quotes would be escaped
                    line = os.pread(fd, _NOTE, start + at).partition(b"\n")[0]
                    break
        total = limits.loads(line, limits.CLI_DEPTH).get("totalCostUSD")
    except (OSError, ValueError):  # no file, or a cut line
        return 0.0
    return float(total) if isinstance(total, int | float) and 0 <= total <= limits.MOST_USD else 0.0
