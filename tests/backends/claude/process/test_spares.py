"""Processes started ahead of time: one for the next new session, never in anybody's way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import ProcessHooks
from cli_session_proxy.backends.claude.process import pool as pool_module
from cli_session_proxy.backends.claude.process import pool as pools
from cli_session_proxy.backends.claude.process.child import Launch
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.settings import Profile, Settings

from ....until import until
from .conftest import Fake
from .helpers import ask, is_gone, said

New = Callable[..., Awaitable[Launch]]


@pytest.fixture
def new(fake: Fake) -> New:
    """`await new()`: the launch of a new session that may take a spare."""

    async def make(mode: str = "echo", **options: Any) -> Launch:
        return await fake(mode, **{"system_prompt": "You are a helpful assistant.", **options})

    return make


@asynccontextmanager
async def pooled(
    settings: Settings,
    tmp_path: Path,
    on_spawn: Callable[[int, str | None, Path], None] = lambda _pid, _start, _cwd: None,
    **changes: float | None,
) -> AsyncIterator[Pool]:
    def ahead() -> tuple[Path, Path]:
        folders = tmp_path / "ahead", tmp_path / "ahead-tmp"
        for folder in folders:
            folder.mkdir(exist_ok=True)
        return folders

    pool = Pool(settings.model_copy(update={"spares": 1, **changes}), ProcessHooks(on_spawn), ahead=ahead)
    try:
        yield pool
    finally:
        await pool.close()


async def spare(pool: Pool) -> int:
    """The pid of the one that is ready."""
    await until(lambda: pool.counts().spare == 1)
    (process,) = pool.table.spares
    assert await asyncio.shield(pool.table.spares[process])
    return process.pid


async def test_a_new_session_takes_the_process_that_was_started_for_it(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkin((await pool.checkout(await new()))[0])
        pid = await spare(pool)
        launch = await new(cwd=tmp_path / "ahead-tmp", env={"TMPDIR": str(tmp_path)})
        process, warm = await pool.checkout(launch)
        assert (process.pid, warm) == (pid, False)
        assert process.launch.cwd == launch.cwd
        assert said(await ask(process)) == "2 hi"
        await pool.checkin(process)
        again = await new(cwd=launch.cwd, env=dict(launch.env), session_id=process.session_id, resume=True)
        assert await pool.checkout(again) == (process, True)
        assert await spare(pool) != pid


async def test_it_is_told_again_which_directory_a_process_works_in_when_that_changes(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    told: list[tuple[int, Path]] = []
    async with pooled(settings, tmp_path, lambda pid, _start, cwd: told.append((pid, cwd))) as pool:
        first, _ = await pool.checkout(await new())
        pid = await spare(pool)
        await pool.checkout(await new(cwd=tmp_path / "ahead-tmp"))
        assert told[:3] == [(first.pid, tmp_path), (pid, tmp_path / "ahead"), (pid, tmp_path / "ahead-tmp")]


async def test_two_new_sessions_do_not_share_one(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new())
        pid = await spare(pool)
        taken = await asyncio.gather(*[pool.checkout(await new()) for _ in range(2)])
        processes = {process.pid for process, _ in taken}
        assert len(processes) == 2
        assert pid in processes


@pytest.mark.parametrize(
    "other",
    [
        {"model": "opus"},
        {"effort": "high"},
        {"profile": Profile(tools=("Bash",))},
        {"profile": Profile(add_dirs=(Path("/tmp"),))},
        {"profile": Profile(setting_sources=("project",))},
        {"profile": Profile(permission_mode="plan")},
        {"resume": True},
        {"system_prompt": None},
        {"env": {"ANTHROPIC_API_KEY": "sk-ant-fake-other"}},
    ],
)
async def test_a_launch_of_another_kind_is_known(new: New, other: dict[str, Any]) -> None:
    assert (await new()).kind not in (None, (await new(**other)).kind)


async def test_one_of_another_kind_is_not_taken(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new())
        pid = await spare(pool)
        for other in ({"model": "opus"}, {"resume": True}):  # of a kind of its own, and of none
            process, _ = await pool.checkout(await new(**other))
            assert process.pid != pid


async def test_the_kind_last_wanted_replaces_the_one_before(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkin((await pool.checkout(await new()))[0])
        pid = await spare(pool)
        await pool.checkin((await pool.checkout(await new(model="opus")))[0])
        await until(lambda: is_gone(pid))
        pid = await spare(pool)
        assert (await pool.checkout(await new(model="opus")))[0].pid == pid


async def test_a_place_that_is_needed_ends_the_spare_and_no_warm_process(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    async with pooled(settings, tmp_path, max_processes=3) as pool:
        oldest = (await pool.checkout(await new()))[0]
        await pool.checkin(oldest)
        pid = await spare(pool)
        for model in ("opus", "haiku"):
            await pool.checkout(await new(model=model, resume=True))
        assert is_gone(pid)
        assert oldest.alive
        assert pool.counts()[:3] == (2, 1, 0)


async def test_none_is_started_where_there_is_no_room(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path, max_processes=1) as pool:
        process, _ = await pool.checkout(await new())
        await pool.checkin(process)
        await pool.table.services["ahead"]
        assert pool.counts()[:3] == (0, 1, 0)
        assert process.alive


async def test_of_many_idle_ones_the_longest_unused_gives_its_place(
    settings: Settings, new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(settings, tmp_path, max_processes=4) as pool:
        processes = [(await pool.checkout(await new(resume=True)))[0] for _ in range(3)]
        processes.append((await pool.checkout(await new()))[0])
        for process in processes:
            await ask(process)
            await pool.checkin(process)
        assert pool.counts()[:3] == (0, 4, 0)  # not at once: their agents may come back
        monkeypatch.setattr(pools, "STALE", 0.5)
        await spare(pool)
        assert pool.counts()[:3] == (0, 3, 1)
        assert is_gone(processes[0].pid)


async def test_none_is_started_while_every_core_has_a_turn(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path, max_spawns=2, max_processes=8) as pool:
        busy = [(await pool.checkout(await new()))[0] for _ in range(2)]
        await asyncio.gather(*(ask(process) for process in busy))  # their starts are over
        await pool.checkin((await pool.checkout(await new()))[0])
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(pool.table.all()) + pool.table.reserved == 3
        await pool.checkin(busy.pop())
        await spare(pool)


async def test_none_is_started_where_none_is_wished(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path, spares=0) as pool:
        await pool.checkout(await new())
        assert "ahead" not in pool.table.services


async def test_those_who_wait_for_a_place_come_first(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path, max_processes=2, max_spawns=1) as pool:
        launches = [await new(session_id=None) for _ in range(4)]
        first = await asyncio.gather(*(pool.checkout(launch) for launch in launches[:2]))
        waiting = [asyncio.create_task(pool.checkout(launch)) for launch in launches[2:]]
        for process, _ in first:
            await ask(process)
            await pool.checkin(process)
        for process, _ in await asyncio.gather(*waiting):
            await ask(process)
        assert pool.counts()[:3] == (2, 0, 0)


async def test_one_that_dies_before_it_is_used_is_replaced_by_a_plain_start(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new())
        pid = await spare(pool)
        os.kill(pid, signal.SIGKILL)
        process, _ = await pool.checkout(await new())  # before anybody has noticed
        assert process.pid != pid
        assert said(await ask(process)) == "2 hi"
        await until(lambda: is_gone(pid))


async def test_one_that_refuses_the_claim_is_ended_and_the_session_starts_plainly(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new("unclaimed"))
        pid = await spare(pool)
        launch = await new("unclaimed")
        process, _ = await pool.checkout(launch)
        assert process.session_id == launch.session_id
        assert is_gone(pid)
        assert said(await ask(process)) == "2 hi"
        await pool.checkin(process)
        await pool.table.services["ahead"]
        assert pool.counts().spare == 0  # the next one would be refused as well


async def test_one_that_is_still_starting_is_waited_for(settings: Settings, new: New, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new(env={"FAKE_GATE": str(gate)}))
        await until(lambda: pool.counts().spare == 1)
        (booting,) = pool.table.spares
        taking = asyncio.create_task(pool.checkout(await new(env={"FAKE_GATE": str(gate)})))
        await until(lambda: pool.counts().busy == 2)
        gate.touch()
        process, _ = await taking
        assert process is booting


async def test_one_that_does_not_come_up_is_not_waited_for_long(
    settings: Settings, new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_TIME", 0.2)
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new(env={"FAKE_GATE": str(tmp_path / "never")}))
        await until(lambda: pool.counts().spare == 1)
        (stuck,) = pool.table.spares
        process, _ = await pool.checkout(await new(env={"FAKE_GATE": str(tmp_path / "never")}))
        assert process is not stuck
        assert said(await ask(process)) == "2 hi"
        assert is_gone(stuck.pid)


async def test_whoever_leaves_while_taking_one_leaves_no_process_behind(
    settings: Settings, new: New, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new(env={"FAKE_GATE": str(gate)}))
        await until(lambda: pool.counts().spare == 1)
        (booting,) = pool.table.spares
        taking = asyncio.create_task(pool.checkout(await new(env={"FAKE_GATE": str(gate)})))
        await until(lambda: pool.counts().busy == 2)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        assert not booting.usable
    assert is_gone(booting.pid)


async def test_an_unused_one_is_retired_like_any_idle_process(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path, process_idle=0.3) as pool:
        await pool.checkout(await new())
        await until(lambda: pool.counts().spare == 1)
        (process,) = pool.table.spares  # on a busy machine its time may be over before it is ready
        await until(lambda: is_gone(process.pid))
        assert pool.counts()[:3] == (1, 0, 0)


async def test_closing_ends_one_that_is_starting(settings: Settings, new: New, tmp_path: Path) -> None:
    async with pooled(settings, tmp_path) as pool:
        await pool.checkout(await new(env={"FAKE_GATE": str(tmp_path / "never")}))
        await until(lambda: pool.counts().spare == 1)
        (booting,) = pool.table.spares
    assert is_gone(booting.pid)
