"""What a budget asks of the store at each turn costs the same however long a chain is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.dialects import sqlite

from cli_session_proxy.domain.budgets import Scope
from cli_session_proxy.stores.sql import spending
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import opened


@pytest.mark.parametrize("scope", ["key", "agent"])
async def test_turns_under_way_are_found_among_the_few_that_are_not_over(scope: Scope, tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    async with opened(lambda: SqliteStore(path)):
        pass
    sql = str(spending._OTHERS_UNFINISHED[scope].statement.compile(dialect=sqlite.dialect(paramstyle="named")))
    with closing(sqlite3.connect(path)) as other:
        values = {"of_owner": "local", "named": "a", "this_turn": "t"}
        plan = [row[3] for row in other.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    assert "SEARCH turns USING INDEX turns_status (status=?)" in plan
