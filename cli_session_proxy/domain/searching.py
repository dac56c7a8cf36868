"""Queries and results of the full-text search. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from . import times
from .models import Agent, Continuity, Status

# The most words of a query, each of which is one lookup in the index; and its most characters.
MAX_WORDS = 16
MAX_TEXT = 400
# The fewest characters of a part of an id: fewer match too many.
SHORTEST_PART = 3

# The kinds of hits: an agent's name, a session's or a turn's id, or the words of a turn.
HitKind = Literal["agent", "session", "turn", "words"]
# The indexed parts of a turn.
Part = Literal["input", "output", "tools", "metadata"]


@dataclass(frozen=True, slots=True)
class Search:
    """A query: `text` has the words, and every other field but `owner` and `limit` filters turns.

    All words must match, the last one as a prefix; words in double quotes are a phrase. Without words: the newest turns
    that match the filters. `owner` None: all owners. `since`, `until`: UTC seconds, `until` is exclusive. `repaired`:
    only turns whose session had to be repaired. `min_cost`: US dollars. `limit`: the most hits.
    """

    text: str
    owner: str | None = None
    since: float | None = None
    until: float | None = None
    model: str | None = None
    status: Status | None = None
    repaired: bool = False
    min_cost: float | None = None
    limit: int = 20

    @property
    def words(self) -> tuple[str, ...]:
        """Words and phrases, in order."""
        text = self.text[:MAX_TEXT].replace("\0", " ")
        found = (quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|([^\s"]+)', text))
        return tuple(word for word in found if word.strip())[:MAX_WORDS]

    @property
    def is_filtered(self) -> bool:
        """Whether there is a filter of turns. Then agents and sessions do not match by name."""
        filters = (self.since, self.until, self.model, self.status, self.min_cost)
        return self.repaired or any(value is not None for value in filters)


@dataclass(frozen=True, slots=True)
class Hit:
    """`snippet`: pieces of the redacted text; every second one is a match.

    `number`: the turn's number in its agent, from 1. For an agent or a session, `turn_id` is its head or tip.
    """

    kind: HitKind
    agent: Agent
    at: float
    turn_id: str | None = None
    number: int | None = None
    session_id: str | None = None
    status: Status | None = None
    model: str | None = None
    continuity: Continuity | None = None
    cost_usd: float | None = None
    part: Part | None = None
    snippet: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Hits, best first: agents, sessions and turns by id, then turns by words. `agents`, `turns`: how many were
    searched; `one_shots`: how many of these agents have no row in a list."""

    hits: tuple[Hit, ...]
    agents: int
    turns: int
    one_shots: int = 0


@dataclass(frozen=True, slots=True)
class Indexed:
    """How many turns are indexed in their present state, and how many there are."""

    done: int
    total: int

    @property
    def is_whole(self) -> bool:
        return self.done >= self.total


def moment(text: str, now: float) -> float:
    """UTC seconds of `30m`, `12h`, `7d` ago, or of a date. Raises `ValueError`."""
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if ago is not None:
        return now - int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
    return times.parse(text)
