"""A store that cannot write: the client learns whether its turn was run, and the conversation is as before."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, heard
from ..until import PATIENCE, until
from ..without_cli import ScriptedModel
from .test_kill import turns_of


class FailingStore(SqliteStore):
    """Refuses the methods named in `broken`, as a full disk does."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        super().__init__(settings.var / FILE, **more)
        self.broken: set[str] = set()

    def _refuse(self, name: str) -> None:
        if name in self.broken:
            raise StoreUnavailable("database or disk is full: free space on its disk")

    async def accept(self, *args: Any, **more: Any) -> Any:
        self._refuse("accept")
        return await super().accept(*args, **more)

    async def begin(self, *args: Any, **more: Any) -> None:
        self._refuse("begin")
        await super().begin(*args, **more)

    async def commit(self, *args: Any, **more: Any) -> Any:
        self._refuse("commit")
        committed = await super().commit(*args, **more)
        self._refuse("after commit")
        return committed

    async def fail(self, *args: Any, **more: Any) -> Any:
        self._refuse("fail")
        return await super().fail(*args, **more)

    async def set_delivery(self, *args: Any, **more: Any) -> Any:
        self._refuse("set_delivery")
        return await super().set_delivery(*args, **more)


@asynccontextmanager
async def on_store(
    settings: Settings, store: SqliteStore, without_cli: Upstream | None = None
) -> AsyncIterator[Engine]:
    """`without_cli`: the upstream, asked for what no CLI decides."""
    engine = Engine(settings, store, ScriptedModel(without_cli, store) if without_cli else None)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("broken", "run"),
    [("accept", False), ("begin", False), ("begin fail", False), ("commit", True), ("commit fail", True)],
)
@pytest.mark.sample(3)
async def test_a_disk_that_is_full_at_a_step_costs_that_turn_only(
    broken: str, run: bool, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Where it was run, its session holds more than the chain."""
    settings = make_settings(claude_bin=claude_2)
    store = FailingStore(settings)
    async with on_store(settings, store, None if run else upstream) as engine:
        await ask(engine, "one")
        store.broken = set(broken.split())
        with pytest.raises(StoreUnavailable, match="was run, and its answer was not kept" if run else "was not run"):
            await ask(engine, "two")
        assert ("two" in heard(upstream)) is run
        store.broken = set()
        await ask(engine, "three")
        turns = await turns_of(engine)
    assert heard(upstream) == ["one", "three"]
    assert [turn.status for turn in turns if turn.status != "failed"] == ["completed", "completed"]
    if "accept" not in broken:
        assert turns[1].error is not None
        assert turns[1].error["code"] == "store_unavailable"


async def test_an_end_that_could_not_be_stored_is_told_and_is_stored_when_the_store_can_again(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Until then it runs as far as the store knows, which the page and the API do not say."""
    settings = make_settings()
    store = FailingStore(settings)
    async with on_store(settings, store, upstream) as engine:
        store.broken = {"commit", "fail"}
        with pytest.raises(StoreUnavailable):
            await ask(engine, "one")

        async def left() -> bool:
            """That its client left is stored after it left."""
            return [(turn.status, turn.delivery) for turn in await turns_of(engine)] == [("running", "undelivered")]

        await until(left)
        (row,) = [row async for row in engine.view.summaries()]
        (turn,) = (await engine.view.page(row.agent.key, before_seq=None, limit=9)).turns
        (streamed,) = [turn async for turn in engine.view.turns(row.agent.key)]
        assert turn == streamed == await engine.view.turn(turn.id)
        assert (row.state, turn.status, (turn.error or {})["code"]) == ("failed", "failed", "store_unavailable")
        store.broken = set()

        async def stored() -> bool:
            return [turn.status for turn in await turns_of(engine)] == ["failed"]

        await until(stored)


async def test_an_answer_of_which_the_disk_said_too_late_that_it_is_not_kept_is_on_no_path(
    make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the file, and was refused as it was synced. Its client was told that the conversation is as before."""
    settings = make_settings()
    store = FailingStore(settings)
    async with on_store(settings, store, upstream) as engine:
        await ask(engine, "one")
        store.broken = {"after commit", "fail", "set_delivery"}
        with pytest.raises(StoreUnavailable, match="the conversation is as before"):
            await ask(engine, "two")
        accept = store.accept

        async def accepted(*args: Any, **more: Any) -> Any:
            """From then on the end of the turn before can be stored."""
            found = await accept(*args, **more)
            store.broken = set()
            return found

        monkeypatch.setattr(store, "accept", accepted)
        await ask(engine, "three")
    assert heard(upstream) == ["one", "three"]


async def test_an_end_that_was_never_stored_is_settled_by_the_next_proxy(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    store = FailingStore(settings)
    async with on_store(settings, store) as engine:
        await ask(engine, "one")
        store.broken = {"commit", "fail"}
        with pytest.raises(StoreUnavailable):
            await ask(engine, "two")
    async with on_store(settings, FailingStore(settings)) as engine:
        await ask(engine, "three")
        turns = await turns_of(engine)
    # The CLI had finished it, but its client was told to send it again.
    assert heard(upstream) == ["one", "three"]
    assert [turn.status for turn in turns] == ["completed", "cancelled", "completed"]


async def test_a_database_that_cannot_grow_is_a_store_that_cannot_write(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    store = FailingStore(settings)

    def pages(limit: int) -> Any:
        return lambda conn: conn.exec_driver_sql(f"PRAGMA max_page_count={limit}").scalar()

    async with on_store(settings, store) as engine:
        await ask(engine, "one")
        free = await store.database.write(pages(1))  # as many as there are now
        assert free
        refused: list[str] = []
        for n in range(4):
            try:
                await ask(engine, f"big {n} " + "x" * 20000)
            except StoreUnavailable as exc:
                refused.append(exc.message)
        assert refused
        assert all("full" in message and ("not run" in message or "not kept" in message) for message in refused)
        await store.database.write(pages(1 << 30))
        await ask(engine, "last")
        done = [turn for turn in await turns_of(engine) if turn.status == "completed"]
    assert heard(upstream) == [block["text"] for turn in done for message in turn.input for block in message.content]


async def test_a_database_locked_by_another_program_is_waited_for_and_then_refused(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    store = FailingStore(settings, busy_timeout=0.3)
    async with on_store(settings, store, upstream) as engine:
        store.database.busy_timeout = PATIENCE  # SQLite alone waits so briefly: no write that a loaded machine holds up
        await ask(engine, "one")
        other = sqlite3.connect(settings.var / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"not run.*locked by"):
            await ask(engine, "two")
        other.execute("ROLLBACK")
        other.close()
        await ask(engine, "three")
    assert heard(upstream) == ["one", "three"]
