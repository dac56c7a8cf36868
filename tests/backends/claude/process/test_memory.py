"""The processes are weighed, and idle ones end where they are too heavy together."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator

import psutil
import pytest

from cli_session_proxy.backends.claude.process import memory
from cli_session_proxy.backends.claude.process import pool as pools
from cli_session_proxy.backends.claude.process.memory import FIRST_WEIGHT, Memory, weigh
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.settings import Settings

from ....until import until
from .conftest import Fake
from .helpers import ask, is_gone

MB = 1024 * 1024
LINUX = sys.platform == "linux"
Weigh = Callable[[int], None]

# Allocates 40 MB, and has a child that allocates 30.
FAMILY = """
import subprocess, sys
held = bytes(range(256)) * (int(sys.argv[1]) * 4096)
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[2]], stdin=0, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> Weigh:
    """`each(bytes)`: what every process weighs from now on. They are weighed as often as possible."""
    weight = 0

    def weighed(pids: Collection[int]) -> dict[int, int]:
        return dict.fromkeys(pids, weight)

    def to(bytes_: int) -> None:
        nonlocal weight
        weight = bytes_

    monkeypatch.setattr(memory, "weigh", weighed)
    monkeypatch.setattr(pools, "WEIGH_EVERY", 0.02)
    return to


@pytest.fixture
def family() -> Iterator[int]:
    command = [sys.executable, "-c", FAMILY, "40", "30", FAMILY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()
        process.wait()


@pytest.mark.skipif(not LINUX, reason="/proc is Linux's")
def test_a_process_is_weighed_with_what_it_started(family: int) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    weights = weigh([family, int(gone.stdout)])
    assert list(weights) == [family]
    assert 70 * MB < weights[family] < 120 * MB


def test_where_it_is_refused_the_resident_size_counts(family: int, macos: None) -> None:
    weights = weigh([family])
    assert 70 * MB < weights[family] < 200 * MB


async def test_a_measurement_that_does_not_end_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for a file system. The last weights hold, and nobody else is made to wait as well."""
    asked, answers = list[int](), threading.Event()

    def blocked(pids: Collection[int]) -> dict[int, int]:
        asked.append(1)
        answers.wait()
        return dict.fromkeys(pids, 7 * MB)

    monkeypatch.setattr(memory, "weigh", blocked)
    monkeypatch.setattr(memory, "WEIGH_WAIT", 0.05)
    scales = Memory(1000 * MB)
    for _ in range(3):
        await scales.weigh({1})
    await until(lambda: bool(asked))
    assert (asked, scales.measured(1)) == ([1], 0)
    answers.set()

    async def weighed() -> bool:
        await scales.weigh({1})
        return scales.measured(1) == 7 * MB

    await until(weighed)


async def test_until_it_is_measured_a_process_counts_as_the_others_do(each: Weigh) -> None:
    scales = Memory(3 * FIRST_WEIGHT)
    assert scales.room({1, 2}, 0)
    assert not scales.room({1, 2}, 1)
    each(FIRST_WEIGHT * 2)
    await scales.weigh({1})
    assert not scales.room({1}, 0)
    assert scales.of({1, 7}) == 4 * FIRST_WEIGHT
    assert scales.over({1, 7})
    assert not scales.over({1})


async def test_one_may_always_run_and_without_a_budget_all_may(each: Weigh) -> None:
    scales = Memory(1)
    each(MB)
    await scales.weigh({1})
    assert scales.room(set(), 0)
    assert not scales.room(set(), 1)
    assert Memory(None).room(set(range(1000)), 1000)


async def test_too_heavy_idle_ones_end_and_busy_ones_stay(settings: Settings, fake: Fake, each: Weigh) -> None:
    each(100 * MB)
    pool = Pool(settings.model_copy(update={"max_memory": 1000 * MB}))
    processes = [(await pool.checkout(await fake()))[0] for _ in range(4)]
    for process in processes:
        await ask(process)
    for process in processes[1:3]:
        await pool.checkin(process)
    each(300 * MB)
    await pool.checkin(processes[3])
    await until(lambda: is_gone(processes[1].pid))
    each(2000 * MB)
    await until(lambda: pool.counts().memory == 900 * MB)
    assert not is_gone(processes[2].pid)
    again, _ = await pool.checkout(processes[3].launch)
    await pool.checkin(again)
    await until(lambda: is_gone(processes[2].pid) and is_gone(processes[3].pid))
    assert processes[0].alive
    await pool.close()


async def test_a_start_that_is_too_heavy_ends_an_idle_one_first_or_waits(
    settings: Settings, fake: Fake, each: Weigh
) -> None:
    each(300 * MB)
    bounds = settings.model_copy(update={"max_memory": 800 * MB, "spawn_timeout": 0.5})
    pool = Pool(bounds)
    first, _ = await pool.checkout(await fake())
    await ask(first)
    await until(lambda: pool.counts().memory == 300 * MB)
    second, _ = await pool.checkout(await fake())
    with pytest.raises(QueueFull, match="max_memory"):
        await pool.checkout(await fake())
    assert first.alive
    assert second.alive  # it has not said a word yet: taken to be like the first
    bounds.spawn_timeout = 60.0  # from here on it gets its place, and a loaded machine takes a while to end the first
    waiting = asyncio.create_task(pool.checkout(await fake()))
    await pool.checkin(first)
    await waiting
    assert is_gone(first.pid)
    await pool.close()


@pytest.mark.skipif(not LINUX or shutil.which("bwrap") is None, reason="bubblewrap is Linux's")
def test_files_in_memory_are_weighed_below_a_folder_with_a_blank_in_its_name() -> None:
    """The kernel writes it as `\\040`, and what lay below weighed nothing."""
    own = [part for name in ("bin", "lib", "lib64", "usr") for part in ("--ro-bind-try", f"/{name}", f"/{name}")]
    fill = 'head -c 5000000 /dev/zero > "/a home/file"; echo filled; read -r _'
    bound = [
        "bwrap",
        *own,
        "--dev",
        "/dev",
        "--tmpfs",
        "/a home",
        "sh",
        "-c",
        fill,
    ]  # none of the machine's own files in memory
    with subprocess.Popen(bound, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == b"filled\n"
        sandboxed = [child.pid for child in psutil.Process(inside.pid).children()] or [inside.pid]
        assert memory._in_memory(sandboxed[0]) >= 5_000_000
        inside.kill()
