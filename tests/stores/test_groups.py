"""Writes that wait together are committed together, and each caller still gets what is its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection

from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sqlite import database as sqlite
from cli_session_proxy.stores.sqlite.file import driver_of, sync

from .words import Words, say


def full(conn: Connection) -> bool:
    """Whether the commit of this transaction waits for the disk."""
    return bool(conn.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2)


async def test_writes_that_wait_are_one_transaction(words: Words) -> None:
    results = await words.together(*(lambda n=n: words.write(f"w{n}") for n in range(5)))
    assert results == [f"w{n}" for n in range(5)]
    assert words.commits == 2  # the one that was under way, and the five
    assert await words.read() == {"first", *(f"w{n}" for n in range(5))}


async def test_one_that_fails_takes_no_other_with_it(words: Words) -> None:
    bad: list[Callable[[], Awaitable[object]]] = [lambda: words.write("never"), lambda: words.write("first")]
    results = await words.together(lambda: words.write("a"), *bad, lambda: words.write("b"))
    assert [result if isinstance(result, str) else type(result).__name__ for result in results] == [
        "a", "InvalidRequest", "StoreUnavailable", "b",
    ]  # fmt: skip
    assert await words.read() == {"first", "a", "b"}


async def test_one_that_goes_alone_is_in_no_group_and_keeps_its_place(words: Words) -> None:
    order: list[str] = []

    def noting(word: str) -> Callable[[Connection], None]:
        return lambda conn: order.append(word) if say(conn, word) else None

    await words.together(
        lambda: words.db.write(noting("a")), lambda: words.db.write(noting("alone"), alone=True),
        lambda: words.db.write(noting("b")),
    )  # fmt: skip
    assert order == ["a", "alone", "b"]
    assert words.commits == 4


async def test_a_caller_that_left_before_its_write_began_takes_it_away(words: Words) -> None:
    async def leaves() -> str:
        task = asyncio.ensure_future(words.write("gone"))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    left, stayed = await words.together(leaves, lambda: words.write("stays"))
    assert isinstance(left, asyncio.CancelledError)
    assert stayed == "stays"
    assert await words.read() == {"first", "stays"}


async def test_a_write_for_which_nobody_waits_is_put_off_but_never_overtaken(words: Words) -> None:
    order: list[str] = []
    later = asyncio.ensure_future(words.db.write(lambda _conn: order.append("later"), Urgency.LATER))
    await asyncio.sleep(0)
    await words.note("entry")
    assert order == []
    await words.db.write(lambda _conn: order.append("now"))
    assert order == ["later", "now"]
    await later


async def test_a_write_for_which_nobody_waits_is_done_without_another(words: Words) -> None:
    assert await words.write("later", Urgency.LATER) == "later"
    assert await words.read() == {"later"}


async def test_closing_writes_what_was_put_off(words: Words) -> None:
    later = asyncio.ensure_future(words.write("later", Urgency.LATER))
    await asyncio.sleep(0)
    await words.db.close()
    assert await later == "later"
    with closing(sqlite3.connect(words.path)) as file:
        assert file.execute("SELECT word FROM said").fetchall() == [("later",)]


async def test_only_an_acknowledgement_waits_for_the_disk(words: Words) -> None:
    assert await words.db.write(full)
    assert not await words.db.write(full, Urgency.JOURNAL)
    assert not await words.quickly(full)
    assert await words.db.write(full)


async def test_a_write_for_which_nobody_waits_leaves_nothing_to_do_for_an_acknowledgement(words: Words) -> None:
    await words.write("arrived", Urgency.LATER)
    said: list[str] = []
    assert words.db._writer is not None
    driver_of(words.db._writer).set_trace_callback(said.append)
    await words.write("done")
    assert [line.split()[0] for line in said] == ["BEGIN", "INSERT", "COMMIT"]


async def test_a_group_with_an_acknowledgement_waits_for_the_disk(words: Words) -> None:
    writes = [lambda: words.db.write(full, Urgency.JOURNAL), lambda: words.db.write(full)]
    assert await words.together(*writes) == [True, True]
    assert words.commits == 2


async def test_a_journal_entry_reaches_the_disk_by_itself(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = asyncio.Event()
    loop = asyncio.get_running_loop()
    files: list[str] = []

    def sync(file: str) -> None:
        files.append(file)
        loop.call_soon_threadsafe(synced.set)

    monkeypatch.setattr(sqlite, "sync", sync)
    await words.write("begun", Urgency.JOURNAL)
    async with asyncio.timeout(60):
        await synced.wait()
    assert files == [f"{words.path}-wal"]


async def test_an_acknowledgement_takes_the_journal_to_the_disk(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(sqlite, "sync", synced.append)
    await words.write("begun", Urgency.JOURNAL)
    await words.write("done")
    await words.write("arrived", Urgency.LATER)  # by now the timer of the first one has run
    assert synced == []


def test_a_sync_reaches_a_real_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    sync(str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError):
        sync(str(tmp_path / "none"))


async def test_a_journal_entry_waits_for_its_place_behind_other_writes(words: Words) -> None:
    results = await words.together(lambda: words.note("a"), lambda: words.write("b"), lambda: words.note("never"))
    assert results[:2] == ["a", "b"]
    assert isinstance(results[2], InvalidRequest)
    assert await words.read() == {"first", "a", "b"}


async def test_a_journal_entry_beside_another_program_waits_for_it_on_a_thread(words: Words) -> None:
    with closing(sqlite3.connect(words.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(words.note("a"))
        assert await words.read() == set()  # the loop goes on meanwhile
        other.execute("ROLLBACK")
    assert await waiting == "a"


async def test_a_journal_entry_that_fails_leaves_nothing(words: Words) -> None:
    await words.note("a")
    with pytest.raises(StoreUnavailable):
        await words.quickly(lambda conn: (say(conn, "b"), say(conn, "a")))
    with pytest.raises(InvalidRequest):
        await words.quickly(lambda conn: (say(conn, "c"), say(conn, "never")))
    assert await words.note("d") == "d"
    assert await words.read() == {"a", "d"}
