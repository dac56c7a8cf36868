"""What the store keeps for stateful wires: calls, conversations and items; and the way there from version 1."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cli_session_proxy.domain.models import Conversation, Item, Message
from cli_session_proxy.stores.base import NewTurn
from cli_session_proxy.stores.sqlite.store import SqliteStore


def new_turn(turn_id: str, agent_key: int, *takes: str) -> NewTurn:
    said = (Message.user("hi"),)
    return NewTurn(turn_id, agent_key, "sonnet", said, 1.0, call={"store": True}, takes=takes)


async def test_items_belong_to_the_turn_that_took_them_and_come_back_when_it_fails(tmp_path: Path) -> None:
    await (store := SqliteStore(tmp_path / "s.sqlite3")).open()
    agent = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    other = await store.ensure_agent("local", "b", "b", named=True, now=1.0)
    items = [Item("i1", {"id": "i1"}), Item("i2", {"id": "i2"})]
    await store.add_items(agent.key, items)
    assert await store.items(agent.key, pending=True) == items
    assert await store.items(other.key) == []
    turn = await store.accept(new_turn("t1", agent.key, "i1"))
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
    await store.close()


async def test_a_file_of_version_1_gets_the_column_and_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    await (store := SqliteStore(path)).open()
    agent = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    await store.accept(new_turn("t1", agent.key))
    await store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        for statement in (
            "DROP TABLE items", "DROP TABLE conversations", 'ALTER TABLE turns DROP COLUMN "call"',
            "UPDATE meta SET value = '1' WHERE name = 'schema_version'",
        ):  # fmt: skip
            old.execute(statement)
    await (store := SqliteStore(path)).open()
    turn = await store.turn("t1")
    assert turn is not None
    assert turn.call is None
    await store.set_call("t1", {"store": False})
    await store.add_items(agent.key, [Item("i1", {"id": "i1"})])
    await store.close()
