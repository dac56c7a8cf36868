"""A PostgreSQL database as one side of a move (see `sql.moving`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Connection, ForeignKeyConstraint, Table, func, inspect, select
from sqlalchemy.exc import DBAPIError

from ..sql.moving import MOVING, Side, changes
from ..sql.tables import metadata
from .database import MOVED, ROLLED_BACK, code_of
from .store import PostgresqlStore

# A lock that another program holds for longer than `lock_timeout` is stuck. The mover's own transaction may be idle for
# long.
_BEGIN = "BEGIN; SET LOCAL lock_timeout = '30s'; SET LOCAL idle_in_transaction_session_timeout = 0"


# How often locking is repeated after a deadlock with a program that locks the tables in another order.
TRIES = 10


class PostgresqlSide(Side):
    def __init__(self, store: PostgresqlStore) -> None:
        super().__init__(store.database.name, store.database.connection)
        self._store = store

    def prepare(self, conn: Connection) -> None:
        self._store.database.prepare(conn, self._store.prepare)

    def begin(self, conn: Connection) -> None:
        conn.exec_driver_sql(_BEGIN)

    def lock(self, conn: Connection, tables: Sequence[Table]) -> None:
        names = ", ".join(table.name for table in tables)
        for tries_left in reversed(range(TRIES)):
            self.begin(conn)
            try:
                conn.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")
                return
            except DBAPIError as exc:
                conn.exec_driver_sql("ROLLBACK")
                if not tries_left or code_of(exc) not in ROLLED_BACK:
                    raise

    def watch(self, conn: Connection, table: Table) -> None:
        def note(row: str) -> str:
            """The statement that notes this row in the table `changes`, or counts another write of it."""
            key = ", ".join(f"{row}.{column.name}" for column in table.primary_key)
            values = f"'{table.name}', json_build_array({key})::text, 1"
            or_count = f"ON CONFLICT (name, key) DO UPDATE SET n = {changes.name}.n + 1"
            return f"INSERT INTO {changes.name} VALUES ({values}) {or_count};"  # noqa: S608 - names of our own tables

        conn.exec_driver_sql(f"""
            CREATE FUNCTION {MOVING}_{table.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF TG_OP <> 'INSERT' THEN {note("OLD")} END IF;
                IF TG_OP <> 'DELETE' THEN {note("NEW")} END IF;
                RETURN NULL;
            END $$;
            CREATE TRIGGER {MOVING} AFTER INSERT OR UPDATE OR DELETE ON {table.name}
                FOR EACH ROW EXECUTE FUNCTION {MOVING}_{table.name}()
        """)

    def unwatch(self, conn: Connection, table: Table) -> None:
        conn.exec_driver_sql(f"DROP TRIGGER IF EXISTS {MOVING} ON {table.name}")
        conn.exec_driver_sql(f"DROP FUNCTION IF EXISTS {MOVING}_{table.name}()")

    def refuse(self, conn: Connection, table: Table, place: str) -> None:
        quoted = place.replace("'", "''").replace("%", "%%")  # the driver takes a single % for a parameter
        conn.exec_driver_sql(f"""
            CREATE FUNCTION moved_{table.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                RAISE EXCEPTION USING ERRCODE = '{MOVED}', MESSAGE = '{quoted}';
            END $$;
            CREATE TRIGGER moved BEFORE INSERT OR UPDATE OR DELETE ON {table.name}
                FOR EACH STATEMENT EXECUTE FUNCTION moved_{table.name}()
        """)

    def drop_foreign_keys(self, conn: Connection) -> None:
        for table in metadata.sorted_tables:
            for key in inspect(conn).get_foreign_keys(table.name):
                conn.exec_driver_sql(f'ALTER TABLE {table.name} DROP CONSTRAINT "{key["name"]}"')

    def restore_foreign_keys(self, conn: Connection) -> None:
        """Add the keys again; the database then checks every row."""
        self.drop_foreign_keys(conn)
        for table in metadata.sorted_tables:
            for constraint in table.constraints:
                if isinstance(constraint, ForeignKeyConstraint):
                    (key,) = constraint.elements
                    # Not with SQLAlchemy's `AddConstraint`: later `metadata.create_all` would leave this key out.
                    conn.exec_driver_sql(
                        f'ALTER TABLE {table.name} ADD FOREIGN KEY ("{key.parent.name}") '
                        f'REFERENCES {key.column.table.name} ("{key.column.name}")'
                    )

    def last_key(self, conn: Connection, column: Column[Any]) -> int:
        query = f"SELECT last_value, is_called FROM {self._sequence(conn, column)}"  # noqa: S608 - a name of our own
        last_value, is_called = conn.exec_driver_sql(query).one()
        highest = conn.scalar(select(func.max(column))) or 0  # an agent's key is not the sequence's
        return max(highest, int(last_value) if is_called else 0)  # a new sequence has a value that no row got

    def set_last_key(self, conn: Connection, column: Column[Any], value: int) -> None:
        name = self._sequence(conn, column)
        conn.exec_driver_sql(f"SELECT setval('{name}', {max(value, 1)}, {'true' if value else 'false'})")

    def _sequence(self, conn: Connection, column: Column[Any]) -> str:
        query = f"SELECT pg_get_serial_sequence('{column.table.name}', '{column.name}')"
        return str(conn.exec_driver_sql(query).scalar())
