"""A large chain comes in piece by piece: nobody waits for it, and nobody sees a part of it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.models import Conversation, Item, Message, Record, Turn
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores import importing
from cli_session_proxy.stores.base import ChainPart, NewChain, NewTurn, WholeTurn
from cli_session_proxy.stores.sql import FILE, SqlStore
from cli_session_proxy.stores.tables import COMING

SOON = 30
COUNT = 2 * importing.PIECE_TURNS + 5
NEW = NewChain("local", "a", "a", True, 1.0, 2.0, lambda: f"turn_{COUNT}")


def turns(count: int = COUNT) -> Iterator[ChainPart]:
    for number in range(1, count + 1):
        parent = f"turn_{number - 1}" if number > 1 else None
        turn = Turn(f"turn_{number}", 0, 0, parent, "completed", "sonnet", (Message.user("hello"),), 1.0)
        yield WholeTurn(turn, (Record("{}"),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_private(Settings(var=tmp_path / "var").var)
    return tmp_path / "var" / FILE


def coming(path: Path) -> int:
    with sqlite3.connect(path) as conn:
        found: int = conn.execute("SELECT count(*) FROM agents WHERE owner = ?", (COMING,)).fetchone()[0]
    conn.close()
    return found


async def test_others_write_meanwhile_and_nobody_sees_a_part(path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def parts() -> Iterator[ChainPart]:
        for at, part in enumerate(turns()):
            if at == importing.PIECE_TURNS + 1:
                reached.set()
                assert go_on.wait(SOON)
            yield part

    one, two = SqlStore(path), SqlStore(path)
    await one.open()
    await two.open()
    bringing = asyncio.create_task(one.import_chain(NEW, parts()))
    assert await asyncio.to_thread(reached.wait, SOON)
    assert coming(path) == 1
    for number, store in enumerate((one, two)):
        assert await store.agent("local", "a") is None
        assert [row async for row in store.summaries()] == []
        assert await store.expired_agents(time.time() + 1) == []
        other = await store.ensure_agent("local", f"b{number}", f"b{number}", named=True, now=time.time())
        began = time.monotonic()
        await store.accept(NewTurn(f"turn_b{number}", other.key, "sonnet", (Message.user("hello"),), 1.0))
        assert time.monotonic() - began < 1.0
        await store.delete_agent(other.key)
    go_on.set()
    agent = await bringing
    assert (agent.agent_id, agent.head, coming(path)) == ("a", NEW.head(), 0)
    assert await two.agent("local", "a") == agent
    assert [row.id async for row in two.turns(agent.key)] == [f"turn_{n}" for n in range(1, COUNT + 1)]
    await one.close()
    await two.close()


async def test_a_part_that_is_wrong_at_the_end_leaves_nothing(path: Path) -> None:
    store = SqlStore(path)
    await store.open()
    with pytest.raises(InvalidRequest, match="names turn turn_of_nobody"):
        await store.import_chain(NEW, [*turns(), Item("msg_1", {}, "turn_of_nobody")])
    assert (coming(path), await store.turn("turn_1")) == (0, None)
    with pytest.raises(InvalidRequest, match="its head"):
        await store.import_chain(NEW, turns(COUNT - 1))
    assert (coming(path), await store.turn("turn_1")) == (0, None)
    await store.import_chain(NEW, turns())
    with pytest.raises(InvalidRequest, match="has turns already"):
        await store.import_chain(NEW, turns())
    await store.close()


async def test_what_a_dead_import_left_is_cleared_away_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore(path)
    await store.open()
    left = importing.Coming(await store._db.write(lambda conn: importing.begin(conn, NEW)))
    await store._db.write(lambda conn: left.take(conn, list(turns(3))), alone=True)
    assert coming(path) == 1
    monkeypatch.setattr(importing, "ABANDONED", -1.0)
    await store.import_chain(NEW, turns())
    assert coming(path) == 0
    await store.close()


async def test_what_was_written_by_hand_for_an_agent_without_turns_stays(path: Path) -> None:
    store = SqlStore(path)
    await store.open()
    empty = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    await store.save_conversation(empty.key, Conversation({"topic": "x"}))
    await store.add_items(empty.key, [Item("msg_1", {"id": "msg_1"})])
    agent = await store.import_chain(NEW, [*turns(), Item("msg_2", {"id": "msg_2"}, "turn_1")])
    assert await store.conversation(agent.key) == Conversation({"topic": "x"})
    assert {item.id: item.turn_id for item in await store.items(agent.key)} == {"msg_1": None, "msg_2": "turn_1"}
    await store.close()
