"""Which records of a transcript a CLI loads, and in which form.

Each CLI loads records of the KNOWN types, from the newest leaf upwards by `parentUuid`, without records of sub-agents
and lines without a uuid. Versions differ in two ways:

- Up to 2.1.90 a CLI drops a record of an unknown type and stops there: all turns before it are lost for the model. From
  2.1.91 on it skips such a record (run on 1.0.120, 2.1.0, 2.1.34, 2.1.67, 2.1.90 and on
  2.1.91, 2.1.94, 2.1.100, 2.1.200, 2.1.260, 2.1.330, with such a record at the root, between any two records and last).
  But not always: on a machine so busy that turns were seconds apart, 2.1.330 stopped there (16 of 16 runs). So we never
  write such records for a CLI; their children get the record before as parent.
- Up to 2.1.29 `--resume` splits each record with several blocks, and gives new uuids to the pieces and to all records
  that follow. Where each record has one block and a time of its own it keeps every uuid, and the request extends the
  last one byte for byte (run on 1.0.120, 1.0.128, 2.0.30, 2.1.0, 2.1.1 and 2.1.29, with a text, an image and a text in
  one prompt). Of records with equal times 1.0.120, 2.1.71 and 2.1.100 lose some; 2.1.200, 2.1.260 and 2.1.332 do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .entries import MORE_BYTES, Entry, too_much

KNOWN = frozenset({"user", "assistant", "attachment", "system"})
GOES_OVER_UNKNOWN = (2, 1, 91)

_TYPES = tuple(f'"type":"{kind}"' for kind in KNOWN)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Loading:
    """How a CLI loads. `whole_records`: it loads records with several blocks, or with equal times, unchanged."""

    whole_records: bool = True

    def takes(self, path: Iterable[Entry]) -> bool:
        """Whether it loads these records (all on the path) without losing or renaming any."""
        return all(entry.kind in KNOWN and (self.whole_records or len(entry.content) < 2) for entry in path)

    def form(self, entries: Sequence[Entry]) -> list[Entry]:
        """The records in a form that it loads completely."""
        remaining = without_unknown(entries)
        return list(remaining) if self.whole_records else _in_pieces(remaining)


def is_of_unknown_kind(line: str) -> bool:
    """Whether this line is a record of an unknown type, without parsing all of it."""
    return '"parentUuid":' in line and not any(kind in line for kind in _TYPES)


def stops_at_unknown(version: str) -> bool:
    """Whether a CLI of this version stops at a record of an unknown type; for `verify`."""
    found = _VERSION.match(version)
    return found is not None and tuple(map(int, found.groups())) < GOES_OVER_UNKNOWN


def as_loaded(path: Sequence[Entry]) -> list[Entry]:
    """These records in a normal form, equal for all forms that show the model the same: to compare two transcripts."""
    return _in_pieces(without_unknown(path))


def _in_pieces(entries: Sequence[Entry]) -> list[Entry]:
    """Split into one block per record. Raises OSError if the result is much larger: a shell may write a record with
    many blocks and megabytes in other fields, which each piece repeats."""
    left = MORE_BYTES + 4 * sum(len(entry.line) for entry in entries)
    out: list[Entry] = []
    for entry in entries:
        for piece in entry.pieces():
            if (left := left - len(piece.line)) < 0:
                raise too_much("beside its blocks than a CLI writes")
            out.append(piece)
    return out


def without_unknown(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Without the path's records of unknown types; their children get the record before as parent."""
    unknown = {entry.uuid: entry.parent for entry in entries if entry.in_conversation and entry.kind not in KNOWN}
    if not unknown:
        return entries
    out: list[Entry] = []
    for entry in entries:
        if entry.uuid in unknown:
            continue
        parent, over = entry.parent, set[str | None]()
        while parent in unknown and parent not in over:  # each once, so that cycles end
            over.add(parent)
            parent = unknown[parent]
        unknown |= dict.fromkeys(over, parent)  # shortcut for further records there
        out.append(entry if parent == entry.parent else entry.with_parent(parent))
    return out
