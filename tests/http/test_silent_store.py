"""A PostgreSQL server, or something before it, that keeps a connection and says nothing more over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, select

from cli_session_proxy.domain.models import Agent, Message, Turn
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.http import relay
from cli_session_proxy.stores.base import NewChain, WholeTurn
from cli_session_proxy.stores.postgresql import database
from cli_session_proxy.stores.postgresql.pipeline import PipelinedConnection
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql import importing
from cli_session_proxy.stores.sql.tables import meta
from cli_session_proxy_store_conformance.samples import opened

from ..until import until
from .cluster import Host, Line, cluster, line, up
from .test_leaving import Client
from .test_passing_on import behind, said, under_way

# Commits of turns that are accepted wait until nobody holds this lock.
SLOW = """
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            WHILE NOT pg_try_advisory_xact_lock_shared(1) LOOP PERFORM pg_sleep(0.02); END LOOP;
            RETURN NULL;
        END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON turns DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION slow();
"""


@asynccontextmanager
async def between(url: str) -> AsyncIterator[tuple[str, Line]]:
    """A way to the server over a line, and the line."""
    told = conninfo_to_dict(url)
    async with line(to=Path(str(told["host"])) / f".s.PGSQL.{told['port']}") as way:
        yield f"postgresql://{told['user']}@127.0.0.1:{urlsplit(way.address).port}/{told['dbname']}", way


def at_the_commit_of(conn: Connection, happens: Callable[[], None]) -> None:
    """It happens when this transaction's commit is about to be sent."""
    driver = conn.connection.dbapi_connection
    assert isinstance(driver, PipelinedConnection)
    commit = driver.commit

    def commits() -> None:
        del driver.commit
        happens()
        commit()

    driver.commit = commits


