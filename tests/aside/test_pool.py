"""Work beside the event loop: bounded in time and memory, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cli_session_proxy.aside import pool
from cli_session_proxy.aside.media import Media
from cli_session_proxy.aside.pool import Aside, Helpers, OutOfBoundsError
from cli_session_proxy.aside.process import PIECE, Ended, Helper
from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.engine.checks import Checks
from cli_session_proxy.errors import ClaudeUnavailable, InvalidRequest, QueueFull

from ..conftest import ROOT
from ..media import image, picture
from ..until import until
from . import jobs

MEMORY = 1024**3


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    made = Helpers(most=1, seconds=0.5, memory=MEMORY)
    yield made
    await made.close()
    assert made.processes == 0


async def gone(pid: int) -> None:
    async def is_gone() -> bool:
        return start_time(pid) is None

    await until(is_gone)


async def begun(path: Path) -> None:
    async def is_there() -> bool:
        return await asyncio.to_thread(path.exists)

    await until(is_there)


async def test_a_result_comes_back_and_the_process_is_kept_for_the_next_call(helpers: Helpers) -> None:
    assert helpers.processes == 0
    assert await helpers.call(jobs.double, 21) == 42
    first = await helpers.call(jobs.pid)
    assert await helpers.call(jobs.pid) == first != os.getpid()
    assert helpers.processes == 1


async def test_what_a_call_raises_is_raised_here(helpers: Helpers) -> None:
    with pytest.raises(InvalidRequest, match="no such thing") as raised:
        await helpers.call(jobs.refuse, "no such thing")
    assert raised.value.param == "there"
    assert await helpers.call(jobs.double, 1) == 2


async def test_what_a_call_prints_is_no_answer(helpers: Helpers) -> None:
    assert await helpers.call(jobs.prints_then, "the answer") == "the answer"


@pytest.mark.parametrize("endless", [jobs.spin, jobs.backtrack])
async def test_a_call_that_does_not_end_is_ended_and_the_next_one_is_done(helpers: Helpers, endless: object) -> None:
    process = await helpers.call(jobs.pid)
    with pytest.raises(OutOfBoundsError, match=r"more than 0\.5 s of processor time"):
        await helpers.call(endless)  # type: ignore[arg-type]  # one of the two
    await gone(process)
    assert await helpers.call(jobs.double, 2) == 4


async def test_a_call_that_wants_too_much_memory_is_refused(helpers: Helpers) -> None:
    with pytest.raises(OutOfBoundsError, match="more than 1024 MiB of memory"):
        await helpers.call(jobs.eat)
    assert await helpers.call(jobs.double, 2) == 4


async def test_a_process_that_dies_in_a_call_is_replaced(helpers: Helpers) -> None:
    with pytest.raises(OutOfBoundsError, match="ends the process"):
        await helpers.call(jobs.die)
    assert await helpers.call(jobs.double, 2) == 4


async def test_a_process_that_died_while_nobody_used_it_is_replaced(helpers: Helpers) -> None:
    idle = await helpers.call(jobs.pid)
    os.kill(idle, signal.SIGKILL)
    await gone(idle)
    assert await helpers.call(jobs.pid) != idle


async def test_a_call_that_ends_its_process_takes_one_idle_process_along_and_no_more() -> None:
    helpers = Helpers(most=3, seconds=5.0, memory=MEMORY)
    try:
        pids = await asyncio.gather(*(helpers.call(jobs.pid) for _ in range(3)))
        assert len(set(pids)) == 3
        with pytest.raises(OutOfBoundsError, match="ends the process"):
            await helpers.call(jobs.die)
        alive = [pid for pid in pids if start_time(pid) is not None]
        assert len(alive) == 2
    finally:
        await helpers.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("size", [0, 8 * PIECE])
def test_one_that_has_ended_says_so_on_both_event_loops(run: Any, size: int) -> None:
    """On uvloop, a write to a pipe that is closed already raises RuntimeError."""

    async def case() -> None:
        helper = await Helper.start(MEMORY)
        try:
            helper.kill()
            await until(lambda: helper._child.returncode is not None)
            with pytest.raises(Ended):
                await helper.call(bytes(size), 1.0)
        finally:
            await helper.end()

    run(case())


async def test_a_process_that_does_not_use_the_processor_is_ended_as_well(
    helpers: Helpers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await helpers.call(jobs.pid)
    monkeypatch.setattr(pool, "PATIENCE", 2.0)  # it runs by now
    with pytest.raises(OutOfBoundsError, match="processor time"):
        await helpers.call(jobs.sleep, str(tmp_path / "begun"))
    await gone(process)


async def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch, helpers: Helpers, tmp_path: Path) -> None:
    monkeypatch.setattr(helpers, "_most_calls", 2)
    calls = [asyncio.ensure_future(helpers.call(jobs.sleep, str(tmp_path / "begun"))) for _ in range(2)]
    await begun(tmp_path / "begun")
    with pytest.raises(QueueFull) as refused:
        await helpers.call(jobs.double, 1)
    assert refused.value.retry_after
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await helpers.call(jobs.double, 2) == 4


async def test_a_caller_that_leaves_takes_its_process_along(helpers: Helpers, tmp_path: Path) -> None:
    process = await helpers.call(jobs.pid)
    call = asyncio.ensure_future(helpers.call(jobs.sleep, str(tmp_path / "begun")))
    await begun(tmp_path / "begun")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await gone(process)


async def test_the_end_waits_for_nobody(helpers: Helpers, tmp_path: Path) -> None:
    process = await helpers.call(jobs.pid)
    calls = [asyncio.ensure_future(helpers.call(jobs.sleep, str(tmp_path / "begun"))) for _ in range(2)]
    await begun(tmp_path / "begun")
    await helpers.close()
    assert start_time(process) is None
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in told] == [ClaudeUnavailable] * 2
    with pytest.raises(ClaudeUnavailable):
        await helpers.call(jobs.double, 1)


async def test_one_that_is_expected_is_there_before_its_call(helpers: Helpers) -> None:
    helpers.expect()
    helpers.expect()

    async def is_there() -> bool:
        return helpers.processes > 0

    await until(is_there)
    assert await helpers.call(jobs.double, 2) == 4
    assert helpers.processes == 1


async def test_an_idle_process_ends_and_a_large_one_at_once(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE", 0.0)
    await gone(await helpers.call(jobs.pid))
    monkeypatch.setattr(pool, "IDLE", 3600.0)
    process = await helpers.call(jobs.pid)
    assert len(await helpers.call(jobs.large, pool.LARGE + 1)) == pool.LARGE + 1
    await gone(process)


async def test_a_process_whose_service_is_killed_ends_by_itself() -> None:
    """In the middle of a call that never ends."""
    service = (
        "import asyncio, sys\n"
        "from cli_session_proxy.aside.pool import Helpers\n"
        "from tests.aside import jobs\n"
        "async def main():\n"
        "    helpers = Helpers(most=1, seconds=0.5, memory=1 << 30)\n"
        "    print(await helpers.call(jobs.pid), flush=True)\n"
        "    call = asyncio.ensure_future(helpers.call(jobs.spin))\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", service, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    process = int(await child.stdout.readline())
    child.kill()
    await child.wait()
    await gone(process)


async def test_an_image_of_an_accepted_turn_is_read_however_many_bodies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    aside, block = Aside(), image(picture(2, 2))
    monkeypatch.setattr(aside.reading, "_most_calls", 0)
    try:
        with pytest.raises(QueueFull):
            await Media(aside).fitted([block], Counter())
        assert await Checks(aside).media([block], Counter()) == (block,)
    finally:
        await aside.close()


async def test_a_thread_takes_the_work_off_the_event_loop_and_no_more_wait_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aside = Aside()
    try:
        assert await aside.thread(threading.get_ident) != threading.get_ident()
        monkeypatch.setattr(pool, "WAITING", -1)
        held = threading.Event()
        waiting = asyncio.ensure_future(aside.thread(held.wait, 30))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await aside.thread(threading.get_ident)
        held.set()
        await waiting
    finally:
        await aside.close()
