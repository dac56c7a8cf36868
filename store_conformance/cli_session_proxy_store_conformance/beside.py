"""What stateful wires keep beside the chain, and chains that come from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cli_session_proxy.domain.models import (
    Conversation,
    Item,
    Link,
    Message,
    Placed,
    Record,
    Session,
    Turn,
    TurnOptions,
)
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.stores.base import ChainPart, NewChain, PathChanged, WholeTurn

from .samples import StoreFactory, a_begin, a_commit, a_turn, accepted, an_agent, gathered, opened, raised, turn_of


async def items_are_off_the_path_unless_the_latest_turn_that_began_with_them_is_on_it(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        items = [Item("i1", {"id": "i1"}), Item("i2", {"id": "i2"}), Item("i3", {"id": "i3"})]
        await store.add_items(agent.key, items)
        assert await store.items_off(agent.key, None) == items
        assert await store.items(other.key) == []
        turn = await accepted(store, a_turn(agent, "t1", call={"store": True}))
        said: dict[str, Any] = {
            "input": (Message.user("more"),), "placed": Placed("head", messages=2), "call": {"b": 2},
            "options": TurnOptions(metadata={"a": 1}),
        }  # fmt: skip
        begun = a_begin(replace(turn, system="s"), takes=(("i1", "t1"),), **said)
        await store.begin(**begun)
        now = await turn_of(store, "t1")
        assert now.system == "s"
        assert {name: getattr(now, name) for name in said} == said
        assert [item.turn_id for item in await store.items(agent.key)] == ["t1", None, None]
        assert [item.id for item in await store.items_off(agent.key, None)] == ["i1", "i2", "i3"]
        assert [item.id for item in await store.items_off(agent.key, "t1")] == ["i2", "i3"]
        await store.commit(**a_commit(turn, agent))
        second = await accepted(store, a_turn(agent, "t2", "t1"))
        gone = a_begin(second, takes=(("i2", "t2"), ("i9", "t2")), **said)
        assert isinstance(await raised(store.begin(**gone)), PathChanged)
        assert (await turn_of(store, "t2")).status == "queued"
        await store.begin(**a_begin(second, takes=(("i2", "t2"),), **said))
        assert [item.id for item in await store.items_off(agent.key, "t2")] == ["i3"]
        assert [item.id for item in await store.items_off(agent.key, "t1")] == ["i2", "i3"]
        await store.delete_agent(agent.key)
        assert await store.items(agent.key) == []


async def items_are_taken_out_by_several_at_once_and_notes_are_apart_from_that(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as second:
        agent, other = await an_agent(store), await an_agent(store, "b")
        await store.add_items(agent.key, [Item("i1", {"id": "i1"}), Item("i2", {"id": "i2"})])
        turn = await accepted(store, a_turn(agent, "t1"))
        await store.begin(**a_begin(turn, takes=(("i1", "t1"),)))
        ids = [f'm{number} "\\é' for number in range(8)]
        both = (store, second)
        await asyncio.gather(*(both[at % 2].take_out(agent.key, item_id) for at, item_id in enumerate([*ids, "i1"])))
        await asyncio.gather(*(both[at % 2].annotate(agent.key, {"n": at}) for at in range(4)))
        await second.annotate(agent.key, {"a": "b"})
        await store.take_out(other.key, "i2")
        assert [item.id for item in await store.items(agent.key)] == ["i1", "i2"]
        await store.take_out(agent.key, "i2")
        assert [item.id for item in await store.items(agent.key)] == ["i1"]
        found = await second.conversation(agent.key)
        assert found is not None
        assert (found.metadata, sorted(found.removed)) == ({"a": "b"}, sorted([*ids, "i1"]))


async def a_chain_from_elsewhere_comes_whole_or_not_at_all(factory: StoreFactory) -> None:
    session_id = "00000000-0000-4000-8000-000000000001"
    new = NewChain("local", "a", "a", True, 1.0, 2.0, lambda: "t9")

    def parts(tip: str) -> Iterator[ChainPart]:
        for number in range(10):
            parent = f"t{number - 1}" if number else None
            said = (Message.user(str(number)),)
            turn = Turn(f"t{number}", 0, 0, parent, "completed", "sonnet", said, 1.0, frame_uuid=f"f{number}")
            yield WholeTurn(turn, (Record(f'{{"n": {number}}}'),))
        yield Session(session_id, 0, tip, "", "2.1.0", 1.0)
        yield Link(None, session_id, "t0", "started", {}, 1.0)
        yield Conversation({"a": "b"})
        yield Item("i1", {"id": "i1"}, "t0")

    async with opened(factory) as store, opened(factory) as other:
        waiting = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
        await store.add_items(waiting.key, [Item("i2", {"id": "i2"})])
        assert isinstance(await raised(store.import_chain(new, parts("nobody"))), InvalidRequest)
        assert await other.turn("t0") is None
        agent = await store.import_chain(new, parts("t9"))
        assert await other.agent("local", "a") == agent
        assert [turn.id for turn in await other.path("t9")] == [f"t{number}" for number in range(10)]
        assert len(await other.records("t9")) == 10
        assert await other.own_frames(agent.key, ["f0", "x"]) == {"f0"}
        assert {item.id for item in await other.items(agent.key)} == {"i1", "i2"}
        assert await other.conversation(agent.key) == Conversation({"a": "b"})
        assert [one.agent.key for one in await gathered(other.summaries())] == [agent.key]
        assert isinstance(await raised(other.import_chain(new, parts("t9"))), InvalidRequest)
