"""A SQLite file as one side of a move (see `sql.moving`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Connection, Table

from ..sql.moving import MOVING, Side, changes
from .file import MOVED
from .store import SqliteStore

OPERATIONS = ("INSERT", "UPDATE", "DELETE")


class SqliteSide(Side):
    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store.database.name, store.database.connection)
        self._store = store

    def prepare(self, conn: Connection) -> None:
        self._store.search_index.remove()  # the index of an earlier store
        self._store.prepare(conn)

    def begin(self, conn: Connection) -> None:
        conn.exec_driver_sql("BEGIN IMMEDIATE")

    def lock(self, conn: Connection, tables: Sequence[Table]) -> None:  # noqa: ARG002 - the whole file
        self.begin(conn)

    def watch(self, conn: Connection, table: Table) -> None:
        own = list(table.primary_key)
        for operation in OPERATIONS:
            rows = ("OLD", "NEW") if operation == "UPDATE" else ("OLD",) if operation == "DELETE" else ("NEW",)
            keys = [", ".join(f"{row}.{column.name}" for column in own) for row in rows]
            once_more = "ON CONFLICT (name, key) DO UPDATE SET n = n + 1"
            inserts = "".join(
                f"INSERT INTO {changes.name} VALUES ('{table.name}', json_array({key}), 1) {once_more}; "  # noqa: S608 - as below
                for key in keys
            )
            # names of our own tables
            conn.exec_driver_sql(
                f"CREATE TRIGGER {_trigger(MOVING, table, operation)} AFTER {operation} ON {table.name} "
                f"BEGIN {inserts}END"
            )

    def unwatch(self, conn: Connection, table: Table) -> None:
        for operation in OPERATIONS:
            conn.exec_driver_sql(f"DROP TRIGGER IF EXISTS {_trigger(MOVING, table, operation)}")

    def refuse(self, conn: Connection, table: Table, place: str) -> None:
        message = (MOVED + place).replace("'", "''")
        for operation in OPERATIONS:
            conn.exec_driver_sql(
                f"CREATE TRIGGER {_trigger('moved', table, operation)} BEFORE {operation} ON {table.name} "
                f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
            )

    def drop_foreign_keys(self, conn: Connection) -> None:
        conn.exec_driver_sql("PRAGMA foreign_keys=OFF")  # on this connection: those of proxies check them

    def last_key(self, conn: Connection, column: Column[Any]) -> int:
        query = "SELECT seq FROM sqlite_sequence WHERE name = ?"
        return int(conn.exec_driver_sql(query, (column.table.name,)).scalar() or 0)

    def set_last_key(self, conn: Connection, column: Column[Any], value: int) -> None:
        conn.exec_driver_sql("DELETE FROM sqlite_sequence WHERE name = ?", (column.table.name,))
        conn.exec_driver_sql("INSERT INTO sqlite_sequence VALUES (?, ?)", (column.table.name, value))


def _trigger(kind: str, table: Table, operation: str) -> str:
    return f"{kind}_{table.name}_{operation.lower()}"
