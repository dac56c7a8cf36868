"""What somebody looks for among all that was said, and what is found. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from . import times
from .models import Agent, Continuity, Status

# More than this nobody types; each word is one look into the index.
MAX_WORDS = 16
MAX_TEXT = 400
# An id that is named by a part of it: fewer characters fit too many.
SHORTEST_PART = 3

# What a hit is found by: an agent's name, a session's or a turn's id, or the words of a turn.
HitKind = Literal["agent", "session", "turn", "words"]
Part = Literal["input", "output", "tools", "metadata"]


@dataclass(frozen=True, slots=True)
class Search:
    """`owner` None: those of all owners. Times are UTC seconds, `until` itself is outside; costs are US dollars.

    Every word has to be there, the last one may go on; words in double quotes stand side by side. Without any words:
    the newest turns that the rest fits.
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
        """Words and phrases, in their order."""
        text = self.text[:MAX_TEXT].replace("\0", " ")
        found = (quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|([^\s"]+)', text))
        return tuple(word for word in found if word.strip())[:MAX_WORDS]

    @property
    def is_filtered(self) -> bool:
        """It asks for turns of some kind: no agent and no session fits by its name alone."""
        given = (self.since, self.until, self.model, self.status, self.min_cost)
        return self.repaired or any(one is not None for one in given)


@dataclass(frozen=True, slots=True)
class Hit:
    """`snippet`: pieces of the text, those at odd places are the words that were looked for. No secret is in them.

    `number` is the turn's place among its agent's, from 1. Of an agent or a session the turn is where it stands.
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
    """The best first: agents, sessions and turns by their ids, then the words. `agents` and `turns`: how many there
    were to look through; `one_shots`: how many of the agents have no row in a list."""

    hits: tuple[Hit, ...]
    agents: int
    turns: int
    one_shots: int = 0


@dataclass(frozen=True, slots=True)
class Indexed:
    """How many turns the index holds as they are, of how many."""

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
