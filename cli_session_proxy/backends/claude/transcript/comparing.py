"""Is a transcript what the chain knows? The one comparator: for repairs, for `verify` and for the page.

By the mark's hash first, then record by record. Where CLI 1.0.120 copied the session it may have cut records and
given them new uuids: then the words decide, as long as the copy hangs together.
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
from .entries import Entry, Parsed, copied_up_to, mark_of, opened, parse, parse_records, unbroken
from .loading import KNOWN, as_loaded

# The most records behind the path that are looked at. This takes 50 ms of the event loop; a person who goes on by hand
# hardly makes so many.
MORE_RECORDS = 20_000

Found = Literal["equal", "tail", "missing", "unreadable", "different"]
State = Literal["equal", "changed", "lost"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A record of the chain's path and the transcript's record of that uuid. `number` counts from 1 on the path.

    `state` is `equal` without a `theirs` where the transcript says the same in other records.
    """

    number: int
    ours: Entry
    theirs: Entry | None
    state: State


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """How a transcript compares with the chain's path.

    `tail`: the path is there whole, and records that the chain does not know follow it. Where the path is damaged, its
    verdict is `different`, and the tail is what hangs on its last record all the same. `note` is evidence for a person.
    `mark` describes the file where it is `equal`; `read` is how many bytes had to be read.
    `leaf` is the uuid of the path's last record in the file, on which a tail of somebody else's hangs.
    `pairs` and `unknown` (every record that the chain does not know) are there where records were compared, not
    where the hash decided. `broken` counts lines that are no JSON or no sound record, a cut last line among them.
    `earlier`: the file is the path as it was some turns ago, and nothing else. `unloaded`: its records of types that
    nobody here knows; they are not compared.
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

    Returns None when the hash does not decide and `known` was not given: load the records and call again.
    """
    try:
        with opened(path) as file:
            stat = os.fstat(file.fileno())
            data = file.read()
        if mark is not None and len(data) >= mark.size and _sha(memoryview(data)[: mark.size]) == mark.sha256:
            added = parse(data[mark.size :])
            if added.follows(mark.leaf):
                tail = tuple(added.path)
                return _whole("what the last turn left is unchanged", (), tail, added.broken, stat, data, mark.leaf)
        if known is None:
            return None
        characters = sum(len(record.line) for record in known)
        return _by_records(parse_records(known).path, parse(data, characters), stat, data)
    except FileNotFoundError:
        return FileVerdict("missing", f"no transcript at {path}")
    except OSError as exc:
        return FileVerdict("unreadable", f"{path}: {exc.strerror}")


def _by_records(path: list[Entry], parsed: Parsed, stat: os.stat_result, data: bytes) -> FileVerdict:
    wanted, have = as_loaded(path), as_loaded(parsed.path)
    unloaded = tuple(entry for entry in parsed.path if entry.kind not in KNOWN)
    verdict = _compared(wanted, have, parsed, stat, data)
    ends = {entry.uuid for entry in unloaded}
    if verdict.found in ("equal", "tail") and path and path[-1].uuid in ends:  # a CLI that knows it hangs on it
        leaf = path[-1].uuid
        verdict = replace(verdict, leaf=leaf, mark=verdict.mark and replace(verdict.mark, leaf=leaf))
    return replace(verdict, unloaded=unloaded) if unloaded else verdict


def _compared(wanted: list[Entry], have: list[Entry], parsed: Parsed, stat: os.stat_result, data: bytes) -> FileVerdict:
    begins = len(have) >= len(wanted) and all(map(_equal, wanted, have))
    end = len(wanted) if begins else None
    renewed = _end_of_copy(wanted, have) if end is None else None
    if renewed is not None:
        pairs = tuple(Pair(number, entry, None, "equal") for number, entry in enumerate(wanted, 1))
        note = f"all {len(wanted)} records are the chain's, under new uuids"
        return _whole(note, pairs, tuple(have[renewed:]), parsed.broken, stat, data, _leaf(have[:renewed]))
    pairs = _pairs(wanted, have)
    if end is not None:
        note = f"all {len(wanted)} records are the chain's"
        return _whole(note, pairs, tuple(have[end:]), parsed.broken, stat, data, _leaf(wanted))
    known = {entry.uuid for entry in wanted}
    unknown = tuple(entry for entry in have if entry.uuid not in known)
    if len(have) < len(wanted):
        broken = f", and {parsed.broken} broken" if parsed.broken else ""
        note = f"{len(have)} records instead of {len(wanted)}{broken}" if data else "the file is empty"
    else:
        at = next(n for n, (mine, theirs) in enumerate(zip(wanted, have, strict=False), 1) if not _equal(mine, theirs))
        note = f"record {at} of {len(wanted)} is not the chain's"
    earlier = 0 < len(have) < len(wanted) and not parsed.broken and all(map(_equal, wanted, have))
    last = wanted[-1].uuid if wanted else None
    behind = next((have[at:] for at, entry in enumerate(have, 1) if last is not None and entry.uuid == last), [])
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
    """The path is there, from its first record to its last. Raises OSError where more follows than is looked at."""
    if len(tail) > MORE_RECORDS:
        raise OSError(errno.EFBIG, f"more than {MORE_RECORDS:,} records follow what the chain knows")
    if tail or broken:
        follow = "1 unknown record follows" if len(tail) == 1 else f"{len(tail)} unknown records follow"
        more = f"{note}; {follow}" + (", the last line is cut" if broken else "")
        return FileVerdict("tail", more, pairs, tail, tail, broken, leaf=leaf, read=len(data))
    mark = mark_of(stat, len(data), _sha(data), leaf)
    return FileVerdict("equal", note, pairs, mark=mark, leaf=leaf, read=len(data))


def _end_of_copy(wanted: Sequence[Entry], have: Sequence[Entry]) -> int | None:
    """Where the records go on behind a copy of the path under new uuids: the same words, nothing beside them lost, and
    unbroken. None when they do not begin with one.

    Its last record is the chain's own: what follows must hang on that.
    """
    end = copied_up_to(wanted, have)
    if end is None or _leaf(have[:end]) != _leaf(wanted) or not unbroken(have[:end], None):
        return None
    return end if _unspoken(wanted) == _unspoken(have[:end]) else None


def _unspoken(entries: Sequence[Entry]) -> list[tuple[object, ...]]:
    """What stands beside the words: attachments, the CLI's own remarks."""
    return [entry.says()[2:] for entry in entries if not entry.spoken()]


def _pairs(wanted: Sequence[Entry], have: Sequence[Entry]) -> tuple[Pair, ...]:
    there = {entry.uuid: entry for entry in have}
    found: list[Pair] = []
    for number, ours in enumerate(wanted, 1):
        theirs = there.get(ours.uuid)
        state: State = "lost" if theirs is None else "equal" if _equal(ours, theirs) else "changed"
        found.append(Pair(number, ours, theirs, state))
    return tuple(found)


def _equal(ours: Entry, theirs: Entry) -> bool:
    return ours.says() == theirs.says()


def _leaf(entries: Sequence[Entry]) -> str | None:
    return entries[-1].uuid if entries else None


def _sha(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
