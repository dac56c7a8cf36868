"""One conversation that is told facts, whoever answers it; what breaks it is told through it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod

from .provider.seen import Seen
from .provider.upstream import Upstream
from .score import Fact, Score, score


class RequestRefused(Exception):
    """The client's view: it got an error, and may send again."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Talk(ABC):
    """`facts` are the acknowledged turns, in order. `before` is the last request that was answered, `sound` the last
    one before something was broken."""

    def __init__(self, upstream: Upstream, model: str) -> None:
        self.upstream = upstream
        self.facts: list[Fact] = []
        self.before: Seen | None = None
        self.sound: Seen | None = None
        self.model = model
        self.refusals: list[str] = []
        self._number = 0

    def new_fact(self) -> Fact:
        self._number += 1
        key = f"fact-{self._number}-{secrets.token_hex(4)}"
        return Fact(f"remember {key} = known", key)

    async def tell(self, fact: Fact | None = None, *, tries: int = 1) -> Fact:
        """One turn; the client sends it again, up to `tries` times in all. Raises `RequestRefused`."""
        fact = fact or self.new_fact()
        for attempt in range(1, tries + 1):
            try:
                answer = await self._say(fact.text)
            except RequestRefused as refused:
                self.refusals.append(refused.why)
                if attempt == tries:
                    raise
                continue
            fact = Fact(fact.text, fact.key, answer)
            self.facts.append(fact)
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
        return score(seen, facts, fact, before)

    def request_of(self, fact: Fact, start: int) -> Seen | None:
        """The last request, of those from `start` on, that the model was told this in."""
        mine = [seen for seen in self.upstream.requests[start:] if fact.key in seen.raw.decode() or fact.whole]
        return mine[-1] if mine else None

    @abstractmethod
    async def _say(self, said: str) -> str:
        """The answer. Raises `RequestRefused`."""
