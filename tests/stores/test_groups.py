"""Writes that wait together are committed together, and each caller still gets what is its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.stores.database import Database

TABLE = "CREATE TABLE said (word TEXT PRIMARY KEY)"


class Words:
    """A database of words, and a way to hold its writer so that what follows waits together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = Database(path, busy_timeout=10.0)
        self.commits = 0

    async def open(self) -> None:
        await self.db.open(_prepare)
        event.listen(self.db._engines[0], "commit", self._count)

    def _count(self, _conn: Connection) -> None:
        self.commits += 1

    async def together(self, *writes: Callable[[], Awaitable[object]]) -> list[object]:
        """Start these while the file is locked by somebody else, and let them go at once."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first = asyncio.ensure_future(self.write("first"))
            await self.read()  # by now the first one waits for the lock on its thread
            rest = [asyncio.ensure_future(write()) for write in writes]
            await self.read()
            self.commits = 0
            other.execute("ROLLBACK")
        await first
        return await asyncio.gather(*rest, return_exceptions=True)

    async def write(self, word: str, *, soon: bool = False, alone: bool = False) -> str:
        return await self.db.write(lambda conn: _say(conn, word), soon=soon, alone=alone)

    async def read(self) -> set[str]:
        return await self.db.read(lambda conn: set(conn.exec_driver_sql("SELECT word FROM said").scalars()))


def _prepare(conn: Connection) -> None:
    conn.exec_driver_sql(TABLE)


def _say(conn: Connection, word: str) -> str:
    if word == "never":
        raise InvalidRequest("this word is not said")
    conn.exec_driver_sql("INSERT INTO said VALUES (?)", (word,))
    return word


@pytest.fixture
async def words(tmp_path: Path) -> AsyncIterator[Words]:
    words = Words(tmp_path / "words.sqlite3")
    await words.open()
    yield words
    await words.db.close()


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
        return lambda conn: order.append(word) if _say(conn, word) else None

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


async def test_a_write_that_can_wait_goes_with_the_next(words: Words) -> None:
    words.commits = 0
    soon = asyncio.ensure_future(words.write("soon", soon=True))
    await asyncio.sleep(0)
    assert await words.read() == set()
    assert await words.write("now") == "now"
    assert await soon == "soon"
    assert words.commits == 1


async def test_a_write_that_can_wait_is_written_without_a_next_one(words: Words) -> None:
    assert await words.write("soon", soon=True) == "soon"
    assert await words.read() == {"soon"}


async def test_closing_writes_what_still_waits(words: Words) -> None:
    soon = asyncio.ensure_future(words.write("soon", soon=True))
    await asyncio.sleep(0)
    await words.db.close()
    assert await soon == "soon"
    with closing(sqlite3.connect(words.path)) as file:
        assert file.execute("SELECT word FROM said").fetchall() == [("soon",)]
