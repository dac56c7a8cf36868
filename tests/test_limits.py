"""A test whose time is up fails, and what a failed test had is put away before the next one begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import asyncio, gc, subprocess, sys, time
from contextlib import asynccontextmanager
from pathlib import Path
import pytest
from tests import limits

LEFT = Path("left")
LEFT.write_text("ended")

@asynccontextmanager
async def program():
    process = await asyncio.create_subprocess_exec("sleep", "600")
    LEFT.write_text("running")
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
        LEFT.write_text("ended")

async def busy():
    while True:
        await asyncio.sleep(0)

@pytest.mark.timeout(1)
async def test_waits_for_a_program():
    async with program() as process:
        await process.wait()

def test_after_it():
    assert LEFT.read_text() == "ended"

@pytest.mark.timeout(1)
async def test_beside_another_task_that_is_nearly_always_the_one_that_runs():
    task = asyncio.create_task(busy())
    async with program() as process:
        await process.wait()

def test_after_that():
    limits.GRACE = 1.0
    assert LEFT.read_text() == "ended"

@pytest.mark.timeout(60)
async def test_whose_loop_has_another_clock(monkeypatch):
    now = time.monotonic
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now() + 3600)
    await asyncio.sleep(0.01)

@pytest.mark.timeout(1)
def test_that_takes_the_first_signal_for_something_else():
    try:
        time.sleep(600)
    except BaseException:
        LEFT.write_text("taken")
    time.sleep(600)

def test_after_the_second_signal():
    assert LEFT.read_text() == "taken"

@pytest.fixture
def ends_late():
    yield
    time.sleep(600)

@pytest.mark.timeout(1)
def test_that_fails_and_hangs_behind_that(ends_late):
    assert False

async def test_that_fails_with_a_connection_open():
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        left = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert False

def test_behind_it():
    gc.collect()
"""


def test_a_test_that_takes_too_long_or_fails_is_put_away_with_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.limits",
        "-p",
        "tests.failing",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "--asyncio-mode=auto",
    ]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", "--rootdir", str(tmp_path), "test_slow.py"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1].startswith("5 failed, 5 passed, 1 error"), done.stdout + done.stderr
