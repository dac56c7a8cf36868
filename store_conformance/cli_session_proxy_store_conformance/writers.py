"""The writer contract: whatever happens to the writers of an agent, each of its turns is written once, by one of them.

These contracts move the store's clock, by which leases expire.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Agent, Turn
from cli_session_proxy.errors import LeaseLost
from cli_session_proxy.stores.base import Granted, Lease, LeaseHeld, Proxy, Store

from .samples import (
    StoreFactory,
    a_begin,
    a_commit,
    a_session,
    a_turn,
    accepted,
    follows,
    gathered,
    granted,
    imported_turns,
    opened,
    raised,
    turn_of,
)

ONE = Proxy("one", "here", 10.0)
TWO = Proxy("two", "there", 10.0)
PAUSE = 6 * ONE.lease


class Clock(Protocol):
    """The clock of all stores that the factory makes."""

    async def advance(self, seconds: float) -> None:
        """So much time goes by on it."""


async def of_two_writers_one_is_granted_the_lease_and_only_its_answer_is_kept(
    factory: StoreFactory, _clock: Clock
) -> None:
    async with opened(factory) as one, opened(factory) as two:
        for number in range(5):
            agent = await _an_agent(one, f"a{number}")
            turn = await accepted(one, a_turn(agent, f"t{number}"))
            sides = ((one, ONE), (two, TWO))
            got = await asyncio.gather(*(store.acquire(agent.key, proxy) for store, proxy in sides))
            assert {type(answer) for answer in got} == {Granted, LeaseHeld}
            (lease,) = [answer.lease for answer in got if isinstance(answer, Granted)]
            asked = await asyncio.gather(
                *(_answer(store, turn, agent, replace(lease, holder=proxy.id)) for store, proxy in sides),
                return_exceptions=True,
            )
            assert [isinstance(answer, LeaseHeld) for answer in got] == [
                isinstance(error, LeaseLost) for error in asked
            ]
            (kept,) = [answer for answer in asked if isinstance(answer, Turn)]
            assert await turn_of(two, turn.id) == kept


async def turns_that_two_writers_accept_at_once_have_one_order(factory: StoreFactory, _clock: Clock) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await _an_agent(one)
        turns = await asyncio.gather(
            *(
                accepted(store, a_turn(agent, f"{name}{n}"))
                for n in range(10)
                for store, name in ((one, "a"), (two, "b"))
            )
        )
        in_order = [turn.id for turn in sorted(turns, key=lambda turn: turn.seq)]
        assert len({turn.seq for turn in turns}) == len(turns)
        for store in (one, two):
            assert [turn.id for turn in await store.unfinished_of(agent.key)] == in_order
            assert [turn.id for turn in await gathered(store.turns(agent.key))] == in_order


async def a_lease_is_its_holders_until_it_has_expired(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await _an_agent(one)
        former = await granted(one, agent, ONE)
        await clock.advance(0.8 * ONE.lease)
        assert await two.acquire(agent.key, TWO) == LeaseHeld("one")
        await one.renew(ONE)
        await clock.advance(0.8 * ONE.lease)
        assert await two.responds("one")
        assert await two.acquire(agent.key, TWO) == LeaseHeld("one")
        await clock.advance(0.4 * ONE.lease)
        assert not await two.responds("one")
        assert follows(await two.acquire(agent.key, TWO), former, "two", "one")


async def a_proxy_is_silent_once_its_last_heartbeat_expired_so_long_ago(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await _an_agent(one)
        await granted(one, agent, ONE)
        await two.renew(TWO)
        await clock.advance(ONE.lease + 5.0)
        await two.renew(TWO)
        assert await two.silent(0.0) == ["one"]
        assert await two.silent(4.0) == ["one"]
        assert await two.silent(6.0) == []
        await one.renew(ONE)
        assert await two.silent(0.0) == []
        await clock.advance(2 * PAUSE)
        await two.resign("one")
        assert await two.silent(PAUSE) == ["two"]


async def an_expired_lease_that_nobody_took_still_writes(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as store:
        agent = await _an_agent(store)
        lease = await granted(store, agent, ONE)
        turn = await _running(store, agent, lease)
        await clock.advance(PAUSE)
        assert (await store.commit(**a_commit(turn, agent, lease=lease))).status == "completed"


async def a_paused_holder_that_wakes_up_writes_nothing_over_its_successor(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as paused, opened(factory) as store:
        agent = await _an_agent(paused)
        stale = await granted(paused, agent, ONE)
        turn = await _running(paused, agent, stale)
        await clock.advance(PAUSE)
        lease = await granted(store, agent, TWO)
        await store.fail(turn.id, "failed", {"code": "x"}, (), {}, 20.0, lease=lease)
        again = await store.requeue(turn.id, "two")
        done = await _answer(store, again, agent, lease)
        theirs, session = imported_turns(agent, 1), a_session(agent, "s9", "i0")
        for write in (
            paused.begin(**a_begin(turn, lease=stale)),
            paused.commit(**a_commit(turn, agent, session="s9", output=(), lease=stale)),
            paused.note(stale, turn.id, Evidence(left_off="t0")),
            paused.fail(turn.id, "failed", {"code": "x"}, (), {}, 20.0, lease=stale),
            paused.adopt(stale, theirs, session, []),
        ):
            assert isinstance(await raised(write), LeaseLost)
        await paused.release(stale)
        assert await paused.renew(ONE) == []
        assert [held.lease for held in await store.renew(TWO)] == [lease]
        for reader in (paused, store):
            assert await gathered(reader.turns(agent.key)) == [done]
            assert await reader.session("s9") is None


async def a_commit_with_a_stale_epoch_is_refused_to_its_own_holder_too(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await _an_agent(one)
        first = await granted(one, agent, ONE)
        turn = await _running(one, agent, first)
        await clock.advance(PAUSE)
        await granted(two, agent, TWO)
        await clock.advance(PAUSE)
        now = await granted(one, agent, ONE)
        assert now.epoch > first.epoch + 1
        assert isinstance(await raised(one.commit(**a_commit(turn, agent, lease=first))), LeaseLost)
        ahead = replace(now, epoch=now.epoch + 1)
        assert isinstance(await raised(one.commit(**a_commit(turn, agent, lease=ahead))), LeaseLost)
        assert await one.records(turn.id) == []
        assert (await one.commit(**a_commit(turn, agent, lease=now))).status == "completed"


async def what_a_successor_finds_at_its_takeover_stays_as_it_found_it(factory: StoreFactory, _clock: Clock) -> None:
    """A commit on its way at that moment is there whole by then, or is refused."""

    async def take_over(store: Store, agent: Agent, turn: Turn, former: Lease) -> Turn:
        assert follows(await store.acquire(agent.key, TWO, dead=("one",)), former, "two", "one")
        return await turn_of(store, turn.id)

    async with opened(factory) as one, opened(factory) as two:
        for number in range(20):
            agent = await _an_agent(one, f"a{number}")
            lease = await granted(one, agent, ONE)
            turn = await _running(one, agent, lease, f"t{number}")
            commit = asyncio.ensure_future(one.commit(**a_commit(turn, agent, session=f"s{number}", lease=lease)))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            found = await take_over(two, agent, turn, lease)
            await asyncio.wait([commit])
            assert await turn_of(one, turn.id) == found
            there = await two.agent_by_key(agent.key)
            assert there is not None
            if found.status == "completed":
                assert commit.result() == found
                assert (there.head, len(await two.records(turn.id))) == (turn.id, 1)
            else:
                assert isinstance(commit.exception(), LeaseLost)
                assert (found.status, there.head, await two.records(turn.id)) == ("running", None, [])


async def an_answer_that_was_written_and_never_acknowledged_is_there_once(factory: StoreFactory, _clock: Clock) -> None:
    """The writer ends between the write and the acknowledgement: its successor finds the answer, and gives it out."""
    async with opened(factory) as store:
        agent = await _an_agent(store)
        lease = await granted(store, agent, ONE)
        turn = await _running(store, agent, lease, fingerprint="f")
        written = await store.commit(**a_commit(turn, agent, lease=lease))
    async with opened(factory) as store:
        now = await granted(store, agent, TWO, dead=("one",))
        assert (await store.arrival("local", "f", None))[0] == written
        assert await store.pending_deliveries() == [written]
        assert await raised(store.commit(**a_commit(turn, agent, output=(), lease=now))) is not None
        assert await raised(store.requeue(turn.id, "two")) is not None
        assert await store.claim(turn.id, "two")
        assert (await turn_of(store, turn.id)).output == written.output
        await _answer(store, await accepted(store, a_turn(agent, "t2", turn.id)), agent, now)
        assert [one.id for one in await store.path("t2")] == [turn.id, "t2"]


async def a_writer_that_leaves_at_any_moment_leaves_all_of_its_write_or_nothing(
    factory: StoreFactory, _clock: Clock
) -> None:
    for moments in range(6):
        async with opened(factory) as store:  # what was submitted ends before it is closed
            agent = await _an_agent(store)
            lease = await granted(store, agent, ONE)
            turn = await _running(store, agent, lease, f"t{moments}")
            commit = asyncio.ensure_future(store.commit(**a_commit(turn, agent, session=f"s{moments}", lease=lease)))
            for _ in range(moments):
                await asyncio.sleep(0)
            commit.cancel()
            await asyncio.wait([commit])
        async with opened(factory) as store:
            now, session = await turn_of(store, turn.id), await store.session(f"s{moments}")
            there = (now.status, len(await store.records(turn.id)), session is not None)
            assert there in {("running", 0, False), ("completed", 1, True)}


# --- steps


async def _an_agent(store: Store, agent_id: str = "a") -> Agent:
    return await store.ensure_agent("local", agent_id, f"local-{agent_id}", named=True, now=1.0)


async def _running(store: Store, agent: Agent, lease: Lease, id: str = "t1", fingerprint: str = "") -> Turn:
    turn = await accepted(store, a_turn(agent, id, fingerprint=fingerprint))
    await store.begin(**a_begin(turn, lease=lease))
    return turn


async def _answer(store: Store, turn: Turn, agent: Agent, lease: Lease) -> Turn:
    await store.begin(**a_begin(turn, session=f"s-{turn.id}", lease=lease))
    return await store.commit(**a_commit(turn, agent, session=f"s-{turn.id}", lease=lease))


async def what_nobody_came_to_find_out_is_claimed_by_another_one(factory: StoreFactory, clock: Clock) -> None:
    async with opened(factory) as one, opened(factory) as two:
        assert await one.claim_finding("a", "b", PAUSE)
        assert not await two.claim_finding("a", "b", PAUSE)
        await clock.advance(2 * PAUSE)
        assert await two.claim_finding("a", "b", PAUSE)
        assert not await one.claim_finding("a", "b", PAUSE)
        await one.keep_findings("a", {"b": {}})  # it was only late
        await clock.advance(2 * PAUSE)
        assert not await two.claim_finding("a", "b", PAUSE)
