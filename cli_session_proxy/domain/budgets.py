"""What a key or an agent may spend in a minute, a day or a month. Pure.

Periods begin in UTC. A turn's request counts when the turn is accepted, its tokens and cost when it ends. So the cost
of an unfinished turn is estimated: as the most that one turn used in this period and in the last earlier period with
spending. If no turn has used anything yet, the estimate is the whole limit, so turns run one after the other. Only one
turn can exceed a limit: one that was accepted below it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, NamedTuple

from ..errors import BudgetExceeded
from . import times
from .models import JSON

Scope = Literal["key", "agent"]
Unit = Literal["requests", "tokens", "usd"]
Per = Literal["minute", "day", "month"]

# Retry-After in seconds for a request that is refused only because of unfinished turns: when they end is unknown.
RETRY_UNFINISHED = 2.0
# The longest Retry-After that the SDKs follow, in seconds.
LONGEST_RETRY_AFTER = 60.0
# The prefix of a key's account. An agent's account is a hash, so that a deleted agent's name is stored nowhere.
KEY_ACCOUNT = "key "


class Period(NamedTuple):
    """`begins` and `ends` are seconds since 1970, UTC."""

    per: Per
    begins: float
    ends: float


class Limit(NamedTuple):
    """At most this many of a unit in each period."""

    unit: Unit
    per: Per
    most: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a client's key (`agent_id` None), or of one of its agents.

    `owner`: the key's name. `account`: under which name the store counts the spending.
    """

    owner: str
    agent_id: str | None
    account: str
    limits: tuple[Limit, ...]

    @property
    def scope(self) -> Scope:
        return "key" if self.agent_id is None else "agent"

    @property
    def name(self) -> str:
        return self.owner if self.agent_id is None else self.agent_id

    def periods(self, *, of_cost: bool = False) -> set[Per]:
        """The periods with a limit; `of_cost`: with a limit of tokens or cost, which are known only when a turn
        ends."""
        return {limit.per for limit in self.limits if not of_cost or limit.unit != "requests"}


@dataclass(frozen=True, slots=True)
class Spent:
    """What an account spent in one period; `most_…`: the most that one turn used."""

    account: str
    per: Per
    begins: float
    requests: int = 0
    tokens: int = 0
    usd: float = 0.0
    most_tokens: int = 0
    most_usd: float = 0.0


def budget_of(owner: str, agent_id: str | None, limits: Sequence[Limit]) -> Budget:
    account = f"{KEY_ACCOUNT}{owner}"
    if agent_id is not None:
        named = f"{owner}\0{agent_id}".encode("utf-8", "surrogatepass")
        account = f"agent {hashlib.sha256(named).hexdigest()[:32]}"
    return Budget(owner, agent_id, account, tuple(limits))


def period(per: Per, at: float) -> Period:
    """The minute, day or month (UTC) that contains this time."""
    return _period_of_minute(per, int(at // 60))


@lru_cache(32)  # each turn asks several times
def _period_of_minute(per: Per, minute: int) -> Period:
    if per != "month":
        length = 60.0 if per == "minute" else 86_400.0
        begins = minute * 60 // length * length
        return Period(per, begins, begins + length)
    first = datetime.fromtimestamp(minute * 60, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return Period(per, first.timestamp(), following.timestamp())


def previous(now: Period) -> Period:
    """The period before this one."""
    return period(now.per, now.begins - 1.0)


def last_used(of_account: Sequence[Spent], running: Period) -> float:
    """The begin of the last earlier period with spending. The rows are of one account and one kind of period."""
    return max((row.begins for row in of_account if row.begins < running.begins), default=running.begins)


def current(budget: Budget, spent: Sequence[Spent], now: float) -> list[tuple[Limit, float, Period]]:
    """For each limit what has been spent, and the period."""
    rows = {(row.per, row.begins): row for row in spent if row.account == budget.account}
    found = []
    for limit in budget.limits:
        running = period(limit.per, now)
        row = rows.get((limit.per, running.begins))
        found.append((limit, 0.0 if row is None else float(getattr(row, limit.unit)), running))
    return found


def refusal(
    budget: Budget, spent: Sequence[Spent], under_way: int, now: float, *, is_new: bool = True
) -> BudgetExceeded | None:
    """Why a turn may not be accepted (of several limits the one that lasts longest); None if it may.

    `spent` includes its request, unless that was counted earlier (`is_new` False). `under_way`: how many other turns of
    the account are unfinished.
    """
    found: list[BudgetExceeded] = []
    for limit, used, running in current(budget, spent, now):
        of_requests = limit.unit == "requests"
        reached = used > limit.most and is_new if of_requests else used >= limit.most
        if reached:
            why = f"the budget of {_named(budget, limit)}, is used up: it begins anew at {times.utc(running.ends)}"
            detail = _detail(budget, limit, min(used, limit.most) if of_requests else used, running)
            found.append(exceeded(why, running.ends - now, detail, budget.account))
        elif under_way and not of_requests:
            of_account = [row for row in spent if row.account == budget.account and row.per == limit.per]
            since = last_used(of_account, running)
            known = [row for row in of_account if row.begins >= since and row.most_tokens]
            estimate = max((getattr(row, f"most_{limit.unit}") for row in known), default=limit.most)
            if used + under_way * estimate >= limit.most:
                turns = f"{under_way} turn{'s' if under_way > 1 else ''} under way"
                why = f"{turns} may use up the budget of {_named(budget, limit)}: send this again when there are fewer"
                found.append(exceeded(why, RETRY_UNFINISHED, _detail(budget, limit, used, running), None))
    return max(found, key=lambda one: one.retry_after or 0.0, default=None)


def amount(unit: Unit, number: float) -> str:
    """`$0.42`, `12 requests`."""
    return f"${number:.2f}" if unit == "usd" else f"{number:.0f} {unit}"


def _named(budget: Budget, limit: Limit) -> str:
    return f"{budget.scope} {budget.name!r}, {amount(limit.unit, limit.most)} a {limit.per}"


def _detail(budget: Budget, limit: Limit, used: float, running: Period) -> JSON:
    detail = {"scope": budget.scope, "unit": limit.unit, "per": limit.per, "limit": limit.most, "used": used}
    return {**detail, "ends": times.utc(running.ends)}


def exceeded(message: str, wait: float, detail: JSON, account: str | None) -> BudgetExceeded:
    """The error for a request that may be sent again after `wait` seconds."""
    # None: the error's default. False: the SDKs would retry too early, and in vain.
    retry = None if wait <= LONGEST_RETRY_AFTER else False
    error = BudgetExceeded(message, retry_after=max(1.0, float(math.ceil(wait))), detail=detail, retry=retry)
    error.account = account
    return error
