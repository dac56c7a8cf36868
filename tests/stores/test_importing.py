"""A large chain comes in piece by piece: nobody waits for it, and nobody sees a part of it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from cli_session_proxy.domain.models import Agent, Conversation, Item, Message, Record, Turn
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ChainPart, Expiry, NewChain, WholeTurn
from cli_session_proxy.stores.sql import importing
from cli_session_proxy.stores.sql.tables import COMING
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import a_turn, accepted

from ..conftest import CONFORMANCE, ROOT

SOON = 60
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


def held(reached: threading.Event, go_on: threading.Event) -> Iterator[ChainPart]:
    """The turns; those of the second piece wait."""
    for at, part in enumerate(turns()):
        if at == importing.PIECE_TURNS + 1:
            reached.set()
            assert go_on.wait(SOON)
        yield part


async def test_others_write_meanwhile_and_nobody_sees_a_part(path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    one, two = SqliteStore(path), SqliteStore(path)
    await one.open()
    await two.open()
    bringing = asyncio.create_task(one.import_chain(NEW, held(reached, go_on)))
    assert await asyncio.to_thread(reached.wait, SOON)
    assert coming(path) == 1
    for number, store in enumerate((one, two)):
        assert await store.agent("local", "a") is None
        first = await store.turn("turn_1")
        assert first is not None
        assert await store.agent_by_key(first.agent_key) is None
        assert [row async for row in store.summaries()] == []
        assert await store.expired_agents(Expiry(time.time() + 1)) == []
        other = await store.ensure_agent("local", f"b{number}", f"b{number}", named=True, now=time.time())
        await accepted(store, a_turn(other, f"turn_b{number}"))  # the import has not gone on: it holds no lock
        await store.delete_agent(other.key)
    go_on.set()
    agent = await bringing
    assert (agent.agent_id, agent.head, coming(path)) == ("a", NEW.head(), 0)
    assert await two.agent("local", "a") == agent
    assert [row.id async for row in two.turns(agent.key)] == [f"turn_{n}" for n in range(1, COUNT + 1)]
    await one.close()
    await two.close()


async def test_a_part_that_is_wrong_at_the_end_leaves_nothing(path: Path) -> None:
    store = SqliteStore(path)
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


# Brings in a chain and says so when the first piece is in the store; then it waits for ever.
PROGRAM = """
import asyncio, sys, threading
from tests.stores.test_importing import NEW, COUNT, importing, turns
from cli_session_proxy.stores.sqlite.store import SqliteStore

def parts():
    for at, part in enumerate(turns()):
        if at == importing.PIECE_TURNS + 1:
            print("here", flush=True)
            threading.Event().wait()
        yield part

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    await store.import_chain(NEW, parts())

asyncio.run(main())
"""


async def test_what_a_dead_import_left_is_cleared_away_and_what_a_living_one_has_is_not(path: Path) -> None:
    env = {"PYTHONPATH": str(CONFORMANCE)}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(path), stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=env
    )
    assert child.stdout is not None
    async with asyncio.timeout(SOON):
        assert await child.stdout.readline() == b"here\n"
    beside = SqliteStore(path)
    await beside.open()
    assert coming(path) == 1
    child.kill()
    await child.wait()
    store = SqliteStore(path)
    await store.open()
    assert (coming(path), await store.turn("turn_1")) == (0, None)
    await store.import_chain(NEW, turns())  # the same turns once more: nothing of the first try is in the way
    assert (coming(path), sorted(path.parent.glob("*import*"))) == (0, [])
    await beside.close()
    await store.close()


async def test_an_import_that_is_cancelled_leaves_nothing(path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    store = SqliteStore(path)
    await store.open()
    bringing = asyncio.create_task(store.import_chain(NEW, held(reached, go_on)))
    assert await asyncio.to_thread(reached.wait, SOON)
    bringing.cancel()
    await asyncio.sleep(0)
    bringing.cancel()  # once more, while it clears away
    with pytest.raises(asyncio.CancelledError):
        await bringing
    assert (coming(path), sorted(path.parent.glob("*import*"))) == (0, [])
    go_on.set()
    await store.close()


async def test_a_cancel_in_the_last_step_comes_too_late(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    finish = importing.ChainImport.finish

    def slow(self: importing.ChainImport, conn: Connection, new: NewChain) -> Agent:
        agent = finish(self, conn, new)
        reached.set()
        assert go_on.wait(SOON)
        return agent

    monkeypatch.setattr(importing.ChainImport, "finish", slow)
    store = SqliteStore(path)
    await store.open()
    empty = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    await store.add_items(empty.key, [Item("msg_1", {"id": "msg_1"})])
    bringing = asyncio.create_task(store.import_chain(NEW, turns()))
    assert await asyncio.to_thread(reached.wait, SOON)
    bringing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    agent = await bringing
    assert await store.agent("local", "a") == agent
    assert [item.id for item in await store.items(agent.key)] == ["msg_1"]
    await store.close()


async def test_of_two_imports_of_one_agent_the_first_to_end_is_it(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()

    def renamed() -> Iterator[ChainPart]:
        for part in turns():
            assert isinstance(part, WholeTurn)
            parent = part.turn.parent_id and f"x{part.turn.parent_id}"
            yield replace(part, turn=replace(part.turn, id=f"x{part.turn.id}", parent_id=parent))

    other = replace(NEW, head=lambda: f"xturn_{COUNT}")
    results = await asyncio.gather(
        store.import_chain(NEW, turns()), store.import_chain(other, renamed()), return_exceptions=True
    )
    (won,) = [result for result in results if not isinstance(result, BaseException)]
    (lost,) = [result for result in results if isinstance(result, BaseException)]
    assert isinstance(lost, InvalidRequest)
    assert "has turns already" in lost.message
    assert len([turn async for turn in store.turns(won.key)]) == COUNT
    assert (coming(path), await store.agent("local", "a")) == (0, won)
    await store.close()


async def test_what_was_written_by_hand_for_an_agent_without_turns_stays(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    empty = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
    await store.annotate(empty.key, {"topic": "x"})
    await store.add_items(empty.key, [Item("msg_1", {"id": "msg_1"})])
    agent = await store.import_chain(NEW, [*turns(), Item("msg_2", {"id": "msg_2"}, "turn_1")])
    assert await store.conversation(agent.key) == Conversation({"topic": "x"})
    assert {item.id: item.turn_id for item in await store.items(agent.key)} == {"msg_1": None, "msg_2": "turn_1"}
    await store.close()
