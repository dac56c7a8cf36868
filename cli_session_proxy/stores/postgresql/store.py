"""The store on a PostgreSQL server: the portable statements on `PostgresqlDatabase`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import Connection

from ...domain.searching import Found, Indexed, Search
from ..base import ASKED_POLL, MigrationProgress
from ..sql.migrations import MIGRATIONS, Migration
from ..sql.store import SqlStore, logged
from . import search
from .database import PostgresqlDatabase
from .notify import Listener

# How long a write waits for a row that another program has locked, or for a server that is away.
BUSY_TIMEOUT = 10.0


class PostgresqlStore(SqlStore):
    """`Store` on one PostgreSQL database. `url`: as libpq takes it, `postgresql://user@host:5432/database?sslmode=…`.

    Leases expire by the server's clock.
    """

    spans_hosts = True

    def __init__(
        self,
        url: str,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        migrations: Sequence[Migration] = MIGRATIONS,
        progress: MigrationProgress = logged,
    ) -> None:
        self.database = PostgresqlDatabase(url, busy_timeout=busy_timeout)
        self._listener: Listener | None = None
        super().__init__(self.database, migrations, progress)

    def prepare(self, conn: Connection) -> None:
        super().prepare(conn)
        search.prepare(conn)

    async def until_asked(self, proxy_id: str, longest: float) -> None:
        if self._listener is None:
            self._listener = self.database.listener()
        await self._listener.wait(proxy_id, longest, ASKED_POLL)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        await super().close()

    async def index(self, seconds: float) -> Indexed:
        return await asyncio.to_thread(search.index, self.database, seconds)

    async def search(self, wanted: Search) -> Found:
        return await asyncio.to_thread(search.search, self.database, wanted)
