"""A path of the chain as the model is shown it (see `transcript.mending`), made off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ....domain.models import Record, Turn
from ....stores.base import Store
from .. import transcript

# Kept with the turns that this backend answers. Those that a client or a session brought have none.
NAME = "claude"


async def shown(store: Store, turn_id: str | None, marks: Sequence[Record] = ()) -> Sequence[Record]:
    """The records of the path to this turn, with these further marks; none for a path that has not begun."""
    records = [*(await store.records(turn_id) if turn_id is not None else ()), *marks]
    if not any(map(transcript.is_mark, records)):
        return records
    return await asyncio.to_thread(transcript.shown, records)


async def last_own(store: Store, turn: Turn | None) -> Turn | None:
    """The newest turn of the path that no other model answered; None where there is none."""
    while turn is not None and turn.backend not in (None, NAME):
        turn = await store.turn(turn.parent_id) if turn.parent_id is not None else None
    return turn
