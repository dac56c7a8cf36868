"""Is a transcript what the chain knows? By the mark of the last turn first, then record by record."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ....domain.models import FileMark, Record
from .entries import Entry, Parsed, parse, parse_records

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
        dangling = f": a link there leads to {os.readlink(path)}, which is not" if path.is_symlink() else ""
        return Verdict("missing", f"no transcript at {path}{dangling}")
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
        broken = f", and {parsed.broken} broken" if parsed.broken else ""
        note = f"{len(have)} records instead of {len(wanted)}{broken}" if data else "the file is empty"
        return Verdict("different", note, read=len(data))
    for at, (mine, theirs) in enumerate(zip(wanted, have, strict=False)):
        if mine.says() != theirs.says():
            return Verdict("different", f"record {at + 1} of {len(wanted)} is not the chain's", read=len(data))
    leaf = wanted[-1].uuid if wanted else None
    rest = Parsed(tuple(have[len(wanted) :]), parsed.broken)
    return _judge(rest, stat, data, leaf, f"all {len(wanted)} records are the chain's")


def _judge(added: Parsed, stat: os.stat_result, data: bytes, leaf: str | None, note: str) -> Verdict:
    tail = tuple(added.path)
    if tail or added.broken:
        follow = "1 unknown record follows" if len(tail) == 1 else f"{len(tail)} unknown records follow"
        more = f"{note}; {follow}" + (", the last line is cut" if added.broken else "")
        return Verdict("tail", more, tail=tail, read=len(data), cut=bool(added.broken))
    return Verdict("equal", note, mark=mark_of(stat, data, leaf), read=len(data))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def mark_of(stat: os.stat_result, data: bytes, leaf: str | None) -> FileMark:
    """The mark of a file that holds exactly these bytes."""
    return FileMark(stat.st_dev, stat.st_ino, len(data), stat.st_mtime_ns, _sha(data), leaf)
