"""What the store keeps for stateful wires: the way there from version 1."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Item
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.stores.sql import side_data
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_turn, accepted, an_agent, opened


async def test_a_file_of_version_1_gets_the_column_and_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    await (store := SqliteStore(path)).open()
    agent = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    await accepted(store, a_turn(agent, "t1", call={"store": True}))
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
    await store.add_to_call("t1", {"store": False})
    await store.add_items(agent.key, [Item("i1", {"id": "i1"})])
    await store.close()


async def test_what_a_client_writes_into_a_conversation_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is read when one item is looked for: a client filled the memory."""
    monkeypatch.setattr(side_data, "MOST_WRITTEN", 1000)
    async with opened(lambda: SqliteStore(tmp_path / "s.sqlite3")) as store:
        agent, other = await an_agent(store), await an_agent(store, "other")
        await store.add_items(agent.key, [Item("i1", {"text": "x" * 900})])
        with pytest.raises(InvalidRequest, match="begin another"):
            await store.add_items(agent.key, [Item("i2", {"text": "x" * 100})])
        await store.add_items(other.key, [Item("i2", {"text": "x" * 100})])
        assert [item.id for item in await store.items(agent.key)] == ["i1"]
