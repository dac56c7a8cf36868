"""What can be found of a turn. A SQLite store's index: a cache that costs no turn anything, and forgets for good."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.engine import Engine

from cli_session_proxy.domain.searching import Search
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.stores.base import Store
from cli_session_proxy.stores.sql import searching
from cli_session_proxy.stores.sql.rows import dumps
from cli_session_proxy.stores.sql.store import SqlStore
from cli_session_proxy.stores.sqlite import search
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import an_agent, complete, imported_turns, opened

NAMES = ("type", "id", "data", "text", "input", "input_x", "thinking", "k")
JSON_TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}[]:, \n\ud800é'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


def strings_of(value: object, key: str = "", *, called: bool = False) -> list[str]:
    """What `searching` finds in JSON, the slow way."""
    if isinstance(value, str):
        return [value] if called or key not in ("type", "id", "data", "thinking") else []
    called = called or key.startswith("input")
    if isinstance(value, dict):
        return [one for name, inner in value.items() for one in strings_of(inner, name, called=called)]
    return [one for inner in value for one in strings_of(inner, called=called)] if isinstance(value, list) else []


@given(JSON_TEXTS)
def test_the_strings_of_a_turn_are_found_in_its_json(value: object) -> None:
    assert searching._strings_of(dumps(value)) == "\n".join(strings_of(value))


@given(JSON_TEXTS, st.integers(0, 60))
def test_of_json_that_is_cut_off_whole_strings_are_found(value: object, end: int) -> None:
    found = searching._strings_of(dumps(value)[:end])
    assert "\n".join(strings_of(value)).startswith(found)


def stored_at(folder: Path) -> SqliteStore:
    return SqliteStore(folder / "chains.sqlite3")


def the_index(folder: Path) -> Path:
    return folder / "chains.sqlite3.search"


def files_with(word: bytes, folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.is_file() and word in file.read_bytes()]


async def found(store: Store, words: str) -> list[str | None]:
    await store.index(60.0)
    return [hit.turn_id for hit in (await store.search(Search(words))).hits if hit.kind == "words"]


async def test_an_agent_that_is_deleted_leaves_no_word_in_the_index(tmp_path: Path) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        gone, kept = await an_agent(store, "gone"), await an_agent(store, "kept")
        for number in range(300):
            said = ({"type": "text", "text": f"xylophone{number} zebrafish"},)
            await complete(store, gone, f"g{number}", session="sg", output=said)
        await complete(store, kept, "k", session="sk", output=({"type": "text", "text": "aardvark"},))
        assert len(await found(store, "zebrafish")) == 20
        assert b"zebrafish" in the_index(tmp_path).read_bytes()
        await store.delete_agent(gone.key)
        for word in (b"zebrafish", b"xylophone", b"ylophone"):
            assert files_with(word, tmp_path) == []
        assert await found(store, "aardvark") == ["k"]


async def test_a_deletion_that_was_cut_short_is_finished_by_the_next_search(tmp_path: Path) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        assert isinstance(store, SqlStore)
        agent = await an_agent(store)
        await complete(store, agent, "t1", output=({"type": "text", "text": "zebrafish"},))
        assert await found(store, "zebrafish") == ["t1"]
        # what a proxy that ends between the two steps leaves
        await SqlStore.delete_agent(store, agent.key)
        assert b"zebrafish" in the_index(tmp_path).read_bytes()
        assert await found(store, "zebrafish") == []
        assert b"zebrafish" not in the_index(tmp_path).read_bytes()


async def test_all_turns_are_counted_without_reading_them_and_ids_only_for_what_one_may_hold(tmp_path: Path) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        for name in ("one", "other"):
            for number in range(3):
                said = ({"type": "text", "text": f"zebra fish {number}"},)
                await complete(store, await an_agent(store, name), f"{name}{number}", session=name, output=said)
        await store.index(60.0)
        ran: list[str] = []

        def note(_conn: object, _cursor: object, statement: str, *_more: object) -> None:
            ran.append(statement)

        event.listen(Engine, "before_cursor_execute", note)
        try:
            phrase = await store.search(Search('"zebra fish"'))
            asked_for_phrase = [statement for statement in ran if "lower(" in statement]
            part = await store.search(Search("other1"))
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        assert [len(phrase.hits), phrase.agents, phrase.turns, part.turns] == [6, 2, 6, 6]
        assert ("turn", "other1") in [(hit.kind, hit.turn_id) for hit in part.hits]
        assert asked_for_phrase == []
        assert any("lower(turns.id)" in statement for statement in ran)
        assert all("turns.agent_key =" in statement for statement in ran if "count(*)" in statement)


@pytest.mark.parametrize("spoiled", [b"no database at all" * 100, b""])
async def test_an_index_that_is_broken_is_made_anew(tmp_path: Path, spoiled: bytes) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        await complete(store, await an_agent(store), "t1")
        assert await found(store, "ask") == ["t1"]
        the_index(tmp_path).write_bytes(spoiled)
        assert await found(store, "ask") == ["t1"]


async def test_an_index_of_another_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        await complete(store, await an_agent(store), "t1")
        assert await found(store, "ask") == ["t1"]
        with closing(sqlite3.connect(the_index(tmp_path), isolation_level=None)) as conn:
            conn.execute("DELETE FROM words")
            conn.execute("PRAGMA user_version = 99")
        assert await found(store, "ask") == ["t1"]


async def test_an_index_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        await complete(store, await an_agent(store), "t1")
        the_index(tmp_path).mkdir()
        with pytest.raises(StoreUnavailable, match="remove the file, it is made anew"):
            await store.index(1.0)


async def test_a_turn_waits_for_no_index_and_writes_none(tmp_path: Path) -> None:
    async with opened(lambda: stored_at(tmp_path)) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        assert not the_index(tmp_path).exists()
        assert await found(store, "ask") == ["t1"]
        with closing(sqlite3.connect(the_index(tmp_path), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # somebody fills the index
            await complete(store, agent, "t2", "t1")
            other.execute("ROLLBACK")
        assert set(await found(store, "ask")) == {"t1", "t2"}


async def test_it_fills_in_pieces_and_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "PIECE", 10)
    async with opened(lambda: stored_at(tmp_path)) as store:
        agent = await an_agent(store)
        await store.import_turns(imported_turns(agent, 45), head="i44")
        done = [(await store.index(0.0)).done for _ in range(5)]
        assert done == [10, 20, 30, 40, 45]
        assert (await store.index(0.0)).is_whole


async def test_where_ranking_takes_too_long_the_newest_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "RANKING", -1.0)
    monkeypatch.setattr(search, "CHECK_EVERY", 1)
    async with opened(lambda: stored_at(tmp_path)) as store:
        agent = await an_agent(store)
        await store.import_turns(imported_turns(agent, 900), head="i899")
        await store.index(60.0)
        hits = (await store.search(Search("1", limit=3))).hits
        assert [hit.turn_id for hit in hits if hit.kind == "words"] == ["i199", "i198", "i197"]
        assert hits[0].snippet == ("", "199", "")
