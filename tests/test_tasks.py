"""A deadline that moves with every sign of life."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars, get_contextvars

from cli_session_proxy.errors import TurnTimeout
from cli_session_proxy.tasks import IdleLimit, TimeLimit, awake_clock, in_thread_at, works_at

from .until import until

PATIENCE = 60.0


async def test_what_takes_minutes_takes_no_thread_of_others(tmp_path: Path) -> None:
    """Eight agents were deleted, each with 20,000 folders: another one's turn waited 20 s for a thread."""
    done, shared = threading.Event(), min(32, (os.cpu_count() or 1) + 4)
    long = [asyncio.create_task(in_thread_at(tmp_path / str(number), done.wait)) for number in range(2 * shared)]
    await asyncio.to_thread(done.set)
    assert all(await asyncio.gather(*long))


async def test_what_is_logged_at_a_folder_tells_its_request(tmp_path: Path) -> None:
    with bound_contextvars(request_id="req_1"):
        assert (await in_thread_at(tmp_path, get_contextvars))["request_id"] == "req_1"


def test_a_program_ends_though_a_look_into_a_folder_does_not() -> None:
    """A command that had told its error waited for as long as an agent's program held the folder."""
    program = """
import asyncio, contextlib, sys
from pathlib import Path
from cli_session_proxy.tasks import in_thread_at

async def main():
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_thread_at(Path("/"), sys.stdin.read)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        try:
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


async def test_what_failed_in_a_folder_keeps_nothing_in_memory(tmp_path: Path) -> None:
    """An agent's program added to a transcript while its CLI loaded it. What was read of it stayed in memory, and with
    it the one place for very long transcripts: all other agents with such a transcript got 409 from then on."""

    class Read:
        pass

    kept: list[weakref.ref[Read]] = []

    def look() -> None:
        read = Read()
        kept.append(weakref.ref(read))
        raise OSError(f"{read}")

    gc.disable()  # a proxy collects rarely
    try:
        with suppress(OSError):
            await in_thread_at(tmp_path, look)
        await until(lambda: [one() for one in kept] == [None])
    finally:
        gc.enable()


async def test_one_thread_is_at_work_in_a_folder_also_if_its_caller_was_cancelled(tmp_path: Path) -> None:
    begun, done, before = threading.Event(), threading.Event(), threading.active_count()

    def look() -> bool:
        begun.set()
        return done.wait()

    looks = [asyncio.create_task(in_thread_at(tmp_path, look)) for _ in range(20)]
    await asyncio.to_thread(begun.wait)
    waits = looks.pop()
    for one in looks:
        one.cancel()
    await asyncio.wait(looks)
    assert works_at(tmp_path)
    assert sum(thread.name.startswith("folder") for thread in threading.enumerate()) == 1
    assert not waits.done()
    done.set()
    assert await waits
    await until(lambda: threading.active_count() <= before + 1)
    assert not works_at(tmp_path)


async def test_silence_ends_it() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TurnTimeout, match="nothing came"):
        async with IdleLimit(loop.time() + 0.01, "nothing came"):
            await asyncio.Event().wait()


async def test_every_sign_of_life_gives_it_new_time() -> None:
    loop = asyncio.get_running_loop()
    async with IdleLimit(loop.time() + 0.02, "nothing came") as limit:
        first = limit.timer
        limit.move(loop.time() + 3600)
        await until(lambda: limit.timer is not first)  # the first deadline has passed


async def test_a_deadline_that_moves_back_counts_at_once() -> None:
    loop = asyncio.get_running_loop()

    async def moved_back() -> None:
        async with IdleLimit(loop.time() + 3600, "nothing came") as limit:
            limit.move(loop.time() + 0.01)
            await asyncio.Event().wait()

    with pytest.raises(TurnTimeout):
        await moved_back()


async def test_what_ends_in_time_leaves_no_timer() -> None:
    loop = asyncio.get_running_loop()
    async with IdleLimit(loop.time() + 3600, "nothing came") as limit:
        pass
    assert limit.timer.cancelled()


async def test_another_timeout_inside_is_not_taken_for_silence() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError) as caught:
        async with IdleLimit(loop.time() + 3600, "nothing came"):
            raise TimeoutError("a disk")
    assert not isinstance(caught.value, TurnTimeout)


@pytest.mark.parametrize("kind", [TimeLimit, IdleLimit])
async def test_an_hour_of_sleep_is_no_time_of_a_turn(
    kind: type[TimeLimit], macos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS uvloop's clock runs on while the machine sleeps, and `time.monotonic` stands still."""
    loop, slept = asyncio.get_running_loop(), 0.0
    runs_on = loop.time
    monkeypatch.setattr(loop, "time", lambda: runs_on() + slept)
    now = awake_clock(loop)
    async with kind(now() + 300, "nothing came") as limit:
        first = limit.timer
        slept = 3600.0
        await until(lambda: limit.timer is not first)  # it was due, and began anew
    assert awake_clock(loop)() == pytest.approx(time.monotonic(), abs=60)


async def test_after_a_sleep_all_that_silence_may_take_begins_anew(
    macos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, awake, slept = asyncio.get_running_loop(), 0.0, 0.0
    runs_on, stands_still = loop.time, time.monotonic
    monkeypatch.setattr(loop, "time", lambda: runs_on() + slept)
    monkeypatch.setattr(time, "monotonic", lambda: stands_still() + awake)
    now = awake_clock(loop)

    async def silent() -> None:
        nonlocal awake, slept
        async with IdleLimit(now() + 300, "nothing came") as limit:
            awake, slept = 290.0, 3600.0
            first = limit.timer
            await until(lambda: limit.timer is not first)
            assert limit.timer.when() == pytest.approx(loop.time() + 300, abs=60)
            awake = 651.0
            await asyncio.Event().wait()

    with pytest.raises(TurnTimeout):
        await silent()
