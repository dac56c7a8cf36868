"""Images once by hash, and every text back to the character."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sqlite3
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_session_proxy.domain.forms import ImageCutter, restore
from cli_session_proxy.domain.models import Agent, Message, Record
from cli_session_proxy.errors import ContextTooLong
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql import reading, rows
from cli_session_proxy.stores.sql.rows import dumps
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_commit, a_turn, accepted, an_agent, opened, turn_of

PICTURE = base64.b64encode(random.Random(1).randbytes(10_000)).decode()

EVERY = settings(deadline=None)
FILES = settings(deadline=None, max_examples=40)  # each example makes a file and syncs it

# any text at all, with halves of surrogate pairs
TEXT = st.text(st.characters(codec=None, categories=None))
IMAGE = st.binary(min_size=0, max_size=200).map(lambda data: base64.b64encode(data).decode())
KEY = st.one_of(st.sampled_from(["data", "base64", "source", "type"]), TEXT)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXT, IMAGE),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEY, inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    """JSON in any spelling, cut anywhere, or no JSON at all."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", "\t:  ")]))
    line = json.dumps(draw(VALUE), ensure_ascii=draw(st.booleans()), separators=separators)
    if draw(st.booleans()):
        line = line.replace("/", "\\/")
    return draw(st.one_of(st.just(line), st.just(line[: len(line) // 2] + draw(TEXT)), TEXT))


@EVERY
@given(st.lists(lines(), max_size=5))
def test_what_is_cut_is_put_back_to_the_character(texts: list[str]) -> None:
    cutter = ImageCutter()
    cut = [cutter.cut(text) for text in texts]
    assert [restore(text, places, cutter.images) for text, places in cut] == texts


@EVERY
@given(st.binary(min_size=48, max_size=300), st.sampled_from(["data", "base64"]))
def test_an_image_leaves_the_text(data: bytes, key: str) -> None:
    image = base64.b64encode(data).decode()
    text, places = ImageCutter().cut(json.dumps({"before": 1, key: image, "after": "x"}))
    assert image not in text
    assert len(places) == 1


@EVERY
@given(VALUE)
def test_content_comes_back_as_it_was(value: Any) -> None:
    text = dumps(value)
    text.encode("utf-8")
    # two halves that stand side by side are one character in JSON: that is what a reader of the wire gets
    assert json.loads(text) == json.loads(json.dumps(value))


@FILES
@given(st.lists(lines(), min_size=1, max_size=6))
def test_stored_lines_come_back_to_the_byte(texts: list[str]) -> None:
    async def there_and_back(path: Path) -> list[Record]:
        async with opened(lambda: SqliteStore(path)) as store:
            agent = await an_agent(store)
            turn = await accepted(store, _turn(agent))
            await store.commit(**a_commit(turn, agent, records=tuple(map(Record, texts))))
            return await store.records(turn.id)

    with tempfile.TemporaryDirectory() as folder:
        assert [record.line for record in asyncio.run(there_and_back(Path(folder) / "s"))] == texts


def _turn(agent: Agent, *blocks: dict[str, Any], id: str = "t1") -> dict[str, Any]:
    return a_turn(agent, id, input=(Message("user", blocks),))


def count(path: Path, needle: str) -> int:
    """How often the needle stands in the file and its WAL."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes().count(needle.encode())


async def test_an_image_is_kept_once_and_goes_with_its_last_agent(tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    line = json.dumps({"message": {"content": [block]}, "toolUseResult": {"file": {"base64": PICTURE}}})
    async with opened(lambda: SqliteStore(path)) as store:
        one, two = await an_agent(store, "one"), await an_agent(store, "two")
        asked = await accepted(store, _turn(one, block, {"type": "tool_result", "content": [block]}))
        await store.commit(**a_commit(asked, one, output=(block,), records=(Record(line), Record(line))))
        await store.save_session(a_commit(asked, one)["kept"].session)
        other = await accepted(store, _turn(two, block, id="t2"))
        assert count(path, PICTURE[:100]) == 1
        summaries = [summary async for summary in store.summaries()]
        assert all(len(PICTURE) < summary.bytes < 2 * len(PICTURE) for summary in summaries)
        await store.delete_agent(one.key)
        assert await turn_of(store, "t2") == other
        assert other.input[0].content == (block,)
        await store.delete_agent(two.key)
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT count(*) FROM images").fetchone() == (0,)


async def test_images_count_where_they_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PDF of 20 MB in each of a hundred turns is stored once: a turn behind them took 15 GB."""
    monkeypatch.setattr(reading, "PAGE_BYTES", 30_000)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    async with opened(lambda: SqliteStore(tmp_path / "s")) as store:
        assert isinstance(store, SqliteStore)
        agent = await an_agent(store)
        parent = None
        for n in range(4):
            new = a_turn(agent, f"t{n}", parent, input=(Message("user", (block,)),))
            turn = await accepted(store, new)
            parent = turn.id
            await store.commit(**a_commit(turn, agent, records=(Record(json.dumps(block)),)))
        page, following = await store._db.read(partial(reading.page_of_agent, agent_key=agent.key, after_seq=0))
        assert ([one.id for one in page], following) == (["t0", "t1"], page[-1].seq)
        outlines, following = await store._db.read(partial(reading.page_of_outlines, agent_key=agent.key, after_seq=0))
        assert (len(outlines), following) == (4, None)
        assert len(await store.path("t3")) == len(await store.records("t3")) == 4
        with monkeypatch.context() as only:  # texts are read without the images
            only.setattr(rows, "load_images", None)
            texts = await store.path_texts("t3")
        assert [turn.input[0].content[0]["source"]["data"] for turn in texts] == [""] * 4
        call = {"id": "c1", "output": "x" * 50_000}
        turn = await accepted(store, a_turn(agent, "t4", "t3"))
        await store.commit(**a_commit(turn, agent, tools=(call,)))
        monkeypatch.setattr(reading, "MOST_OF_A_PATH", 20_000)
        with pytest.raises(ContextTooLong, match="bytes of turns, and 40,000 are the most"):
            await store.path_texts("t4")
        assert len(await store.path_texts("t3")) == 4
        assert len(await store.records("t0")) == 1
        for read in (store.path, store.records):
            with pytest.raises(ContextTooLong, match="rewind it"):
                await read("t3")
        assert await store.ancestors("t3") == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("first", ["the deletion", "the turn"])
async def test_an_image_that_one_agent_shows_while_another_one_that_has_it_is_deleted(
    first: str, postgres_url: str
) -> None:
    """Each waits for the other: one of them failed, although neither agent is the other's."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    steps = {
        "the deletion": ["DELETE FROM image_refs", "DELETE FROM images"],
        "the turn": ["INSERT INTO image_refs SELECT key, sha256 FROM agents, images WHERE agent_id = 'two'"],
    }
    waits = "SELECT 1 FROM pg_locks WHERE NOT granted"

    def commit(other: psycopg.Connection) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as conn:
            while not conn.execute(waits).fetchone():
                time.sleep(0.01)  # another connection waits in the server
        other.commit()

    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        one, two = await an_agent(store, "one"), await an_agent(store, "two")
        await accepted(store, _turn(one, block))
        with psycopg.connect(postgres_url) as other:
            for step in steps[first]:
                other.execute(step)
            act = store.delete_agent(one.key) if first == "the turn" else accepted(store, _turn(two, block, id="t2"))
            await asyncio.gather(act, asyncio.to_thread(commit, other))
            assert other.execute("SELECT count(*) FROM images").fetchone() == (1,)
            assert other.execute("SELECT agent_key FROM image_refs").fetchall() == [(two.key,)]


async def test_an_image_that_is_put_in_and_taken_out_while_a_turn_stores_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two other agents did that, between the turn's look and its reference: the turn failed."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    insert = rows._INSERT_IMAGE

    class Meanwhile:
        done = False

        def run(self, conn: Any, values: dict[str, Any]) -> None:
            if self.done:
                insert.run(conn, values)
                return
            self.done = True
            with psycopg.connect(postgres_url, autocommit=True) as other:
                other.execute("INSERT INTO images VALUES (%(sha256)s, %(size)s, %(data)s)", values)
                insert.run(conn, values)
                other.execute("DELETE FROM images")

    async with opened(lambda: PostgresqlStore(postgres_url)) as store:
        agent = await an_agent(store)
        monkeypatch.setattr(rows, "_INSERT_IMAGE", Meanwhile())
        await accepted(store, _turn(agent, block))
        assert (await turn_of(store, "t1")).input == (Message("user", (block,)),)
