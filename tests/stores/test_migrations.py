"""Opening older, newer and foreign files."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection

from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.stores.sql.migrations import Migration, newest
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import an_agent, complete, opened, turn_of

applied: list[str] = []


def add_notes(conn: Connection) -> None:
    applied.append("add_notes")
    conn.exec_driver_sql("CREATE TABLE notes (text TEXT)")


def fill_notes(conn: Connection) -> None:
    applied.append("fill_notes")
    conn.exec_driver_sql("INSERT INTO notes SELECT model FROM turns")


def break_down(conn: Connection) -> None:
    fill_notes(conn)
    conn.exec_driver_sql("SELECT * FROM no_such_table")


ADD = Migration("add_notes", add_notes, to=2)
FILL = Migration("fill_notes", fill_notes, to=3)
BREAK = Migration("break_down", break_down, to=3)


@pytest.fixture(autouse=True)
def _nothing_applied() -> None:
    applied.clear()


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """A file of version 1 with one turn in it."""
    path = tmp_path / "chains.sqlite3"
    async with opened(lambda: SqliteStore(path, migrations=())) as store:
        await complete(store, await an_agent(store), "t1")
    return path


def query(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        return other.execute(statement).fetchall()


def beside(path: Path) -> list[str]:
    return [file.name for file in path.parent.glob(path.name + "*")]


VERSION = "SELECT value FROM meta WHERE name = 'schema_version'"


async def test_a_new_file_has_the_newest_version_and_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite3"
    await (store := SqliteStore(path)).open()
    await store.close()
    assert query(path, VERSION) == [(str(newest()),)]
    assert beside(path) == ["new.sqlite3"]


async def test_an_older_file_is_copied_aside_and_taken_through_each_step(path: Path) -> None:
    async with opened(lambda: SqliteStore(path, migrations=(ADD, FILL))) as store:
        assert applied == ["add_notes", "fill_notes"]
        assert (await turn_of(store, "t1")).status == "completed"
    assert query(path, VERSION) == [("3",)]
    assert query(path, "SELECT * FROM notes") == [("sonnet",)]
    aside = path.with_name("chains.sqlite3.v1.bak")
    assert query(aside, VERSION) == [("1",)]
    assert query(aside, "SELECT id FROM turns") == [("t1",)]
    async with opened(lambda: SqliteStore(aside, migrations=())) as old:
        assert (await turn_of(old, "t1")).id == "t1"


async def test_only_the_missing_steps_are_taken(path: Path) -> None:
    async with opened(lambda: SqliteStore(path, migrations=(ADD,))):
        pass
    async with opened(lambda: SqliteStore(path, migrations=(ADD, FILL))):
        pass
    async with opened(lambda: SqliteStore(path, migrations=(ADD, FILL))):
        pass
    assert applied == ["add_notes", "fill_notes"]
    assert query(path.with_name("chains.sqlite3.v2.bak"), VERSION) == [("2",)]


async def test_two_programs_migrate_it_once(path: Path) -> None:
    stores = [SqliteStore(path, migrations=(ADD, FILL)) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.close() for store in stores))
    assert applied == ["add_notes", "fill_notes"]


async def test_a_step_that_fails_leaves_the_older_file(path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no_such_table"):
        await SqliteStore(path, migrations=(ADD, BREAK)).open()
    assert query(path, VERSION) == [("1",)]
    assert query(path, "SELECT name FROM sqlite_master WHERE name = 'notes'") == []
    async with opened(lambda: SqliteStore(path, migrations=())) as store:
        assert (await turn_of(store, "t1")).status == "completed"


async def test_the_index_over_histories_gets_its_second_column(tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    async with opened(lambda: SqliteStore(path)) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
    query(path, "DROP INDEX turns_path_hash")
    query(path, "CREATE INDEX turns_path_hash ON turns (path_hash)")
    query(path, "UPDATE meta SET value = '6' WHERE name = 'schema_version'")
    query(path, "DELETE FROM proxies")  # a later migration waits until every proxy has ended
    async with opened(lambda: SqliteStore(path)) as store:
        assert await store.deepest("local", ["hash-t1"], agent.key) == await turn_of(store, "t1")
    assert [row[2] for row in query(path, "PRAGMA index_info(turns_path_hash)")] == ["path_hash", "seq"]


async def test_without_room_for_the_copy_nothing_is_migrated(path: Path) -> None:
    path.with_name("chains.sqlite3.v1.bak").mkdir()
    with pytest.raises(StoreUnavailable, match="no copy"):
        await SqliteStore(path, migrations=(ADD,)).open()
    assert applied == []
    assert query(path, VERSION) == [("1",)]


async def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    query(path, "UPDATE meta SET value = '7'")
    with pytest.raises(StoreUnavailable, match=r"version 7.*up to 1.*upgrade") as raised:
        await SqliteStore(path, migrations=()).open()
    assert raised.value.detail == {"found": 7, "known": 1}
    assert query(path, VERSION) == [("7",)]


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE shopping (item TEXT)", "CREATE TABLE meta (name TEXT, value TEXT)"]
)
async def test_a_database_of_another_program_is_refused(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "other.sqlite3"
    query(path, statement)
    before = query(path, "SELECT name FROM sqlite_master")
    with pytest.raises(StoreUnavailable, match="another program"):
        await SqliteStore(path).open()
    assert query(path, "SELECT name FROM sqlite_master") == before
