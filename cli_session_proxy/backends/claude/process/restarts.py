"""An agent whose CLI keeps dying: after a few deaths in a row it is not started at once again, but ever later.

Counted by agent, not by session: a session whose first turn dies leaves nothing, and the next one has another id.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ....errors import ClaudeUnavailable
from .events import ProcessDied
from .failures import error_for_death

# A turn is repeated once by itself, so this many deaths are more than one bad turn.
LIMIT = 3
# How long the next start is refused after the last of them, doubled at each further death. Seconds.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
# Agents that are remembered: beyond it the one that died longest ago gets a fresh start.
KNOWN = 1024


@dataclass(slots=True)
class _Deaths:
    count: int
    until: float
    last: str


class Restarts:
    """The deaths in a row of each agent's processes. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[int, _Deaths] = OrderedDict()

    def check(self, agent_key: int) -> None:
        """Raises `ClaudeUnavailable` while this agent's CLI is not to be started."""
        deaths = self._deaths.get(agent_key)
        if deaths is None or (left := deaths.until - self._clock()) <= 0:
            return
        raise ClaudeUnavailable(
            f"the Claude CLI of this agent has died {deaths.count} times in a row and is not started again before "
            f"{math.ceil(left)} s are over. The last time: {deaths.last}. See `doctor` and the proxy's log",
            retry_after=left,
            detail={"deaths": deaths.count},
        )

    def died(self, agent_key: int, how: ProcessDied) -> None:
        """One more process ended without a result."""
        deaths = self._deaths.setdefault(agent_key, _Deaths(0, 0.0, ""))
        deaths.count += 1
        deaths.last = error_for_death(how).message
        if deaths.count >= LIMIT:
            doubled = min(deaths.count - LIMIT, 32)  # as a float has an end
            deaths.until = self._clock() + min(LONGEST_WAIT, FIRST_WAIT * 2.0**doubled)
        self._deaths.move_to_end(agent_key)
        if len(self._deaths) > KNOWN:
            self._deaths.popitem(last=False)

    def lived(self, agent_key: int) -> None:
        """A turn of this agent was answered."""
        self._deaths.pop(agent_key, None)
