"""Which limits apply to a turn, and how much of them is spent. The store counts; see `domain.budgets`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from ..domain import budgets
from ..domain.budgets import KEY_ACCOUNT, Budget, Limit, Per, Scope, Unit
from ..domain.models import JSON
from ..errors import BudgetExceeded
from ..settings import BudgetSettings, Limits
from ..stores.base import Store

_UNITS: tuple[Unit, ...] = ("usd", "tokens", "requests")
_PERIODS: tuple[Per, ...] = ("minute", "day", "month")


# The budgets of a key and one of its agents: `Budgets.of`.
BudgetsOf = Callable[[str, str | None], tuple[Budget, ...]]


class Budgets:
    """One per engine. `refused`: how many requests were refused, by scope, unit and period of the limit."""

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        self._is_set = settings != BudgetSettings()
        self.refused: Counter[tuple[Scope, Unit, Per]] = Counter()
        # Within a period spending only grows: after one refusal the same error holds until the period ends.
        self._until: dict[str, tuple[float, BudgetExceeded]] = {}

    def of(self, owner: str, agent_id: str | None) -> tuple[Budget, ...]:
        """The budgets of this key and of this agent, where they have one."""
        if not self._is_set:
            return ()
        own = self._settings
        both = [budgets.budget_of(owner, None, _limits(own.each_key, own.keys, owner))]
        if agent_id is not None:
            both.append(budgets.budget_of(owner, agent_id, _limits(own.each_agent, own.agents, agent_id)))
        return tuple(budget for budget in both if budget.limits)

    def admit(self, owner: str, agent_id: str | None, now: float) -> None:
        """Called before a request is stored. Raises `BudgetExceeded` if a limit is known to be reached."""
        if not self._until:
            return
        for budget in self.of(owner, agent_id):
            until, error = self._until.get(budget.account, (0.0, None))
            if error is None:
                continue
            if now < until:
                self._count(error)
                raise budgets.exceeded(error.message, until - now, error.detail, error.account)
            del self._until[budget.account]

    def refuse(self, error: BudgetExceeded, now: float) -> None:
        """Remember that the store refused a turn."""
        self._count(error)
        self._until = {account: known for account, known in self._until.items() if known[0] > now}
        if error.account is not None and error.retry_after is not None:
            self._until[error.account] = now + error.retry_after, error

    def _count(self, error: BudgetExceeded) -> None:
        self.refused[error.detail["scope"], error.detail["unit"], error.detail["per"]] += 1

    async def shown(self, store: Store, owner: str | None, agent_id: str | None, now: float) -> list[JSON]:
        """What is spent of each limit of this key, or of one of its agents. `owner` None: of every key that has spent
        anything or has limits of its own. `ends`: seconds since 1970."""
        if not self._is_set:
            return []
        if owner is not None:
            selected = [budget for budget in self.of(owner, agent_id) if budget.agent_id == agent_id]
            rows = [row for budget in selected for row in await store.spent(budget.account)]
        else:
            rows = await store.spent()
            owners = {row.account.removeprefix(KEY_ACCOUNT) for row in rows} | set(self._settings.keys)
            selected = [budget for name in sorted(owners) for budget in self.of(name, None)]
        return [
            {
                "scope": budget.scope, "name": budget.name, "unit": limit.unit, "per": limit.per, "limit": limit.most,
                "used": used, "ends": running.ends,
            }
            for budget in selected
            for limit, used, running in budgets.current(budget, rows, now)
        ]  # fmt: skip


def _limits(each: Limits, named: Mapping[str, Limits], name: str) -> Sequence[Limit]:
    """The limits of this key or agent: its own ones (`named`); where it has none, those for all (`each`)."""
    own = named.get(name, each)
    limits = []
    for unit, per in product(_UNITS, _PERIODS):
        field = f"{unit}_per_{per}"
        most = getattr(own, field)
        most = getattr(each, field) if most is None else most
        if most is not None:
            limits.append(Limit(unit, per, float(most)))
    return limits
