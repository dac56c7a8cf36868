"""Compares a transcript with the chain, for repairs, `verify` and the page.

The hash of the mark is compared first, then each record. CLI 1.0.120 copies a session at a resume, may split its
records and gives them new uuids. In such a copy the messages are compared, and its records must be connected.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ....domain.limits import values_in
from ....domain.models import FileMark, Record
from .entries import (
    Entry,
    Parsed,
    end_of_copy,
    mark_of,
    most_bytes,
    opened,
    parse,
    parse_records,
    read_whole,
    too_much,
    unbroken,
)
from .loading import KNOWN, as_loaded

# The most records after the path that are read. They take 50 ms of the event loop; a person hardly adds so many.
MOST_ADDED = 20_000
# The most JSON values of records that are not the chain's. They take 75 MB for as long as the verdict is used, also of
# several agents at once.
MOST_VALUES = 500_000

Found = Literal["equal", "tail", "missing", "unreadable", "different"]
State = Literal["equal", "changed", "lost"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A record of the chain's path, and the transcript's record with that uuid. `number`: on the path, from 1.

    `state` is `equal` without a `theirs` if the transcript has the same messages in other records.
    """

    number: int
    ours: Entry
    theirs: Entry | None
    state: State


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """The result of comparing a transcript with the chain's path."""

    found: Found  # `tail`: the path is complete, and followed by records that the chain does not have
    note: str  # evidence for a person
    pairs: tuple[Pair, ...] = ()  # only if records were compared, not the hash alone
    unknown: tuple[Entry, ...] = ()  # the same: all records that the chain does not have
    tail: tuple[Entry, ...] = ()  # the records after the path; in a `different` file, those after its last record
    broken: int = 0  # lines that are no JSON or no valid record, a cut last line included
    mark: FileMark | None = None  # of an `equal` file
    leaf: str | None = None  # the uuid of the path's last record in the file, the parent of a tail
    read: int = 0  # bytes
    is_prefix: bool = False  # the file has the first records of the path, unchanged, and nothing else
    unknown_types: tuple[Entry, ...] = ()  # records of types that we do not know: they are not compared


def check(path: Path, mark: FileMark | None, expected: Sequence[Record] | None) -> FileVerdict | None:
    """Compare a transcript with the path: by the mark's hash first, then with the path's records, `expected`.

    Returns None if the hash is not enough and `expected` is None: load the path's records and call again.
    """
    try:
        with opened(path) as file:
            stat = os.fstat(file.fileno())
            if mark is None and expected is None:
                return None
            known = sum(len(record.line) for record in expected or ())
            most = most_bytes(max(4 * known, 0 if mark is None else mark.size))
            data = read_whole(file, path, most=most)
        if mark is not None and len(data) >= mark.size and _sha(memoryview(data)[: mark.size]) == mark.sha256:
            added = parse(data[mark.size :])
            if added.follows(mark.leaf):
                note = "what the last turn left is unchanged"
                verdict = _whole_path(note, (), tuple(added.path), added.broken, stat, data, mark.leaf)
                return _bounded(verdict, added, ())
        if expected is None:
            return None
        chain = parse_records(expected).path
        parsed = parse(data, known)
        unknown_types = tuple(entry for entry in parsed.path if entry.kind not in KNOWN)
        verdict = _compared(as_loaded(chain), as_loaded(parsed.path), parsed, stat, data)
        leaf = _leaf(chain)
        if verdict.found in ("equal", "tail") and chain and leaf in {entry.uuid for entry in unknown_types}:
            # A new CLI's records have this record as parent, although it does not load it.
            verdict = replace(verdict, leaf=leaf, mark=verdict.mark and replace(verdict.mark, leaf=leaf))
        return _bounded(replace(verdict, unknown_types=unknown_types) if unknown_types else verdict, parsed, chain)
    except FileNotFoundError:
        return FileVerdict("missing", f"no transcript at {path}")
    except OSError as exc:
        return FileVerdict("unreadable", f"{path}: {exc.strerror}")


def _bounded(verdict: FileVerdict, parsed: Parsed, chain: Sequence[Entry]) -> FileVerdict:
    """The verdict. Raises OSError if it keeps more than `MOST_VALUES` values that the chain does not have."""
    if parsed.place is not None:
        kept = [*verdict.unknown, *verdict.unknown_types, *(pair.theirs for pair in verdict.pairs if pair.theirs)]
        if _values(kept) - _values(chain) > MOST_VALUES:
            raise too_much(f"than {MOST_VALUES:,} values that the chain does not know")
    return verdict


