"""Whether the proxy is ready: the store has shown it a moment ago, however many ask and whatever it does."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from cli_session_proxy.engine import readiness
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.readiness import Readiness
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Store
from cli_session_proxy.tasks import Tasks

from ..until import PATIENCE, until


class Probed:
    """A store that can be probed, and an engine that is open."""

    ready = True

    def __init__(self) -> None:
        self.probes = 0
        self.fault: Exception | None = None
        self.held: asyncio.Event | None = None

    async def probe(self) -> None:
        self.probes += 1
        if self.held is not None:
            await self.held.wait()
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def store() -> Probed:
    return Probed()


@pytest.fixture
async def asked(store: Probed) -> AsyncIterator[Readiness]:
    tasks = Tasks()
    yield Readiness(lambda: store.ready, cast(Store, store), tasks.own)
    await tasks.stop()


async def test_the_store_decides(store: Probed, asked: Readiness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "KEPT", 0.0)
    assert await asked.state() == "ready"
    store.fault = StoreUnavailable("the disk is full: free some space")
    assert await asked.state() == "store_unavailable"
    store.fault = None
    assert await asked.state() == "ready"
    store.ready = False
    assert await asked.state() == "draining"
    assert store.probes == 3


async def test_however_many_ask_it_is_probed_once_and_the_answer_holds_for_a_while(
    store: Probed, asked: Readiness
) -> None:
    store.held = asyncio.Event()
    many = [asyncio.ensure_future(asked.state()) for _ in range(50)]
    await asyncio.sleep(0)
    store.held.set()
    assert set(await asyncio.gather(*many)) == {"ready"}
    assert await asked.state() == "ready"
    assert store.probes == 1


async def test_a_store_that_does_not_answer_is_not_waited_for_nor_asked_again_before_it_has(
    store: Probed, asked: Readiness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "KEPT", 0.0)
    store.held = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(readiness, "PATIENCE", 0.01)
        assert [await asked.state() for _ in range(3)] == ["store_unavailable"] * 3
    assert store.probes == 1
    store.held.set()
    assert await asked.state() == "ready"


async def test_a_store_that_cannot_be_written_any_more_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, whose file is locked by another program."""
    monkeypatch.setattr(readiness, "KEPT", 0.0)
    monkeypatch.setattr(readiness, "PATIENCE", PATIENCE)
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    engine = Engine(settings)
    await engine.start()
    try:
        assert await engine.state() == "ready"
        other: Any = sqlite3.connect(settings.var / "chains.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patch:
            patch.setattr(readiness, "PATIENCE", 0.2)
            assert await engine.state() == "store_unavailable"
        other.execute("ROLLBACK")
        other.close()

        async def is_ready() -> bool:
            return await engine.state() == "ready"

        await until(is_ready)
    finally:
        await engine.stop()
    assert await engine.state() == "draining"
