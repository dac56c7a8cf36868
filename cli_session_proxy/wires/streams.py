"""Shared by the writers of streamed answers: framing, and the texts and blocks of a turn's events. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from ..domain.lineage import TextJoin, answer_text
from ..domain.models import (
    JSON,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Finished,
    Started,
    Status,
    Turn,
    TurnEvent,
    Waits,
)
from ..errors import ProxyError
from .common import compact

SSE_DONE = b"data: [DONE]\n\n"


def sse(data: JSON) -> bytes:
    """One `data:` event. ASCII JSON has no line breaks of its own, so one line is enough."""
    return b"data: " + compact(data) + b"\n\n"


def sse_event(name: str, data: JSON) -> bytes:
    """The same with an `event:` line."""
    return b"event: " + name.encode() + b"\n" + sse(data)


class EventStream:
    """The part of a `Writer` that all streams of server-sent events share."""

    media_type = "text/event-stream; charset=utf-8"

    def keep_alive(self, words: str = "keep-alive") -> bytes:
        return f": {words}\n\n".encode()


class SentTexts:
    """The text and the thinking of an answer that a stream has sent so far, joined as by `lineage.answer_text`."""

    def __init__(self) -> None:
        self._sent: dict[str, list[str]] = {"text": [], "thinking": []}
        self._join = TextJoin()

    def piece(self, event: TurnEvent) -> tuple[str, str]:
        """The kind (`text` or `thinking`) and the text to send for this event; an empty text if there is none."""
        if isinstance(event, BlockDelta):
            kind = str(event.delta.get("type", "")).removesuffix("_delta")
            text = event.delta.get(kind)
        elif isinstance(event, BlockStart):
            kind = str(event.block.get("type", ""))
            text = event.block.get(kind)
            if kind == "text":
                self._join.next_text()
        else:
            return "", ""
        if kind not in self._sent or not isinstance(text, str):
            return kind, ""
        if kind == "text":
            text = self._join.feed(text)
        self._sent[kind].append(text)
        return kind, text

    def rest(self, turn: Turn, kind: str = "text") -> str:
        """The committed text that was not sent yet: the join held it back, the turn is replayed, or its CLI has no
        partial messages."""
        whole, sent = answer_text(turn.output, kind), "".join(self._sent[kind])
        return whole.removeprefix(sent) if whole.startswith(sent) else ""


class ReplayedStream(EventStream, ABC):
    """Writes the events of one turn: as they come, or all of them after its end, also from a position on.

    `accepted`: the turn at its acceptance.
    """

    def __init__(self, accepted: Turn) -> None:
        self._turn = replace(accepted, output=(), error=None)
        self._begun = False
        self._kinds: dict[int, str] = {}  # by index: the type of each open block of text or thinking

    def feed(self, event: TurnEvent) -> list[bytes]:
        """The bytes of this event; none for events without a form on this wire."""
        match event:
            case Started():
                return self._begin_once()
            case BlockStart():
                return self._start_block(event.index, event.block)
            case BlockDelta():
                return self._delta(event.index, event.delta)
            case BlockStop():
                return self._stop_block(event.index)
            case Waits():
                return []
            case Finished():
                return self._end(event.turn)

    def whole(self, turn: Turn) -> list[bytes]:
        """All events of an ended turn."""
        return self._end(turn) if turn.error is None else [*self._begin_once(), *self._failed(turn)]

    def error(self, error: ProxyError) -> list[bytes]:
        """The last events of a stream whose turn failed."""
        status: Status = "cancelled" if error.code == "turn_cancelled" else "failed"
        return [*self._begin_once(), *self._failed(replace(self._turn, status=status, error=error.as_dict()))]

    def _begin_once(self) -> list[bytes]:
        """The opening events, unless they were sent."""
        if self._begun:
            return []
        self._begun = True
        return self._opening()

    def _start_block(self, index: int, block: Block) -> list[bytes]:
        """A block begins. Its item or step begins with its first text: an empty block has none."""
        kind = str(block.get("type"))
        if kind not in ("text", "thinking"):
            return []
        self._kinds[index] = kind
        return [*self._begin_once(), *self._delta(index, {"type": f"{kind}_delta", kind: block.get(kind) or ""})]

    @abstractmethod
    def _opening(self) -> list[bytes]:
        """The events before the first block."""

    @abstractmethod
    def _delta(self, index: int, delta: Block) -> list[bytes]: ...

    @abstractmethod
    def _stop_block(self, index: int) -> list[bytes]: ...

    @abstractmethod
    def _end(self, turn: Turn) -> list[bytes]:
        """The events that are missing at the end of a committed turn."""

    @abstractmethod
    def _failed(self, turn: Turn) -> list[bytes]:
        """The last events of a failed or cancelled turn."""
