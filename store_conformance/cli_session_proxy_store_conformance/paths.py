"""The tree of turns: its order, its branches, and what comes in as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cli_session_proxy.domain.models import Link
from cli_session_proxy.errors import ContextTooLong
from cli_session_proxy.stores.base import Tree, TurnOutline

from .samples import (
    StoreFactory,
    a_finished_turn,
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


async def acceptance_is_one_order_for_all(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await an_agent(one)
        turns = await asyncio.gather(
            *(
                accepted(store, a_turn(agent, f"{name}{n}"))
                for n in range(20)
                for name, store in (("x", one), ("y", two))
            )
        )
        assert len({turn.seq for turn in turns}) == 40
        last = await accepted(one, a_turn(agent, "last"))
        assert last.seq > max(turn.seq for turn in turns)
        streamed = [turn.seq for turn in await gathered(two.turns(agent.key))]
        assert streamed == sorted(streamed)
        assert len(streamed) == 41
        assert [turn.id for turn in await gathered(two.turns(agent.key, after_seq=streamed[-2]))] == ["last"]
        await two.delete_agent(agent.key)
        reborn = await an_agent(one)
        assert reborn.key != agent.key
        assert (await accepted(one, a_turn(reborn, "first"))).seq > last.seq


async def long_chains_stream_whole(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, count = await an_agent(store), 250
        await store.import_turns(imported_turns(agent, count), head=f"i{count - 1}")
        ids = [f"i{n}" for n in range(count)]
        whole = await gathered(store.turns(agent.key))
        assert [turn.id for turn in whole] == ids
        outlines = [TurnOutline(*(getattr(turn, name) for name in TurnOutline.__slots__)) for turn in whole]
        assert await gathered(store.outlines(agent.key)) == outlines
        assert [turn.id for turn in await store.path(ids[-1])] == ids
        assert [record.line for record in await store.records(ids[-1])] == [f'{{"n": {n}}}' for n in range(count)]
        found = await store.deepest("local", [f"h{n}" for n in range(1200)], agent.key)
        assert found is not None
        assert found.id == ids[-1]


async def turns_are_paged_newest_first_with_their_links(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        for n in range(5):
            link = Link(None, "s1", f"t{n}", "rebuilt" if n else "started", {"n": n}, float(n))
            await complete(store, agent, f"t{n}", f"t{n - 1}" if n else None, links=(link,))
            await complete(store, other, f"x{n}", session="s2")
        first = await store.page(agent.key, before_seq=None, limit=2)
        assert [turn.id for turn in first.turns] == ["t4", "t3"]
        assert sorted(link.turn_id or "" for link in first.links) == ["t3", "t4"]
        assert (first.newest, first.total, first.link_counts) == (5, 5, {"started": 1, "rebuilt": 4})
        rest = await store.page(agent.key, before_seq=first.turns[-1].seq, limit=9)
        assert [turn.id for turn in rest.turns] == ["t2", "t1", "t0"]
        assert (rest.newest, rest.total) == (3, 5)
        past = await store.page(agent.key, before_seq=rest.turns[-1].seq, limit=9)
        assert (past.turns, past.links, past.newest) == ((), (), 0)
        assert [link.turn_id for link in await store.repairs(agent.key, limit=3)] == ["t4", "t3", "t2"]
        assert len(await store.repairs(agent.key, limit=99)) == 4


async def an_import_is_all_or_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        good, bad = imported_turns(agent, 2)
        orphan = a_finished_turn(
            "o", agent.key, "no such turn", "sonnet", bad.turn.input, bad.turn.output, (), 2.0, None, 1
        )  # fmt: skip
        assert await raised(store.import_turns([good, bad, orphan])) is not None
        assert await gathered(store.turns(agent.key)) == []
        await store.import_turns([good, bad], head="i1")
        turn = await turn_of(store, "i1")
        assert (turn.status, turn.delivery, turn.origin) == ("completed", "delivered", "imported")
        found = await store.agent_by_key(agent.key)
        assert found is not None
        assert found.head == "i1"


async def what_somebody_else_had_is_adopted_whole_or_not_at_all(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        theirs = imported_turns(agent, 2)
        why = Link("s", "s", "i1", "adopted", {"turns": ["i0", "i1"]}, 3.0)
        elsewhere = replace(why, turn_id="no such turn")
        assert (
            await raised(store.adopt(a_lease(agent.key), theirs, a_session(agent, "s", "i1"), [elsewhere])) is not None
        )
        assert await gathered(store.turns(agent.key)) == []
        last = await store.adopt(a_lease(agent.key), theirs, a_session(agent, "s", "i1"), [why])
        chain = await store.chain(agent.key)
        assert chain is not None
        assert (last.id, chain.agent.head, chain.links) == ("i1", "i1", (why,))
        assert await store.session_at(agent.key, "i1") == a_session(agent, "s", "i1")


async def a_path_is_one_branch_of_the_tree(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for turn_id, parent in (("t1", None), ("t2", "t1"), ("t3", "t1"), ("t4", "t3")):
            await complete(store, agent, turn_id, parent)
        assert [turn.id for turn in await store.path("t4")] == ["t1", "t3", "t4"]
        assert [turn.id for turn in await store.path_texts("t4")] == ["t1", "t3", "t4"]
        assert isinstance(await raised(store.path_texts("t4", 10)), ContextTooLong)
        assert [record.line for record in await store.records("t4")] == [f'{{"r": "{n}"}}' for n in ("t1", "t3", "t4")]
        assert await store.children("t1") == [("t2", "completed"), ("t3", "completed")]
        assert await store.path("none") == []
        assert await store.records("none") == []


async def a_tree_tells_the_places_of_parents_and_of_repairs(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "other")
        await complete(store, other, "o1", session="s2")
        await complete(store, agent, "t1")
        await complete(store, agent, "t2", "t1", links=(Link("s", "s", "t2", "rebuilt", {}, 1.0),))
        await complete(store, agent, "t3", "t1", links=(Link("s", "b", "t3", "branched", {}, 2.0),))
        await complete(store, agent, "t4", "t3")
        assert await store.tree(agent.key) == Tree((0, 1, 1, 3), (2,))
        assert await store.tree(agent.key, after=2) == Tree((1, 3), ())
        assert await store.tree(agent.key, after=9) == Tree((), ())
        assert await store.places(agent.key, ["t4", "t1", "o1", "gone"]) == {"t1": 1, "t4": 4}


async def a_page_may_begin_at_a_place(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await store.import_turns(imported_turns(agent, 9), head="i8")
        page = await store.page(agent.key, before_seq=None, limit=3, newest=5)
        assert ([turn.id for turn in page.turns], page.newest, page.total) == (["i4", "i3", "i2"], 5, 9)
        newest = await store.page(agent.key, before_seq=None, limit=1, newest=99)
        assert newest.turns[0].id == "i8"


async def facts_are_the_newest_turns_of_one_owner(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        foreign = await an_agent(store, "b", "somebody")
        await complete(store, foreign, "f1", session="s2")
        first = await complete(store, agent, "t1")
        await complete(store, agent, "t2", "t1", links=(Link("s", "s", "t2", "rebuilt", {}, 1.0),))
        error = {"code": "overloaded", "message": "busy"}
        await accepted(store, a_turn(agent, "t3"))
        await store.fail("t3", "cancelled", error, [], {}, 9.0)
        found = await store.facts(agent.owner, since=0.0, limit=10)
        assert [(one.id, one.status, one.repairs, one.code) for one in found] == [
            ("t3", "cancelled", 0, "overloaded"), ("t2", "completed", 1, None), ("t1", "completed", 0, None),
        ]  # fmt: skip
        assert {one.owner for one in found} == {"local"}
        every = await store.facts(None, since=0.0, limit=10)
        assert [(one.id, one.owner) for one in every][1:] == [("t2", "local"), ("t1", "local"), ("f1", "somebody")]
        assert (found[-1].usage, found[-1].cost_usd, found[-1].agent_key) == (first.usage, first.cost_usd, agent.key)
        assert [one.id for one in await store.facts(agent.owner, since=0.0, limit=1)] == ["t3"]
        assert await store.facts(agent.owner, since=first.created_at + 1e9, limit=10) == []
