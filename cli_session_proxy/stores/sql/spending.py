"""Counts what keys and agents with a budget have spent, in the transactions that accept and commit their turns.

The rows of an account are written first in a transaction, always in the same order: this locks the account until the
end of the transaction, without deadlocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, func, or_, select

from ...domain import budgets
from ...domain.budgets import KEY_ACCOUNT, Budget, Per, Scope, Spent
from ...domain.models import Usage
from .damaged import reads, undamaged
from .database import InsertOrAdd, Prepared, Values
from .rows import unfinished
from .tables import agents, spent, turns

_ADD = Prepared(InsertOrAdd(spent))
_OF_ACCOUNT = Prepared(select(spent).where(spent.c.account == bindparam("of_account")))
# The number of other unfinished turns, of an owner and of an agent.
_others = (
    select(func.count().label("turns"))
    .select_from(turns.join(agents, unfinished(turns, agents.c.key)))
    .where(turns.c.id != bindparam("this_turn"), agents.c.owner == bindparam("of_owner"))
)
_OTHERS_UNFINISHED: Mapping[Scope, Prepared] = {
    "key": Prepared(_others),
    "agent": Prepared(_others.where(agents.c.agent_id == bindparam("named"))),
}
_NOTHING: Values = {"requests": 0, "tokens": 0, "usd": 0.0, "most_tokens": 0, "most_usd": 0.0}


def request(conn: Connection, of: Sequence[Budget], turn_id: str, now: float, *, is_new: bool = True) -> None:
    """Count the request of a turn that is being accepted in the accounts of these budgets. `BudgetExceeded` rolls this
    back with the transaction.

    `is_new` False: its request is already counted.
    """
    _add(
        conn,
        [(budget.account, per) for budget in of for per in budget.periods()],
        now,
        {**_NOTHING, "requests": int(is_new)},
    )
    # Run all before asking for a result: one round trip.
    ran = []
    for budget in of:
        others = {"of_owner": budget.owner, "this_turn": turn_id}
        if budget.agent_id is not None:
            others["named"] = budget.agent_id
        # A turn's cost is only known at its end, so unfinished turns matter.
        limits_cost = any(limit.unit != "requests" for limit in budget.limits)
        counting = _OTHERS_UNFINISHED[budget.scope].run(conn, others) if limits_cost else None
        ran.append((budget, _OF_ACCOUNT.run(conn, {"of_account": budget.account}), counting))
    accounts = []
    refusals = []
    for budget, of_account, counting in ran:
        # All rows are read before a refusal is raised: until then SQLite holds its lock.
        rows = list(map(_spent, _OF_ACCOUNT.rows(of_account)))
        unfinished_turns = 0
        if counting is not None:
            unfinished_turns = sum(row.turns for row in _OTHERS_UNFINISHED[budget.scope].rows(counting))
        accounts.append(rows)
        if (refusal := budgets.refusal(budget, rows, unfinished_turns, now, is_new=is_new)) is not None:
            refusals.append(refusal)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.retry_after or 0.0)
    for rows in accounts:
        for row in rows:
            running = budgets.period(row.per, now)
            if row.begins == running.begins and row.requests <= 1:  # the first turn of the period: delete older rows
                since = budgets.last_used([one for one in rows if one.per == row.per], running)
                of_this_account = and_(spent.c.account == row.account, spent.c.begins < since)
                of_any_account = spent.c.begins < budgets.previous(budgets.period("month", now)).begins
                conn.execute(delete(spent).where(spent.c.per == row.per, or_(of_this_account, of_any_account)))


def turn(conn: Connection, of: Sequence[Budget], usage: Usage, cost_usd: float | None, now: float) -> None:
    """Count the usage of a turn that is being committed, or has failed."""
    tokens, usd = usage.prompt_tokens + usage.output_tokens, max(0.0, cost_usd or 0.0)
    ended = {"requests": 0, "tokens": tokens, "usd": usd, "most_tokens": tokens, "most_usd": usd}
    _add(conn, [(budget.account, per) for budget in of for per in budget.periods(of_cost=True)], now, ended)


def of_accounts(conn: Connection, account: str | None = None) -> list[Spent]:
    of_keys = spent.c.account.startswith(KEY_ACCOUNT, autoescape=True)
    condition = of_keys if account is None else spent.c.account == account
    return undamaged(_spent, conn.execute(select(spent).where(condition)))


@reads(*spent.c)
def _spent(row: Any) -> Spent:
    return Spent(**row._asdict())


def _add(conn: Connection, to: Sequence[tuple[str, Per]], now: float, more: Values) -> None:
    """Add to the accounts' rows, always in the same order, because this locks them."""
    _ADD.run_each(
        conn,
        [{"account": one, "per": per, "begins": budgets.period(per, now).begins, **more} for one, per in sorted(to)],
    )
