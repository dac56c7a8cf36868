"""The events of a streamed Response. Pure.

The events of a turn depend only on its blocks: a text is split into deltas by position, not by arrival. So a
broken stream can be resumed from `starting_after`, even long after the turn, with the same `sequence_number`s.

    created  [queued]  in_progress
    each block: output_item.added, content_part.added, output_text.delta × n, output_text.done,
                content_part.done, output_item.done; thinking as a reasoning item with one summary part
    completed | incomplete | failed
    [DONE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ...domain.models import JSON, Block, Turn
from ..streams import SSE_DONE, ReplayedStream, sse_event
from . import body as responses
from .items import hex_of, message_item, reasoning_item, shown, text_part

# Characters of a delta at the start of an answer; one more after each `DELTA_GROWS` characters, so that an answer of
# 3 MB has some 1,500 deltas instead of 100,000.
DELTA, DELTA_GROWS = 16, 200


class Pieces:
    """Splits a growing text into deltas at positions that depend only on the text."""

    def __init__(self) -> None:
        self._at = 0
        self._held = ""

    def feed(self, text: str) -> Iterator[str]:
        self._held += text
        start = 0
        while len(self._held) - start >= (size := DELTA + self._at // DELTA_GROWS):
            yield self._held[start : start + size]
            start += size
            self._at += size
        self._held = self._held[start:]

    def end(self) -> Iterator[str]:
        if self._held:
            yield self._held
            self._held = ""


class _StreamedItem:
    """One streamed item of the output: a message or a reasoning item."""

    def __init__(self, kind: str, key: str, index: int) -> None:
        self.kind = kind
        self.text: list[str] = []
        self.pieces = Pieces()
        self._index = index
        if kind == "text":
            self._id = f"msg_{key}_{index}"
            self._within: JSON = {"item_id": self._id, "output_index": index, "content_index": 0}
            self._part_event, self._text_event = "response.content_part", "response.output_text"
        else:
            self._id = f"rs_{key}_{index}"
            self._within = {"item_id": self._id, "output_index": index, "summary_index": 0}
            self._part_event = "response.reasoning_summary_part"
            self._text_event = "response.reasoning_summary_text"

    def _part(self, text: str) -> JSON:
        return text_part(text) if self.kind == "text" else {"type": "summary_text", "text": text}

    def _item(self, status: str, text: str | None) -> JSON:
        parts = [] if text is None else [self._part(text)]
        made = message_item if self.kind == "text" else reasoning_item
        return made(self._id, status, parts)

    def added(self) -> list[JSON]:
        return [
            {
                "type": "response.output_item.added",
                "output_index": self._index,
                "item": self._item("in_progress", None),
            },
            {"type": f"{self._part_event}.added", **self._within, "part": self._part("")},
        ]

    def deltas(self, pieces: Iterable[str]) -> list[JSON]:
        events = []
        extra: JSON = {"logprobs": []} if self.kind == "text" else {}
        for piece in pieces:
            self.text.append(piece)
            events.append({"type": f"{self._text_event}.delta", **self._within, "delta": piece, **extra})
        return events

    def done(self) -> list[JSON]:
        events = self.deltas(self.pieces.end())
        text = "".join(self.text)
        extra: JSON = {"logprobs": []} if self.kind == "text" else {}
        item = self._item("completed", text)
        return [
            *events,
            {"type": f"{self._text_event}.done", **self._within, "text": text, **extra},
            {"type": f"{self._part_event}.done", **self._within, "part": self._part(text)},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]


class ResponsesWriter(ReplayedStream):
    """Converts a turn's events to server-sent events, or to what `frame` makes of them.

    Events up to the number `starting_after` are counted, not sent. `end`: the bytes after the last event.
    """

    def __init__(
        self,
        accepted: Turn,
        *,
        starting_after: int = -1,
        frame: Callable[[JSON], bytes] = lambda event: sse_event(event["type"], event),
        end: Sequence[bytes] = (SSE_DONE,),
    ) -> None:
        super().__init__(accepted)
        self._frame = frame
        self._bytes_at_end = end
        self._after = starting_after
        self._number = 0  # of the next event
        self._open_items: dict[int, _StreamedItem] = {}  # by the block's index, once it has a text
        self._items_begun = 0

    def _failed(self, turn: Turn) -> list[bytes]:
        return [*self._send([{"type": "response.failed", "response": responses.response(turn)}]), *self._bytes_at_end]

    def _opening(self) -> list[bytes]:
        in_background = self._turn.in_background
        states = [("created", "queued"), ("queued", "queued")] if in_background else [("created", "in_progress")]
        return self._send(
            {"type": f"response.{name}", "response": responses.response(self._turn, status)}
            for name, status in [*states, ("in_progress", "in_progress")]
        )

    def _delta(self, index: int, delta: Block) -> list[bytes]:
        text = str(delta.get(self._kinds.get(index, "")) or "")
        if not text:
            return []
        out: list[bytes] = []
        item = self._open_items.get(index)
        if item is None:
            item = self._open_items[index] = _StreamedItem(self._kinds[index], hex_of(self._turn.id), self._items_begun)
            self._items_begun += 1
            out += self._send(item.added())
        return out + self._send(item.deltas(item.pieces.feed(text)))

    def _stop_block(self, index: int) -> list[bytes]:
        self._kinds.pop(index, None)
        item = self._open_items.pop(index, None)
        return [] if item is None else self._send(item.done())

    def _end(self, turn: Turn) -> list[bytes]:
        out = self._begin_once()
        for index in list(self._open_items):
            out += self._stop_block(index)
        # Committed blocks that were not streamed: of a replayed turn, or calls of the client's tools.
        for n, block in enumerate(shown(turn.output, calls=turn.status == "requires_action")):
            if n < self._items_begun:
                continue
            if block["type"] != "tool_use":
                index = -1  # none of the streamed blocks
                out += [*self._start_block(index, block), *self._stop_block(index)]
                continue
            self._items_begun += 1
            out += self._send(_call_events(responses.response(turn)["output"][n], n))
        status = responses.status_of(turn)
        name = f"response.{status if status in ('completed', 'incomplete') else 'failed'}"
        return [*out, *self._send([{"type": name, "response": responses.response(turn)}]), *self._bytes_at_end]

    def _send(self, events: Iterable[JSON]) -> list[bytes]:
        out = []
        for event in events:
            number, self._number = self._number, self._number + 1
            if number > self._after:
                out.append(self._frame({**event, "sequence_number": number}))
        return out


def _call_events(item: JSON, n: int) -> list[JSON]:
    """The events of a client's tool call, with the arguments in one piece."""
    within = {"item_id": item["id"], "output_index": n}
    opened: JSON = {**item, "status": "in_progress"}
    pieces: list[JSON] = []  # none for a tool defined by OpenAI
    if item["type"] == "custom_tool_call":
        kind, opened["input"] = "response.custom_tool_call_input", ""
        pieces = [
            {"type": f"{kind}.delta", **within, "delta": item["input"]},
            {"type": f"{kind}.done", **within, "input": item["input"]},
        ]
    elif "arguments" in item:
        kind, opened["arguments"] = "response.function_call_arguments", ""
        pieces = [
            {"type": f"{kind}.delta", **within, "delta": item["arguments"]},
            {"type": f"{kind}.done", **within, "arguments": item["arguments"], "name": item["name"]},
        ]
    return [
        {"type": "response.output_item.added", "output_index": n, "item": opened},
        *pieces,
        {"type": "response.output_item.done", "output_index": n, "item": item},
    ]
