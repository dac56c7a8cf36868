"""The search index of the store in PostgreSQL: it costs no turn anything, and its words are those of SQLite's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Text, cast, func

from cli_session_proxy.domain.searching import Search
from cli_session_proxy.stores.base import Store
from cli_session_proxy.stores.postgresql import search
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql import searching
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_turn, accepted, an_agent, complete, imported_turns, opened


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresqlStore]:
    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        assert isinstance(store, PostgresqlStore)
        yield store


async def found(store: Store, words: str) -> list[str | None]:
    await store.index(60.0)
    return [hit.turn_id for hit in (await store.search(Search(words))).hits if hit.kind == "words"]


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(query.encode()).fetchall()


TEXTS = (
    "the Café in Lisbon", "/etc/motd and ada-17", "naïve ﬁne ½ Straße", "foo_bar snake_case", "a.b.c@example.com",
    "漢字 かな", "e\u0301te\u0301 İstanbul", "3.14 1e5 0x1F", "it's o'clock \\ back", "x" * 3000,
)  # fmt: skip
QUERIES = (
    "cafe", "CAFÉ lis", "motd", "ada-17", '"etc motd"', "17", "naive", "bar", "snake", "example", "com a", "漢字",
    "かな", "ete", "istanbul", "14", "1e5", "clock", "s o", '"Lisbon in"', "strasse",
    "xxx", "foo bar", "back", "'", "\\", "zz",
)  # fmt: skip


async def test_words_are_the_same_as_in_a_sqlite_store(store: PostgresqlStore, tmp_path: Path) -> None:
    async with opened(lambda: SqliteStore(tmp_path / "chains.sqlite3")) as other:
        for one in (store, other):
            agent = await an_agent(one)
            for n, text in enumerate(TEXTS):
                await complete(one, agent, f"t{n}", output=({"type": "text", "text": text},))
        for query in QUERIES:
            if query != "strasse":  # SQLite leaves a sharp s as it is; here either is found by the other
                assert set(await found(store, query)) == set(await found(other, query)), query
        assert await found(store, "strasse") == await found(store, "STRASSE") == ["t2"]


async def test_a_store_that_has_no_index_yet_is_filled_in_pieces(
    store: PostgresqlStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "PIECE", 10)
    agent = await an_agent(store)
    await store.import_turns(imported_turns(agent, 45), head="i44")
    with psycopg.connect(postgres_url) as conn:  # as a former version left it
        conn.execute("DROP TABLE search")
    async with opened(lambda: PostgresqlStore(postgres_url)) as again:
        assert [(await again.index(0.0)).done for _ in range(5)] == [10, 20, 30, 40, 45]
        assert (await again.index(0.0)).is_whole
        assert await found(again, "44") == ["i44"]


async def test_an_index_of_another_version_is_made_anew(
    store: PostgresqlStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await complete(store, await an_agent(store), "t1")
    assert await found(store, "ask") == ["t1"]
    for version, kept in (("1", 1), ("another", 0)):
        monkeypatch.setattr(search, "_SCHEMA", search._SCHEMA.replace("'1'", f"'{version}'"))
        monkeypatch.setattr(search, "VERSION", version)
        async with opened(lambda: PostgresqlStore(postgres_url)) as again:
            assert rows(postgres_url, "SELECT count(*) FROM search") == [(kept,)]
            assert await found(again, "ask") == ["t1"]


async def test_where_ranking_takes_too_long_the_newest_are_shown(
    store: PostgresqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await an_agent(store)
    await store.import_turns(imported_turns(agent, 900), head="i899")
    await store.index(60.0)
    monkeypatch.setattr(search, "_RANK", lambda *_: cast(func.pg_sleep(60), Text))
    monkeypatch.setattr(searching, "RANKING", 0.05)
    hits = (await store.search(Search("1", limit=3))).hits
    assert [hit.turn_id for hit in hits if hit.kind == "words"] == ["i199", "i198", "i197"]
    assert hits[0].snippet == ("", "199", "")


async def test_a_turn_waits_for_no_index_and_writes_none(store: PostgresqlStore, postgres_url: str) -> None:
    agent = await an_agent(store)
    await complete(store, agent, "t1")
    assert rows(postgres_url, "SELECT * FROM search") == []
    with psycopg.connect(postgres_url) as filling:  # somebody fills the index, and has just taken this turn in
        filling.execute(f"SELECT pg_advisory_xact_lock({search.FILLING})")
        filling.execute("SELECT 1 FROM turns FOR KEY SHARE")
        filling.execute("INSERT INTO search SELECT seq, 'queued', ''::tsvector FROM turns")
        await store.set_delivery("t1", "delivered")
        await complete(store, agent, "t2", "t1")
        filling.rollback()
    assert set(await found(store, "ask")) == {"t1", "t2"}


async def test_an_agent_that_is_deleted_leaves_no_row_in_the_index(store: PostgresqlStore, postgres_url: str) -> None:
    gone, kept = await an_agent(store, "gone"), await an_agent(store, "kept")
    await complete(store, gone, "t1")
    await complete(store, kept, "t2", session="s2")
    assert (await store.index(60.0)).done == 2
    await asyncio.gather(store.delete_agent(gone.key), *(store.index(60.0) for _ in range(3)))
    assert rows(postgres_url, "SELECT count(*) FROM search") == [(1,)]


async def test_a_turn_that_is_tried_again_is_found_by_its_new_answer(store: PostgresqlStore) -> None:
    agent = await an_agent(store)
    await accepted(store, a_turn(agent, "t1"))
    await store.fail("t1", "failed", {"code": "x"}, (), {}, 20.0)
    assert await found(store, "answer") == []
    await store.requeue("t1", None)
    await store.fail("t1", "cancelled", {"code": "x"}, (), {}, 21.0)
    await found(store, "answer")
    assert (await store.search(Search("ask"))).hits[0].status == "cancelled"


async def test_of_a_turn_with_more_words_than_the_server_takes_the_first_are_found(store: PostgresqlStore) -> None:
    agent = await an_agent(store)
    many = tuple({"type": "text", "text": " ".join(f"w{n}x{part}" for n in range(30_000))} for part in range(3))
    tools = ({"type": "tool_use", "id": "x", "name": "t", "input": {"text": many[1]["text"]}},)
    await complete(store, agent, "t1", output=many[:1], tools=tools)
    assert await found(store, "w0x0") == await found(store, "w20000x0") == await found(store, "w50x1") == ["t1"]


def test_a_snippet_is_the_part_with_the_most_of_the_words() -> None:
    text = "one " + "far away " * 40 + "two words stand here, one more " + "and so on " * 40
    phrases = [search._Phrase(("two", "words"), goes_on=False), search._Phrase(("on",), goes_on=True)]
    _, pieces = search._snippet(text, phrases)
    assert pieces[1::2][:2] == ("two words", "one")
    assert pieces[0] == "…"
    assert pieces[-1].endswith("…")
    assert "".join(pieces).strip("…") in text
    assert search._snippet("nothing", phrases) == (0, ())
