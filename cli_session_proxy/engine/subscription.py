"""Follows a chain live: turns that began or ended, and their links.

It polls the store, so any process may run the turns. It remembers only turns that may still change; the agent's lane
bounds these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ..domain.models import ANSWERED, FINISHED, Agent, Link, Status, Turn
from ..domain.ordering import by_turn, sorted_by_parent
from ..stores.base import Store

# Seconds between polls: quick enough for a person, and 2 indexed reads a second for the store.
POLL = 0.5
# How many failed turns are still watched, because a retry may run them again; older ones are dropped.
WATCHED = 256


@dataclass(frozen=True, slots=True)
class Happened:
    """A turn in a new status, with its new links."""

    turn: Turn
    links: tuple[Link, ...]


class Follower:
    """One reader of one chain. `after_seq`: the `seq` of the last turn that it knows; None: it is told only of changes
    from now on."""

    def __init__(self, store: Store, agent: Agent, after_seq: int | None = None) -> None:
        self._store = store
        self._agent = agent
        self._after = after_seq
        self._watched: dict[str, Status] = {}
        self._links: int | None = None  # how many links it knows

    async def start(self) -> None:
        """Start after what exists now."""
        if self._after is not None:
            return
        chain = await self._store.chain(self._agent.key)
        self._links = len(chain.links) if chain else 0
        newest = (await self._store.page(self._agent.key, before_seq=None, limit=1)).turns
        self._after = newest[0].seq if newest else 0
        for turn in await self._store.unfinished_of(self._agent.key):
            self._watch(turn)

    async def happened(self) -> list[Happened]:
        """What changed since the last call, in the order of acceptance but parents first."""
        assert self._after is not None
        changed: list[Turn] = []
        for turn_id, before in list(self._watched.items()):
            present = await self._store.turn(turn_id)
            if present is None:
                self._watched.pop(turn_id)
            elif present.status != before:
                changed.append(present)
        async for turn in self._store.turns(self._agent.key, after_seq=self._after):
            self._after = turn.seq
            changed.append(turn)
        if not changed:
            return []
        for turn in changed:
            self._watch(turn)
        goes_on = self._links is None  # the first call of a reader that did not `start` here: links until now are old
        chain = await self._store.chain(self._agent.key)
        all_links = chain.links if chain else ()
        links = by_turn(all_links[self._links or 0 :])
        self._links = len(all_links)
        ended = [turn for turn in changed if turn.status in FINISHED]
        own = {turn.id: links.pop(turn.id, ()) for turn in ended}
        news = [Happened(turn, tuple(own.get(turn.id, ()))) for turn in sorted_by_parent(changed)]
        # New links of turns that were reported earlier: each turn again, in its present state. Links without a turn are
        # reported with the last turn.
        for earlier_id, new_links in () if goes_on else links.items():
            earlier = await self._store.turn(earlier_id) if earlier_id is not None else None
            if earlier is not None:
                self._watch(earlier)
            news.append(Happened(earlier or changed[-1], tuple(new_links)))
        return news

    async def gone(self) -> bool:
        """Whether the agent was deleted."""
        return await self._store.agent_by_key(self._agent.key) is None

    async def follow(self, beat: float = POLL) -> AsyncIterator[list[Happened]]:
        """Yield a list of changes every `beat` seconds (mostly empty, as a sign of life) until the agent is deleted.

        The store is polled every `POLL` seconds, however short a beat is.
        """
        await self.start()
        beats = max(1, round(POLL / beat))
        while not await self.gone():
            yield await self.happened()
            for _ in range(beats - 1):
                await asyncio.sleep(beat)
                yield []
            await asyncio.sleep(beat)

    def _watch(self, turn: Turn) -> None:
        self._watched.pop(turn.id, None)
        if turn.status not in ANSWERED:
            self._watched[turn.id] = turn.status
        while len(self._watched) > WATCHED:
            self._watched.pop(next(iter(self._watched)))
