"""Compares the conversation in a request to the model with the expected one. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from turnfault.provider.seen import Seen, parts, spoken

from ..backends.claude.transcript import Entry
from ..domain.models import JSON, Block

Texts = list[tuple[str, str]]

# The CLI adds a text that names the image's file, beside the image (2.1.329).
_IMAGE_NOTE = "[Image: source:"


def texts_in(request: Seen) -> Texts:
    """(role, text) of each block of the request's conversation, without the CLI's own additions."""
    return _texts(
        (str(message.get("role")), block)
        for message in request.messages
        if message.get("role") != "system"
        for block in parts(message.get("content"))
    )


def texts_of(role: str, blocks: Iterable[Block]) -> Texts:
    """(role, text) of each block of one message."""
    return _texts((role, block) for block in blocks)


def texts_of_path(entries: Iterable[Entry]) -> Texts:
    """(role, text) of each block of a path's records."""
    return _texts(pair for entry in entries for pair in entry.message_blocks())


def difference(expected: Sequence[tuple[str, str]], actual: Sequence[tuple[str, str]]) -> str | None:
    """The first difference, as a sentence; None if they are equal."""
    for number, (theirs, ours) in enumerate(zip_longest(actual, expected), 1):
        if theirs != ours:
            return f"block {number} is {_quoted(theirs)} instead of {_quoted(ours)}"
    return None


def _quoted(one: tuple[str, str] | None) -> str:
    return "nothing" if one is None else f"{one[0]}: {one[1][:120]!r}"


def _texts(blocks: Iterable[tuple[str, Block]]) -> Texts:
    return [(role, text) for role, block in blocks if (text := _text(block)) is not None]


def _text(block: Block) -> str | None:
    """A block as the model reads it. The CLI never sends an unsigned thought."""
    kind = block.get("type")
    if kind == "text":
        text = spoken(str(block.get("text", "")))
        if text is None or text.startswith(_IMAGE_NOTE):
            return None
        return f"text {text}".removesuffix("\n")  # the CLI appends one to a text beside an image (2.1.332)
    if kind == "thinking":
        return f"thinking {block.get('thinking')} {block.get('signature')}" if block.get("signature") else None
    if kind == "tool_use":
        return f"tool_use {block.get('id')} {block.get('name')} {_canonical(block.get('input'))}"
    if kind == "tool_result":
        text = " ".join(str(part.get("text", part.get("type"))) for part in parts(block.get("content")))
        return f"tool_result {block.get('tool_use_id')} {text}"
    return f"{kind} {_canonical(block.get('source'))}"


def _canonical(value: JSON | object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
