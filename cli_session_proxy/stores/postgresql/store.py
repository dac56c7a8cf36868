"""The store on a PostgreSQL server: the portable statements on `PostgresqlDatabase`."""

from __future__ import annotations

from collections.abc import Sequence

from ...domain.searching import Found, Indexed, Search
from ...errors import InvalidRequest
from ..base import Telling
from ..sql.migrations import MIGRATIONS, Migration
from ..sql.store import SqlStore, logged
from .database import PostgresqlDatabase

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
        telling: Telling = logged,
    ) -> None:
        self.database = PostgresqlDatabase(url, busy_timeout=busy_timeout)
        super().__init__(self.database, migrations, telling)

    async def index(self, seconds: float) -> Indexed:
        raise _no_search()

    async def search(self, wanted: Search) -> Found:
        raise _no_search()


def _no_search() -> InvalidRequest:
    return InvalidRequest("there is no search in a PostgreSQL store yet: `chains` lists its agents, `dump` shows one")
