"""Inspects a store in PostgreSQL, read only."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection, func, inspect, select

from ..base import Facts, Finding
from ..sql import finding, leases
from ..sql.migrations import version_of
from ..sql.tables import COMING_IN, MOVED_TO, agents, findings, meta
from .database import PostgresqlDatabase
from .store import BUSY_TIMEOUT


@dataclass(frozen=True, slots=True)
class DatabaseLook:
    """`server`: its version. `schema` None: the database is empty. `last_at`: the time of the last turn. `is_marked`:
    no proxy may use it, because it was moved (`moved_to`) or because a move into it has not ended. `hosts`: those
    whose proxies run, with what has to be the same on all of them. `findings`: see `base.Findings`."""

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
    """Raises `ConfigError`, and `StoreUnavailable` with the reason. Blocks."""
    database = PostgresqlDatabase(url, busy_timeout=BUSY_TIMEOUT)

    def work(conn: Connection) -> DatabaseLook:
        server = str(conn.exec_driver_sql("SHOW server_version").scalar())
        schema = version_of(conn, database.name)
        tables = inspect(conn).get_table_names()
        if schema is None or agents.name not in tables:
            return DatabaseLook(database.name, server, schema, 0, None)
        count, last_at = conn.execute(select(func.count(), func.max(agents.c.last_at))).one()
        marks = dict(
            conn.execute(select(meta.c.name, meta.c.value).where(meta.c.name.in_([MOVED_TO, COMING_IN]))).all()
        )
        moved_to = marks.get(MOVED_TO)
        known = finding.all_of(conn, None) if findings.name in tables else []
        hosts = leases.hosts(conn)
        return DatabaseLook(database.name, server, schema, count, last_at, bool(marks), moved_to, hosts, known)

    return database.look(work)
