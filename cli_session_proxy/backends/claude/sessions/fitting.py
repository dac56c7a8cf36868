"""Fits images of adopted and imported turns to the model's limits.

The records stay unchanged; marks name the replacements, and thinking that becomes invalid. `adopt` and `import` use
this for all turns, parents before children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ....domain.models import Block, Record
from ....domain.notes import Code, Note
from .. import transcript

# The replacement of an image or document with the code of its note; None: it can stay. Called on a thread.
Look = Callable[[Block], tuple[Code, Block] | None]


class ImportFitting:
    """One per imported chain."""

    def __init__(self, look: Look) -> None:
        self._look = look
        # For turns after the first change on their path: counts of changes.
        self._changed: dict[str, Counter[Code]] = {}

    def records(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        """The turn's records, with marks for its images."""
        changed = Counter(self._changed.get(parent_id or ""))
        instead: dict[str, Block] = {}
        since = next((record.uuid for record in records if record.uuid is not None), None) if changed else None
        for uuid, sha256, block in transcript.media_of(records):
            if sha256 not in instead and (found := self._look(block)) is not None:
                instead[sha256] = found[1]
                changed[found[0]] += 1
                since = since or uuid
        if not changed:
            return tuple(records)
        self._changed[turn_id] = changed
        marks = [transcript.fitted(instead)] if instead else []
        # Thinking after a changed image is invalid: its signature covers the original.
        behind = [record.uuid for record in records]
        void = records[behind.index(since) :] if since is not None else ()
        if thoughts := transcript.count(void, "thinking"):
            changed["thinking_left_out"] += thoughts
            marks.append(transcript.leave_out("thinking", since))
        marks.append(transcript.imported(Note(code, number) for code, number in changed.items()))
        return (*records, *marks)
