"""Many processes: one a session, bounded, reused, reaped."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.process import descriptors
from cli_session_proxy.backends.claude.process.child import Child
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.errors import ClaudeUnavailable, QueueFull, SessionBusy, TurnCancelled
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....simulated import still
from ....talking import ask as say
from ....talking import claude, heard, request, running
from ....until import until
from .conftest import Fake
from .helpers import ask, is_gone, said


def bounded(settings: Settings, **changes: float) -> Settings:
    return settings.model_copy(update=changes)


async def test_the_same_session_gets_its_warm_process(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launch = await fake()
    first, warm = await pool.checkout(launch)
    assert not warm
    assert said(await ask(first)) == "2 hi"
    await pool.checkin(first)
    again, warm = await pool.checkout(await fake(session_id=launch.session_id, resume=True))
    assert warm
    assert again is first
    await pool.close()
    assert is_gone(first.pid)


async def test_a_different_launch_of_the_session_ends_the_old_process_first(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launch = await fake()
    first, _ = await pool.checkout(launch)
    await pool.checkin(first)
    second, warm = await pool.checkout(await fake(session_id=launch.session_id, model="opus"))
    assert not warm
    assert is_gone(first.pid)
    assert pool.peek(launch.session_id) is second
    await pool.close()


async def test_a_session_in_use_is_not_given_out_twice(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launch = await fake()
    await pool.checkout(launch)
    with pytest.raises(SessionBusy):
        await pool.checkout(launch)
    await pool.close()


async def test_at_the_limit_the_longest_idle_one_makes_room(settings: Settings, fake: Fake) -> None:
    pool = Pool(bounded(settings, max_processes=2))
    processes = [(await pool.checkout(await fake()))[0] for _ in range(2)]
    for process in processes:
        await pool.checkin(process)
    await pool.checkout(await fake())
    await until(lambda: is_gone(processes[0].pid))
    assert not is_gone(processes[1].pid)
    await pool.close()


async def test_one_starts_while_the_evicted_one_ends_and_no_further_one(settings: Settings, fake: Fake) -> None:
    pool = Pool(bounded(settings, max_processes=1, spawn_timeout=60))
    evicted, _ = await pool.checkout(await fake("stubborn"))  # it does not end by itself
    await ask(evicted)
    await pool.checkin(evicted)
    second, _ = await pool.checkout(await fake())
    assert not is_gone(evicted.pid)
    await pool.checkin(second)
    await pool.checkout(await fake())
    assert is_gone(evicted.pid) or is_gone(second.pid)
    await pool.close()


async def test_when_all_are_busy_it_waits_and_then_says_so(settings: Settings, fake: Fake) -> None:
    bounds = bounded(settings, max_processes=1, spawn_timeout=0.3)
    pool = Pool(bounds)
    process, _ = await pool.checkout(await fake())
    with pytest.raises(QueueFull) as full:
        await pool.checkout(await fake())
    assert full.value.retry_after
    bounds.spawn_timeout = 60.0  # from here on it gets its place, and a loaded machine takes a while to end the other
    waiting = asyncio.create_task(pool.checkout(await fake()))
    await asyncio.sleep(0)
    await pool.checkin(process)
    _, warm = await waiting
    assert not warm
    await pool.close()


@pytest.mark.parametrize("gives_way", [True, False])
async def test_a_start_that_finds_no_descriptor_waits_while_there_is_a_process_that_may_free_some(
    settings: Settings, fake: Fake, monkeypatch: pytest.MonkeyPatch, gives_way: bool
) -> None:
    pool = Pool(bounded(settings, max_processes=4, spawn_timeout=60 if gives_way else 0.3))
    busy, _ = await pool.checkout(await fake())
    spawn, tries = ClaudeProcess.spawn, 0

    async def scarce(*args: Any) -> ClaudeProcess:
        nonlocal tries
        tries += 1
        if not is_gone(busy.pid):
            raise descriptors.unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        return await spawn(*args)

    monkeypatch.setattr(ClaudeProcess, "spawn", scarce)
    waiting = asyncio.create_task(pool.checkout(await fake()))
    await until(lambda: tries > 1)
    if gives_way:
        monkeypatch.setattr(descriptors, "are_free", lambda _: is_gone(busy.pid))
        await pool.checkin(busy)
        process, warm = await waiting
        assert (process.alive, warm) == (True, False)
    else:
        with pytest.raises(ClaudeUnavailable, match="no file descriptor is free"):
            await waiting
    await pool.close()


async def test_a_start_that_finds_no_descriptor_says_so_at_once_where_nobody_could_free_any(
    settings: Settings, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scarce(*_: Any) -> ClaudeProcess:
        raise descriptors.unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    monkeypatch.setattr(ClaudeProcess, "spawn", scarce)
    pool = Pool(bounded(settings, spawn_timeout=10_000))
    with pytest.raises(ClaudeUnavailable, match="no file descriptor is free"):
        await pool.checkout(await fake())
    await pool.close()


async def test_a_boundary_that_finds_no_descriptor_is_made_once_an_idle_process_has_freed_some(
    settings: Settings, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made before there is a place: nothing had been evicted, and every start of a confined CLI failed."""
    pool = Pool(settings)
    idle, _ = await pool.checkout(await fake())
    await pool.checkin(idle)

    async def scarce() -> tuple[str, ...]:
        if not is_gone(idle.pid):
            raise descriptors.unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        return ()

    monkeypatch.setattr(descriptors, "are_free", lambda _: is_gone(idle.pid))
    process, warm = await pool.checkout(replace(await fake(), wrapper=scarce))
    assert (process.alive, warm, pool.table.reserved) == (True, False, 0)
    await pool.close()


