"""A database of words, for tests of what the writer does beneath a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import TypeVar

from sqlalchemy import Connection

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.stores.sql.database import Urgency, Work
from cli_session_proxy.stores.sqlite.database import SqliteDatabase
from cli_session_proxy.stores.sqlite.file import driver_of

T = TypeVar("T")

TABLE = "CREATE TABLE said (word TEXT PRIMARY KEY)"


class Words:
    """A database of words, and a way to hold its writer so that what follows waits together."""

    def __init__(self, path: Path, *, busy_timeout: float = 10.0) -> None:
        self.path = path
        self.db = SqliteDatabase(path, busy_timeout=busy_timeout)
        self.commits = 0

    async def open(self) -> None:
        await self.db.open(prepare)
        await self.db.write(lambda conn: driver_of(conn).set_trace_callback(self._count))

    def _count(self, statement: str) -> None:
        self.commits += statement == "COMMIT"

    async def together(self, *writes: Callable[[], Awaitable[object]]) -> list[object]:
        """Start these while the file is locked by somebody else, and let them go at once."""
        with closing(connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first = asyncio.ensure_future(self.write("first"))
            await self.read()  # by now the first one waits for the lock on its thread
            rest = [asyncio.ensure_future(write()) for write in writes]
            await self.read()
            self.commits = 0
            other.execute("ROLLBACK")
        await first
        return await asyncio.gather(*rest, return_exceptions=True)

    async def write(self, word: str, urgency: Urgency = Urgency.DURABLE) -> str:
        return await self.db.write(lambda conn: say(conn, word), urgency)

    async def note(self, word: str) -> str:
        return await self.quickly(lambda conn: say(conn, word))

    async def quickly(self, work: Work[T], urgency: Urgency = Urgency.JOURNAL) -> T:
        return await self.db.write(work, urgency, quick=True)

    async def read(self) -> set[str]:
        return await self.db.read(lambda conn: set(conn.exec_driver_sql("SELECT word FROM said").scalars()))


def prepare(conn: Connection) -> None:
    conn.exec_driver_sql(TABLE)


def say(conn: Connection, word: str) -> str:
    if word == "never":
        raise InvalidRequest("this word is not said")
    conn.exec_driver_sql("INSERT INTO said VALUES (?)", (word,))
    return word
