"""What is not kept: requests that asked for it, one-shots, and agents that nobody came back to in time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from .. import logs
from ..domain.models import ONCE, Agent, TurnRequest
from ..settings import Settings
from ..stores.base import Expiry, Store
from ..tasks import Tasks, survived
from .live import LiveTurn

log = logs.get(__name__)

HOUR = 3600.0
# Clients whose habit is known; of those that were not here for longest it is learned anew.
CLIENTS = 1000
# Later than any turn: an agent of this kind goes however young it is.
ANY_AGE = float("inf")


@dataclass(slots=True)
class Habit:
    """What a client does that asks for nothing to be stored, seen from its requests so far.

    Where two of its requests followed each other and neither goes on from anything, it asks once, until one does.
    """

    goes_on: bool = False
    asked: int = 0
    answered: list[int] = field(default_factory=list)  # agents that go when it turns out that it asks once


class Forgetting:
    """`now`: seconds since 1970, the same for all proxies of the store. `delete`: False where the agent stays."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        tasks: Tasks,
        now: Callable[[], float],
        delete: Callable[[str, str, Expiry], Awaitable[bool]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._tasks = tasks
        self._now = now
        self._delete = delete
        self.expires: Callable[[Agent], None] = lambda _agent: None  # told of each named agent before it is deleted
        self._habits: OrderedDict[tuple[str, str], Habit] = OrderedDict()
        self._of: WeakKeyDictionary[LiveTurn, Habit] = WeakKeyDictionary()

    def accepted(self, live: LiveTurn, request: TurnRequest) -> None:
        """A new turn of this request. What its client was given before may be forgotten now."""
        if request.client is None:
            return
        client = request.owner, request.client
        habit = self._habits.setdefault(client, Habit())
        self._habits.move_to_end(client)
        if len(self._habits) > CLIENTS:
            self._habits.popitem(last=False)
        if request.goes_on:
            habit.goes_on = True
            habit.answered.clear()
        else:
            habit.asked += 1
            self._of[live] = habit
            self._forget_answered(habit)

    def delivered(self, live: LiveTurn) -> None:
        habit = self._of.pop(live, None)
        if live.agent_id.startswith(f"{ONCE}_"):
            self._tasks.own(self._forget(live.turn.agent_key, Expiry(once=ANY_AGE)))
        elif habit is not None and not habit.goes_on and live.turn.status == "completed":
            habit.answered.append(live.turn.agent_key)
            self._forget_answered(habit)

    def _forget_answered(self, habit: Habit) -> None:
        if habit.asked > 1 and not habit.goes_on:
            for key in habit.answered:
                self._tasks.own(self._forget(key, Expiry(one_shots=ANY_AGE)))
            habit.answered.clear()

    async def _forget(self, key: int, expiry: Expiry) -> None:
        """Where that fails, `idle` does it later."""
        with survived("not_forgotten"):
            agent = await self._store.agent_by_key(key)
            if agent is not None and not agent.named:
                await self._delete(agent.owner, agent.agent_id, expiry)

    async def serve(self) -> None:
        """Once an hour, delete what `retention_days` and `forget_unnamed` do not keep, and what a crash left of
        requests with `X-Chain: none`."""
        while True:
            with survived("not_expired"):
                hours = self._settings.forget_unnamed
                await self.idle(self._settings.retention_days, None if hours == "never" else hours)
            await asyncio.sleep(HOUR)

    async def idle(self, days: float | None, unnamed_hours: float | None = None) -> None:
        """Delete the agents whose last turn is older than so many days, and one-shots older than so many hours."""
        now = self._now()
        expiry = Expiry(
            None if days is None else now - days * 24 * HOUR,
            None if unnamed_hours is None else now - unnamed_hours * HOUR,
            now - HOUR,
        )
        for agent in await self._store.expired_agents(expiry):
            with survived("not_expired", agent=agent.agent_id):
                if agent.named:
                    self.expires(agent)
                if await self._delete(agent.owner, agent.agent_id, expiry):
                    log.info("expired")  # without its name: nothing is left of it
