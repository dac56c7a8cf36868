"""Lists of 100,000 one-shots. What a database has to do is counted in its own instructions, not in seconds."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from cli_session_proxy.stores.base import Expiry
from cli_session_proxy.stores.sql import reading
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    a_begin,
    a_commit,
    a_turn,
    accepted,
    an_agent,
    gathered,
    imported_turns,
    opened,
)

MANY = 100_000
# Instructions between two counts.
STEP = 1000
# At most so many for each agent: one look at its row, and at its turn.
EACH = 100

Steps = Callable[[], int]


@pytest.fixture
def steps() -> Iterator[Steps]:
    """How many instructions SQLite has run since it was asked last."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += STEP

    def connected(conn: Any, _: object) -> None:
        conn.set_progress_handler(count, STEP)

    event.listen(Engine, "connect", connected)

    def since() -> int:
        nonlocal counted
        counted, found = 0, counted
        return found

    yield since
    event.remove(Engine, "connect", connected)


@pytest.fixture
async def store(tmp_path: Path, steps: Steps) -> AsyncIterator[SqliteStore]:
    path = tmp_path / "chains.sqlite3"
    async with opened(lambda: SqliteStore(path)) as store:
        for name in ("shot", "ada"):
            agent = await an_agent(store, name, named=name == "ada")
            turn = await accepted(store, a_turn(agent, f"{name}1", call={"wire": "responses", "store": False}))
            await store.begin(**a_begin(turn))
            await store.commit(**a_commit(turn, agent, name))
    with closing(sqlite3.connect(path)) as conn, conn:
        repeat(conn, "agents", "agent_id = 'shot'", key="n + 9", agent_id="'auto_' || n", dir="'d' || n", last_at="n")
        repeat(conn, "turns", "id = 'shot1'", seq="n + 9", id="'t' || n", agent_key="n + 9", path_hash="'h' || n")
    async with opened(lambda: SqliteStore(path)) as filled:
        assert isinstance(filled, SqliteStore)
        steps()
        yield filled


def repeat(conn: sqlite3.Connection, table: str, row: str, **columns: str) -> None:
    """Copies of the row, numbered `n` from 1, until there are `MANY`; `columns` are different in each."""
    names = [column[1] for column in conn.execute(f"PRAGMA table_info({table})")]
    conn.execute(
        f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {MANY - 1}) "
        f"INSERT INTO {table} ({', '.join(names)}) "
        f"SELECT {', '.join(columns.get(name, name) for name in names)} FROM {table}, numbers WHERE {row}"
    )


async def test_a_list_that_folds_them_passes_each_once(store: SqliteStore, steps: Steps) -> None:
    (row,) = await gathered(store.summaries(since=float(MANY)))
    assert row.agent.agent_id == "ada"
    assert 0 < steps() < EACH * MANY


async def test_a_list_of_each_reads_no_row_twice(store: SqliteStore, steps: Steps) -> None:
    assert len(await gathered(store.summaries())) == MANY + 1
    assert 0 < steps() < EACH * MANY


async def test_they_are_counted_and_chosen_in_one_pass(store: SqliteStore, steps: Steps) -> None:
    number, cost = await store.one_shots(None, since=0.0, until=float(MANY))
    assert (number, cost) == (MANY, 0.25 * MANY)
    assert 0 < steps() < EACH * MANY
    assert len(await store.expired_agents(Expiry(one_shots=100.0))) == 100
    assert 0 < steps() < EACH * MANY
    assert await store.expired_agents(Expiry(once=1e10)) == []
    assert 0 < steps() < EACH * MANY


async def test_turns_that_are_large_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a hundred turns of 60 MB was in memory at once."""
    monkeypatch.setattr(reading, "PAGE_BYTES", 3000)
    async with opened(lambda: SqliteStore(tmp_path / "chains.sqlite3")) as store:
        assert isinstance(store, SqliteStore)
        agent = await an_agent(store)
        large = [replace(one, turn=replace(one.turn, system="x" * 1200)) for one in imported_turns(agent, 5)]
        await store.import_turns(large)
        page, following = await store._db.read(partial(reading.page_of_agent, agent_key=agent.key, after_seq=0))
        assert ([one.id for one in page], following) == (["i0", "i1"], page[-1].seq)
        outlines, _ = await store._db.read(partial(reading.page_of_outlines, agent_key=agent.key, after_seq=0))
        assert len(outlines) == 2
        for stream in (store.turns(agent.key), store.outlines(agent.key)):
            assert [one.id async for one in stream] == [f"i{n}" for n in range(5)]
        shown = await store.page(agent.key, before_seq=None, limit=9, most_bytes=3000)
        assert ([one.id for one in shown.turns], shown.newest) == (["i4", "i3"], 5)
        assert len((await store.page(agent.key, before_seq=None, limit=9, most_bytes=1)).turns) == 1
        assert len((await store.page(agent.key, before_seq=None, limit=9)).turns) == 5
