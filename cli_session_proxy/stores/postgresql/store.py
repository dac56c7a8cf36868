"""The store on a PostgreSQL server: the portable statements on `PostgresqlDatabase`; and `look`, which only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, inspect, select

from ...domain.searching import Found, Indexed, Search
from ..base import ASKED_POLL, Facts, Finding, MigrationProgress
from ..sql import leases, side_data
from ..sql.migrations import MIGRATIONS, Migration, version_of
from ..sql.store import SqlStore, logged
from ..sql.tables import COMING_IN, MOVED_TO, agents, findings, meta
from . import search
from .database import READ, PostgresqlDatabase
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


@dataclass(frozen=True, slots=True)
class DatabaseLook:
    """What `doctor` reads of a database. `server`: the server's version. `schema` None: the database is empty.
    `last_at`: the time of the last turn. `is_marked`: no proxy may use the store, because it was moved (`moved_to`) or
    because a move into it has not ended. `hosts`: those whose proxies run, with the facts that have to be the same on
    all of them."""

    name: str
    server: str
    schema: int | None
    agents: int
    last_at: float | None
    is_marked: bool = False
    moved_to: str | None = None
    hosts: list[tuple[str, Facts]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def look(url: str) -> DatabaseLook:
    """Inspect the database at this URL. Raises `ConfigError`, and `StoreUnavailable` with the reason. Blocks."""
    database = PostgresqlDatabase(url, busy_timeout=BUSY_TIMEOUT)

    with database.connection() as conn:
        conn.exec_driver_sql("; ".join(READ))
        server = str(conn.exec_driver_sql("SHOW server_version").scalar())
        schema = version_of(conn, database.name)
        tables = inspect(conn).get_table_names()
        if schema is None or agents.name not in tables:
            return DatabaseLook(database.name, server, schema, 0, None)
        count, last_at = conn.execute(select(func.count(), func.max(agents.c.last_at))).one()
        of_moves = select(meta.c.name, meta.c.value).where(meta.c.name.in_([MOVED_TO, COMING_IN]))
        marks = dict(conn.execute(of_moves).all())
        known = side_data.findings_of(conn, None) if findings.name in tables else []
        return DatabaseLook(
            database.name, server, schema, count, last_at, bool(marks), marks.get(MOVED_TO), leases.hosts(conn), known
        )
