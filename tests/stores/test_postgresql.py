"""PostgreSQL against the contract of every store, and what is its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

from cli_session_proxy.domain.models import Message, Record, Turn
from cli_session_proxy.errors import ConfigError, InvalidRequest, LeaseLost, NotFound, ProxyError, StoreUnavailable
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores.auto import place_of, store_for
from cli_session_proxy.stores.base import NewChain, Proxy, WholeTurn
from cli_session_proxy.stores.postgresql.database import PostgresqlDatabase
from cli_session_proxy.stores.postgresql.pipeline import PipelinedConnection
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql import lifecycle, side_data
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sql.migrations import MIGRATIONS, Migration, newest
from cli_session_proxy.stores.sql.tables import COMING, agents, meta
from cli_session_proxy_store_conformance import (
    CONTRACTS,
    WRITER_CONTRACTS,
    Contract,
    WriterContract,
)
from cli_session_proxy_store_conformance.samples import (
    HOLDER,
    a_begin,
    a_commit,
    a_turn,
    accepted,
    an_agent,
    complete,
    gathered,
    opened,
    turn_of,
)
from turnfault.ports import free_port

from ..postgres import PATIENCE, USER, HandClock, Postgres, folder, needed, server, unprivileged
from ..until import until

OTHER = Proxy("other", "there", 3600.0)
# A chain that is imported, and its one turn.
NEW = NewChain("local", "a", "a", True, 1.0, 2.0, lambda: "turn_1")
TURN = WholeTurn(Turn("turn_1", 0, 0, None, "completed", "sonnet", (Message.user("hello"),), 1.0), (Record("{}"),))


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
async def test_contract(contract: Contract, postgres_url: str) -> None:
    await contract(lambda: PostgresqlStore(postgres_url))


@pytest.mark.parametrize("contract", WRITER_CONTRACTS, ids=lambda contract: contract.__name__)
async def test_writer_contract(contract: WriterContract, postgres_url: str) -> None:
    clock = HandClock(postgres_url)
    await contract(lambda: PostgresqlStore(postgres_url), clock)


# --- transactions


async def lost(store: PostgresqlStore, url: str) -> None:
    """The server ends every connection of the store."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )


async def test_connections_that_the_server_has_ended_are_made_anew(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        await asyncio.gather(*(store.agent("local", "a") for _ in range(20)))
        await lost(store, postgres_url)
        assert await store.agent("local", "a") == agent
        await lost(store, postgres_url)
        assert (await complete(store, agent, "t1")).status == "completed"


@pytest.mark.parametrize("quick", [False, True], ids=["on a thread", "on the loop"])
async def test_work_whose_connection_is_lost_is_done_again_and_counts_once(postgres_url: str, quick: bool) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        tries = 0

        def work(conn: Connection) -> None:
            nonlocal tries
            tries += 1
            conn.execute(meta.insert(), {"name": "x", "value": str(tries)})
            if tries == 1:
                conn.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

        await store.database.write(work, quick=quick)
        found = await store.database.read(
            lambda conn: conn.execute(select(meta.c.value).where(meta.c.name == "x")).all()
        )
        assert [row.value for row in found] == ["2"]


async def test_work_that_may_be_done_only_once_is_not_done_again(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        tries = 0

        def work(conn: Connection) -> None:
            nonlocal tries
            tries += 1
            conn.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

        with pytest.raises(StoreUnavailable, match="try again in a moment"):
            await store.database.write(work, alone=True)
        assert tries == 1


async def test_a_commit_that_nobody_knows_the_end_of_is_told_as_that(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        commit = PipelinedConnection.commit

        def cut(conn: PipelinedConnection) -> None:
            commit(conn)
            conn.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(PipelinedConnection, "commit", cut)
        with pytest.raises(StoreUnavailable, match="it may be there or not") as told:
            await accepted(store, a_turn(agent, "t1"))
        assert told.value.detail["in_doubt"]
        monkeypatch.undo()
        assert (await turn_of(store, "t1")).status == "queued"


@pytest.mark.parametrize("quick", [False, True], ids=["on a thread", "on the loop"])
async def test_a_server_that_has_ended_the_session_before_the_commit_has_changed_nothing(
    postgres_url: str, quick: bool
) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        tries = 0

        def work(conn: Connection) -> None:
            nonlocal tries
            tries += 1
            driver = conn.connection.dbapi_connection
            assert isinstance(driver, PipelinedConnection)
            if tries == 1:
                end = "SELECT pg_terminate_backend(%s)", (driver.info.backend_pid,)
                gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", (driver.info.backend_pid,)
                with psycopg.connect(postgres_url, autocommit=True) as other:
                    other.execute(*end)
                    while other.execute(*gone).fetchone() != (0,):
                        pass
            lifecycle.accept(conn, **a_turn(agent, "t1"), limit=1000)

        await store.database.write(work, quick=quick)
        assert tries == 2
        assert [turn.id for turn in await store.unfinished_of(agent.key)] == ["t1"]


async def test_a_commit_that_the_server_answers_with_a_rollback_is_none(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):

        def work(conn: Connection) -> None:
            conn.execute(meta.insert(), {"name": "x", "value": ""})
            with suppress(DBAPIError):
                conn.exec_driver_sql("SELECT nothing")

        with pytest.raises(StoreUnavailable, match="rolled back"):
            await store.database.write(work)


async def test_a_warm_turn_goes_to_the_server_and_back_five_times(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        steps: list[int] = []
        send = PipelinedConnection.flush

        def counted(driver: PipelinedConnection) -> None:
            steps.append(len(driver._collected))
            send(driver)

        monkeypatch.setattr(PipelinedConnection, "flush", counted)
        await store.arrival("local", "t2", "a")
        turn, state = await store.accept(**a_turn(agent, "t2", "t1"))
        assert state is not None
        assert state.session is not None
        await store.begin(**a_begin(turn))
        await store.commit(**a_commit(turn, agent))
        monkeypatch.undo()
        assert [turn.id for turn in await gathered(store.turns(agent.key))] == ["t1", "t2"]
        assert [number for number in steps if number] == [1, 6, 7, 5, 4]


async def test_statements_are_prepared_where_one_session_answers_each_time(postgres_url: str, pooled_url: str) -> None:
    for url, prepared in ((postgres_url, True), (pooled_url, False)):
        store = PostgresqlStore(url)
        async with opened(lambda store=store: store):  # type: ignore[misc]
            agent = await an_agent(store)
            for n in range(3):
                await complete(store, agent, f"{prepared} {n}")
            held = await store.database.read(lambda conn: conn.exec_driver_sql("TABLE pg_prepared_statements").all())
            assert bool(held) is prepared


async def test_statements_and_rows_that_no_buffer_holds_go_both_ways(postgres_url: str) -> None:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        agent = await an_agent(store)
        said = {"type": "text", "text": "é" * 2_000_000}
        lines = tuple(Record(f'{{"n": {n}, "said": "{"x" * 3_000_000}"}}') for n in range(4))
        turn = await accepted(store, a_turn(agent, "t1"))
        await store.begin(**a_begin(turn))
        await store.commit(**a_commit(turn, agent, output=(said,), records=lines))
        state = await store.agent_state(agent.key, None, at_head=True)
        assert state is not None
        assert state.parent is not None
        assert state.parent.output == (said,)
        assert tuple(await store.records("t1")) == lines


async def test_two_transactions_that_wait_for_each_other_both_happen(postgres_url: str) -> None:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        assert isinstance(store, PostgresqlStore)
        database = store.database
        for name in ("x", "y"):
            await database.write(lambda conn, name=name: conn.execute(meta.insert(), {"name": name, "value": ""}))  # type: ignore[misc]
        both, tries = threading.Barrier(2), Counter[str]()

        def work(conn: Connection, first: str, second: str) -> None:
            conn.execute(meta.update().where(meta.c.name == first).values(value=meta.c.value + first))
            tries[first] += 1
            if tries[first] == 1:
                both.wait(PATIENCE)
            conn.execute(meta.update().where(meta.c.name == second).values(value=meta.c.value + first))

        await asyncio.gather(
            database.write(lambda conn: work(conn, "x", "y")), database.write(lambda conn: work(conn, "y", "x"))
        )
        found = await database.read(lambda conn: dict(conn.execute(select(meta.c.name, meta.c.value)).all()))
        assert tries.total() == 3
        assert [sorted(found[name]) for name in ("x", "y")] == [["x", "y"]] * 2


async def test_a_row_that_somebody_keeps_locked_is_waited_for_and_then_told(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        patience = store.database.busy_timeout
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM agents FOR UPDATE")
            store.database.busy_timeout = 0.3
            with pytest.raises(StoreUnavailable, match=r"locked by another program for more than 0\.3 s"):
                await accepted(store, a_turn(agent, "t1"))
        store.database.busy_timeout = patience
        await accepted(store, a_turn(agent, "t1"))


async def test_a_read_is_one_snapshot_and_writes_nothing(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):

        def twice(conn: Connection) -> tuple[int, int]:
            before = conn.scalar(select(func.count()).select_from(agents)) or 0
            with psycopg.connect(postgres_url) as other:
                other.execute(
                    "INSERT INTO agents (owner, agent_id, dir, named, created_at, last_at) "
                    "VALUES ('a', 'b', 'c', true, 1, 1)"
                )
            return before, conn.scalar(select(func.count()).select_from(agents)) or 0

        assert await store.database.read(twice) == (0, 0)
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.database.read(lambda conn: conn.execute(agents.delete()).rowcount)
        assert await store.agent("a", "b") is not None


async def test_what_is_written_a_moment_later_is_there_before_what_is_asked_for_after_it(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):

        def slow(conn: Connection) -> None:
            conn.exec_driver_sql("SELECT pg_sleep(0.1)")
            conn.execute(meta.insert(), {"name": "x", "value": ""})

        later = asyncio.ensure_future(store.database.write(slow, Urgency.LATER))
        await asyncio.sleep(0)
        there = await store.database.write(
            lambda conn: conn.execute(meta.update().where(meta.c.name == "x").values(value="y")).rowcount
        )
        await later
        assert there == 1


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
async def test_a_name_that_no_text_can_hold_is_the_clients_mistake(postgres_url: str, name: str) -> None:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        with pytest.raises(InvalidRequest, match="well-formed"):
            await store.ensure_agent("local", name, "dir", named=True, now=1.0)


# --- the schema


async def test_many_programs_open_a_new_database_at_once(postgres_url: str) -> None:
    stores = [PostgresqlStore(postgres_url) for _ in range(6)]
    await asyncio.gather(*(store.open() for store in stores))
    made = await asyncio.gather(*(an_agent(store) for store in stores))
    assert len({agent.key for agent in made}) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_migration_is_made_once_or_not_at_all(postgres_url: str) -> None:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        await an_agent(store)
    made = 0

    def step(conn: Connection) -> None:
        nonlocal made
        conn.exec_driver_sql("ALTER TABLE turns ADD COLUMN more TEXT")
        made += 1
        if made == 1:
            raise ValueError("half way")

    newer = (*MIGRATIONS, Migration("more", step, to=newest() + 1))
    with pytest.raises(ValueError, match="half way"):
        await PostgresqlStore(postgres_url, migrations=newer).open()
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:  # as it was
        assert await store.agent("local", "a") is not None
    stores = [PostgresqlStore(postgres_url, migrations=newer) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.close() for store in stores))
    assert made == 2
    with pytest.raises(StoreUnavailable, match="upgrade cli-session-proxy"):
        await PostgresqlStore(postgres_url).open()


async def test_a_proxy_that_was_paused_while_another_program_migrated_writes_no_more(
    postgres_url: str,
) -> None:
    """Its lease had expired, so it did not count as one that is on the store."""
    clock = HandClock(postgres_url)
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        agent = await an_agent(store)
        await store.renew(HOLDER)
        turn = await accepted(store, a_turn(agent, "t1", instance=HOLDER.id))
        await store.begin(**a_begin(turn))
        step = Migration("more", lambda _: None, to=newest() + 1, exclusive=True)
        newer = PostgresqlStore(postgres_url, migrations=(*MIGRATIONS, step))
        with pytest.raises(StoreUnavailable, match="stop every proxy"):
            await newer.open()
        await clock.advance(HOLDER.lease + 1)
        await newer.open()
        await newer.close()
        with pytest.raises(LeaseLost):
            await store.commit(**a_commit(turn, agent))
        for heartbeat in (store.renew(HOLDER), store.acquire(agent.key, HOLDER)):
            with pytest.raises(StoreUnavailable, match="upgrade cli-session-proxy"):
                await heartbeat


async def test_a_database_of_another_program_is_left_alone(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        conn.execute("CREATE TABLE theirs (x int)")
    with pytest.raises(StoreUnavailable, match="another program"):
        await PostgresqlStore(postgres_url).open()


async def test_an_import_whose_program_died_is_cleared_and_one_under_way_is_not(postgres_url: str) -> None:
    """The server releases a claim a moment after its connection is closed."""

    def claims() -> int:
        of_here = (
            "locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with psycopg.connect(postgres_url) as conn:
            row = conn.execute(f"SELECT count(*) FROM pg_locks WHERE {of_here}").fetchone()
        assert row is not None
        return int(row[0])

    async with (
        opened(lambda: PostgresqlStore(postgres_url)) as store,
        opened(lambda: PostgresqlStore(postgres_url)) as other,
    ):
        assert isinstance(store, PostgresqlStore)
        assert isinstance(other, PostgresqlStore)
        release_held, release_gone = store.database.claim("held"), store.database.claim("gone")
        assert release_held is not None
        assert release_gone is not None
        assert other.database.claim("held") is None
        for name in ("held", "gone"):
            await store.ensure_agent(COMING, name, f"{COMING}-{name}", named=True, now=1.0)
        release_gone()
        await until(lambda: claims() == 1)
        async with opened(lambda: PostgresqlStore(postgres_url)):
            assert await store.agent(COMING, "held") is not None
            assert await store.agent(COMING, "gone") is None
        release_held()
        await until(lambda: claims() == 0)
        release_again = other.database.claim("held")
        assert release_again is not None
        release_again()


async def test_an_import_that_ends_while_leftovers_are_looked_for_stays(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    loop, claim = asyncio.get_running_loop(), PostgresqlDatabase.claim

    def parts() -> Iterator[WholeTurn]:
        begun.set()
        assert go_on.wait(PATIENCE)
        yield TURN

    def claims(database: PostgresqlDatabase, name: str) -> Callable[[], None] | None:
        go_on.set()
        asyncio.run_coroutine_threadsafe(asyncio.wait([importing]), loop).result(PATIENCE)
        return claim(database, name)

    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        importing = asyncio.create_task(store.import_chain(NEW, parts()))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        monkeypatch.setattr(PostgresqlDatabase, "claim", claims)
        async with opened(lambda: PostgresqlStore(postgres_url)):
            assert await store.agent("local", "a") == await importing


async def test_no_turn_is_accepted_for_an_agent_that_an_import_replaces(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    conversation = side_data.conversation

    def between(conn: Connection, key: int) -> object:
        with psycopg.connect(postgres_url) as other:
            found.append(
                other.execute("SELECT key FROM agents WHERE key = %s FOR UPDATE SKIP LOCKED", (key,)).fetchone()
            )
        return conversation(conn, key)

    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        empty = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
        monkeypatch.setattr(side_data, "conversation", between)
        assert (await store.import_chain(NEW, [TURN])).key != empty.key
        assert found[0] is None


# --- servers


@pytest.mark.parametrize(
    ("option", "why"),
    [("fsync=off", "its `fsync` is off, so that a power cut loses acknowledged turns")],
)
async def test_a_server_that_may_lose_turns_is_refused(option: str, why: str) -> None:
    with server("-c", option) as unsafe, pytest.raises(StoreUnavailable, match=why):
        await PostgresqlStore(unsafe.new_url()).open()


async def test_a_standby_is_refused() -> None:
    with server(start=False) as standby:
        (standby.folder / "data" / "standby.signal").touch()
        standby.start()
        with pytest.raises(StoreUnavailable, match="it is a standby, which takes no writes: name the primary"):
            await PostgresqlStore(standby.url("postgres")).open()


async def test_a_commit_waits_for_the_servers_disk_whatever_its_own_setting_is(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        every = {Urgency.DURABLE: "on", Urgency.JOURNAL: "on", Urgency.AHEAD: "off", Urgency.LATER: "off"}
        for urgency, waits in every.items():
            asked = store.database.write(lambda conn: conn.exec_driver_sql("SHOW synchronous_commit").scalar(), urgency)
            assert await asked == waits
    with psycopg.connect(postgres_url) as conn:
        found = conn.execute("SHOW synchronous_commit").fetchone()
    assert found == ("off",)


@pytest.mark.full  # `tests.engine.test_hosts` kills one in every run
async def test_a_server_that_is_killed_and_comes_back_has_every_acknowledged_turn() -> None:
    with server() as mortal:
        store = PostgresqlStore(mortal.new_url())
        async with opened(lambda: store):
            agent = await an_agent(store)
            acknowledged: list[str] = []
            told: list[ProxyError] = []
            ended = asyncio.Event()

            async def writes(name: str) -> None:
                number = 0
                while not ended.is_set():
                    number += 1
                    try:
                        done = await complete(store, agent, f"{name}{number}", session=name)
                        acknowledged.append(done.id)
                    except ProxyError as exc:
                        told.append(exc)
                        await asyncio.sleep(0.01)

            writing = [asyncio.create_task(writes(name)) for name in "abc"]
            for _ in range(5):
                before = len(acknowledged)
                await until(lambda before=before: len(acknowledged) > before + 10)  # type: ignore[misc]
                await asyncio.to_thread(mortal.stop, signal.SIGKILL)
                with pytest.raises(StoreUnavailable, match="start PostgreSQL"):
                    await store.agent("local", "a")
                await asyncio.to_thread(mortal.start)
            ended.set()
            await asyncio.gather(*writing)
            await store.probe()
            kept = {turn.id: turn for turn in await gathered(store.turns(agent.key))}
            assert {kept[name].status for name in acknowledged} == {"completed"}
            assert [len(await store.records(name)) for name in acknowledged[-5:]] == [1] * 5
            assert {type(one) for one in told} <= {StoreUnavailable, NotFound}


async def test_a_turn_that_the_server_has_lost_is_never_begun(postgres_url: str) -> None:
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1"))
        with psycopg.connect(postgres_url) as crash:
            crash.execute("DELETE FROM turns")
        with pytest.raises(StoreUnavailable, match="before it had kept this turn"):
            await store.begin(**a_begin(turn))


async def test_a_turn_that_has_begun_survives_the_servers_death() -> None:
    with server("-c", "wal_writer_delay=10s") as mortal:
        store = PostgresqlStore(mortal.new_url())
        async with opened(lambda: store):
            agent = await an_agent(store)
            turn = await accepted(store, a_turn(agent, "t1"))
            await store.begin(**a_begin(turn))
            await asyncio.to_thread(mortal.stop, signal.SIGKILL)
            await asyncio.to_thread(mortal.start)
            assert (await store.commit(**a_commit(turn, agent))).status == "completed"


async def test_a_server_that_is_away_for_a_moment_costs_a_commit_only_time() -> None:
    with server() as mortal:
        store = PostgresqlStore(mortal.new_url())
        async with opened(lambda: store):
            agent = await an_agent(store)
            turn = await accepted(store, a_turn(agent, "t1"))
            await store.begin(**a_begin(turn))
            await asyncio.to_thread(mortal.stop)
            commit = asyncio.create_task(store.commit(**a_commit(turn, agent)))
            with pytest.raises(StoreUnavailable, match="cannot be used"):
                await accepted(store, a_turn(agent, "t2"))
            await asyncio.to_thread(mortal.start)
            assert (await commit).status == "completed"


async def test_a_server_that_does_not_come_back_is_told_in_time() -> None:
    with server() as mortal:
        store = PostgresqlStore(mortal.new_url())
        async with opened(lambda: store):
            await asyncio.to_thread(mortal.stop)
            store.database.busy_timeout = 0.5
            for ask in (store.probe(), store.agent("local", "a"), store.renew(HOLDER)):
                with pytest.raises(StoreUnavailable) as told:
                    await ask
                assert told.value.retry_after == 1.0


# --- who may come in: the password and TLS


def certify(folder: Path) -> None:
    """A certificate of `localhost` that nobody has signed, and its key."""
    named = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    files = ("-out", folder / "server.crt", "-keyout", folder / "server.key")
    command: list[str | Path] = ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", *named, *files]
    subprocess.run(command, check=True, capture_output=True)


PASSWORD = "correct@horse/battery"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Postgres]:
    """A server that takes TLS and a password on a port, and nothing else there."""
    with server("-c", "ssl=on", port=free_port(), start=False) as made:
        data = made.folder / "data"
        certify(data)
        for name in ("server.crt", "server.key"):
            (data / name).chmod(0o600)
            if unprivileged():
                os.chown(data / name, unprivileged()["user"], unprivileged()["group"])
        (data / "pg_hba.conf").write_text(f"local all {USER} trust\nhostssl all all all scram-sha-256\n")
        made.start()
        with psycopg.connect(made.url("postgres"), autocommit=True) as conn:
            conn.execute(f"CREATE USER guest PASSWORD '{PASSWORD}'")
            conn.execute("CREATE DATABASE chains OWNER guest TEMPLATE template0")
        yield made


def guest(guarded: Postgres, password: str | None = PASSWORD, **more: str) -> str:
    said = "" if password is None else f":{quote(password, safe='')}"
    options = urlencode({"sslmode": "verify-full", "sslrootcert": guarded.folder / "data" / "server.crt", **more})
    return f"postgresql://guest{said}@localhost:{guarded.port}/chains?{options}"


async def test_tls_that_is_verified_and_a_password_in_the_url(guarded: Postgres) -> None:
    async with opened(lambda: PostgresqlStore(guest(guarded))) as store:
        await complete(store, await an_agent(store), "t1")
        assert isinstance(store, PostgresqlStore)
        over = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert await store.database.read(lambda conn: conn.exec_driver_sql(over).scalar()) is True


async def test_a_password_from_the_environment(guarded: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    async with opened(lambda: PostgresqlStore(guest(guarded, None))) as store:
        await store.probe()


async def test_a_server_that_is_not_the_one_of_the_certificate_is_refused(guarded: Postgres, tmp_path: Path) -> None:
    await asyncio.to_thread(certify, tmp_path)
    for wrong in (
        guest(guarded, sslrootcert=str(tmp_path / "server.crt")),
        guest(guarded).replace("localhost", "127.0.0.1"),
    ):
        with pytest.raises(StoreUnavailable, match=r"certificate|match host"):
            await PostgresqlStore(wrong).open()


@pytest.mark.parametrize(
    ("place", "asks"),
    [
        *((place, asks) for place in ("the URL", "the environment", "a file") for asks in ("by a password", "by MD5")),
        ("the URL", "nothing"), ("the environment", "nothing"),
    ],
)  # fmt: skip
async def test_who_takes_the_servers_port_is_sent_no_password_and_no_query(
    asks: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of PostgreSQL's own: AuthenticationCleartextPassword, AuthenticationMD5Password, AuthenticationOk."""
    asked = {"by a password": (3, b""), "by MD5": (5, b"salt"), "nothing": (0, b"")}[asks]
    heard = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            while True:
                (length,) = struct.unpack("!I", await reader.readexactly(4))
                if length != 8:  # its start, and no question for TLS
                    break
                await reader.readexactly(4)
                writer.write(b"N")
            await reader.readexactly(length - 4)
            writer.write(b"R" + struct.pack("!II", 8 + len(asked[1]), asked[0]) + asked[1])
            while got := await reader.read(4096):
                heard.extend(got)
        ended.set()

    ended = asyncio.Event()
    port, password = free_port(), "marmalade"
    if place == "the environment":
        monkeypatch.setenv("PGPASSWORD", password)
    elif place == "a file":
        (tmp_path / "pass").write_text(f"*:*:*:*:{password}\n")
        (tmp_path / "pass").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pass"))
    url = f"postgresql://u{f':{password}' if place == 'the URL' else ''}@127.0.0.1:{port}/chains"
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        with pytest.raises(StoreUnavailable, match="asked otherwise than by SCRAM"):
            await PostgresqlStore(url).open()
        assert bytes(heard) == b""
        await ended.wait()


async def test_scram_without_tls_and_another_way_where_the_url_says_so(guarded: Postgres) -> None:
    rules = guarded.folder / "data" / "pg_hba.conf"
    before = rules.read_text()

    def loaded() -> float:
        with psycopg.connect(guarded.url("postgres")) as conn:
            found = conn.execute("SELECT extract(epoch FROM pg_conf_load_time())::float").fetchone()
            return float(found[0]) if found else 0.0

    async def allow(method: str) -> None:
        rules.write_text(f"{before}hostnossl all all all {method}\n" if method else before)
        was = loaded()
        with psycopg.connect(guarded.url("postgres")) as conn:
            conn.execute("SELECT pg_reload_conf()")
        await until(lambda: loaded() > was)

    url = guest(guarded, sslmode="disable")
    try:
        await allow("scram-sha-256")
        async with opened(lambda: PostgresqlStore(url)) as store:
            await store.probe()
        await allow("password")
        with pytest.raises(StoreUnavailable, match="say require_auth"):
            await PostgresqlStore(url).open()
        async with opened(lambda: PostgresqlStore(f"{url}&require_auth=password")) as store:
            await store.probe()
    finally:
        await allow("")


async def test_a_password_is_in_no_message(guarded: Postgres) -> None:
    store = PostgresqlStore(guest(guarded, "a-wrong-Secret1"))
    with pytest.raises(StoreUnavailable, match="password authentication failed") as told:
        await store.open()
    shown = "".join(traceback.format_exception(told.value))
    assert "a-wrong-Secret1" not in shown
    assert store.database.name == f"postgresql://guest@localhost:{guarded.port}/chains"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hid%ZZden@host/db",
        "postgresql://u@host/db?password=hidden&what=",
        "mysql://u:hidden@host/db",
    ],
)
def test_a_url_that_is_none_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://user@host:5432/database") as told:
        store_for(load(store=url))
    assert "hid" not in str(told.value).replace("hidden_", "")
    assert "hid" not in repr(told.value.detail)


def test_the_settings_show_no_password(tmp_path: Path) -> None:
    settings = load(store="postgresql://u:hidden@host/db?password=hidden", var=tmp_path)
    for shown in (repr(settings), str(settings), settings.model_dump_json(), place_of(settings)):
        assert "hidden" not in shown
    assert isinstance(store_for(settings), PostgresqlStore)
    assert not isinstance(store_for(Settings(var=tmp_path)), PostgresqlStore)


def test_a_file_in_the_working_directory_names_no_store(tmp_path: Path) -> None:
    (tmp_path / "cli_session_proxy.toml").write_text('store = "postgresql://elsewhere/db"')
    with pytest.raises(ConfigError, match="where conversations are kept"):
        load()


# --- a pooler in front


@pytest.fixture(scope="module")
def pooler(postgres: Postgres) -> Iterator[int]:
    """PgBouncer in transaction mode, with fewer sessions than a store has connections. Its port."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    needed(program, "PgBouncer")
    assert program is not None
    port = free_port()
    with folder() as place:
        (place / "users").write_text(f'"{USER}" ""\n')
        (place / "ini").write_text(
            f"[databases]\n* = user={USER} host={postgres.folder} port={postgres.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = 3\nauth_file = {place}/users\nlogfile = {place}/log\n"
        )
        command: Any = [program, "-q", place / "ini"]
        process = subprocess.Popen(command, cwd=place, env={}, **unprivileged())
        try:
            deadline = time.monotonic() + PATIENCE
            while not answers_at(port):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)  # another program's start: nothing to wait on but its port
            yield port
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.fixture
def pooled_url(postgres_url: str, pooler: int) -> str:
    """A new database behind the pooler."""
    return f"postgresql://{USER}@127.0.0.1:{pooler}/{conninfo_to_dict(postgres_url)['dbname']}"


def answers_at(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
        return True
    return False


# What one transaction might leave to the next one on its session shows in leases and claims.
def _behind_a_pooler() -> Iterator[object]:
    for contract in CONTRACTS:
        always = contract.__module__.rpartition(".")[2] in ("leases", "beside")
        yield pytest.param(contract, id=contract.__name__, marks=() if always else (pytest.mark.full,))


@pytest.mark.parametrize("contract", list(_behind_a_pooler()))
async def test_contract_behind_a_pooler(contract: Contract, pooled_url: str) -> None:
    await contract(lambda: PostgresqlStore(pooled_url))


@pytest.mark.full
@pytest.mark.parametrize("contract", WRITER_CONTRACTS, ids=lambda contract: contract.__name__)
async def test_writer_contract_behind_a_pooler(contract: WriterContract, postgres_url: str, pooled_url: str) -> None:
    clock = HandClock(postgres_url)
    await contract(lambda: PostgresqlStore(pooled_url), clock)


# --- what another proxy asks, told at once


async def listens(store: PostgresqlStore) -> None:
    """Wait until the store's bell is heard, with nothing left in it."""
    await store.until_asked("holder", 0.01)
    assert store._listener is not None
    bell = store._listener
    await until(lambda: bell.listens)
    await store.until_asked("holder", 3600.0)  # what was asked until now was not heard, so it is looked for


async def test_a_proxy_is_told_when_another_one_asks_for_an_agent_or_a_turn(postgres_url: str) -> None:
    one, two = PostgresqlStore(postgres_url), PostgresqlStore(postgres_url)
    async with opened(lambda: one), opened(lambda: two):
        agent = await an_agent(one)
        await accepted(one, a_turn(agent, "t1"))
        await listens(one)
        for asking in (two.acquire(agent.key, OTHER), two.cancel("t1", "holder", "client")):
            told = asyncio.create_task(one.until_asked("holder", 3600.0))
            await two.cancel("t1", "another", "client")  # is not for this one
            await two.forget_cancel("t1")
            await asking
            await told
            assert await one.asked("holder")


async def test_a_proxy_looks_by_itself_while_nobody_can_tell_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli_session_proxy.stores.postgresql.notify.AGAIN", 0.05)
    store = PostgresqlStore(postgres_url)
    async with opened(lambda: store):
        await listens(store)
        waiting = asyncio.create_task(store.until_asked("holder", 3600.0))
        await lost(store, postgres_url)
        await waiting
        await listens(store)


async def test_nothing_is_listened_to_behind_a_pooler(pooled_url: str) -> None:
    store = PostgresqlStore(pooled_url)
    async with opened(lambda: store):
        for _ in range(3):
            await store.until_asked("holder", 3600.0)
        assert store._listener is not None
        task = store._listener._task
        assert task is not None
        await task
        assert not store._listener.listens
        await store.until_asked("holder", 3600.0)