async def test_discard_returns_when_the_process_is_dead_even_in_use(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launch = await fake("stubborn")
    process, _ = await pool.checkout(launch)
    await ask(process)
    await pool.discard(launch.session_id)
    assert is_gone(process.pid)
    assert pool.peek(launch.session_id) is None
    await pool.discard(launch.session_id)
    await pool.close()


async def test_a_session_being_evicted_is_dead_before_it_is_opened_again(settings: Settings, fake: Fake) -> None:
    pool = Pool(bounded(settings, max_processes=1))
    launch = await fake("stubborn")
    old, _ = await pool.checkout(launch)
    await ask(old)
    await pool.checkin(old)
    evicting = asyncio.create_task(pool.checkout(await fake()))
    await asyncio.sleep(0)
    assert pool.peek(launch.session_id) is None
    await pool.discard(launch.session_id)
    assert is_gone(old.pid)
    await evicting
    await pool.close()


async def test_one_that_was_left_half_way_is_closed_at_checkin(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    process, _ = await pool.checkout(await fake("silent"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(process), 0.2)
    await pool.checkin(process)
    assert is_gone(process.pid)
    await pool.close()


async def test_a_process_that_cannot_be_closed_keeps_no_other_from_being_retired(
    settings: Settings, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, failed = ClaudeProcess.close, list[int]()

    async def fails_once(process: ClaudeProcess) -> None:
        await close(process)
        if not failed:
            failed.append(process.pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ClaudeProcess, "close", fails_once)
    pool = Pool(bounded(settings, process_idle=0.2))
    every = [(await pool.checkout(await fake()))[0] for _ in range(2)]
    for process in every:
        await pool.checkin(process)
    await until(lambda: all(is_gone(process.pid) for process in every))
    assert len(failed) == 1
    await pool.close()


async def test_idle_and_dead_processes_are_reaped(settings: Settings, fake: Fake) -> None:
    pool = Pool(bounded(settings, process_idle=0.2))
    process, _ = await pool.checkout(await fake())
    busy, _ = await pool.checkout(await fake())
    await pool.checkin(process)
    await until(lambda: pool.peek(process.launch.session_id) is None)
    assert pool.peek(busy.launch.session_id) is busy
    await pool.close()


async def test_a_process_that_died_while_idle_is_replaced(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launch = await fake()
    process, _ = await pool.checkout(launch)
    await pool.checkin(process)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not process.usable)
    second, warm = await pool.checkout(launch)
    assert not warm
    assert said(await ask(second)) == "2 hi"
    await pool.close()


async def test_only_so_many_start_at_once_and_a_failed_start_gives_its_place_back(
    settings: Settings, fake: Fake
) -> None:
    pool = Pool(bounded(settings, max_spawns=1, max_processes=1, spawn_timeout=60))
    broken = await fake(cwd=settings.var / "nowhere")
    for _ in range(2):
        with pytest.raises(Exception, match="not a directory"):
            await pool.checkout(broken)
    process, _ = await pool.checkout(await fake())
    assert said(await ask(process)) == "2 hi"
    await pool.close()


async def test_a_cancelled_wait_leaves_no_place_taken(settings: Settings, fake: Fake) -> None:
    pool = Pool(bounded(settings, max_processes=1))
    process, _ = await pool.checkout(await fake())
    waiting = asyncio.create_task(pool.checkout(await fake()))
    await still()
    waiting.cancel()
    await asyncio.wait([waiting])
    await pool.discard(process.launch.session_id)
    other, _ = await pool.checkout(await fake())
    assert other.alive
    await pool.close()


async def test_after_close_nothing_can_be_had_and_nothing_is_left(settings: Settings, fake: Fake) -> None:
    pool = Pool(settings)
    launches = [await fake() for _ in range(4)]
    taken = await asyncio.gather(*(pool.checkout(launch) for launch in launches[:3]))
    late = asyncio.create_task(pool.checkout(launches[3]))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(ClaudeUnavailable):
        await late
    assert all(is_gone(process.pid) for process, _ in taken)
    with pytest.raises(ClaudeUnavailable):
        await pool.checkout(await fake())


async def test_a_turn_that_is_cancelled_just_after_its_checkout_leaves_no_process_in_use(
    make_settings: MakeSettings, fake_cli: Path, claude_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def total_cost(_: Path) -> float:
        loop.call_soon_threadsafe(reached.set)
        goes_on.wait(60)
        return 0.0

    monkeypatch.setattr(transcript, "total_cost", total_cost)
    async with running(make_settings(claude_bin=fake_cli, claude_env=claude_env)) as engine:
        answer = await engine.submit(request("hello"))
        await reached.wait()
        answer.cancel()
        goes_on.set()
        with pytest.raises(TurnCancelled):
            await answer.turn()
        assert engine.backend.counts()[:3] == (0, 0, 0)


async def test_a_turn_stays_when_its_process_dies_behind_the_commit_and_cannot_be_closed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Child.close

    async def out_of_threads(child: Child) -> None:
        await close(child)
        raise RuntimeError("can't start new thread")

    async with running(make_settings(claude_bin=claude_2)) as engine:
        await say(engine, "one")
        commit = engine.store.commit

        async def committed(*done: Any, **how: Any) -> Turn:
            turn = await commit(*done, **how)
            (process,) = claude(engine).pool.table.all()
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: not process.alive)
            return turn

        with monkeypatch.context() as broken:
            broken.setattr(engine.store, "commit", committed)
            broken.setattr(Child, "close", out_of_threads)
            slow = await engine.submit(request("two"))
            await slow.turn()
            await engine.ended(slow.turn_id)
        await say(engine, "three")  # another client, while that one is still being given its answer
        slow.acknowledge()
        await say(engine, "four")
    assert heard(upstream) == ["one", "two", "three", "four"]
