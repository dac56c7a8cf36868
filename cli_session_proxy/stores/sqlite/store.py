"""The store on a SQLite file: the portable statements on `SqliteDatabase`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...domain.searching import Found, Indexed, Search
from ..base import Expiry, MigrationProgress
from ..sql.migrations import MIGRATIONS, Migration
from ..sql.store import SqlStore, logged
from .database import SqliteDatabase
from .search import SearchIndex

# The store of a `var/` directory.
FILE = "chains.sqlite3"

# How long a write waits for another program before `StoreUnavailable`; a commit takes about a millisecond,
# so only a stuck lock takes this long.
BUSY_TIMEOUT = 10.0


class SqliteStore(SqlStore):
    """`Store` on one SQLite file in WAL mode. Its directory must exist.

    `clock`: UTC seconds since the epoch, by which leases expire.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
        clock: Callable[[], float] = time.time,
        migrations: Sequence[Migration] = MIGRATIONS,
        progress: MigrationProgress = logged,
    ) -> None:
        self.database = SqliteDatabase(path, busy_timeout=busy_timeout, clock=clock)
        self.search_index = SearchIndex(self.database.path, busy_timeout)
        super().__init__(self.database, migrations, progress)

    async def delete_agent(self, key: int, expiry: Expiry | None = None) -> bool:
        deleted = await super().delete_agent(key, expiry)
        if deleted:  # the index is a file of its own, which no foreign key cleans
            await asyncio.to_thread(self.search_index.forget, key)
        return deleted

    async def index(self, seconds: float) -> Indexed:
        return await asyncio.to_thread(self.search_index.index, seconds)

    async def search(self, wanted: Search) -> Found:
        return await asyncio.to_thread(self.search_index.search, wanted)
