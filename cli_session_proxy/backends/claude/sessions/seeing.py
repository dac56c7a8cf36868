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
from ..transcript import mending
from . import paths

RoleBlock = tuple[str, Block]


async def seen(store: Store, turn: Turn) -> RequestSeen | None:
    """None for a turn without an answer or records. Takes time in proportion to the path's length."""
    if turn.status not in ANSWERED or not await store.own_records(turn.id):
        return None
    path = await store.path_texts(turn.id)
    records = await paths.shown(store, turn.id)
    before = await paths.shown(store, turn.parent_id) if turn.parent_id is not None else ()
    return await asyncio.to_thread(_seen, path, records, before)


def _seen(path: Sequence[Turn], records: Sequence[Record], before: Sequence[Record]) -> RequestSeen:
    sent, is_summarised = _request(records)
    previous, _ = _request(before)
    texts = {role: _text(sent, role) for role in ("user", "assistant")}
    ends = dict.fromkeys(texts, 0)  # of the last found turn in each text
    missing: list[str] = []
    first: int | None = None  # the first turn that was sent
    for number, turn in enumerate(path):
        blocks = [(message.role, block) for message in turn.input for block in message.content]
        # Without the turn's own answer, which came after the request.
        blocks += [("assistant", block) for block in turn.output] if turn.id != path[-1].id else []
        own = {role: _text(blocks, role) for role in texts}
        starts = {role: texts[role].find(own[role], ends[role]) for role in texts}
        if -1 in starts.values():
            missing.append(turn.id)
        else:
            ends = {role: starts[role] + len(own[role]) for role in texts}
            first = number if first is None and any(own.values()) else first
    in_summary = {turn.id for turn in path[:first]} if is_summarised else set()
    return RequestSeen(
        turns=len(path),
        missing=tuple(turn_id for turn_id in missing if turn_id not in in_summary),
        summarised=sum(turn_id in in_summary for turn_id in missing),
        messages=tuple(sent),
        extends=sent[: len(previous)] == previous if before else None,
    )


def _request(records: Sequence[Record]) -> tuple[list[RoleBlock], bool]:
    """The blocks of the last request in these records, and whether it begins with a summary."""
    entries = transcript.parse_records(records).path
    boundaries = [at for at, entry in enumerate(entries) if entry.data.get("subtype") == "compact_boundary"]
    entries = entries[boundaries[-1] :] if boundaries else entries
    answers = [entry for entry in entries if entry.kind == "assistant"]
    if answers:  # the last answer has a record per block
        ids = [(entry.data.get("message") or {}).get("id") for entry in answers]
        first = answers[ids.index(ids[-1])] if ids[-1] else answers[-1]
        entries = entries[: entries.index(first)]
    blocks = [
        (entry.kind, block) for entry in entries if entry.kind in ("user", "assistant") for block in entry.content
    ]
    opening = str(blocks[0][1].get("text", "")) if blocks else ""
    return blocks, bool(boundaries) or opening.startswith(mending.SUMMARY)


def _text(blocks: Sequence[RoleBlock], role: str) -> str:
    """All text of one role without blanks: a record may have two blocks for one block in the chain."""
    texts = (str(block.get("text", "")) for by, block in blocks if by == role and block.get("type") == "text")
    return "".join("".join(texts).split())
