"""A path of the chain as the model is shown it (see `transcript.mending`), made off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ....domain.models import Record
from ....stores.base import Store
from .. import transcript


async def shown(store: Store, turn_id: str | None, marks: Sequence[Record] = ()) -> Sequence[Record]:
    """The records of the path to this turn, with these further marks; none for a path that has not begun."""
    records = [*(await store.records(turn_id) if turn_id is not None else ()), *marks]
    if not any(map(transcript.is_mark, records)):
        return records
    return await asyncio.to_thread(transcript.shown, records)
