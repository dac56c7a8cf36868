"""Ends an answer as its request asks: exactly before the first stop sequence, or at the token limit.

Pure, and the same for streams: text that may be the beginning of a sequence is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .models import Block, BlockDelta, BlockStart, BlockStop, TurnEvent

# For backends without a token limit: the usual rule of thumb for English.
BYTES_PER_TOKEN = 4


class StopCutter:
    """Cuts the texts of one answer. Once it has `ended`, it emits nothing.

    `tokens`: the limit; tokens are estimated. `hit`: the sequence that ended the answer.
    """

    def __init__(self, sequences: Sequence[str], tokens: int | None = None) -> None:
        self._sequences = [sequence for sequence in sequences if sequence]
        self._longest = max(map(len, self._sequences), default=0)
        self._left = None if tokens is None else tokens * BYTES_PER_TOKEN  # bytes that may still be emitted
        self._held = ""  # the end of the text so far, held back: it may be the beginning of a sequence
        self._emitted = ""
        self._block: int | None = None  # the index of the open text block
        self.hit: str | None = None
        self.ended: Literal["stop_sequence", "max_tokens"] | None = None

    @property
    def last(self) -> Block:
        """The emitted part of the text block that was cut."""
        return {"type": "text", "text": self._emitted}

    def feed(self, event: BlockStart | BlockDelta | BlockStop) -> list[TurnEvent]:
        if self.ended is not None:
            return []
        if not self._sequences and self._left is None:
            return [event]
        if isinstance(event, BlockStart):
            if event.block.get("type") != "text":
                return [event]
            self._block, self._held, self._emitted = event.index, "", ""
            first = str(event.block.get("text", ""))
            return [BlockStart(event.index, {**event.block, "text": ""}), *self._add_text(event.index, first)]
        if event.index != self._block:
            return [event]
        if isinstance(event, BlockDelta):
            return self._add_text(event.index, str(event.delta.get("text", "")))
        held, self._held, self._block = self._held, "", None
        return [*self._emit(event.index, held), *([] if self.ended else [event])]

    def _add_text(self, index: int, piece: str) -> list[TurnEvent]:
        self._held += piece
        found = [(at, sequence) for sequence in self._sequences if (at := self._held.find(sequence)) >= 0]
        if found:
            # The sequence that is complete first, as if the text came letter by letter: the result must not depend on
            # how the text was cut into pieces.
            at, hit = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            events = self._emit(index, self._held[:at])
            if self.ended is None:
                self.hit, self.ended = hit, "stop_sequence"
                events.append(BlockStop(index))
            return events
        # The last characters wait for the next piece if they may be the beginning of a sequence.
        keep = next(
            (
                size
                for size in range(min(self._longest - 1, len(self._held)), 0, -1)
                if any(sequence.startswith(self._held[-size:]) for sequence in self._sequences)
            ),
            0,
        )
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._emit(index, ready)

    def _emit(self, index: int, text: str) -> list[TurnEvent]:
        """Emit as much of the text as the token limit allows. If that is not all, end the block there."""
        ends: list[TurnEvent] = []
        if self._left is not None:
            whole = text.encode("utf-8", "surrogatepass")
            if len(whole) > self._left:
                text = whole[: self._left].decode("utf-8", "ignore")
                self.ended, ends = "max_tokens", [BlockStop(index)]
            self._left -= min(self._left, len(whole))
        self._emitted += text
        return [*([BlockDelta(index, {"type": "text_delta", "text": text})] if text else []), *ends]
