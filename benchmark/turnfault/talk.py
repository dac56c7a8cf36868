"""One conversation that is told facts, whoever answers it; what breaks it is told through it."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

from .provider.seen import Seen
from .provider.upstream import Upstream
from .score import Fact, Score, score

T = TypeVar("T")
# Characters of a text that a trace keeps.
KEPT = 200


class RequestRefused(Exception):
    """The client's view: it got an error, and may send again."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Talk(ABC):
    """`facts` are the acknowledged turns, in order. `before` is the last request that was answered, `sound` the last
    one before something was broken. `doubtful` turns ended in an error: whether they count is not
    known. `leave_after`: the client goes away when this is set. `dice` makes the facts,
    `log` is what the client saw: {"event": "told" or "refused", …}."""

    def __init__(self, upstream: Upstream, model: str) -> None:
        self.upstream = upstream
        self.facts: list[Fact] = []
        self.before: Seen | None = None
        self.sound: Seen | None = None
        self.model = model
        self.refusals: list[str] = []
        self.doubtful: list[Fact] = []
        self.leave_after: asyncio.Event | None = None
        self.dice = random.Random()
        self.log: list[dict[str, Any]] = []
        self._number = 0

    def new_fact(self) -> Fact:
        self._number += 1
        key = f"fact-{self._number}-{self.dice.getrandbits(32):08x}"
        return Fact(f"remember {key} = known", key)

    async def tell(self, fact: Fact | None = None, *, tries: int = 1) -> Fact:
        """One turn; the client sends it again, up to `tries` times in all. Raises `RequestRefused`."""
        fact = fact or self.new_fact()
        for attempt in range(1, tries + 1):
            try:
                answer = await self._say(fact.text)
            except RequestRefused as refused:
                self.refusals.append(refused.why)
                self.log.append({"event": "refused", "words": shortened(fact.text), "why": refused.why})
                if attempt == tries:
                    raise
                continue
            fact = Fact(fact.text, fact.key, answer)
            self.facts.append(fact)
            self.log.append({"event": "told", "words": shortened(fact.text), "answer": shortened(answer)})
            return fact
        raise AssertionError("tries must be positive")

    def remember(self, fact: Fact, answer: str) -> None:
        """A turn that somebody else had in this session."""
        self.facts.append(Fact(fact.text, fact.key, answer))

    async def probe(self, fact: Fact | None = None) -> Score:
        """One more turn, and how its request tells all that was acknowledged before."""
        facts, fact = list(self.facts), fact or self.new_fact()
        before = [one for one in (self.sound, self.before) if one is not None]
        count = len(self.upstream.requests)
        try:
            await self.tell(fact)
        except RequestRefused as refused:
            return Score(len(facts), refused=refused.why)
        seen = self.request_of(fact, count)
        if seen is None:  # an answer that no model was asked for
            return Score(len(facts), lost=len(facts) + 1)
        return score(seen, facts, fact, before, self.doubtful)

    def request_of(self, fact: Fact, start: int) -> Seen | None:
        """The last request, of those from `start` on, that the model was told this in."""
        mine = [seen for seen in self.upstream.requests[start:] if fact.key in seen.raw.decode() or fact.whole]
        return mine[-1] if mine else None

    async def unless_left(self, asking: Awaitable[T]) -> T:
        """What is asked for, unless `leave_after` is set first: then `RequestRefused`."""
        asked = asyncio.ensure_future(asking)
        leaving = None if self.leave_after is None else asyncio.ensure_future(self.leave_after.wait())
        try:
            if leaving is not None:
                await asyncio.wait({asked, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    raise RequestRefused("the client left")
            return await asked
        finally:
            for one in (asked, leaving):
                if one is not None and not one.done():
                    one.cancel()
                    await asyncio.wait({one})

    def noted(self, said: str, start: int) -> None:
        """These words were answered: `before` is the newest request with them, of those from `start` on."""
        mine = [seen for seen in self.upstream.requests[start:] if said in "".join(seen.user_texts())]
        self.before = mine[-1] if mine else self.before

    @abstractmethod
    async def _say(self, said: str) -> str:
        """The answer. Raises `RequestRefused`."""


def shortened(text: str) -> str:
    return text if len(text) <= KEPT else f"{text[:KEPT]}… ({len(text)} characters)"
