"""Converts a client's history to records that the API accepts, with its roles, images, calls and results. Pure.

Only what the API refuses is repaired: a call without a result, a result without a call, blank texts, empty messages,
half surrogate pairs (ids: `domain.client_tools`). Thinking of others is dropped, because its signature cannot be
trusted. This is done once: the records are stored, with a mark that counts the repairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ....domain.blocks import contents
from ....domain.client_tools import UNPARSED, calls_of
from ....domain.evidence import Note, NoteCode
from ....domain.models import THINKING, Block, Message, Record
from ..transcript import OPENED_BY_ASSISTANT, Scribe
from ..transcript.mending import imported

NO_RESULT = "(no result)"
# CLI 2.1.329 drops an answer "(no content)", and joins the messages around it.
EMPTY = "[This message was empty.]"

_HALF = re.compile("[\ud800-\udfff]")


class Mender:
    """Goes through a history in order. `open_calls`: of the answer before it, by the id in results: the id in the
    records."""

    def __init__(self, open_calls: Mapping[str, str]) -> None:
        self.open = open_calls
        self._mended: Counter[NoteCode] = Counter()

    def notes(self) -> list[Note]:
        """The repairs since the last call of this."""
        notes = [Note(code, number) for code, number in self._mended.items() if number]
        self._mended.clear()
        return notes

    def asked(self, messages: Sequence[Message]) -> Message:
        """The user's run as one message; the results of open calls come first, as the API requires."""
        results: dict[str, Block] = {}  # by the id in the records
        rest: list[Block] = []
        for block in (block for message in messages for block in message.content if _tells(block)):
            known = self.open.get(str(block.get("tool_use_id")))
            if block.get("type") != "tool_result":
                rest.append(block)
            elif known is not None and known not in results:
                results[known] = {**block, "tool_use_id": known}
            else:
                # A result without a call: its content becomes the user's.
                self._mended["results_without_call"] += 1
                rest.append({"type": "text", "text": "[The result of a tool call that is not in this conversation:]"})
                rest += contents(block)
        missing = {"content": NO_RESULT, "is_error": True}
        found = [
            results.get(known, {"type": "tool_result", "tool_use_id": known, **missing}) for known in self.open.values()
        ]
        self._mended["calls_without_result"] += len(self.open) - len(results)
        self.open = {}
        return Message("user", self._sound(found + rest))

    def said(self, blocks: Sequence[Block]) -> Message:
        """The assistant's run as one message."""
        self.open = {call: call for call in calls_of(blocks)}
        unparsed = (set(block.get("input") or ()) == {UNPARSED} for block in blocks if block.get("type") == "tool_use")
        self._mended["arguments_kept_as_text"] += sum(unparsed)
        self._mended["foreign_thinking_left_out"] += sum(block.get("type") in THINKING for block in blocks)
        telling = [block for block in blocks if block.get("type") not in THINKING and _tells(block)]
        return Message("assistant", self._sound(telling))

    def _sound(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The content of a message, not empty, without unpaired surrogates, which the API refuses."""
        if not blocks:
            self._mended["empty_messages"] += 1
            return ({"type": "text", "text": EMPTY},)
        return tuple(self._whole(block) for block in blocks)

    def _whole(self, value: Any) -> Any:
        if isinstance(value, str):
            whole, halves = _HALF.subn("\ufffd", value)
            self._mended["characters_replaced"] += halves
            return whole
        if isinstance(value, dict):
            return {self._whole(name): self._whole(one) for name, one in value.items()}
        return [self._whole(one) for one in value] if isinstance(value, list) else value


def records(
    scribe: Scribe,
    mender: Mender,
    asked: Sequence[Message],
    said: Sequence[Block],
    model: str,
    changed: Sequence[Note] = (),
) -> list[Record]:
    """One exchange as two records, and a mark if something was repaired.

    `changed`: earlier repairs. A history that begins with the assistant gets a message before it; an answer directly
    after an answer has no prompt.
    """
    made: list[Record] = []
    if asked or mender.open:
        made.append(scribe.record(mender.asked(asked), model))
    elif scribe.parent is None:
        made.append(scribe.record(Message.user(OPENED_BY_ASSISTANT), model))
    made.append(scribe.record(mender.said(said), model))
    notes = [*changed, *mender.notes()]
    return [*made, imported(notes)] if notes else made


def _tells(block: Block) -> bool:
    return block.get("type") != "text" or bool(str(block.get("text", "")).strip())
