"""What keys and agents spend of their budgets: counted once, with the turn, however many proxies there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cli_session_proxy.domain.budgets import Budget, Limit, Spent, budget_of, period
from cli_session_proxy.domain.models import Turn, Usage
from cli_session_proxy.errors import BudgetExceeded
from cli_session_proxy.stores.base import KeyTaken, Store

from .samples import StoreFactory, a_begin, a_commit, a_turn, accepted, an_agent, opened, raised

# A moment in the middle of a minute, a day and a month: 2026-11-24 12:00:30 UTC.
NOON = 1_795_521_630.0
THREE_REQUESTS = (budget_of("local", None, [Limit("requests", "minute", 3)]),)
A_DOLLAR = (budget_of("local", None, [Limit("usd", "day", 1.0)]),)


async def _accepted(store: Store, agent: str, id: str, of: tuple[Budget, ...], at: float = NOON) -> Turn:
    found = await store.agent("local", agent)
    assert found is not None
    return await accepted(store, a_turn(found, id, at=at, budgets=of))


async def _answered(store: Store, turn: Turn, of: tuple[Budget, ...], cost: float, at: float = NOON) -> None:
    agent = await store.agent_by_key(turn.agent_key)
    assert agent is not None
    await store.begin(**a_begin(turn, f"s-{turn.id}"))
    done = a_commit(turn, agent, f"s-{turn.id}", cost_usd=cost, finished_at=at, budgets=of, usage=Usage(5, 7, 11, 13))
    await store.commit(**done)


async def _spent(store: Store, account: str | None = None) -> list[Spent]:
    return sorted(await store.spent(account), key=lambda one: (one.account, one.per, one.begins))


async def requests_count_when_they_are_accepted_tokens_and_cost_when_a_turn_is_committed(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        await an_agent(one)
        both = (*A_DOLLAR, budget_of("local", "a", [Limit("tokens", "month", 10**6)]))
        turn = await _accepted(one, "a", "t1", both)
        day, month = period("day", NOON), period("month", NOON)
        assert await _spent(two) == [Spent("key local", "day", day.begins, 1)]
        await _answered(one, turn, both, 0.5)
        of_agent = Spent(both[1].account, "month", month.begins, 1, 36, 0.5, 36, 0.5)
        assert await _spent(two, both[1].account) == [of_agent]
        assert await _spent(two) == [Spent("key local", "day", day.begins, 1, 36, 0.5, 36, 0.5)]


async def over_a_limit_nothing_is_kept_and_nothing_counts(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await an_agent(store)
        for n in range(3):
            await _answered(store, await _accepted(store, "a", f"t{n}", THREE_REQUESTS), THREE_REQUESTS, 0.0)
        before = await _spent(store)
        refused = await raised(_accepted(store, "a", "t3", THREE_REQUESTS))
        assert isinstance(refused, BudgetExceeded)
        assert refused.retry_after == 30.0
        assert await store.turn("t3") is None
        assert await _spent(store) == before
        await _accepted(store, "a", "t4", THREE_REQUESTS, NOON + 30.0)  # the next minute


async def _at_once(stores: Sequence[Store], budgets: tuple[Budget, ...]) -> tuple[list[Turn], list[BudgetExceeded]]:
    """A turn of its own agent at each of these, all at once: those that were accepted, and why the others were not."""
    for n in range(len(stores)):
        await an_agent(stores[0], f"a{n}")
    asked = [_accepted(store, f"a{n}", f"t{n}", budgets) for n, store in enumerate(stores)]
    told = await asyncio.gather(*asked, return_exceptions=True)
    return [one for one in told if isinstance(one, Turn)], [one for one in told if isinstance(one, BudgetExceeded)]


async def of_turns_that_are_accepted_at_once_as_many_come_through_as_may(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        accepted, refused = await _at_once((one, two) * 5, THREE_REQUESTS)
        assert (len(accepted), len(refused)) == (3, 7)
        assert [row.requests for row in await _spent(two)] == [3]


async def turns_under_way_are_reckoned_with_what_the_dearest_one_cost(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        for n in range(4):
            await an_agent(one, f"a{n}")
        await _answered(one, await _accepted(one, "a0", "t0", A_DOLLAR), A_DOLLAR, 0.4)
        running = await _accepted(one, "a1", "t1", A_DOLLAR)  # 0.4 of 1.0 is spent
        await _accepted(two, "a2", "t2", A_DOLLAR)  # 0.8 may be
        refused = await raised(_accepted(two, "a3", "t3", A_DOLLAR))  # 1.2 may be
        assert isinstance(refused, BudgetExceeded)
        assert (refused.account, refused.retry_after) == (None, 2.0)
        await _answered(one, running, A_DOLLAR, 0.1)
        await _accepted(two, "a3", "t3", A_DOLLAR)  # 0.5 is spent, 0.9 may be


async def while_nobody_knows_what_a_turn_costs_they_run_one_after_the_other(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        (first,), refused = await _at_once((one, two) * 3, A_DOLLAR)
        assert [(each.account, each.retry_after) for each in refused] == [(None, 2.0)] * 5
        await _answered(one, first, A_DOLLAR, 0.3)
        month = NOON + 86_400.0 * 31  # known still, however long nothing was spent
        for n in range(4):
            await _accepted(two, f"a{n}", f"u{n}", A_DOLLAR, month)
        assert isinstance(await raised(_accepted(one, "a4", "u4", A_DOLLAR, month)), BudgetExceeded)


async def what_a_turn_used_that_failed_counts(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await an_agent(store)
        await _accepted(store, "a", "t1", A_DOLLAR)
        await store.spend(A_DOLLAR, Usage(5, 7, 11, 13), None, NOON)
        await store.spend(A_DOLLAR, Usage(), 1.0, NOON)
        (row,) = await _spent(store)
        assert (row.requests, row.tokens, row.usd, row.most_tokens, row.most_usd) == (1, 36, 1.0, 36, 1.0)
        assert isinstance(await raised(_accepted(store, "a", "t2", A_DOLLAR)), BudgetExceeded)


async def the_turn_that_goes_over_a_limit_of_cost_is_the_last(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await an_agent(store)
        for n in range(2):
            await _answered(store, await _accepted(store, "a", f"t{n}", A_DOLLAR), A_DOLLAR, 0.75)
        refused = await raised(_accepted(store, "a", "t2", A_DOLLAR))
        assert isinstance(refused, BudgetExceeded)
        assert refused.account == "key local"
        assert refused.detail["used"] == 1.5


async def a_new_attempt_counts_no_request_and_holds_to_limits_of_cost(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await an_agent(store)
        of = (budget_of("local", None, [Limit("requests", "day", 2), Limit("usd", "day", 1.0)]),)
        failed = await _accepted(store, "a", "t1", of)
        await store.fail("t1", "failed", {"code": "x"}, (), {}, NOON)
        await store.requeue("t1", "here", of, NOON)
        await store.fail("t1", "failed", {"code": "x"}, (), {}, NOON)
        assert [row.requests for row in await _spent(store)] == [1]
        await _answered(store, await _accepted(store, "a", "t2", of), of, 1.0)
        assert isinstance(await raised(store.requeue(failed.id, "here", of, NOON)), BudgetExceeded)
        now = await store.turn(failed.id)
        assert now is not None
        assert now.status == "failed"


async def a_key_that_is_taken_counts_no_request(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        told: dict[str, Any] = {"budgets": THREE_REQUESTS, "idempotency_key": "k", "idempotency_until": NOON + 99.0}
        await accepted(store, a_turn(agent, "t1", at=NOON, **told))
        assert isinstance(await raised(accepted(store, a_turn(agent, "t2", at=NOON, **told))), KeyTaken)
        assert [row.requests for row in await _spent(store)] == [1]


async def what_an_agent_spent_stays_counted_when_it_is_deleted(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        of = (*A_DOLLAR, budget_of("local", "a", [Limit("usd", "day", 1.0)]))
        await _answered(store, await _accepted(store, "a", "t1", of), of, 1.0)
        await store.delete_agent(agent.key)
        await an_agent(store)
        assert isinstance(await raised(_accepted(store, "a", "t2", of)), BudgetExceeded)
        assert isinstance(await raised(_accepted(store, "a", "t2", of[1:])), BudgetExceeded)


async def a_clock_that_jumps_resets_no_budget(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        await an_agent(store)
        for n in range(3):
            await _accepted(store, "a", f"t{n}", THREE_REQUESTS)
        for n in range(3):
            await _accepted(store, "a", f"later{n}", THREE_REQUESTS, NOON + 60.0)
        assert isinstance(await raised(_accepted(store, "a", "back", THREE_REQUESTS)), BudgetExceeded)
        await _accepted(store, "a", "far", THREE_REQUESTS, NOON + 3600.0)
        assert [row.requests for row in await _spent(store)] == [3, 1]  # of earlier minutes the last one in use is kept
