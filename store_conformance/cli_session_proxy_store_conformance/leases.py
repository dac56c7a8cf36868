"""Who may write an agent: one holder at a time, a higher epoch for each new one, and no write of a former one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cli_session_proxy.domain.models import Placed
from cli_session_proxy.errors import LeaseLost, StoreUnavailable
from cli_session_proxy.stores.base import Granted, Home, LeaseHeld, PathChanged, PeerRequests, Proxy, Whereabouts

from .samples import (
    HOLDER,
    StoreFactory,
    a_begin,
    a_commit,
    a_lease,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    follows,
    gathered,
    granted,
    imported_turns,
    opened,
    raised,
    turn_of,
)

OTHER = replace(HOLDER, id="other")
# Its heartbeats have expired as soon as they are stored.
STOPPED = Proxy("stopped", "here", -1.0)


async def a_lease_has_one_holder_at_a_time(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await one.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        got = await asyncio.gather(*(store.acquire(agent.key, p) for store, p in ((one, HOLDER), (two, OTHER)) * 3))
        granted = {answer.lease.holder for answer in got if isinstance(answer, Granted)}
        assert len(granted) == 1
        assert {answer.holder for answer in got if isinstance(answer, LeaseHeld)} == granted


async def all_proxies_are_told_one_clock(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        told = [await one.clock(), await two.clock(), await one.clock()]
        assert told == sorted(told)


async def the_same_holder_keeps_its_epoch(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        assert await store.acquire(agent.key, HOLDER) == Granted(a_lease(agent.key), None)
        assert [held.lease for held in await store.renew(HOLDER)] == [a_lease(agent.key)]


async def a_released_lease_is_granted_with_a_higher_epoch_and_nothing_to_settle(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await store.release(a_lease(agent.key))
        assert await store.renew(HOLDER) == []
        assert follows(await store.acquire(agent.key, OTHER), a_lease(agent.key), "other", None)


async def a_holder_that_responds_is_asked_and_not_replaced(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        assert await store.acquire(agent.key, OTHER, asks=False) == LeaseHeld("holder")
        assert not await store.asked("holder")
        assert await store.acquire(agent.key, OTHER) == LeaseHeld("holder")
        assert await store.asked("holder") == PeerRequests((agent.key,))
        assert [held.wanted for held in await store.renew(HOLDER)] == ["other"]
        await store.release(a_lease(agent.key))
        assert isinstance(await store.acquire(agent.key, OTHER), Granted)
        assert not await store.asked("other")


async def an_expired_lease_is_taken_over_and_names_its_former_holder(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        former = await granted(store, agent, STOPPED)
        assert not await store.responds("stopped")
        assert follows(await store.acquire(agent.key, OTHER), former, "other", "stopped")
        assert await store.renew(STOPPED) == []


async def an_expired_lease_that_nobody_took_is_renewed_under_its_epoch(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        former = await granted(store, agent, STOPPED)
        assert not await store.responds("stopped")
        awake = replace(STOPPED, lease=3600.0)
        assert [held.lease for held in await store.renew(awake)] == [former]
        assert await store.responds("stopped")
        assert await store.acquire(agent.key, OTHER) == LeaseHeld("stopped")


async def an_expired_lease_is_left_to_its_holder_by_who_cannot_tell_a_pause_from_its_own(
    factory: StoreFactory,
) -> None:
    async with opened(factory) as store:
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        former = await granted(store, agent, STOPPED)
        assert await store.acquire(agent.key, OTHER, awake=lambda: False) == LeaseHeld("stopped")
        assert await store.asked("stopped") == PeerRequests((agent.key,))
        ended = await store.acquire(agent.key, OTHER, dead=("stopped",), awake=lambda: False)
        assert follows(ended, former, "other", "stopped")


async def a_holder_that_is_known_to_have_ended_is_replaced_at_once(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        taken = await store.acquire(agent.key, OTHER, dead=("holder",))
        assert follows(taken, a_lease(agent.key), "other", "holder")


async def a_stale_holder_writes_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1"))
        await store.begin(**a_begin(turn))
        running = await turn_of(store, "t1")
        now = await granted(store, agent, OTHER, dead=("holder",))
        assert isinstance(await raised(store.begin(**a_begin(turn))), LeaseLost)
        assert isinstance(await raised(store.commit(**a_commit(turn, agent))), LeaseLost)
        ended = store.fail("t1", "failed", {"code": "x"}, (), {}, 20.0, lease=a_lease(agent.key))
        assert isinstance(await raised(ended), LeaseLost)
        theirs = imported_turns(agent, 1)
        assert isinstance(
            await raised(store.adopt(a_lease(agent.key), theirs, a_session(agent, "s", "i0"), [])), LeaseLost
        )
        assert await turn_of(store, "t1") == running
        assert [one.id for one in await gathered(store.turns(agent.key))] == ["t1"]
        await store.release(a_lease(agent.key))  # not its own any more
        assert [held.lease for held in await store.renew(OTHER)] == [now]
        done = await store.commit(**a_commit(turn, agent, lease=now))
        assert done.status == "completed"


async def a_running_turn_is_ended_only_under_a_lease(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1"))
        assert (await store.fail("t1", "cancelled", {"code": "x"}, (), {}, 20.0)).status == "cancelled"
        await store.requeue(turn.id, "holder")
        await store.begin(**a_begin(turn))
        assert await raised(store.fail("t1", "cancelled", {"code": "x"}, (), {}, 20.0)) is not None
        assert (await turn_of(store, "t1")).status == "running"


async def a_turn_that_another_proxy_took_is_not_ended_by_the_former_one(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1", instance="holder"))
        ended = await store.fail("t1", "cancelled", {"code": "x"}, (), {}, 20.0, instance="holder")
        assert ended.status == "cancelled"
        await store.requeue(turn.id, "other")
        for lease in (None, a_lease(agent.key)):
            late = store.fail("t1", "cancelled", {"code": "y"}, (), {}, 20.0, lease=lease, instance="holder")
            assert isinstance(await raised(late), StoreUnavailable)
        assert (await turn_of(store, "t1")).status == "queued"


async def who_has_an_agent_is_known_while_it_responds(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        assert await store.whereabouts(agent.key) == Whereabouts()
        reached = Proxy("reached", "there", 3600.0, "http://there:1")
        await store.acquire(agent.key, reached)
        assert await store.whereabouts(agent.key) == Whereabouts("reached", "http://there:1")
        found = await store.proxy("reached")
        assert found is not None
        assert replace(found, lease=3600.0) == reached
        (row,) = await gathered(store.summaries())
        assert (row.host, row.address) == ("there", "http://there:1")
        await store.acquire(agent.key, STOPPED, dead=("reached",))
        assert await store.whereabouts(agent.key) == Whereabouts()
        assert await store.proxy("stopped") is None
        assert await store.proxy("nobody") is None
        (row,) = await gathered(store.summaries())
        assert (row.host, row.address) == (None, None)


async def where_an_agents_files_are_is_known_from_its_last_turn_that_left_some(factory: StoreFactory) -> None:
    home = Home("there:/var", "http://there:1")
    async with opened(factory) as store:
        agent = await an_agent(store)
        for name, at in (("t1", home), ("t2", None)):
            turn = await accepted(store, a_turn(agent, name))
            await store.begin(**a_begin(turn, home=at))
            await store.commit(**a_commit(turn, agent, session=f"s-{name}"))
        await store.release(a_lease(agent.key))
        await store.resign(HOLDER.id)
    async with opened(factory) as store:
        assert (await store.whereabouts(agent.key)).home == home
        await store.acquire(agent.key, OTHER)
        assert (await store.whereabouts(agent.key)).home == home


async def a_turn_that_another_proxy_wants_to_end_is_known_until_it_has(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for name in ("t1", "t2"):
            await accepted(store, a_turn(agent, name))
        for _ in range(2):
            await store.cancel("t1", "holder", "client")
        await store.cancel("t2", "other", "operator")
        assert await store.asked("holder") == PeerRequests((), (("t1", "client"),))
        await store.forget_cancel("t1")
        assert not await store.asked("holder")
        await store.fail("t2", "cancelled", {"code": "x"}, (), {}, 20.0)
        await store.requeue("t2", "other")
        assert not await store.asked("other")  # it was the end of the attempt before
        await store.cancel("t2", "other", "operator")
        await store.resign("other")
        assert not await store.asked("other")
        await store.cancel("t1", "holder", "client")
        await store.delete_agent(agent.key)
        assert not await store.asked("holder")


async def what_is_asked_of_a_proxy_is_looked_for_in_a_bounded_time(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        async with asyncio.timeout(60):
            await store.until_asked("holder", 0.01)


async def epochs_never_come_back(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        leases = [a_lease(agent.key)]
        for name in ("a", "b", "a"):
            leases.append(await granted(store, agent, Proxy(name, "here", 3600.0), dead=("holder", "a", "b")))
        epochs = [lease.epoch for lease in leases]
        assert epochs == sorted(set(epochs))
    async with opened(factory) as store:
        await store.resign("a")
        assert follows(await store.acquire(agent.key, HOLDER), leases[-1], "holder", None)


async def a_deleted_agent_has_no_lease_and_its_key_is_not_given_again(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        await store.follow(done.id, "other")
        await store.delete_agent(agent.key)
        assert await store.renew(HOLDER) == []
        assert await store.followers(done.id) == []
        assert (await an_agent(store)).key != agent.key


# --- answers, and who still wants them ---


async def a_proxy_whose_clients_wait_for_an_answer_is_known_until_it_resigns(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        for proxy in ("b", "b", "c"):
            await store.follow(done.id, proxy)
        assert sorted(await store.followers(done.id)) == ["b", "c"]
        await store.unfollow(done.id, "b")
        await store.resign("c")
        assert await store.followers(done.id) == []


async def an_answer_that_a_turn_continues_has_arrived(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        child = await accepted(store, a_turn(agent, "t2", "t1"))
        await store.begin(**a_begin(child))
        await store.set_delivery("t1", "undelivered")
        assert (await turn_of(store, "t1")).delivery == "pending"
        await store.commit(**a_commit(child, agent))
        await store.set_delivery("t1", "undelivered")
        assert (await turn_of(store, "t1")).delivery == "pending"


async def an_answer_that_another_proxy_gives_to_its_client_is_that_proxys_to_mark(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        await store.set_delivery("t1", "undelivered", by="a")
        assert await store.claim("t1", "b")
        await store.set_delivery("t1", "undelivered", by="a")
        assert (await turn_of(store, "t1")).delivery == "pending"
        await store.set_delivery("t1", "uncertain")
        await store.set_delivery("t1", "undelivered", by="b")
        assert await store.claim("t1", "b")
        assert (await turn_of(store, "t1")).delivery == "uncertain"
        await complete(store, agent, "t2", "t1")
        await store.set_delivery("t2", "undelivered")
        assert await store.claim("t2", "b")
        await store.set_delivery("t2", "undelivered", by="b")
        assert (await turn_of(store, "t2")).delivery == "undelivered"


async def a_note_that_comes_late_does_not_change_an_answer_that_may_be_off_the_path(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        await store.set_delivery("t1", "undelivered")
        for note in ("uncertain", "pending"):
            await store.set_delivery("t1", note)
            assert (await turn_of(store, "t1")).delivery == "undelivered"
        running = await accepted(store, a_turn(agent, "t2", instance="a"))
        await store.set_delivery(running.id, "undelivered", by="a")
        await store.set_delivery(running.id, "pending", by="b")
        assert (await turn_of(store, "t2")).delivery == "undelivered"
        await store.set_delivery(running.id, "pending", by="a")
        assert (await turn_of(store, "t2")).delivery == "pending"


async def an_answer_whose_line_was_lost_is_uncertain_from_then_on(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        earlier = await complete(store, agent, "t1")
        running = await accepted(store, a_turn(agent, "t2", earlier.id, instance="a", fingerprint="f"))
        await store.begin(**a_begin(running))
        for instances, turn_id, fingerprint in ((("b",), None, "f"), (("a",), None, "g"), (("a",), "t1", None)):
            await store.doubt(agent.key, instances, turn_id, fingerprint)
        assert [(await turn_of(store, one)).delivery for one in ("t1", "t2")] == ["pending", "pending"]
        await store.doubt(agent.key, ("a", "b"), None, "f")
        assert (await store.commit(**a_commit(running, agent))).delivery == "uncertain"
        await store.hand_on("t2", "a", "b")
        assert (await turn_of(store, "t2")).instance == "a"
        await store.set_delivery("t2", "delivered")
        await store.doubt(agent.key, ("a", "b"), "t2", None)
        assert (await turn_of(store, "t2")).delivery == "delivered"
        # one in the background, whose client has its id
        running = await accepted(store, a_turn(agent, "t3", "t2", instance="a"))
        await store.begin(**a_begin(running))
        await store.set_delivery("t3", "delivered")
        assert (await store.commit(**a_commit(running, agent))).delivery == "delivered"


async def a_pending_answer_is_handed_on_by_the_proxy_that_has_it(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        await store.set_delivery("t1", "undelivered")
        assert await store.claim("t1", "a")
        await store.hand_on("t1", "b", "c")
        assert (await turn_of(store, "t1")).instance == "a"
        await store.hand_on("t1", "a", "b")
        assert (await turn_of(store, "t1")).instance == "b"
        await store.set_delivery("t1", "undelivered")
        await store.hand_on("t1", "b", "c")
        assert (await turn_of(store, "t1")).instance == "b"


async def an_undelivered_answer_is_claimed_while_the_conversation_can_go_on_from_it(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        await store.set_delivery("t1", "undelivered")
        waiting = await accepted(store, a_turn(agent, "t2", placed=Placed("head")))
        assert await store.claim("t1", "b")
        assert (await turn_of(store, "t1")).delivery == "pending"
        await store.set_delivery("t1", "undelivered")
        await store.begin(**a_begin(waiting, left_off=("t1",)))
        assert not await store.claim("t1", "b")  # a turn that runs has begun without it


async def a_turn_does_not_begin_without_an_answer_that_was_claimed_meanwhile(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        await store.set_delivery("t1", "undelivered")
        turn = await accepted(store, a_turn(agent, "t2", placed=Placed("head")))
        assert await store.claim("t1", "b")
        assert isinstance(await raised(store.begin(**a_begin(turn, left_off=("t1",)))), PathChanged)
        assert (await turn_of(store, "t2")).status == "queued"


async def a_begin_that_is_refused_leaves_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        turn = await accepted(store, a_turn(agent, "t1"))
        home = Home("host", "http://there")
        stale = replace(a_lease(agent.key), epoch=a_lease(agent.key).epoch - 1)
        assert isinstance(await raised(store.begin(**a_begin(turn, lease=stale, home=home))), LeaseLost)
        assert isinstance(await raised(store.begin(**a_begin(turn, lease=a_lease(other.key), home=home))), ValueError)
        assert await store.turn("t1") == turn
        assert (await store.whereabouts(agent.key)).home is None
        await complete(store, agent, "t2")
        done = await turn_of(store, "t2")
        assert await raised(store.begin(**a_begin(done, frame_uuid="again", home=home))) is not None
        assert await store.turn("t2") == done
        assert (await store.whereabouts(agent.key)).home is None
        assert await store.own_frames(agent.key, ["frame-t1", "frame-t2", "again"]) == {"frame-t2"}
