"""Deletes agents that are not to be kept: of requests that asked for it, of one-shots, and those idle for too long."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from .. import logs
from ..domain.models import ONCE, Agent, TurnRequest
from ..settings import Settings
from ..stores.base import Expiry, Store
from ..tasks import Tasks, failures_logged
from .live import LiveTurn

log = logs.get(__name__)

HOUR = 3600.0
# How many clients' habits are remembered. The least recently seen are dropped, and learned again.
CLIENTS = 1000
# Later than any turn: these agents are deleted at any age.
ANY_AGE = float("inf")


@dataclass(slots=True)
class Habit:
    """Whether a client asks one-shot questions, judged by its requests so far: it does after two requests that continue
    nothing, until a request continues something.

    `asked`: how many requests continued nothing. `answered`: keys of their agents, deleted if they were one-shots.
    """

    goes_on: bool = False
    asked: int = 0
    answered: list[int] = field(default_factory=list)


class Forgetting:
    """`now`: seconds since 1970 by the store's clock. `delete` returns False if the agent stays."""

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
        self.expires: Callable[[Agent], None] = lambda _agent: None  # called with each named agent before its deletion
        self._habits: OrderedDict[tuple[str, str], Habit] = OrderedDict()
        self._of: WeakKeyDictionary[LiveTurn, Habit] = WeakKeyDictionary()

    def accepted(self, live: LiveTurn, request: TurnRequest) -> None:
        """A new turn of this request was accepted. Its client's earlier one-shots may be deleted now."""
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
        """The turn's answer arrived at a client. Delete its agent if it is not to be kept."""
        habit = self._of.pop(live, None)
        if live.agent.agent_id.startswith(f"{ONCE}_"):
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
        """Delete an unnamed agent. If this fails, `idle` deletes it later."""
        with failures_logged("not_forgotten"):
            agent = await self._store.agent_by_key(key)
            if agent is not None and not agent.named:
                await self._delete(agent.owner, agent.agent_id, expiry)

    async def serve(self) -> None:
        """Once an hour, delete what `retention_days` and `forget_unnamed` do not keep, and what a crash left of
        requests with `X-Chain: none`."""
        while True:
            with failures_logged("not_expired"):
                hours = self._settings.forget_unnamed
                await self.idle(self._settings.retention_days, None if hours == "never" else hours)
            await asyncio.sleep(HOUR)

    async def idle(self, days: float | None, unnamed_hours: float | None = None) -> None:
        """Delete the agents whose last turn is older than so many days, and one-shots older than so many hours."""
        now = min(self._now(), time.time())  # a clock that is ahead, the server's or this machine's, deletes nothing
        expiry = Expiry(
            None if days is None else now - days * 24 * HOUR,
            None if unnamed_hours is None else now - unnamed_hours * HOUR,
            now - HOUR,
        )
        for agent in await self._store.expired_agents(expiry):
            with failures_logged("not_expired", **agent.named_in_logs):
                if agent.named:
                    self.expires(agent)
                if await self._delete(agent.owner, agent.agent_id, expiry):
                    log.info("expired")  # without its name: it is deleted
