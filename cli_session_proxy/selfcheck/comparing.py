"""Compares what a request to the model holds with what it should hold. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from turnfault.provider.seen import Seen, parts, spoken

from ..backends.claude.transcript import Entry
from ..domain.models import JSON, Block

Said = list[tuple[str, str]]

# The CLI notes beside an image which file it is, in a text of its own (2.1.329).
_IMAGE_NOTE = "[Image: source:"


def said_in(request: Seen) -> Said:
    """(role, block) of the request's conversation, without what the CLI adds by itself."""
    return _told(
        (str(message.get("role")), block)
        for message in request.messages
        if message.get("role") != "system"
        for block in parts(message.get("content"))
    )


def said_of(role: str, blocks: Iterable[Block]) -> Said:
    """The same of one message's blocks."""
    return _told((role, block) for block in blocks)


def said_by(entries: Iterable[Entry]) -> Said:
    """The same of a path's records."""
    return _told(pair for entry in entries for pair in entry.spoken())


def difference(wanted: Sequence[tuple[str, str]], got: Sequence[tuple[str, str]]) -> str | None:
    """The first place where they differ, in words; None where they are equal."""
    for at in range(max(len(wanted), len(got))):
        mine = wanted[at] if at < len(wanted) else None
        theirs = got[at] if at < len(got) else None
        if mine != theirs:
            return f"block {at + 1} is {_quoted(theirs)} instead of {_quoted(mine)}"
    return None


def _quoted(one: tuple[str, str] | None) -> str:
    return "nothing" if one is None else f"{one[0]}: {one[1][:120]!r}"


def _told(blocks: Iterable[tuple[str, Block]]) -> Said:
    return [(role, text) for role, block in blocks if (text := _text(block)) is not None]


def _text(block: Block) -> str | None:
    """A block as the model reads it. A thought that is not signed is never sent."""
    kind = block.get("type")
    if kind == "text":
        said = spoken(str(block.get("text", "")))
        if said is None or said.startswith(_IMAGE_NOTE):
            return None
        return f"text {said}".removesuffix("\n")  # the CLI puts one behind the words beside an image (2.1.332)
    if kind == "thinking":
        return f"thinking {block.get('thinking')} {block.get('signature')}" if block.get("signature") else None
    if kind == "tool_use":
        return f"tool_use {block.get('id')} {block.get('name')} {_canonical(block.get('input'))}"
    if kind == "tool_result":
        said = " ".join(str(part.get("text", part.get("type"))) for part in parts(block.get("content")))
        return f"tool_result {block.get('tool_use_id')} {said}"
    return f"{kind} {_canonical(block.get('source'))}"


def _canonical(value: JSON | object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
