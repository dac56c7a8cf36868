"""An agent and what it owns: its head, its sessions, its summary, its end."""

from __future__ import annotations

import asyncio

from cli_session_proxy.domain.models import ONCE, Agent, Item, Link, Record, Session
from cli_session_proxy.domain.searching import Search
from cli_session_proxy.stores.base import Expiry, Forgotten, MirrorKey

from .samples import (
    IMAGE,
    StoreFactory,
    a_begin,
    a_commit,
    a_lease,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    gathered,
    imported_turns,
    opened,
    raised,
    turn_of,
)


async def an_agent_is_made_once(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        both = await asyncio.gather(an_agent(one), an_agent(two), an_agent(one))
        assert both[0] == both[1] == both[2]
        assert both[0].head is None
        assert both[0].named
        assert await two.agent_by_key(both[0].key) == both[0]
        assert await two.agent("local", "other") is None


async def owners_never_meet(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        mine = await an_agent(store, "same", "me", named=False)
        theirs = await an_agent(store, "same", "them", named=False)
        assert mine.key != theirs.key
        await accepted(store, a_turn(theirs, "t1", fingerprint="f", idempotency_key="k", idempotency_until=99.0))
        await store.commit(**a_commit(await turn_of(store, "t1"), theirs, path_hash="h"))
        assert await store.turn_by_key("me", "k", 20.0) is None
        assert (await store.arrival("me", "f", None))[0] is None
        assert await store.deepest("me", ["h"]) is None
        assert await store.deepest("me", ["h"], theirs.key) is None
        assert (await store.deepest("them", ["h"]) or mine) == await turn_of(store, "t1")
        assert [row.agent.key for row in await gathered(store.summaries("me"))] == [mine.key]
        own = await accepted(store, a_turn(mine, "t2", idempotency_key="k", idempotency_until=99.0))
        found = await store.turn_by_key("me", "k", 20.0)
        assert found is not None
        assert found.id == own.id


async def the_head_stays_within_its_agent(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        one, two = await an_agent(store, "a"), await an_agent(store, "b")
        await complete(store, one, "t1")
        await complete(store, one, "t2", move_head=False)
        heads = [await store.agent_by_key(agent.key) for agent in (one, two)]
        assert [agent.head for agent in heads if agent is not None] == ["t1", None]


async def a_session_belongs_to_one_agent_for_ever(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        one, two = await an_agent(store, "a"), await an_agent(store, "b")
        await complete(store, one, "t1")
        newer = a_session(one, "s2", "t1")
        await store.save_session(newer, [Link("s1", "s2", "t1", "rebuilt", {}, 12.0)])
        assert await store.session_at(one.key, "t1") == newer
        assert await store.session_at(two.key, "t1") is None
        assert await raised(store.save_session(a_session(two, "s1", None))) is not None
        assert await store.session("s1") == a_session(one, "s1", "t1")
        moved = Session("s2", one.key, None, "/elsewhere", "2.2", 11.0, None)
        await store.save_session(moved)
        assert await store.session("s2") == moved


async def summaries_come_last_active_first(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        idle, busy = await an_agent(store, "idle"), await an_agent(store, "busy")
        await complete(store, busy, "t1", links=(Link("s1", "s1", "t1", "rebuilt", {}, 1.0),))
        turn = await accepted(store, a_turn(busy, "t2", at=30.0))
        first, second = await gathered(store.summaries())
        assert (first.agent.key, second.agent.key) == (busy.key, idle.key)
        assert (first.turns, first.sessions, first.repairs, first.state) == (2, 1, 1, "queued")
        assert (first.cost_usd, first.last_at) == (0.25, 30.0)
        assert first.bytes > 0
        assert (second.turns, second.state, second.bytes) == (0, None, 0)
        assert [agent.key for agent in await store.expired_agents(Expiry(30.0))] == [idle.key]
        assert {agent.key for agent in await store.expired_agents(Expiry(31.0))} == {idle.key, busy.key}
        await store.begin(**a_begin(turn))
        await accepted(store, a_turn(busy, "t3", at=31.0))  # waits behind it
        assert [row.state for row in await gathered(store.summaries())] == ["running", None]


async def a_version_is_another_one_after_each_change_of_the_chain(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store, "a")
        seen = [await store.version(agent.key)]

        async def changed() -> None:
            assert await store.version(agent.key) not in seen
            assert not await store.delete_agent(agent.key, Expiry(100.0, version=seen[-1]))
            seen.append(await store.version(agent.key))

        turn = await accepted(store, a_turn(agent, "t1", at=10.0))
        await changed()
        await store.begin(**a_begin(turn))
        await changed()
        await store.commit(**a_commit(turn, agent, "t1", finished_at=10.0))
        await changed()
        await store.set_delivery("t1", "delivered")
        await changed()
        # of the same moment
        await accepted(store, a_turn(agent, "t2", "t1", at=10.0))
        await changed()
        await store.fail("t2", "cancelled", {}, [], {}, 10.0)
        await changed()
        await store.annotate(agent.key, {"a": "b"})
        await changed()
        await store.add_items(agent.key, [Item("item_1", {"id": "item_1"}, None)])
        await changed()
        await store.mirror(agent.key, MirrorKey("p", "s", ""), [Record("{}", "u1")])
        await changed()
        await an_agent(store, "another")
        assert await store.version(agent.key) == seen[-1]
        assert not await store.delete_agent(agent.key, Expiry(10.0, version=seen[-1]))
        assert await store.delete_agent(agent.key, Expiry(100.0, version=seen[-1]))
        assert await store.version(agent.key) is None


async def one_shots_are_told_apart_from_what_a_client_may_come_back_for(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        kept: dict[str, Agent] = {}
        for name in ("shot", "named", "longer", "stored", "talking", "open", "late"):
            kept[name] = await an_agent(store, name, named=name == "named")
            at = 50.0 if name == "late" else 10.0
            call = {"wire": "responses", "store": True} if name == "stored" else None
            turn = await accepted(store, a_turn(kept[name], f"{name}1", at=at, call=call))
            if name != "open":
                await store.begin(**a_begin(turn))
                await store.commit(**a_commit(turn, kept[name], name, finished_at=at))
        await accepted(store, a_turn(kept["longer"], "longer2", "longer1", at=10.0))
        await store.annotate(kept["talking"].key, {})
        shot, late = kept["shot"], kept["late"]
        assert [one.key for one in await store.expired_agents(Expiry(one_shots=40.0))] == [shot.key]
        assert await store.expired_agents(Expiry(one_shots=40.0), only=late.key) == []
        assert [one.key for one in await store.expired_agents(Expiry(one_shots=60.0))] == [shot.key, late.key]
        assert await store.expired_agents(Expiry()) == []
        number, cost = await store.one_shots("local", since=0.0, until=40.0)
        assert (number, cost) == (1, 0.25)
        rows = await gathered(store.summaries("local", since=40.0))
        assert {row.agent.agent_id for row in rows} == set(kept) - {"shot"}
        found = await store.search(Search("", "local"))
        assert (found.agents, found.one_shots) == (len(kept), 2)


async def of_what_is_forgotten_cost_and_count_are_left(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        for name, at in (("one", 7250.0), ("two", 7300.0), ("later", 11000.0)):
            agent = await an_agent(store, name, named=False)
            turn = await accepted(store, a_turn(agent, f"{name}1", at=at))
            await store.begin(**a_begin(turn))
            await store.commit(**a_commit(turn, agent, name, finished_at=at))
            assert not await store.delete_agent(agent.key, Expiry(one_shots=at))
            assert await store.delete_agent(agent.key, Expiry(one_shots=at + 1))
        await store.delete_agent((await an_agent(store, "gone", named=False)).key)
        first, second = await store.forgotten("local", 7300.0)
        assert first == Forgotten(7200.0, "local", "sonnet", 2, 0.5)
        assert (second.at, second.turns) == (10800.0, 1)
        assert await store.forgotten("local", 10800.0) == [second]
        assert await store.forgotten("another", 0.0) == []
        assert await store.forgotten(None, 0.0) == [first, second]
        assert await store.one_shots("local", since=7300.0, until=9999.0) == (3, 0.75)


async def nobody_goes_on_from_an_agent_that_is_asked_once(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        for name in (f"{ONCE}_1", "auto_1"):
            agent = await an_agent(store, name, named=False)
            turn = await accepted(store, a_turn(agent, f"{name}t"))
            await store.commit(**a_commit(turn, agent, name, path_hash=name))
        assert await store.deepest("local", [f"{ONCE}_1"]) is None
        assert await store.deepest("local", ["auto_1"]) is not None


async def totals_are_what_a_sum_of_the_turns_would_be(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1", links=(Link("s1", "s1", "t1", "rebuilt", {}, 1.0),))
        for number, status in enumerate(("failed", "cancelled"), 2):
            await accepted(store, a_turn(agent, f"t{number}", "t1"))
            await store.fail(f"t{number}", status, {"code": "x"}, (), {}, 9.0)  # type: ignore[arg-type]  # its statuses
        refused = await accepted(store, a_turn(agent, "t4", "t1"))
        await store.commit(**a_commit(refused, agent, status="refused"))
        await store.import_turns(imported_turns(agent, 3, renamed="x"))
        (before,) = await gathered(store.summaries())
        assert (before.turns, before.failures, before.cost_usd, before.sessions, before.repairs) == (7, 2, 0.5, 1, 1)
        # a turn that failed is run again, and its path is left by a rewind
        again = await store.requeue("t2", None)
        await store.begin(**a_begin(again))
        await store.commit(**a_commit(again, agent, "s2", links=(Link("s1", "s2", "t2", "branched", {}, 1.0),)))
        await store.rewind(a_lease(agent.key), "t1")
        (after,) = await gathered(store.summaries())
        assert (after.turns, after.failures, after.cost_usd, after.sessions, after.repairs) == (7, 1, 0.75, 2, 1)
        assert after.bytes > before.bytes
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
        sizes = [after.bytes]
        for number in (5, 6):
            await complete(store, agent, f"t{number}", output=(picture,))
            sizes.append((await gathered(store.summaries()))[0].bytes)
        # the same image is kept, and counted, once
        assert (sizes[1] - sizes[0]) - (sizes[2] - sizes[1]) == len(IMAGE)


async def deleting_an_agent_leaves_the_others_whole(factory: StoreFactory) -> None:
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    async with opened(factory) as store:
        gone, kept = await an_agent(store, "gone"), await an_agent(store, "kept")
        await complete(store, gone, "t1", output=(source,), links=(Link(None, "s1", "t1", "started", {}, 1.0),))
        await complete(store, gone, "t2", "t1")
        await accepted(store, a_turn(gone, "t3", idempotency_key="k", idempotency_until=99.0))
        stays = await complete(store, kept, "t4", session="s2", output=(source,))
        await store.delete_agent(gone.key)
        assert await store.agent("local", "gone") is None
        assert await gathered(store.turns(gone.key)) == []
        assert await store.session("s1") is None
        assert await store.turn_by_key("local", "k", 20.0) is None
        assert await store.own_frames(gone.key, ["frame-t1"]) == set()
        assert await turn_of(store, "t4") == stays
        assert await store.session("s2") is not None
        await store.delete_agent(gone.key)


async def a_probe_is_made_by_anybody_at_any_time_and_shows_up_nowhere(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        await asyncio.gather(*(store.probe() for store in (one, two) for _ in range(3)))
        assert await gathered(one.summaries()) == []
        agent = await an_agent(one)
        await two.probe()
        assert [row.agent for row in await gathered(two.summaries())] == [agent]
