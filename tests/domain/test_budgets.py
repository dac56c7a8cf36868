"""What a budget lets through: pure, with hypothesis over histories of turns that run beside each other."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.budgets import Budget, Limit, Per, Spent, budget_of, period, previous, refusal

NOON = datetime(2026, 11, 24, 12, 0, 30, tzinfo=UTC).timestamp()


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("per", "begins", "ends"),
    [
        ("minute", "2026-11-24T12:00:00", "2026-11-24T12:01:00"),
        ("day", "2026-11-24", "2026-11-25"),
        ("month", "2026-11-01", "2026-12-01"),
    ],
)
def test_periods_begin_in_utc(per: Per, begins: str, ends: str) -> None:
    assert period(per, NOON) == (per, at(begins), at(ends))


@pytest.mark.parametrize("moment", ["2026-12-31T23:59:59", "2027-01-01", "2028-02-29T12:00:00", "2026-01-31"])
@pytest.mark.parametrize("per", ["minute", "day", "month"])
def test_a_period_holds_its_moment_and_follows_the_one_before(per: Per, moment: str) -> None:
    now = period(per, at(moment))
    assert now.begins <= at(moment) < now.ends
    assert previous(now).ends == now.begins


def spent(of: Budget, per: Per, **more: Any) -> Spent:
    return Spent(of.account, per, period(per, NOON).begins, **more)


def test_the_limit_that_holds_longest_is_told() -> None:
    of = budget_of("alice", None, [Limit("requests", "minute", 2), Limit("usd", "month", 5.0)])
    rows = [spent(of, "minute", requests=3), spent(of, "month", usd=6.0)]
    told = refusal(of, rows, 0, NOON)
    assert told is not None
    assert (
        told.message == "the budget of key 'alice', $5.00 a month, is used up: it begins anew at 2026-12-01T00:00:00Z"
    )
    assert told.retry_after == at("2026-12-01") - NOON
    assert not told.retry
    assert told.detail == {
        "scope": "key", "unit": "usd", "per": "month", "limit": 5.0, "used": 6.0, "ends": "2026-12-01T00:00:00Z",
    }  # fmt: skip
    soon = refusal(of, rows[:1], 0, NOON)
    assert soon is not None
    assert (soon.retry_after, soon.retry, soon.detail["used"]) == (30.0, True, 2)


def test_an_agent_is_kept_under_a_name_that_does_not_tell_it() -> None:
    of = budget_of("alice", "payroll", [Limit("usd", "day", 1.0)])
    assert "payroll" not in of.account
    assert of.account != budget_of("bob", "payroll", of.limits).account
    told = refusal(of, [spent(of, "day", usd=1.0)], 0, NOON)
    assert told is not None
    assert "agent 'payroll'" in told.message


def test_another_periods_spending_does_not_count() -> None:
    of = budget_of("alice", None, [Limit("usd", "day", 1.0)])
    yesterday = Spent(of.account, "day", previous(period("day", NOON)).begins, usd=9.0)
    assert refusal(of, [yesterday], 0, NOON) is None


@given(
    costs=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    limit=st.integers(1, 200),
    beside=st.lists(st.booleans(), min_size=1, max_size=60),
)
def test_no_more_than_one_turn_goes_over_once_the_dearest_is_known(
    costs: list[int], limit: int, beside: list[bool]
) -> None:
    """Turns that are accepted (True) and that end (False) in any order: the first one shows what the dearest costs."""
    of = budget_of("alice", None, [Limit("tokens", "day", limit)])
    dearest = max(costs)
    row = spent(of, "day", requests=1, tokens=dearest, most_tokens=dearest)
    under_way: list[int] = []
    left = list(costs)
    for accepts in [*beside, *[False] * len(beside)]:
        if accepts and left and refusal(of, [row], len(under_way), NOON) is None:
            under_way.append(left.pop())
        elif not accepts and under_way:
            cost = under_way.pop(0)
            row = spent(of, "day", requests=1, tokens=row.tokens + cost, most_tokens=dearest)
    assert row.tokens < limit + dearest or row.tokens == dearest
