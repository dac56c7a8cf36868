"""Compares a turn's last request to the model with the chain: which turns of the path did the model get? Read only.

The request is reconstructed from the CLI's records: all before the last answer, from the last compaction on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ....domain.models import ANSWERED, Block, Record, Turn
from ....stores.base import Store
from ...base import RequestSeen
from .. import transcript
from ..transcript import Entry
from . import paths

Said = tuple[str, Block]


async def seen(store: Store, turn: Turn) -> RequestSeen | None:
    """None for a turn without an answer or records. Takes time in proportion to the path's length."""
    if turn.status not in ANSWERED or not await store.own_records(turn.id):
        return None
    path = await store.path(turn.id)
    records = await paths.shown(store, turn.id)
    before = await paths.shown(store, turn.parent_id) if turn.parent_id is not None else ()
    return await asyncio.to_thread(_seen, path, records, before)


def _seen(path: Sequence[Turn], records: Sequence[Record], before: Sequence[Record]) -> RequestSeen:
    sent, summarised = _request(records)
    former, _ = _request(before)
    whole = {role: _text(sent, role) for role in ("user", "assistant")}
    at = dict.fromkeys(whole, 0)
    missing: list[str] = []
    first: int | None = None  # the first turn that was sent
    for n, turn in enumerate(path):
        said = [(message.role, block) for message in turn.input for block in message.content]
        # Without the turn's own answer, which came after the request.
        said += [("assistant", block) for block in turn.output] if turn.id != path[-1].id else []
        words = {role: _text(said, role) for role in whole}
        found = {role: whole[role].find(words[role], at[role]) for role in whole}
        if -1 in found.values():
            missing.append(turn.id)
        else:
            at = {role: found[role] + len(words[role]) for role in whole}
            first = n if first is None and any(words.values()) else first
    before_first = {turn.id for turn in path[:first]} if summarised else set()  # in the summary
    return RequestSeen(
        turns=len(path),
        missing=tuple(turn_id for turn_id in missing if turn_id not in before_first),
        summarised=sum(turn_id in before_first for turn_id in missing),
        messages=tuple(sent),
        extends=sent[: len(former)] == former if before else None,
    )


def _request(records: Sequence[Record]) -> tuple[list[Said], bool]:
    """The blocks of the last request in these records, each with its role, and whether it begins with a summary."""
    entries = transcript.parse_records(records).path
    boundaries = [n for n, entry in enumerate(entries) if entry.data.get("subtype") == "compact_boundary"]
    entries = entries[boundaries[-1] :] if boundaries else entries
    answers = [entry for entry in entries if entry.kind == "assistant"]
    if answers:  # the last answer has a record per block
        named = _message_id(answers[-1])
        first = next(entry for entry in answers if entry is answers[-1] or (named and _message_id(entry) == named))
        entries = entries[: entries.index(first)]
    said = [(entry.kind, block) for entry in entries if entry.kind in ("user", "assistant") for block in entry.content]
    opening = str(said[0][1].get("text", "")) if said else ""
    return said, bool(boundaries) or opening.startswith(transcript.SUMMARY)


def _message_id(entry: Entry) -> object:
    return (entry.data.get("message") or {}).get("id")


def _text(said: Sequence[Said], role: str) -> str:
    """All text of one role without blanks: a record may have two blocks for one block in the chain."""
    texts = (str(block.get("text", "")) for by, block in said if by == role and block.get("type") == "text")
    return "".join("".join(texts).split())
