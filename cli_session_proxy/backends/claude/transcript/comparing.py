"""Compares a transcript with the chain, for repairs, `verify` and the page.

By the mark's hash first, then record by record. If CLI 1.0.120 copied the session, it may have split records and given
them new uuids: then the messages are compared, if the copy's records are connected.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ....domain.models import FileMark, Record
from .entries import Entry, Parsed, copied_up_to, mark_of, opened, parse, parse_records, read_whole, unbroken
from .loading import KNOWN, as_loaded

# The most records after the path that are read. They take 50 ms of the event loop; a person hardly makes so many.
MORE_RECORDS = 20_000

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
    """The result of comparing a transcript with the chain's path.

    `found` is `tail` if the path is complete and followed by records that the chain does not have: the `tail`. For a
    damaged path (`different`) the tail has those whose ancestor is its last record. `note`: evidence for a person.
    `mark`: of the file, if it is `equal`; `read`: how many bytes were read.
    `leaf`: the uuid of the path's last record in the file, the parent of a tail.
    `pairs` and `unknown` (all records that the chain does not have) are only set if records were compared, not by the
    hash alone. `broken`: how many lines are no JSON or no valid record, including a cut last line.
    `earlier`: the file is the path as of some turns ago, and nothing else. `unloaded`: records of unknown types, which
    are not compared.
    """

    found: Found
    note: str
    pairs: tuple[Pair, ...] = ()
    unknown: tuple[Entry, ...] = ()
    tail: tuple[Entry, ...] = ()
    broken: int = 0
    mark: FileMark | None = None
    leaf: str | None = None
    read: int = 0
    earlier: bool = False
    unloaded: tuple[Entry, ...] = ()

    @property
    def cut(self) -> bool:
        return self.broken > 0


def check(path: Path, mark: FileMark | None, known: Sequence[Record] | None) -> FileVerdict | None:
    """Compare a transcript with the path: by the mark's hash first, then record by record with `known`.

    Returns None if the hash is not enough and `known` was not given: load the records and call again.
    """
    try:
        with opened(path) as file:
            stat = os.fstat(file.fileno())
            data = read_whole(file, path)
        if mark is not None and len(data) >= mark.size and _sha(memoryview(data)[: mark.size]) == mark.sha256:
            added = parse(data[mark.size :])
            if added.follows(mark.leaf):
                tail = tuple(added.path)
                return _whole("what the last turn left is unchanged", (), tail, added.broken, stat, data, mark.leaf)
        if known is None:
            return None
        chain = parse_records(known).path
        parsed = parse(data, sum(len(record.line) for record in known))
        unloaded = tuple(entry for entry in parsed.path if entry.kind not in KNOWN)
        verdict = _compared(as_loaded(chain), as_loaded(parsed.path), parsed, stat, data)
        leaf = _leaf(chain)
        if verdict.found in ("equal", "tail") and chain and leaf in {entry.uuid for entry in unloaded}:
            # A new CLI's records have this record as parent, although it does not load it.
            verdict = replace(verdict, leaf=leaf, mark=verdict.mark and replace(verdict.mark, leaf=leaf))
        return replace(verdict, unloaded=unloaded) if unloaded else verdict
    except FileNotFoundError:
        return FileVerdict("missing", f"no transcript at {path}")
    except OSError as exc:
        return FileVerdict("unreadable", f"{path}: {exc.strerror}")


def _compared(
    expected: list[Entry], present: list[Entry], parsed: Parsed, stat: os.stat_result, data: bytes
) -> FileVerdict:
    """Compare the chain's records with those of the file, in the form of `as_loaded`."""
    equal = [ours.comparable() == theirs.comparable() for ours, theirs in zip(expected, present, strict=False)]
    is_whole = len(present) >= len(expected) and all(equal)
    copy_end = None if is_whole else copied_up_to(expected, present)
    if copy_end is not None:
        # A copy under new uuids: equal messages, and nothing else lost. Its records are connected, and its last one is
        # the parent of what follows.
        copy = present[:copy_end]
        same_leaf = _leaf(copy) == _leaf(expected) and unbroken(copy, None)
        remarks, copied = (
            [entry.comparable()[2:] for entry in entries if not entry.spoken()] for entries in (expected, copy)
        )
        if same_leaf and remarks == copied:
            pairs = tuple(Pair(number, entry, None, "equal") for number, entry in enumerate(expected, 1))
            note = f"all {len(expected)} records are the chain's, under new uuids"
            return _whole(note, pairs, tuple(present[copy_end:]), parsed.broken, stat, data, _leaf(copy))
    by_uuid = {entry.uuid: entry for entry in present}
    found: list[Pair] = []
    for number, ours in enumerate(expected, 1):
        theirs = by_uuid.get(ours.uuid)
        same = theirs is not None and ours.comparable() == theirs.comparable()
        found.append(Pair(number, ours, theirs, "lost" if theirs is None else "equal" if same else "changed"))
    pairs = tuple(found)
    if is_whole:
        note = f"all {len(expected)} records are the chain's"
        return _whole(note, pairs, tuple(present[len(expected) :]), parsed.broken, stat, data, _leaf(expected))
    known = {entry.uuid for entry in expected}
    unknown = tuple(entry for entry in present if entry.uuid not in known)
    if len(present) < len(expected):
        broken = f", and {parsed.broken} broken" if parsed.broken else ""
        note = f"{len(present)} records instead of {len(expected)}{broken}" if data else "the file is empty"
    else:
        note = f"record {equal.index(False) + 1} of {len(expected)} is not the chain's"
    earlier = 0 < len(present) < len(expected) and not parsed.broken and all(equal)
    last = _leaf(expected)
    behind = next((present[at:] for at, entry in enumerate(present, 1) if last is not None and entry.uuid == last), [])
    tail = tuple(behind) if len(behind) <= MORE_RECORDS and not any(entry.uuid in known for entry in behind) else ()
    return FileVerdict(
        "different", note, pairs, unknown, tail, parsed.broken, leaf=last, read=len(data), earlier=earlier
    )


def _whole(
    note: str,
    pairs: tuple[Pair, ...],
    tail: tuple[Entry, ...],
    broken: int,
    stat: os.stat_result,
    data: bytes,
    leaf: str | None,
) -> FileVerdict:
    """The verdict for a complete path. Raises OSError if too many records follow."""
    if len(tail) > MORE_RECORDS:
        raise OSError(errno.EFBIG, f"more than {MORE_RECORDS:,} records follow what the chain knows")
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
