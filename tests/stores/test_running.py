"""Transactions on the event loop: what keeps them whole, and the loop free."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
import uvloop
from sqlalchemy import Connection, select, text

from cli_session_proxy.domain.models import Message, Record, Turn
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.stores.postgresql.database import WRITERS
from cli_session_proxy.stores.postgresql.running import Slots, on_thread
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql import lifecycle
from cli_session_proxy.stores.sql.store import FEW, LARGE, SMALL
from cli_session_proxy.stores.sql.tables import meta
from cli_session_proxy_store_conformance.samples import a_begin, a_commit, a_turn, accepted, an_agent, opened

from ..postgres import server
from ..until import until

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresqlStore]:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        assert isinstance(store, PostgresqlStore)
        yield store


def on_the_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


def note(conn: Connection, name: str) -> None:
    conn.execute(meta.insert(), {"name": name, "value": "noted"})


def slowly(conn: Connection, names: Sequence[str]) -> None:
    assert on_the_loop()
    for name in names:
        note(conn, name)
        conn.exec_driver_sql("SELECT pg_sleep(0.1)")


def held_up(conn: Connection) -> None:
    """While somebody else holds the lock."""
    note(conn, "a")
    conn.exec_driver_sql("SELECT pg_advisory_xact_lock(7)")
    note(conn, "b")


def held_up_together(conn: Connection) -> None:
    """The same as a turn's own statements."""
    driver: Any = conn.connection.dbapi_connection
    driver.execute("INSERT INTO meta (name, value) VALUES ('a', 'noted')")
    driver.execute("SELECT pg_advisory_xact_lock(7)").fetchone()
    driver.execute("INSERT INTO meta (name, value) VALUES ('b', 'noted')")


async def until_held_up(store: PostgresqlStore) -> None:
    async def is_held_up() -> bool:
        waits = text("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'")
        return await store.database.read(lambda conn: conn.scalar(waits) is not None)

    await until(is_held_up)


async def noted(store: PostgresqlStore) -> set[str]:
    query = select(meta.c.name).where(meta.c.value == "noted")
    return set(await store.database.read(lambda conn: conn.scalars(query).all()))


async def ticks(work: asyncio.Future[Any]) -> int:
    """How often others came to run until this was done."""
    count = 0
    while not work.done():
        await asyncio.sleep(0.001)
        count += 1
    return count


@pytest.mark.parametrize("loop", LOOPS)
def test_turns_of_many_agents_at_once(postgres_url: str, loop: str) -> None:
    async def turns(store: PostgresqlStore, name: str) -> list[str]:
        agent, done = await an_agent(store, name), list[str]()
        for n in range(10):
            await store.arrival("local", f"{name}{n}", name)
            turn, _ = await store.accept(**a_turn(agent, f"{name}{n}", done[-1] if done else None))
            await store.begin(**a_begin(turn))
            done.append((await store.commit(**a_commit(turn, agent, session=name))).id)
        return [turn.id for turn in await store.path(done[-1])]

    async def all_of_them() -> None:
        async with opened(lambda: PostgresqlStore(postgres_url)) as store:
            assert isinstance(store, PostgresqlStore)
            agents = [f"{n}-" for n in range(8)]
            found = await asyncio.gather(*(turns(store, name) for name in agents))
            assert found == [[f"{name}{n}" for n in range(10)] for name in agents]

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(all_of_them())


async def test_a_cancelled_callers_transaction_ends_whole(store: PostgresqlStore) -> None:
    with store.database.connection() as other:
        other.exec_driver_sql("SELECT pg_advisory_lock(7)")
        write = asyncio.create_task(store.database.write(held_up, quick=True))
        await until_held_up(store)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        assert await noted(store) == set()
        other.exec_driver_sql("SELECT pg_advisory_unlock(7)")
    await store.close()
    await store.open()
    assert await noted(store) == {"a", "b"}


async def test_closing_waits_for_what_runs_and_for_what_waits(store: PostgresqlStore) -> None:
    names = [f"{number}" for number in range(WRITERS + 2)]
    writes = [asyncio.create_task(store.database.write(partial(slowly, names=[name]), quick=True)) for name in names]
    await asyncio.sleep(0.01)
    await store.close()
    for write in writes:
        await write
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.database.write(partial(note, name="x"), quick=True)
    await store.open()
    assert await noted(store) == set(names)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("work", [held_up, held_up_together], ids=["by a cursor", "together"])
@pytest.mark.sample(2)
def test_a_loop_that_ends_without_closing_the_store_leaves_nothing_half_done(
    postgres_url: str, loop: str, work: Callable[..., None]
) -> None:
    async def leave() -> None:
        store = PostgresqlStore(postgres_url)
        await store.open()
        write = asyncio.create_task(store.database.write(work, quick=True))
        await until_held_up(store)
        write.cancel()

    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(7)")
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(leave())
        gc.collect()
        assert conn.execute("SELECT name FROM meta WHERE value = 'noted'").fetchall() == []


async def test_a_row_that_another_program_has_locked_keeps_only_its_own_write_waiting(
    store: PostgresqlStore, postgres_url: str
) -> None:
    agent = await an_agent(store)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM agents FOR UPDATE")
        accepting = asyncio.create_task(accepted(store, a_turn(agent, "t1")))
        async with asyncio.timeout(60):
            assert (await store.arrival("local", "t1", "a"))[1] == agent
        await asyncio.sleep(0.05)
        assert not accepting.done()
    assert (await accepting).id == "t1"


