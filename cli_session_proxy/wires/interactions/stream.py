"""The events of a streamed interaction. Pure.

    interaction.created, interaction.status_update,
    each block: step.start, step.delta × n, step.stop
    interaction.completed (or error), [DONE]

`event_id` is a position: an event counts one, but a delta the number of its characters. So a broken stream can be
resumed after `last_event_id`, long after the turn, even if the text is then split into other deltas.
"""

from __future__ import annotations

from typing import Any

from ...domain.blocks import as_stream
from ...domain.models import JSON, Block, Turn
from ...errors import from_dict
from ..common import calls_for_client
from ..streams import SSE_DONE, ReplayedStream, sse_event
from . import body as interactions
from .steps import signature, step_of


class InteractionsWriter(ReplayedStream):
    """Converts a turn's events to server-sent events. Events up to the position `after` are counted, not sent."""

    def __init__(self, accepted: Turn, *, after: int = 0) -> None:
        super().__init__(accepted)
        self._summaries = (accepted.call or {}).get("summaries", False)
        self._after = after
        self._position = 0
        self._step_of_block: dict[int, int] = {}  # by block index: its step, which its first text begins
        self._step_count = 0

    def _failed(self, turn: Turn) -> list[bytes]:
        status = interactions.status_of(turn)
        update = self._send(
            "interaction.status_update", interaction_id=interactions.interaction_id(turn.id), status=status
        )
        if status == "cancelled":
            return [*update, SSE_DONE]
        return [*update, *self._send("error", **interactions.error_body(from_dict(turn.error or {}))), SSE_DONE]

    def _opening(self) -> list[bytes]:
        status = "queued" if self._turn.in_background else "in_progress"
        made = interactions.interaction_id(self._turn.id)
        return [
            *self._send("interaction.created", interaction=interactions.head(self._turn, status)),
            *self._send("interaction.status_update", interaction_id=made, status="in_progress"),
        ]

    def _delta(self, index: int, delta: Block) -> list[bytes]:
        if index not in self._kinds:
            return []
        kind = str(delta.get("type", "")).removesuffix("_delta")
        text = str(delta.get(kind) or "")
        if not text or (kind == "thinking" and not self._summaries):
            return []
        events: list[bytes] = []
        if index not in self._step_of_block:
            self._step_of_block[index] = self._step_count
            self._step_count += 1
            is_text = self._kinds[index] == "text"
            opening: JSON = {"type": "model_output", "content": []} if is_text else {"type": "thought"}
            events = self._send("step.start", index=self._step_of_block[index], step=opening)
        step = self._step_of_block[index]
        if kind == "signature":
            thought: JSON = {"type": "thought_signature", "signature": signature(text)}
            return [*events, *self._send("step.delta", index=step, delta=thought)]
        start = self._position
        self._position += len(text)
        if self._position <= self._after:
            return events  # the client has all of this text
        content = {"type": "text", "text": text[max(0, self._after - start) :]}
        sent = {"type": "thought_summary", "content": content} if kind == "thinking" else content
        return [*events, self._event("step.delta", index=step, delta=sent)]

    def _stop_block(self, index: int) -> list[bytes]:
        self._kinds.pop(index, None)
        step = self._step_of_block.pop(index, None)
        return [] if step is None else self._send("step.stop", index=step)

    def _end(self, turn: Turn) -> list[bytes]:
        events = self._begin_once()
        if self._step_count == 0:  # nothing was streamed: an ended turn, or a CLI without partial messages
            for index, block in enumerate(turn.output):
                opening, deltas = as_stream(block)
                events += self._start_block(index, opening)
                events += [piece for delta in deltas for piece in self._delta(index, delta)]
                events += self._stop_block(index)
        for block in calls_for_client(turn):
            step, self._step_count = self._step_count, self._step_count + 1
            events += self._send("step.start", index=step, step=step_of(block, summaries=False))
            events += self._send("step.stop", index=step)
        return [*events, *self._send("interaction.completed", interaction=interactions.interaction(turn)), SSE_DONE]

    def _send(self, kind: str, **fields: Any) -> list[bytes]:
        """An event that counts one; none if the client has received it before."""
        self._position += 1
        return [self._event(kind, **fields)] if self._position > self._after else []

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse_event(kind, {"event_type": kind, "event_id": str(self._position), **fields})
