"""What a request finds: by history, by its like, by what is open."""

from __future__ import annotations

from cli_session_proxy.stores.base import AgentState

from .samples import StoreFactory, a_begin, a_lease, a_turn, accepted, an_agent, complete, gathered, opened, turn_of


async def history_finds_only_what_it_may(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        named, anonymous = await an_agent(store, "n"), await an_agent(store, "h", named=False)
        await complete(store, named, "t1", path_hash="h")
        await complete(store, anonymous, "t2", session="s2", path_hash="h")
        await accepted(store, a_turn(anonymous, "t3"))
        found = [await store.deepest("local", ["h"]), await store.deepest("local", ["h"], named.key)]
        assert [turn.id for turn in found if turn is not None] == ["t2", "t1"]
        assert await store.deepest("local", []) is None


async def the_deepest_known_hash_decides(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        for owner in ("me", "them"):
            agent = await an_agent(store, "a", owner, named=False)
            for depth in range(40):
                turn_id, parent = f"{owner}{depth}", f"{owner}{depth - 1}" if depth else None
                await complete(store, agent, turn_id, parent, session=f"{owner}s", path_hash=f"{owner[0]}{depth}")
        known = [f"m{depth}" for depth in range(40)]
        for depth in (1, 2, 3, 17, 39, 40):
            foreign = [f"x{n}" for n in range(7)]
            for path in (known[:depth], [*known[:depth], *foreign]):
                found = await store.deepest("me", path)
                assert found is not None
                assert found.id == f"me{depth - 1}"
        assert await store.deepest("me", []) is None
        assert await store.deepest("me", ["x1", "x2"]) is None
        assert await store.deepest("them", known) is None


async def of_turns_on_one_path_a_head_wins_then_the_newest_that_arrived(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store, "a", named=False), await an_agent(store, "b", named=False)
        for number in range(1, 3):
            await complete(store, agent, f"t{number}", session=f"s{number}", path_hash="h", move_head=False)
        await complete(store, other, "lost", session="s9", path_hash="h", move_head=False)
        await store.set_delivery("lost", "undelivered")

        async def found() -> str | None:
            turn = await store.deepest("local", ["h"])
            return turn.id if turn else None

        assert await found() == "t2"
        await complete(store, agent, "t3", session="s3", path_hash="h")
        await complete(store, agent, "t4", session="s4", path_hash="h", move_head=False)
        assert await found() == "t3"


async def a_fingerprint_finds_the_latest(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for turn_id in ("t1", "t2", "t3"):
            await accepted(store, a_turn(agent, turn_id, fingerprint="other" if turn_id == "t3" else "f"))
        await store.fail("t2", "failed", {}, (), {}, 20.0, lease=a_lease(agent.key))
        found = (await store.arrival("local", "f", None))[0]
        assert found is not None
        assert found.id == "t2"


async def what_is_open_is_listed(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        running = await accepted(store, a_turn(agent, "t2"))
        await store.begin(**a_begin(running))
        await accepted(store, a_turn(agent, "t3"))
        assert [turn.id for turn in await gathered(store.unfinished())] == ["t2", "t3"]
        await store.fail((await accepted(store, a_turn(agent, "t4"))).id, "failed", {}, (), {}, 20.0)
        assert [turn.id for turn in await store.pending_deliveries()] == ["t1"]
        assert [turn.id for turn in await store.pending_deliveries(agent.key)] == ["t1"]
        assert await store.pending_deliveries(agent.key + 1) == []
        await store.set_delivery(done.id, "delivered")
        assert await store.pending_deliveries() == []
        assert (await turn_of(store, "t1")).delivery == "delivered"


async def one_read_tells_what_a_request_meets(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        assert await store.arrival("local", "f", "a") == (None, None)
        agent = await an_agent(store, "a")
        first = await accepted(store, a_turn(agent, "t1", fingerprint="f"))
        latest = await accepted(store, a_turn(agent, "t2", fingerprint="f"))
        assert latest.seq > first.seq
        assert await store.arrival("local", "f", "a") == (latest, agent)
        assert await store.arrival("local", "f", None) == (latest, None)
        assert await store.arrival("another", "f", "a") == (None, None)


async def one_read_tells_where_an_agent_stands(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store, "a")
        assert await store.agent_state(agent.key, None, at_head=True) == AgentState(agent, None, None)
        first = await complete(store, agent, "t1")
        second = await complete(store, agent, "t2", parent="t1")
        at_head = await store.agent_state(agent.key, "t1", at_head=True)
        assert at_head is not None
        assert at_head == AgentState(at_head.agent, second, await store.session_at(agent.key, second.id))
        assert at_head.agent == await store.agent_by_key(agent.key)
        assert at_head.session is not None
        behind = await store.agent_state(agent.key, "t1", at_head=False)
        assert behind is not None
        assert behind.parent == first
        fresh = await store.agent_state(agent.key, None, at_head=False)
        assert fresh is not None
        assert (fresh.parent, fresh.session) == (None, None)
        assert await store.agent_state(agent.key + 1, "t1", at_head=True) is None
