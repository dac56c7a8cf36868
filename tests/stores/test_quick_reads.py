"""What every turn reads is read on the event loop while it is small, and never holds the loop up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Row

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Agent, Block, Placed, Turn
from cli_session_proxy.stores.sql import rows
from cli_session_proxy.stores.sql.database import Urgency
from cli_session_proxy.stores.sql.store import LARGE
from cli_session_proxy.stores.sqlite.file import driver_of
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    IMAGE,
    a_turn,
    accepted,
    an_agent,
    complete,
    imported_turns,
    opened,
)

PICTURE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}


def text(size: int) -> Block:
    return {"type": "text", "text": "x" * size}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with opened(lambda: SqliteStore(tmp_path / "chains.sqlite3")) as store:
        assert isinstance(store, SqliteStore)
        yield store


@pytest.mark.parametrize(
    ("output", "on_the_loop"),
    [((text(100),), True), ((text(LARGE - 5000),), True), ((text(LARGE),), False), ((PICTURE,), False)],
    ids=["short", "long", "too long", "a picture"],
)
async def test_a_large_turn_is_read_beside_the_loop(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, output: tuple[Block, ...], on_the_loop: bool
) -> None:
    agent = await an_agent(store)
    done = await complete(store, agent, "t1", output=output)
    await accepted(store, a_turn(agent, "t2", "t1", fingerprint="f"))
    seen: list[bool] = []
    load = rows.loaded_turns

    def loaded(conn: Connection, found: Sequence[Row[tuple[object, ...]]]) -> list[Turn]:
        seen.append(threading.current_thread() is threading.main_thread())
        return load(conn, found)

    monkeypatch.setattr(rows, "loaded_turns", loaded)
    state = await store.agent_state(agent.key, "t1", at_head=False)
    assert state is not None
    assert state.parent == done
    assert seen == [on_the_loop]
    latest, _ = await store.arrival("local", "", "a")  # the fingerprint of "t1"
    assert latest == done
    assert seen == [on_the_loop] * 2


@pytest.mark.parametrize(
    "said",
    [
        {"tools": ({"type": "tool_result", "content": "x" * 50_000},)},
        {"output": ({"type": "thinking", "thinking": "x" * 50_000},)},
        {"evidence": Evidence(retries=({"error": "x" * 50_000},))},
    ],
    ids="".join,
)
async def test_a_large_commit_is_written_beside_the_loop(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    """Also one whose records are small: a shell said 200 MB in its CLI's place, and nobody was served for 4 s."""
    seen: list[bool] = []
    make = rows.answer_values

    def made(*given: Any) -> dict[str, Any]:
        seen.append(threading.current_thread() is threading.main_thread())
        return make(*given)

    monkeypatch.setattr(rows, "answer_values", made)
    agent = await an_agent(store)
    await complete(store, agent, "t1")
    await complete(store, agent, "t2", "t1", **said)
    assert seen == [True, False]


async def test_what_accepting_a_turn_takes_does_not_grow_with_its_agents_turns(store: SqliteStore) -> None:
    agent, other = await an_agent(store), await an_agent(store, "other")
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def count(conn: Connection) -> None:
        driver_of(conn).set_progress_handler(step, 1)

    async def taken(id: str, of: Agent) -> int:
        """What SQLite's own machine does for it."""
        before = steps
        _, state = await store.accept(**a_turn(of, id, placed=Placed("head"), instance="here"))
        assert state is not None
        assert not state.others
        took = steps - before
        await store.fail(id, "failed", {"code": "x"}, (), {}, 1.0)
        return took

    await store.import_turns(imported_turns(agent, 300), "i299")
    await store.import_turns(imported_turns(other, 2, renamed="x"))
    await store.database.write(count, Urgency.JOURNAL, quick=True)
    assert await taken("t1", agent) < await taken("t2", other) + 100
