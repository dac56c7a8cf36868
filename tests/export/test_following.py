"""A link is told at its own turn, whenever it is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Chain, Link
from cli_session_proxy.engine.subscription import Follower
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    a_begin,
    a_commit,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    imported_turns,
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "chains.sqlite3")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def test_a_link_that_is_stored_after_its_turn_was_told_is_told_at_that_turn(store: SqliteStore) -> None:
    agent = await an_agent(store)
    follower = Follower(store, agent)
    await follower.start()
    await store.import_turns(imported_turns(agent, 2), head="i1")
    assert [(one.turn.id, one.links) for one in await follower.happened()] == [("i0", ()), ("i1", ())]
    link = Link("s", "s", "i1", "adopted", {"turns": ["i0", "i1"]}, 1.0)
    await store.save_session(a_session(agent, "s", "i1"), [link])
    await accepted(store, a_turn(agent, "t1"))
    assert [(one.turn.id, one.links) for one in await follower.happened()] == [("t1", ()), ("i1", (link,))]
    assert await follower.happened() == []


async def test_who_goes_on_where_another_left_off_is_not_told_older_links(store: SqliteStore) -> None:
    agent = await an_agent(store)
    first, second = Link(None, "s1", "t1", "started", {}, 1.0), Link("s1", "s1", "t2", "rebuilt", {}, 2.0)
    known = await complete(store, agent, "t1", links=(first,))
    follower = Follower(store, agent, known.seq)
    await follower.start()
    await complete(store, agent, "t2", "t1", links=(second,))
    assert [(one.turn.id, one.links) for one in await follower.happened()] == [("t2", (second,))]


async def test_a_turn_that_ends_while_it_is_read_is_told_once_with_its_links(store: SqliteStore) -> None:
    agent = await an_agent(store)
    turn = await accepted(store, a_turn(agent, "t1"))
    follower = Follower(store, agent)
    await follower.start()
    await store.begin(**a_begin(turn))
    link = Link(None, "s1", "t1", "started", {}, 1.0)
    read = store.chain

    async def ends_meanwhile(agent_key: int) -> Chain | None:
        if (await store.turn("t1")).status == "running":  # type: ignore[union-attr]  # it is there
            await store.commit(**a_commit(turn, agent, links=(link,)))
        return await read(agent_key)

    store.chain = ends_meanwhile  # type: ignore[method-assign]
    told = await follower.happened()
    assert [(one.turn.status, one.links) for one in told] == [("running", ()), ("completed", (link,))]
    assert await follower.happened() == []
