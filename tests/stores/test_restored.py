"""A store that was put back from a backup, or a standby that lacked the newest writes: what a proxy was granted after
the backup is worth nothing for ever, and what it read then is of no agent that was made since."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cli_session_proxy.errors import LeaseLost
from cli_session_proxy.stores.base import Proxy, Store
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    a_begin,
    a_turn,
    accepted,
    gathered,
    granted,
    imported_turns,
    opened,
    raised,
)

ONE, TWO = Proxy("one", "here", 3600.0), Proxy("two", "here", 3600.0)


async def never_rolls_back(
    store: Callable[[], Store], back_up: Callable[[], None], restore: Callable[[], None]
) -> None:
    async with opened(store) as one:
        agent = await one.ensure_agent("local", "a", "a", named=True, now=1.0)
        first = await granted(one, agent, ONE)
    back_up()
    async with opened(store) as one:
        second = await granted(one, agent, TWO, dead=("one",))
        third = await granted(one, agent, ONE, dead=("two",))
        lost = await one.ensure_agent("local", "lost", "lost", named=True, now=1.0)
        of_lost = await granted(one, lost, TWO)
    restore()
    async with opened(store) as one:
        assert await one.agent("local", "lost") is None
        later = await one.ensure_agent("local", "later", "later", named=True, now=1.0)
        assert await raised(one.accept(**a_turn(lost, "placed"))) is not None
        assert await raised(one.import_turns(imported_turns(lost, 2))) is not None
        assert not await gathered(one.turns(later.key))
        now = await granted(one, agent, TWO, dead=("one",))
        of_later = await granted(one, later, TWO)
        assert now.epoch > third.epoch > second.epoch > first.epoch
        assert of_later.epoch > of_lost.epoch
        for name, of, stale in (
            ("t1", agent, first),
            ("t2", agent, second),
            ("t3", agent, third),
            ("t4", later, of_lost),
        ):
            turn = await accepted(one, a_turn(of, name))
            assert isinstance(await raised(one.begin(**a_begin(turn, lease=stale))), LeaseLost)
        turn = await accepted(one, a_turn(agent, "t5"))
        await one.begin(**a_begin(turn, lease=now))


async def test_a_restored_file_grants_no_epoch_that_was_granted_before(tmp_path: Path) -> None:
    file, copy = tmp_path / "chains.sqlite3", tmp_path / "backup.sqlite3"

    def back_up() -> None:
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)

    await never_rolls_back(lambda: SqliteStore(file), back_up, lambda: Path(shutil.copy(copy, file)).touch())


async def test_a_restored_database_grants_no_epoch_that_was_granted_before(postgres_url: str) -> None:
    name = str(conninfo_to_dict(postgres_url)["dbname"])
    url = postgres_url.replace(f"/{name}?", "/postgres?")

    def run(*statements: str) -> None:
        with psycopg.connect(url, autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    await never_rolls_back(
        lambda: PostgresqlStore(postgres_url),
        lambda: run(f"CREATE DATABASE {name}_backup TEMPLATE {name}"),
        lambda: run(f"DROP DATABASE {name}", f"CREATE DATABASE {name} TEMPLATE {name}_backup"),
    )


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_the_number_of_a_deleted_agent_is_not_given_again_by_a_clock_that_went_back(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A proxy that still serves a request for the deleted agent would store its turn with the new one."""
    if kind == "sqlite":
        times = [2e9]
        made: Store = SqliteStore(tmp_path / "chains.sqlite3", clock=lambda: times[0])
    else:
        made = PostgresqlStore(request.getfixturevalue("postgres_url"))
    async with opened(lambda: made) as store:
        first = await store.ensure_agent("local", "first", "first", named=True, now=1.0)
        if kind == "sqlite":
            times[0] = 1e9
        else:
            with psycopg.connect(request.getfixturevalue("postgres_url"), autocommit=True) as conn:
                conn.execute(
                    "CREATE OR REPLACE FUNCTION store_clock() RETURNS double precision LANGUAGE sql VOLATILE "
                    "AS 'SELECT 1e9::double precision'"
                )
        seen = {first.key}
        for name in ("second", "third", "fourth"):
            agent = await store.ensure_agent("local", name, name, named=True, now=1.0)
            assert agent.key > max(seen)
            seen.add(agent.key)
            await store.delete_agent(agent.key)
        assert await store.delete_agent(first.key)
        last = await store.ensure_agent("local", "last", "last", named=True, now=1.0)
        assert last.key > max(seen)
        assert await raised(store.accept(**a_turn(agent, "late"))) is not None