async def test_no_server_and_no_new_connection_keep_the_loop_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as mortal:
        store = PostgresqlStore(mortal.new_url(), busy_timeout=60)
        async with opened(lambda: store):
            connected: list[bool] = []
            connect = store.database._connect

            def seen() -> Any:
                connected.append(on_the_loop())
                return connect()

            monkeypatch.setattr(store.database, "_connect", seen)
            await asyncio.to_thread(mortal.stop)
            write = asyncio.create_task(store.database.write(lambda conn: note(conn, "x"), quick=True))
            await asyncio.sleep(0.3)
            assert not write.done()
            await asyncio.to_thread(mortal.start)
            await write
            assert await noted(store) == {"x"}


async def test_a_server_that_ends_in_the_middle_of_a_write_on_the_loop() -> None:
    with server() as mortal:
        store = PostgresqlStore(mortal.new_url())
        async with opened(lambda: store):
            tries = 0

            def work(conn: Connection) -> None:
                nonlocal tries
                tries += 1
                note(conn, "a")
                conn.exec_driver_sql("SELECT pg_sleep(%s)", (3600 if tries == 1 else 0,))

            write = asyncio.create_task(store.database.write(work, quick=True))
            await until(lambda: tries == 1)
            await asyncio.to_thread(mortal.stop)
            await asyncio.to_thread(mortal.start)
            await write
            assert tries == 2
            assert await noted(store) == {"a"}


async def test_two_on_the_loop_that_wait_for_each_other_both_happen(store: PostgresqlStore) -> None:
    for name in ("x", "y"):
        await store.database.write(partial(note, name=name))
    tries = 0
    locked: set[str] = set()

    def work(conn: Connection, first: str, second: str) -> None:
        nonlocal tries
        assert on_the_loop()
        tries += 1
        for name in (first, second):
            conn.execute(meta.update().where(meta.c.name == name).values(value=meta.c.value + first))
            locked.add(name)
            while len(locked) < 2:  # until each has the row that the other one wants
                conn.exec_driver_sql("SELECT pg_sleep(0.01)")

    both = asyncio.gather(
        *(store.database.write(partial(work, first=a, second=b), quick=True) for a, b in (("x", "y"), ("y", "x")))
    )
    assert await ticks(both) > 10
    found = await store.database.read(lambda conn: dict(conn.execute(select(meta.c.name, meta.c.value)).all()))
    assert tries == 3
    assert [sorted(found[name].removeprefix("noted")) for name in ("x", "y")] == [["x", "y"]] * 2


async def test_what_a_quick_write_raises_undoes_it_and_its_connection_is_used_again(store: PostgresqlStore) -> None:
    def work(conn: Connection) -> None:
        slowly(conn, ["a"])
        raise ZeroDivisionError

    before = len(store.database._idle)
    with pytest.raises(ZeroDivisionError):
        await store.database.write(work, quick=True)
    assert len(store.database._idle) == before
    assert await noted(store) == set()


@pytest.mark.parametrize(
    ("asked", "answered", "lines", "where"),
    [(100, 100, 3, [True]), (100, SMALL, 3, [False]), (100, 100, FEW + 1, [False]), (LARGE, 100, 3, [True, False])],
    ids=["small", "a long answer", "many records", "a long prompt"],
)
async def test_a_small_commit_is_on_the_loop(
    store: PostgresqlStore, monkeypatch: pytest.MonkeyPatch, asked: int, answered: int, lines: int, where: list[bool]
) -> None:
    agent, seen = await an_agent(store), list[bool]()
    commit = lifecycle.commit

    def committed(conn: Connection, **done: Any) -> Turn:
        seen.append(on_the_loop())
        return commit(conn, **done)

    monkeypatch.setattr(lifecycle, "commit", committed)
    prompt = Message("user", ({"type": "text", "text": "x" * asked},))
    turn = await accepted(store, a_turn(agent, "t1", input=(prompt,)))
    await store.begin(**a_begin(turn))
    records = tuple(Record(f'{{"n": {n}}}') for n in range(lines))
    said = {"type": "text", "text": "x" * answered}
    done = await store.commit(**a_commit(turn, agent, output=(said,), records=records))
    assert done == await store.turn("t1")
    assert len(await store.records("t1")) == lines
    assert seen == where


# --- places


@pytest.fixture
async def places() -> AsyncIterator[Slots]:
    made = Slots(2, "here")
    yield made
    await made.drain()
    await asyncio.to_thread(made.stop)


async def test_so_many_run_at_once_of_both_kinds_together_and_begin_in_their_order(places: Slots) -> None:
    began: list[int] = []
    goes_on = [threading.Event() for _ in range(4)]

    def work(number: int) -> bool:
        began.append(number)
        on_thread(goes_on[number].wait)
        return on_the_loop()

    done = [places.run(partial(work, number), quick=number % 2 == 0) for number in range(4)]
    await until(lambda: len(began) == 2)
    await asyncio.sleep(0.01)
    assert sorted(began) == [0, 1]
    done[0].cancel()  # it has begun: its place is free when it has ended
    await asyncio.sleep(0.01)
    assert len(began) == 2
    goes_on[1].set()
    await until(lambda: len(began) == 3)
    assert began[2] == 2
    done[3].cancel()
    for event in goes_on:
        event.set()
    assert [await done[1], await done[2]] == [False, True]
    await places.drain()
    assert began[2:] == [2]


async def test_what_it_raises_on_the_loop_is_raised_where_it_is_waited_for(places: Slots) -> None:
    def work() -> None:
        assert on_thread(on_the_loop) is False
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await places.run(work, quick=True)
    assert await places.run(on_the_loop, quick=True) is True
    assert await places.run(on_the_loop) is False
