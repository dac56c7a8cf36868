"""A client's own history as records that the API takes: roles, images, calls and results stay what they are. Pure.

What the API refuses is mended, and only that: a call without its result, a result without its call, blank texts,
messages without content, ids that are no ids or used twice. Thinking of others is dropped: its signature is not
ours to vouch for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ....domain.models import THINKING, Block, Message, Record
from ..transcript import OPENED_BY_ASSISTANT, Scribe

NO_RESULT = "(no result)"
# CLI 2.1.329 leaves out an answer that says "(no content)", and its neighbours become one message.
EMPTY = "[This message was empty.]"

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Of an id that is used again; a number of six digits has room behind it.
_STEM = 56


class Mender:
    """Goes through a history front to back. `open_calls` are those of the answer before it."""

    def __init__(self, open_calls: Iterable[str] = ()) -> None:
        self._open = {call: call for call in open_calls}  # the client's id -> the id in the records
        self._used = set(self._open)
        self._numbers: Counter[str] = Counter()  # the last one given to ids that begin so

    def asked(self, messages: Sequence[Message]) -> Message:
        """The user's run as one message: the results of the open calls first, as the API wants them."""
        results: dict[str, Block] = {}
        rest: list[Block] = []
        for block in (block for message in messages for block in message.content if _tells(block)):
            call = str(block.get("tool_use_id"))
            if block.get("type") != "tool_result":
                rest.append(block)
            elif call in self._open and call not in results:
                results[call] = {**block, "tool_use_id": self._open[call]}
            else:
                # A result that belongs to no call: its content, said by the user.
                content = block.get("content")
                rest.append({"type": "text", "text": "[The result of a tool call that is not in this conversation:]"})
                rest += [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        missing = {"content": NO_RESULT, "is_error": True}
        found = [
            results.get(call, {"type": "tool_result", "tool_use_id": known, **missing})
            for call, known in self._open.items()
        ]
        self._open = {}
        return Message("user", tuple(found + rest) or _nothing())

    def said(self, blocks: Sequence[Block]) -> Message:
        """The assistant's run as one message."""
        self._open = {}
        out = tuple(self._call(block) if block.get("type") == "tool_use" else block for block in blocks)
        telling = tuple(block for block in out if block.get("type") not in THINKING and _tells(block))
        return Message("assistant", telling or _nothing())

    def _call(self, block: Block) -> Block:
        wanted = str(block.get("id"))
        known = wanted if _CALL_ID.fullmatch(wanted) else "call"
        stem = known[:_STEM]
        while known in self._used:
            self._numbers[stem] += 1
            known = f"{stem}-n{self._numbers[stem] + 1}"
        self._used.add(known)
        self._open[wanted] = known
        return {**block, "id": known}


def records(
    scribe: Scribe, mender: Mender, asked: Sequence[Message], said: Sequence[Block], model: str
) -> list[Record]:
    """One exchange as two records. A history that opens with the assistant gets a first message before it."""
    first = mender.asked(asked) if asked else Message.user(OPENED_BY_ASSISTANT)
    return [scribe.record(first, model), scribe.record(mender.said(said), model)]


def calls(blocks: Iterable[Block]) -> list[str]:
    return [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]


def _tells(block: Block) -> bool:
    return block.get("type") != "text" or bool(str(block.get("text", "")).strip())


def _nothing() -> tuple[Block, ...]:
    return ({"type": "text", "text": EMPTY},)
