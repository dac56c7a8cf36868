"""What can go wrong beneath a store, and what is left then."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url

from cli_session_proxy.domain.models import Link, Record
from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sql.tables import metadata
from cli_session_proxy.stores.sqlite.file import driver_of
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    a_begin,
    a_commit,
    a_turn,
    accepted,
    an_agent,
    complete,
    gathered,
    opened,
    turn_of,
)

from ..conftest import CONFORMANCE, ROOT
from ..until import PATIENCE

FOREIGN = b"something else entirely" * 100

SHORT = 0.2  # seconds that a test waits for a lock it holds itself


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chains.sqlite3"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with opened(lambda: SqliteStore(path, busy_timeout=SHORT)) as store:
        assert isinstance(store, SqliteStore)
        store.database.busy_timeout = PATIENCE  # SQLite alone waits so briefly: no write that a loaded machine holds up
        yield store


def run(path: Path, statement: str) -> list[tuple[object, ...]]:
    """One statement by another program."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        return other.execute(statement).fetchall()


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, at: int, data: bytes) -> None:
    path.touch()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("table", ["records", "sessions", "links", "image_refs"])
async def test_a_commit_that_breaks_at_any_table_leaves_nothing(store: SqliteStore, path: Path, table: str) -> None:
    agent = await an_agent(store)
    turn = await accepted(store, a_turn(agent, "t1"))
    await store.begin(**a_begin(turn))
    before = await turn_of(store, "t1")
    record = Record('{"data":"' + "A" * 64 + '"}')
    done = a_commit(turn, agent, records=(record,), links=(Link(None, "s1", "t1", "started", {}, 1.0),))
    run(path, f"CREATE TRIGGER broken BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'broken'); END")
    with pytest.raises(StoreUnavailable, match="broken"):
        await store.commit(**done)
    assert await turn_of(store, "t1") == before
    tables = ("records", "sessions", "links", "images", "image_refs")
    assert {name: run(path, f"SELECT count(*) FROM {name}") for name in tables} == {name: [(0,)] for name in tables}
    run(path, "DROP TRIGGER broken")
    assert (await store.commit(**done)).status == "completed"


