"""PostgreSQL's dialect writes what `stores.sql` says: every statement that the contracts run, and the schema."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import ClauseElement, Connection, Engine, Insert, TextClause, event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.schema import CreateIndex, CreateTable

from cli_session_proxy.stores import sql
from cli_session_proxy.stores.sql import database
from cli_session_proxy.stores.sql.database import Prepared, Values
from cli_session_proxy.stores.sql.tables import metadata
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance import CONTRACTS

POSTGRESQL = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # it has no annotations
# How SQLite says what PostgreSQL does not.
SQLITE_ONLY = ("OR IGNORE", "OR REPLACE", "PRAGMA", "AUTOINCREMENT", "rowid", "?")


def said_to_postgresql(statement: ClauseElement, names: list[str] | None = None) -> str:
    if names is None:
        return str(statement.compile(dialect=POSTGRESQL))
    return str(statement.compile(dialect=POSTGRESQL, column_keys=names))


@contextmanager
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the stores run meanwhile, as PostgreSQL would get it."""
    texts: dict[str, str] = {}

    def executed(_conn: Connection, statement: object, *_rest: object) -> None:
        if isinstance(statement, ClauseElement) and not isinstance(statement, TextClause):
            texts[str(statement)] = said_to_postgresql(statement)

    def prepared_one(self: Prepared, conn: Connection, values: Values) -> object:
        texts[f"{id(self)} {sorted(values)}"] = said_to_postgresql(self.statement, list(values))
        return ready(self, conn, values)

    ready = Prepared._ready
    monkeypatch.setattr(Prepared, "_ready", prepared_one)
    event.listen(Engine, "before_execute", executed)
    try:
        yield texts
    finally:
        event.remove(Engine, "before_execute", executed)


@pytest.mark.full  # each time on a real PostgreSQL: test_postgresql.py
async def test_every_statement_of_the_contracts_is_written_for_postgresql_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with heard(monkeypatch) as texts:
        for number, contract in enumerate(CONTRACTS):
            path = tmp_path / f"{number}.sqlite3"
            await contract(lambda path=path: SqliteStore(path))  # type: ignore[misc]  # mypy takes no default here
    assert len(texts) > 80
    for text in texts.values():
        if "search." in text:  # its index is SQLite's own
            continue
        assert not [word for word in SQLITE_ONLY if word in text], text
    frames = [text for text in texts.values() if text.startswith("INSERT INTO frames")]
    assert frames
    assert all(text.endswith("ON CONFLICT DO NOTHING") for text in frames)
    locking = [text for text in texts.values() if "FOR NO KEY UPDATE" in text]
    assert any("FROM leases" in text for text in locking)
    assert any("FROM turns" in text for text in locking)


def test_every_prepared_statement_is_written_for_postgresql_too() -> None:
    modules = [importlib.import_module(f"{sql.__name__}.{found.name}") for found in pkgutil.iter_modules(sql.__path__)]
    statements = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Prepared)}
    assert len(statements) > 25
    for one in statements.values():
        columns = one.statement.table.columns.keys() if isinstance(one.statement, Insert) else None
        assert said_to_postgresql(one.statement, columns)


def test_the_schema_is_written_for_postgresql_too() -> None:
    for table in metadata.sorted_tables:
        text = str(CreateTable(table).compile(dialect=POSTGRESQL))
        assert not [word for word in SQLITE_ONLY if word in text], text
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=POSTGRESQL))
    assert "seq BIGSERIAL" in str(CreateTable(metadata.tables["turns"]).compile(dialect=POSTGRESQL))


def test_the_portable_rooms_know_no_database() -> None:
    """They import neither a driver, nor a dialect, nor the room of a database."""
    for path in Path(database.__file__).parent.glob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        assert not [name for name in names if "sqlite" in name or "psycopg" in name or "dialects" in name], path.name
