"""What stateful wires keep beside the chain, and chains that come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from ...domain.models import Conversation, Item, Link, Message, Record, Session, Turn
from ...errors import InvalidRequest
from ...stores.base import ChainPart, NewChain, NewTurn, WholeTurn
from ..store_samples import StoreFactory, gathered, opened, raised


async def items_belong_to_the_turn_that_took_them_and_come_back_when_it_fails(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
        other = await store.ensure_agent("local", "b", "b", named=True, now=1.0)
        items = [Item("i1", {"id": "i1"}), Item("i2", {"id": "i2"})]
        await store.add_items(agent.key, items)
        assert await store.items(agent.key, pending=True) == items
        assert await store.items(other.key) == []
        said = (Message.user("hi"),)
        new = NewTurn("t1", agent.key, "sonnet", said, 1.0, call={"store": True}, takes=("i1",))
        turn = await store.accept(new)
        assert turn.call == {"store": True}
        assert [item.id for item in await store.items(agent.key, pending=True)] == ["i2"]
        assert [item.turn_id for item in await store.items(agent.key)] == ["t1", None]
        await store.fail("t1", "failed", {}, [], {}, 2.0)
        assert await store.items(agent.key, pending=True) == items
        assert not await store.remove_item(other.key, "i1")
        assert await store.remove_item(agent.key, "i1")
        await store.set_call("t1", {"deleted": True})
        found = await store.turn("t1")
        assert found is not None
        assert found.call == {"deleted": True}
        await store.save_conversation(agent.key, Conversation({"a": "b"}))
        await store.save_conversation(agent.key, Conversation({"c": "d"}, ("i9",)))
        assert await store.conversation(agent.key) == Conversation({"c": "d"}, ("i9",))
        assert await store.conversation(other.key) is None
        await store.delete_agent(agent.key)
        assert await store.items(agent.key) == []


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
