"""From an older schema to this one: small named steps in a list, and a copy aside before the first.

A new file is made from `tables` at once; `MIGRATIONS[0]` leads from version 1 to 2, the next from 2 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, false, inspect, select

from ...errors import StoreUnavailable
from .database import Database
from .tables import conversations, followers, items, leases, meta, metadata, proxies, turns


@dataclass(frozen=True, slots=True)
class Migration:
    """One step to the next version. `apply` runs inside the transaction of the whole migration."""

    name: str
    apply: Callable[[Connection], None]


def _stateful_wires(conn: Connection) -> None:
    """What OpenAI's Responses and Conversations keep: a column of `turns`, and two tables."""
    if turns.c.call.name not in {column["name"] for column in inspect(conn).get_columns(turns.name)}:
        conn.exec_driver_sql(f'ALTER TABLE {turns.name} ADD COLUMN "{turns.c.call.name}" TEXT')
    metadata.create_all(conn, tables=[conversations, items])


def _leases(conn: Connection) -> None:
    """Who may write an agent, and who waits for the answers of other proxies' turns."""
    metadata.create_all(conn, tables=[proxies, leases, followers])


MIGRATIONS: tuple[Migration, ...] = (Migration("stateful wires", _stateful_wires), Migration("leases", _leases))


def prepare(conn: Connection, database: Database, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Create the schema in an empty database, migrate an older one, refuse a newer or a foreign one.

    Runs inside `Database.open`: of two programs that open it at once, one does it and the other finds it done.
    """
    newest = 1 + len(migrations)
    version = _version(conn, database.name)
    if version is None:
        metadata.create_all(conn)
        conn.execute(meta.insert(), {"name": "schema_version", "value": str(newest)})
    elif version > newest:
        raise StoreUnavailable(
            f"the store {database.name} has schema version {version}, this program knows up to {newest}: "
            "upgrade cli-session-proxy, or choose another --var",
            detail={"found": version, "known": newest},
        )
    elif version < newest:
        _migrate(conn, database, version, migrations)
    # SQLite begins a write on a read-only file without a word; a write of no rows speaks up now, not at a turn
    conn.execute(meta.update().where(false()).values(value=""))


def _migrate(conn: Connection, database: Database, version: int, migrations: Sequence[Migration]) -> None:
    database.back_up(version)
    for step in migrations[version - 1 :]:
        step.apply(conn)
    newest = str(1 + len(migrations))
    conn.execute(meta.update().where(meta.c.name == "schema_version").values(value=newest))


def _version(conn: Connection, name: str) -> int | None:
    """The schema's version; None for an empty database."""
    names = inspect(conn).get_table_names()
    if not names:
        return None
    text = None
    if meta.name in names:
        text = conn.scalar(select(meta.c.value).where(meta.c.name == "schema_version"))
    if text is None or not text.isdecimal() or int(text) < 1:
        raise StoreUnavailable(f"{name} is a database of another program: move it away or choose another --var")
    return int(text)
