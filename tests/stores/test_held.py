"""How much of long conversations is in memory at once: of one owner, and of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import Adoptable, Execution, Job
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores import held
from cli_session_proxy.stores.held import Holds
from cli_session_proxy.stores.sql import store

from ..engine.test_core import core
from ..memory_backend import MemoryBackend
from ..talking import ask
from ..until import until


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST", 100)
    monkeypatch.setattr(held, "MOST_OF_AN_OWNER", 60)


class Reader:
    """A task that reads a path, and has it in memory until it is told to end."""

    def __init__(self, holds: Holds, owner: str, *sizes: int) -> None:
        self.read = 0
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(holds, owner, sizes))

    async def _run(self, holds: Holds, owner: str, sizes: tuple[int, ...]) -> None:
        with holds.hold(owner):
            for size in sizes:
                await held.about_to_read(size)
                self.read += 1
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


@asynccontextmanager
async def readers(holds: Holds, *of: tuple[str, int]) -> AsyncIterator[list[Reader]]:
    found = [Reader(holds, *one) for one in of]
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        for one in found:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in found), return_exceptions=True)
        assert not holds.bytes.total()


async def test_one_owners_paths_wait_for_each_other_and_for_no_other_owner() -> None:
    holds = Holds()
    async with readers(holds, ("a", 40), ("a", 40), ("b", 40)) as (first, second, other):
        assert (first.read, second.read, other.read) == (1, 0, 1)
        await first.end()
        await until(lambda: second.read == 1)
        assert holds.bytes == {"a": 40, "b": 40}


async def test_all_paths_have_a_bound_and_a_large_one_is_not_overtaken() -> None:
    holds = Holds()
    async with readers(holds, ("a", 50), ("b", 60), ("c", 10)) as (first, large, later):
        assert (first.read, large.read, later.read) == (1, 0, 0)
        await first.end()
        await until(lambda: (large.read, later.read) == (1, 1))


async def test_one_path_is_read_whatever_its_size() -> None:
    holds = Holds()
    async with readers(holds, ("a", 1000), ("b", 10)) as (large, other):
        assert (large.read, other.read) == (1, 0)


async def test_who_has_a_path_waits_for_nobody() -> None:
    """Two that had one path each and wanted more would wait for each other."""
    holds = Holds()
    async with readers(holds, ("a", 50), ("b", 40)):
        both = [Reader(holds, owner, 5, 90) for owner in ("c", "d")]
        await until(lambda: both[0].read == 2)
        await both[0].end()
        await until(lambda: both[1].read == 2)
        await both[1].end()


async def test_a_wait_has_an_end_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "PATIENCE", 0.0)
    holds = Holds()
    async with readers(holds, ("a", 50), ("a", 20)) as (_, refused):
        with pytest.raises(QueueFull, match="of yours 50 bytes"):
            await refused.task


async def test_a_read_whose_caller_was_cancelled_is_counted_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread reads on: cancelled turns had four times as much in memory as all may have."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    monkeypatch.setattr(store, "UNCOUNTED", 0)
    may_end = asyncio.Event()
    async with core(settings) as (engine, _):
        turn = await ask(engine, "one", agent="a")
        assert isinstance(engine.store, store.SqlStore)
        read = engine.store._db.read

        async def slow(work: Any, **how: Any) -> Any:
            found = await read(work, **how)
            await may_end.wait()
            return found

        async def reading() -> None:
            with engine.holds.hold("local"):
                await engine.store.path(turn.id)

        monkeypatch.setattr(engine.store._db, "read", slow)
        task = asyncio.create_task(reading())
        await until(lambda: bool(engine.holds.bytes))
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.holds.bytes
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.holds.bytes
        monkeypatch.undo()


async def test_a_request_that_waits_in_its_lane_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that imports a history has read a path. The turn before it waited for that memory until it failed."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    monkeypatch.setattr(store, "UNCOUNTED", 0)
    monkeypatch.setattr(held, "PATIENCE", 0.0)
    prepare, may_read = MemoryBackend.prepare, asyncio.Event()

    async def reading(self: MemoryBackend, job: Job) -> Execution | Adoptable:
        await may_read.wait()
        if job.parent is not None:
            await engine.store.path(job.parent.id)
        return await prepare(self, job)

    async def importing() -> Turn:
        with engine.holds.hold("local"):
            await held.about_to_read(50)
            return await ask(engine, "three", agent="a")

    monkeypatch.setattr(MemoryBackend, "prepare", reading)
    async with core(settings) as (engine, _):
        may_read.set()
        await ask(engine, "one", agent="a")
        may_read.clear()
        first = asyncio.create_task(ask(engine, "two", agent="a"))
        await until(lambda: engine.running() == 1)
        second = asyncio.create_task(importing())
        await until(lambda: engine.queued() == 1)
        may_read.set()
        assert [turn.depth for turn in await asyncio.gather(first, second)] == [2, 3]
        assert not engine.holds.bytes


async def test_a_repeated_request_holds_nothing_while_it_waits_for_the_answer(tmp_path: Path) -> None:
    """Its streamed answer had to end within the time that a client has to take what is in memory for it."""
    async with core(Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")) as (engine, _):
        first = await ask(engine, "one", agent="a", idempotency_key="k")
        with engine.holds.hold("local"):
            await held.about_to_read(50)
            assert (await ask(engine, "one", agent="a", idempotency_key="k")).id == first.id
            assert not held.is_held()


async def test_turns_on_long_paths_are_prepared_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of 240 MB at once took several gigabytes: `max_turns` alone bounded them."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    monkeypatch.setattr(store, "UNCOUNTED", 0)
    monkeypatch.setattr(held, "PATIENCE", 0.0)
    prepare = MemoryBackend.prepare

    async def reading(self: MemoryBackend, job: Job) -> Execution | Adoptable:
        if job.parent is not None:
            await engine.store.path(job.parent.id)
        return await prepare(self, job)

    monkeypatch.setattr(MemoryBackend, "prepare", reading)
    async with core(settings) as (engine, _):
        await ask(engine, "x" * 1000, agent="a")
        async with readers(engine.holds, ("local", 50)):
            with pytest.raises(QueueFull, match="of yours 50 bytes"):
                await ask(engine, "two", agent="a")
        assert (await ask(engine, "two", agent="a")).depth == 2
        assert not engine.holds.bytes