def at_the_next_commit(store: PostgresqlStore, happens: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """It happens at the commit of the transaction that this store's caller begins next: no other program's, nor one of
    the proxy's background, if the caller asks the store for it without a pause."""
    write = store.database.write

    def writes(work: Callable[[Connection], Any], *given: Any, **how: Any) -> Any:
        patch.setattr(store.database, "write", write)

        def works(conn: Connection) -> Any:
            done = work(conn)
            at_the_commit_of(conn, happens)
            return done

        return write(works, *given, **how)

    patch.setattr(store.database, "write", writes)


@pytest.mark.parametrize("quick", [False, True], ids=["on a thread", "on the loop"])
async def test_a_commit_that_is_not_answered_is_in_doubt_and_the_next_connection_works(
    quick: bool, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE", 0.5)

    def write(conn: Connection) -> None:
        conn.execute(meta.insert(), {"name": "x", "value": "y"})
        at_the_commit_of(conn, way.lose_answers)

    def read(conn: Connection) -> list[str]:
        return list(conn.scalars(select(meta.c.value).where(meta.c.name == "x")).all())

    async with between(postgres_url) as (url, way), opened(lambda: PostgresqlStore(url)) as store:
        assert isinstance(store, PostgresqlStore)
        with pytest.raises(StoreUnavailable, match="said nothing for") as told:
            await store.database.write(write, quick=quick)
        assert told.value.detail["in_doubt"]
        assert await store.database.read(read, quick=quick) == ["y"]


@pytest.mark.parametrize("quick", [False, True], ids=["on a thread", "on the loop"])
async def test_a_read_that_is_not_answered_is_repeated_on_another_connection(
    quick: bool, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE", 0.5)
    async with between(postgres_url) as (url, way), opened(lambda: PostgresqlStore(url)) as store:
        assert isinstance(store, PostgresqlStore)
        await store.database.read(lambda conn: conn.exec_driver_sql("SELECT 1").scalar(), quick=quick)
        way.lose_answers()
        assert await store.database.read(lambda conn: conn.exec_driver_sql("SELECT 1").scalar(), quick=quick) == 1


async def test_an_import_whose_end_is_not_answered_takes_no_chain_away(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE_ALONE", 0.5)
    finish = importing.ChainImport.finish

    def finishes(chain: importing.ChainImport, conn: Connection, new: NewChain) -> Agent:
        at_the_commit_of(conn, way.lose_answers)
        return finish(chain, conn, new)

    monkeypatch.setattr(importing.ChainImport, "finish", finishes)
    turn = Turn("turn_1", 0, 0, None, "completed", "sonnet", (Message.user("hello"),), 1.0)
    async with between(postgres_url) as (url, way), opened(lambda: PostgresqlStore(url)) as store:
        with pytest.raises(StoreUnavailable, match="may be there or not"):
            await store.import_chain(
                NewChain("local", "a", "a", True, 1.0, 2.0, lambda: turn.id), [WholeTurn(turn, ())]
            )
        assert await store.agent("local", "a") is not None  # others may have continued it meanwhile


async def test_a_turn_whose_commit_is_not_answered_is_the_same_turn_at_another_proxy(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENCE", 0.5)
    async with between(postgres_url) as (url, way), cluster(postgres_url, tmp_path, 1) as (one,):
        two = Host(url, tmp_path / "two")
        async with up(two):
            await two.chat("zero")
            commit = two.store.commit

            async def commits(*given: object, **how: object) -> object:
                at_the_next_commit(two.store, way.lose_answers, monkeypatch)
                return await commit(*given, **how)  # type: ignore[arg-type]

            monkeypatch.setattr(two.store, "commit", commits)
            failed = await two.chat("one")
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_unavailable")
            assert said(await one.chat("one")) == "You said: one (2)"
            assert [path[-1] for path in [*one.asked, *two.asked]] == ["zero", "one"]
            await asyncio.gather(two.store.agent("local", "a"), one.store.agent("local", "a"))


async def test_a_turn_whose_acceptance_is_committed_after_its_client_was_told_to_send_it_again_ends(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit may take longer than a minute: a disk stalls, or a standby that has to confirm it is away. The turn was
    queued for ever, at a proxy that did not know it."""
    monkeypatch.setattr(database, "SILENCE", 0.5)
    async with cluster(postgres_url, tmp_path, 1) as (one,):
        await one.chat("zero")
        with psycopg.connect(postgres_url, autocommit=True) as conn:
            conn.execute(SLOW)
            conn.execute("SELECT pg_advisory_lock(1)")
            failed = await one.chat("one")
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_unavailable")
            await until(lambda: not one.engine._ends.waiting)
            assert [turn.status for turn in await one.turns()] == ["completed"]
            conn.execute("SELECT pg_advisory_unlock(1)")

            async def is_ended() -> bool:
                return [turn.status for turn in await one.turns()] == ["completed", "cancelled"]

            await until(is_ended)
            conn.execute("DROP TRIGGER slow ON turns")
        assert said(await one.chat("one")) == "You said: one (2)"
        assert one.asked == [["zero"], ["zero", "one"]]


async def test_who_left_while_the_note_of_it_was_lost_and_says_the_same_again_has_said_it_once(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note was written once, and dropped if its commit was in doubt."""
    async with between(postgres_url) as (url, way):
        one = Host(url, tmp_path / "one")
        async with up(one):
            await one.chat("zero")
            client, tried = Client(one.settings.port, stream=False), asyncio.Event()
            commit, note = one.store.commit, one.store.set_delivery

            async def committed(*given: Any, **how: Any) -> Turn:
                turn = await commit(*given, **how)
                client.leave()
                return turn

            async def noted(*given: Any, **how: Any) -> None:
                monkeypatch.setattr(one.store, "set_delivery", note)
                monkeypatch.setattr(one.store, "commit", commit)
                at_the_next_commit(one.store, way.cut, monkeypatch)
                try:
                    await note(*given, **how)
                finally:
                    tried.set()

            monkeypatch.setattr(one.store, "commit", committed)
            monkeypatch.setattr(one.store, "set_delivery", noted)
            client.first.say()
            await tried.wait()
            client.second.say()
            assert b"200 OK" in await client.second.answer()
            await until(lambda: not one.engine.progress())
            assert one.asked == [["zero"], ["zero", "one"]]


@pytest.mark.parametrize("again_at", [0, 1], ids=["another", "the same"])
@pytest.mark.sample(1)
async def test_an_answer_whose_claim_is_not_answered_is_given_to_the_same_request_again(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_at: int
) -> None:
    """It was pending then, as if its client had it: the same request was a second turn."""
    monkeypatch.setattr(database, "SILENCE", 0.5)
    async with between(postgres_url) as (url, way), cluster(postgres_url, tmp_path, 1) as (one,):
        two = Host(url, tmp_path / "two")
        async with up(two):
            await one.chat("zero")
            client = Client(one.settings.port, two.settings.port, stream=False)
            commit, claim = one.store.commit, two.store.claim

            async def commits(*given: Any, **how: Any) -> Turn:
                client.leave()
                return await commit(*given, **how)

            async def claims(*given: Any) -> bool:
                monkeypatch.setattr(two.store, "claim", claim)
                at_the_next_commit(two.store, way.lose_answers, monkeypatch)
                return await claim(*given)

            async def is_undelivered() -> bool:
                return (await one.turns())[-1].delivery == "undelivered"

            monkeypatch.setattr(one.store, "commit", commits)
            monkeypatch.setattr(two.store, "claim", claims)
            client.first.say()
            await until(is_undelivered)
            client.second.say()
            assert b"503 Service Unavailable" in await client.second.answer()
            assert said(await (one, two)[again_at].chat("one", stream=False)) == "You said: one (2)"
            assert [path[-1] for path in [*one.asked, *two.asked]] == ["zero", "one"]


async def test_a_lost_line_whose_note_was_lost_too_makes_no_second_turn(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One outage of a network takes the line to the other proxy and the one to the store."""
    async with (
        line() as there,
        between(postgres_url) as (url, way),
        cluster(postgres_url, tmp_path, 1, each=[behind(there)], silence=2.0) as (one,),
    ):
        two = Host(url, tmp_path / "two", silence=2.0)
        async with up(two):
            await one.chat("one")
            waiting = await under_way(one, two)
            doubt = two.store.doubt

            async def doubts(*given: Any) -> None:
                monkeypatch.setattr(two.store, "doubt", doubt)
                at_the_next_commit(two.store, way.cut, monkeypatch)
                await doubt(*given)

            monkeypatch.setattr(two.store, "doubt", doubts)
            with monkeypatch.context() as while_it_runs:
                while_it_runs.setattr(relay, "PROBE_TIMEOUT", 0.5)
                there.lose()
                one.model.open.set()
                failed = await waiting
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "interrupted")
            assert said(await two.chat("two")) == "You said: two (2)"
            assert [path[-1] for path in [*one.asked, *two.asked]] == ["one", "two"]


async def test_a_turn_that_was_queued_again_after_its_client_was_told_otherwise_ends(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ran it: each retry waited until `turn_timeout`."""
    monkeypatch.setattr(database, "SILENCE", 0.5)
    retry = {"Idempotency-Key": "k"}
    async with cluster(postgres_url, tmp_path, 1) as (one,):
        await one.chat("zero")
        one.model.reached.clear()
        one.model.open.clear()
        first = asyncio.create_task(one.chat("one", headers=retry))
        await one.model.reached.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        async def status(wanted: str) -> bool:
            return (await one.turns())[-1].status == wanted

        await until(lambda: status("cancelled"))
        one.model.open.set()
        with psycopg.connect(postgres_url, autocommit=True) as conn:
            conn.execute(SLOW.replace("AFTER INSERT", "AFTER UPDATE"))
            conn.execute("SELECT pg_advisory_lock(1)")
            failed = await one.chat("one", headers=retry)
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_unavailable")
            await until(lambda: not one.engine._ends.waiting)
            conn.execute("SELECT pg_advisory_unlock(1)")
            await until(lambda: status("queued"))
            conn.execute("DROP TRIGGER slow ON turns")
        assert said(await one.chat("one", headers=retry)) == "You said: one (2)"
