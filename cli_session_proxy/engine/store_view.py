"""The store as people and clients see it: a turn whose end is not stored yet (the disk is full) reads as ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ..domain.models import FINISHED, ChainSummary, Turn
from ..stores.base import Store, TurnPage
from .ends import Ends


class StoreView:
    """A `Store` for reading. Other methods are those of the store itself."""

    def __init__(self, store: Store, ends: Ends) -> None:
        self._store = store
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def turn(self, turn_id: str) -> Turn | None:
        turn = await self._store.turn(turn_id)
        return None if turn is None else self._ends.applied(turn)

    async def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        async for turn in self._store.turns(agent_key, after_seq=after_seq):
            yield self._ends.applied(turn)

    async def page(self, agent_key: int, **wanted: Any) -> TurnPage:
        page = await self._store.page(agent_key, **wanted)
        return (
            replace(page, turns=tuple(self._ends.applied(turn) for turn in page.turns)) if self._ends.waiting else page
        )

    async def summaries(self, owner: str | None = None, *, folded: float | None = None) -> AsyncIterator[ChainSummary]:
        async for row in self._store.summaries(owner, folded=folded):
            if self._ends.waiting and row.state is not None and row.state not in FINISHED:
                newest = (await self.page(row.agent.key, before_seq=None, limit=1)).turns
                yield replace(row, state=newest[0].status) if newest else row
            else:
                yield row
