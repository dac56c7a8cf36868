"""A path of the chain as the model is shown it (see `transcript.mending`), and whether its transcript counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ....domain.models import Agent, Record, Turn
from ....sandbox import Sandboxes
from ....stores.base import Store
from .. import transcript
from ..transcript import mending

NAME = "claude"  # stored with the turns of this backend
# Backends of turns that no other model answered. Imported and adopted turns have None.
OWN = (None, NAME)
# Characters of records that are parsed on the event loop, in about a millisecond.
SHORT = 64 * 1024


def may_be_forged(sandboxes: Sandboxes, agent: Agent, parent: Turn) -> bool:
    """Whether programs of a confined agent can have written the transcript of the path to this turn. The turn is asked,
    too, because a host that was restored without its sandboxes does not know."""
    return sandboxes.was_confined(agent.dir) or parent.evidence.records == "reported"


async def shown(store: Store, turn_id: str | None, decisions: Sequence[Record] = ()) -> Sequence[Record]:
    """The records of the path to this turn, after these additional decisions; none without a turn. Raises
    `DamagedRow`."""
    records = [*(await store.records(turn_id) if turn_id is not None else ()), *decisions]
    uuids = [record.uuid for record in records if record.uuid is not None]
    if len(set(uuids)) < len(uuids):
        records = await asyncio.to_thread(_named_once, records)
    if not any(map(mending.is_mark, records)):
        return records
    with transcript.stored():
        return await asyncio.to_thread(mending.shown, records)


def _named_once(records: Sequence[Record]) -> list[Record]:
    """Without records whose uuid one before has: an agent's shell wrote them during a turn. Their children get the
    record before as parent."""
    seen: set[str | None] = {None}
    instead: dict[str | None, str | None] = {}
    out: list[Record] = []
    for record in records:
        is_first = record.uuid not in seen or record.uuid is None
        seen.add(record.uuid)
        if is_first and not instead:
            out.append(record)
            continue
        [entry] = transcript.parse_records([record]).entries
        if not is_first:
            if entry.in_conversation:
                instead[entry.uuid] = instead.get(entry.parent, entry.parent)
        elif entry.parent in instead:
            out.append(entry.with_parent(instead[entry.parent]).record())
        else:
            out.append(record)
    return out


async def parsed(records: Sequence[Record]) -> transcript.Parsed:
    """These records, parsed; off the event loop where they are long."""
    if sum(len(record.line) for record in records) <= SHORT:
        return transcript.parse_records(records)
    return await asyncio.to_thread(transcript.parse_records, records)


async def own_above(store: Store, turn: Turn) -> Turn | None:
    """The newest ancestor that the CLI answered; None if there is none."""
    above: Turn | None = turn
    while above is not None and (above is turn or above.backend not in OWN):
        above = await store.turn(above.parent_id) if above.parent_id is not None else None
    return above