def _values(entries: Sequence[Entry]) -> int:
    return sum(values_in(entry.line.encode("utf-8", "surrogatepass")) for entry in entries)


def _compared(
    expected: list[Entry], present: list[Entry], parsed: Parsed, stat: os.stat_result, data: bytes
) -> FileVerdict:
    """Compare the chain's records with those of the file, in the form of `as_loaded`."""
    equal = [ours.comparable() == theirs.comparable() for ours, theirs in zip(expected, present, strict=False)]
    has_whole_path = len(present) >= len(expected) and all(equal)
    copy_end = None if has_whole_path else end_of_copy(expected, present)
    if copy_end is not None:
        # A copy of the path has equal messages, equal other records (compared without their uuids) and the same leaf,
        # the parent of what follows. It is connected.
        copy = present[:copy_end]
        is_connected = _leaf(copy) == _leaf(expected) and unbroken(copy, None)
        others, copied_others = (
            [entry.without_uuids() for entry in entries if not entry.message_blocks()] for entries in (expected, copy)
        )
        if is_connected and others == copied_others:
            pairs = tuple(Pair(number, entry, None, "equal") for number, entry in enumerate(expected, 1))
            note = f"all {len(expected)} records are the chain's, under new uuids"
            return _whole_path(note, pairs, tuple(present[copy_end:]), parsed.broken, stat, data, _leaf(copy))
    by_uuid = {entry.uuid: entry for entry in present}
    found: list[Pair] = []
    for number, ours in enumerate(expected, 1):
        theirs = by_uuid.get(ours.uuid)
        same = theirs is not None and ours.comparable() == theirs.comparable()
        found.append(Pair(number, ours, theirs, "lost" if theirs is None else "equal" if same else "changed"))
    pairs = tuple(found)
    if has_whole_path:
        note = f"all {len(expected)} records are the chain's"
        return _whole_path(note, pairs, tuple(present[len(expected) :]), parsed.broken, stat, data, _leaf(expected))
    known = {entry.uuid for entry in expected}
    unknown = tuple(entry for entry in present if entry.uuid not in known)
    if len(present) < len(expected):
        broken = f", and {parsed.broken} broken" if parsed.broken else ""
        note = f"{len(present)} records instead of {len(expected)}{broken}" if data else "the file is empty"
    else:
        note = f"record {equal.index(False) + 1} of {len(expected)} is not the chain's"
    is_prefix = 0 < len(present) < len(expected) and not parsed.broken and all(equal)
    leaf = _leaf(expected)
    at_leaf = (at for at, entry in enumerate(present, 1) if leaf is not None and entry.uuid == leaf)
    after_leaf = present[next(at_leaf, len(present)) :]
    is_new = not any(entry.uuid in known for entry in after_leaf)
    tail = tuple(after_leaf) if is_new and len(after_leaf) <= MOST_ADDED else ()
    return FileVerdict(
        "different", note, pairs, unknown, tail, parsed.broken, leaf=leaf, read=len(data), is_prefix=is_prefix
    )


def _whole_path(
    note: str,
    pairs: tuple[Pair, ...],
    tail: tuple[Entry, ...],
    broken: int,
    stat: os.stat_result,
    data: bytes,
    leaf: str | None,
) -> FileVerdict:
    """The verdict for a complete path. Raises OSError if too many records follow."""
    if len(tail) > MOST_ADDED:
        raise OSError(errno.EFBIG, f"more than {MOST_ADDED:,} records follow what the chain knows")
    if tail or broken:
        follow = "1 unknown record follows" if len(tail) == 1 else f"{len(tail)} unknown records follow"
        more = f"{note}; {follow}" + (", the last line is cut" if broken else "")
        return FileVerdict("tail", more, pairs, tail, tail, broken, leaf=leaf, read=len(data))
    mark = mark_of(stat, len(data), _sha(data), leaf)
    return FileVerdict("equal", note, pairs, mark=mark, leaf=leaf, read=len(data))


def _leaf(entries: Sequence[Entry]) -> str | None:
    return entries[-1].uuid if entries else None


def _sha(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
