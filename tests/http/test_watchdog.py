"""What holds the event loop up is told and counted; and a service that was told to end does end.

On both event loops. Ends are tried in a process of their own: a blocked one would block the test as well.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from cli_session_proxy.http import watchdog as watchdogs
from cli_session_proxy.http.metrics import Metrics
from cli_session_proxy.http.watchdog import Watchdog, on_signals

from ..conftest import ROOT
from ..matrix import rest_in_full
from ..talking import events
from .conftest import SOON, Run
from .test_metrics import GOING


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    left: list[int] = []
    made = Watchdog(leave=left.append)
    made.start()
    yield made
    made.stop()
    assert left == []


def busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def sleepy(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("hold", [busy, sleepy])
@pytest.mark.sample(2)
def test_what_holds_the_loop_up_is_told_with_its_place_and_counted(
    run: Run,
    watchdog: Watchdog,
    hold: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watchdogs, "LATE", 1.0)  # a loaded machine holds it up as well, but not for so long
    held: list[float] = []

    async def case() -> None:
        with watchdog.watching(held.append):
            await asyncio.sleep(0.3)
            hold(2.0)
            await asyncio.sleep(0.3)

    run(case())
    assert max(held) > 1.0
    told = [one for one in events(caplog) if one["event"] == "event_loop_held"]
    assert re.match(rf"test_watchdog\.py:\d+ {hold.__name__} < test_watchdog\.py:\d+ case < ", told[0]["by"])


@pytest.mark.sample(1)
def test_a_loop_that_is_held_up_again_and_again_is_told_once_in_a_while_and_counted_each_time(
    run: Run, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdogs, "BEAT", 0.01)
    metrics = Metrics(GOING)

    async def case() -> None:
        with watchdog.watching(metrics.loop_held):
            for _ in range(5):
                sleepy(0.5)
                await asyncio.sleep(0.05)

    run(case())
    assert [one["event"] for one in events(caplog)].count("event_loop_held") == 1
    counted = re.search(rb"event_loop_held_seconds_count (\S+)", metrics.text())
    assert counted is not None
    assert float(counted[1]) >= 5  # a loaded machine may hold it up once more


def test_a_loop_that_waits_is_not_held_up(
    run: Run, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdogs, "LATE", 1.0)  # a loaded machine holds it up, but not for so long
    held: list[float] = []

    async def case() -> None:
        with watchdog.watching(held.append):
            await asyncio.to_thread(time.sleep, 1.5)

    run(case())
    assert (held, events(caplog)) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_at_once_and_acted_on_when_the_loop_is_free(run: Run, number: int) -> None:
    said: list[str] = []

    async def case() -> None:
        stop = asyncio.Event()
        with on_signals(stop.set, lambda: said.append("noted")):
            os.kill(os.getpid(), number)
            busy(0.05)  # the loop has no turn
            assert said == ["noted"]
            assert not stop.is_set()
            await stop.wait()

    run(case())
    assert said == ["noted"]


# --- the end

PROGRAM = """
import asyncio, sys, threading, time, uvloop
from cli_session_proxy.http import watchdog as watchdogs
from cli_session_proxy.http.watchdog import Watchdog, on_signals

watchdogs.LAST_LOG = watchdogs.AFTER = {last}

def block():
    {block}

async def main():
    stop = asyncio.Event()
    with on_signals(stop.set, lambda: watchdog.end_within({within})):
        print("ready", flush=True)
        {work}
        await stop.wait()

watchdog = Watchdog()
watchdog.kill = lambda: print("last", flush=True)
watchdog.start()
{runner}.run(main())
"""

# What keeps the end from coming, and whether the thread can still say its last words.
BLOCKS = {
    "python code on the loop": ("while True: pass", "block()", True),
    "a system call on the loop": ("time.sleep(3600)", "block()", True),
    "a call into C on the loop": ("sum(range(10**12))", "await stop.wait(); block()", False),
    "a thread that is joined at the end": (
        "time.sleep(3600)", "asyncio.get_running_loop().run_in_executor(None, block)", True,
    ),
    "a task that will not be cancelled": (
        "pass", "\n        while True:\n            try: await asyncio.sleep(3600)\n"
        "            except asyncio.CancelledError: pass", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("runner", rest_in_full("uvloop", "asyncio"))
@pytest.mark.parametrize("what", BLOCKS)
@pytest.mark.sample(3)
async def test_the_service_ends_whatever_keeps_it(what: str, runner: str) -> None:
    block, work, speaks = BLOCKS[what]
    # A loaded machine may take a while for the last words; where there are none, Python's own watchdog ends it.
    last = SOON if speaks else 1.0
    program = PROGRAM.format(block=block, work=work, runner=runner, within=0.5, last=last)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SOON):
            said, logged = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 1
    assert said.startswith(b"last\n") == speaks
    assert (b"stop_forced" in logged) == speaks


async def test_a_service_that_ends_by_itself_is_not_disturbed() -> None:
    program = PROGRAM.format(block="pass", work="pass", runner="uvloop", within=SOON, last=1.0)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(SOON):
        said, _ = await child.communicate()
    assert (child.returncode, said) == (0, b"")