async def test_a_lock_held_by_another_program_is_waited_for_then_named(store: SqliteStore, path: Path) -> None:
    agent = await an_agent(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            *(accepted(store, a_turn(agent, f"t{n}")) for n in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [StoreUnavailable] * 3
        assert "locked by" in str(results[0])
        assert await gathered(store.turns(agent.key)) == []  # reads go on meanwhile
        other.execute("ROLLBACK")
    assert (await accepted(store, a_turn(agent, "t1"))).status == "queued"


async def test_a_write_waits_for_a_lock_that_is_given_back(path: Path) -> None:
    async with opened(lambda: SqliteStore(path)) as store:
        agent = await an_agent(store)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(accepted(store, a_turn(agent, "t1")))
            assert await store.agent_by_key(agent.key) == agent
            assert not waiting.done()
            other.execute("ROLLBACK")
        assert (await waiting).id == "t1"


async def test_a_cancelled_caller_leaves_a_store_that_works(path: Path) -> None:
    async with opened(lambda: SqliteStore(path)) as store:
        agent = await an_agent(store)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            calls = [asyncio.create_task(accepted(store, a_turn(agent, f"t{n}"))) for n in range(3)]
            assert await store.agent_by_key(agent.key) == agent  # by now the first one is on its thread
            for call in calls:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            other.execute("ROLLBACK")
        await accepted(store, a_turn(agent, "after"))
        turns = await gathered(store.turns(agent.key))
        assert turns[-1].id == "after"
        assert len({turn.seq for turn in turns}) == len(turns)


ONE_LARGE_TURN = """
import asyncio, os, sys
from pathlib import Path
from cli_session_proxy.domain.models import Message
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_begin, a_commit, a_turn, accepted, an_agent, opened

async def main():
    async with opened(lambda: SqliteStore(Path(sys.argv[1]))) as store:
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1", input=(Message.user("x" * 100_000),)))
        await store.begin(**a_begin(turn))
        print((await store.commit(**a_commit(turn, agent))).status)
        if sys.argv[2:]:
            print(await store.delete_agent(agent.key))

asyncio.run(main())
"""


@pytest.mark.parametrize("then", [[], ["delete"]], ids=["a turn", "a deletion"])
@pytest.mark.sample(1)
async def test_a_turn_is_journaled_in_memory_and_a_deletion_in_the_folder_for_temporary_files(
    path: Path, tmp_path: Path, then: list[str]
) -> None:
    """Anybody may have filled that one. Then turns of more than 60 KB failed, and the store's own disk was blamed. But
    an agent may be larger than the memory: one of 193 MB took 190 MB. SQLite reads the folder's name once in a
    process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    os.utime(folder, (1, 1))
    env = {"SQLITE_TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, CONFORMANCE)))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ONE_LARGE_TURN, str(path), *then, env=env, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert said.split() == [b"completed"] + [b"True" for _ in then]
    assert (os.stat(folder).st_mtime == 1) == (not then)  # no file was ever made there


async def test_a_full_disk_is_named_and_loses_nothing(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    agent = await an_agent(store)
    done = await complete(store, agent, "t1")

    def no_more_pages(conn: Connection) -> int:
        (pages,) = conn.exec_driver_sql("PRAGMA page_count").one()
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        return threading.get_ident()

    def pages_again(conn: Connection) -> int:
        conn.exec_driver_sql("PRAGMA max_page_count=1000000")
        return threading.get_ident()

    async def on_both_connections(work: Callable[[Connection], int]) -> None:
        await store.database.write(work, Urgency.JOURNAL)
        # a quick write goes to the thread as well while that one waits for the disk
        while await store.database.write(work, Urgency.JOURNAL, quick=True) != threading.get_ident():
            pass

    # one that is written on the writer's thread, and one small enough for the event loop
    for size in (100_000, 20_000):
        await on_both_connections(no_more_pages)
        with pytest.raises(StoreUnavailable, match=r"full.*free space"):
            await accepted(store, a_turn(agent, "t2", system="x" * size))
        assert await turn_of(store, "t1") == done
        assert await store.turn("t2") is None
        await on_both_connections(pages_again)
    await complete(store, agent, "t2", "t1")
    await store.close()


async def test_a_read_only_store_is_named(store: SqliteStore, path: Path) -> None:
    agent = await an_agent(store)
    read_only = SqliteStore(path)
    read_only.database.url = make_url(f"sqlite+pysqlite:///file:{path}?mode=ro&uri=true")
    with pytest.raises(StoreUnavailable, match=r"readonly.*writable"):
        await read_only.open()
    assert await store.agent_by_key(agent.key) == agent


async def test_a_file_that_is_not_a_database_is_left_alone(path: Path) -> None:
    write(path, 0, FOREIGN)
    with pytest.raises(StoreUnavailable, match="not a SQLite file"):
        await SqliteStore(path).open()
    assert read(path) == FOREIGN


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="create its directory"):
        await SqliteStore(tmp_path / "none" / "chains.sqlite3").open()


async def test_a_damaged_file_is_named(path: Path) -> None:
    async with opened(lambda: SqliteStore(path)) as store:
        await an_agent(store)
    write(path, 4096, b"\xff" * (len(read(path)) - 4096))
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match=r"malformed|not a database"):
        await store.open()
    await store.close()


async def test_an_error_never_shows_what_was_said(store: SqliteStore, path: Path) -> None:
    agent = await an_agent(store)
    run(path, "CREATE TRIGGER broken BEFORE INSERT ON turns BEGIN SELECT RAISE(ABORT, 'broken'); END")
    prompt = "-".join(("kept", "to", "ourselves"))
    with pytest.raises(StoreUnavailable) as raised:
        await accepted(store, a_turn(agent, "t1", system=prompt))
    assert "\n" not in str(raised.value)
    assert prompt not in "".join(traceback.format_exception(raised.value))


async def test_half_a_surrogate_pair_in_a_name_is_the_clients_error(store: SqliteStore) -> None:
    with pytest.raises(InvalidRequest):
        await store.agent("local", "\ud800")


async def test_a_closed_store_says_so_and_closing_twice_is_silent(path: Path) -> None:
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.turn("t1")
    await store.open()
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.turn("t1")


async def test_two_stores_open_a_new_file_at_once(path: Path) -> None:
    stores = [SqliteStore(path) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    agents = await asyncio.gather(*(an_agent(store) for store in stores))
    assert len(set(agents)) == 1
    await asyncio.gather(*(store.close() for store in stores))


def test_the_store_of_the_settings_is_one_file_under_var(tmp_path: Path) -> None:
    store = store_for(Settings(var=tmp_path))
    assert isinstance(store, SqliteStore)
    assert store.database.path == tmp_path / "chains.sqlite3"


async def test_an_acknowledged_write_is_on_the_disk(store: SqliteStore) -> None:
    def pragmas(conn: Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [conn.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names]

    assert await store.database.write(pragmas) == ["wal", 2, 1]


async def test_a_turn_takes_the_write_lock_three_times(store: SqliteStore) -> None:
    agent = await an_agent(store)
    seen: list[str] = []
    for conn in (store.database._writer, store.database._quick):
        assert conn is not None
        driver_of(conn).set_trace_callback(seen.append)
    await complete(store, agent, "t1")
    assert [statement for statement in seen if statement.startswith("BEGIN")] == ["BEGIN IMMEDIATE"] * 3


def test_every_reference_has_an_index_so_that_deleting_stays_linear() -> None:
    for table in metadata.tables.values():
        leading = {next(iter(index.columns)).name for index in table.indexes}
        leading |= {next(iter(table.primary_key.columns)).name}
        bare = {key.parent.name for key in table.foreign_keys} - leading
        assert not bare, f"{table.name}: {bare}"
