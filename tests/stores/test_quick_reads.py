"""What every turn reads is read on the event loop while it is small, and never holds the loop up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import Connection, Row

from cli_session_proxy.domain.models import Block, Turn
from cli_session_proxy.stores.sql import rows
from cli_session_proxy.stores.sql.store import LARGE
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy.testing.store_samples import IMAGE, a_turn, an_agent, complete, opened

PICTURE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}


def text(size: int) -> Block:
    return {"type": "text", "text": "x" * size}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with opened(lambda: SqliteStore(tmp_path / "chains.sqlite3")) as store:
        assert isinstance(store, SqliteStore)
        yield store


@pytest.mark.parametrize(
    ("output", "on_the_loop"),
    [((text(100),), True), ((text(LARGE - 5000),), True), ((text(LARGE),), False), ((PICTURE,), False)],
    ids=["short", "long", "too long", "a picture"],
)
async def test_a_large_turn_is_read_beside_the_loop(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, output: tuple[Block, ...], on_the_loop: bool
) -> None:
    agent = await an_agent(store)
    done = await complete(store, agent, "t1", output=output)
    await store.accept(a_turn(agent, "t2", "t1", fingerprint="f"))
    seen: list[bool] = []
    load = rows.loaded_turns

    def loaded(conn: Connection, found: Sequence[Row[tuple[object, ...]]]) -> list[Turn]:
        seen.append(threading.current_thread() is threading.main_thread())
        return load(conn, found)

    monkeypatch.setattr(rows, "loaded_turns", loaded)
    standing = await store.standing(agent.key, "t1", at_head=False)
    assert standing is not None
    assert standing.parent == done
    assert seen == [on_the_loop]
    arrived = await store.arrival("local", "", "a")  # the fingerprint of "t1"
    assert arrived.latest == done
    assert seen == [on_the_loop] * 2
