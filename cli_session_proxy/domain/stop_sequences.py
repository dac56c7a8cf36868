"""Stop sequences: the answer ends exactly before the first of them, on a stream too. Pure.

What may be the beginning of one is held back until more is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from .models import Block, BlockDelta, BlockStart, BlockStop, TurnEvent


class Cutter:
    """Watches the texts of one answer. After a `hit` nothing more comes out."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = [sequence for sequence in sequences if sequence]
        self._longest = max(map(len, self._sequences), default=0)
        self._held = ""
        self._said = ""
        self._text: int | None = None  # the text block that is open
        self.hit: str | None = None

    @property
    def last(self) -> Block:
        """The text block that was cut, as far as it came out."""
        return {"type": "text", "text": self._said}

    def feed(self, event: BlockStart | BlockDelta | BlockStop) -> list[TurnEvent]:
        if self.hit is not None:
            return []
        if not self._sequences:
            return [event]
        if isinstance(event, BlockStart):
            if event.block.get("type") != "text":
                return [event]
            self._text, self._held, self._said = event.index, "", ""
            begun = str(event.block.get("text", ""))
            return [BlockStart(event.index, {**event.block, "text": ""}), *self._text_of(event.index, begun)]
        if event.index != self._text:
            return [event]
        if isinstance(event, BlockDelta):
            return self._text_of(event.index, str(event.delta.get("text", "")))
        held, self._held, self._text = self._held, "", None
        return [*self._say(event.index, held), event]

    def _text_of(self, index: int, piece: str) -> list[TurnEvent]:
        self._held += piece
        found = [(at, sequence) for sequence in self._sequences if (at := self._held.find(sequence)) >= 0]
        if found:
            # The first that is complete, as if the text came letter by letter: in which pieces it came is chance.
            at, self.hit = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            return [*self._say(index, self._held[:at]), BlockStop(index)]
        keep = self._beginning()
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._say(index, ready)

    def _beginning(self) -> int:
        """How many of the last characters may be the beginning of a sequence."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(sequence.startswith(self._held[-size:]) for sequence in self._sequences):
                return size
        return 0

    def _say(self, index: int, text: str) -> list[TurnEvent]:
        self._said += text
        return [BlockDelta(index, {"type": "text_delta", "text": text})] if text else []
