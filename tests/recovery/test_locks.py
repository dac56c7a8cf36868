"""Locks on files: exclusive, given back by the kernel, and cheap."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.locks import FileLock

HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


async def test_two_holders_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    one, two = FileLock(tmp_path / "a.lock"), FileLock(tmp_path / "a.lock")
    assert one.try_acquire()
    assert not two.try_acquire()
    one.release()
    one.release()
    assert two.try_acquire()
    two.release()


async def test_a_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    lock = FileLock(path)
    assert not lock.try_acquire()
    holder.kill()
    await holder.wait()
    assert lock.try_acquire()
    lock.release()


async def test_a_lock_whose_file_was_removed_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    one, two = FileLock(path), FileLock(path)
    assert one.try_acquire()
    late = os.open(path, os.O_RDWR)  # somebody who opened the file just before it was removed
    one.release()
    assert two.try_acquire()
    assert not FileLock(path).try_acquire()
    os.close(late)
    two.release()


async def test_a_lock_that_cannot_be_opened_says_where(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"nowhere/a\.lock"):
        FileLock(tmp_path / "nowhere" / "a.lock").try_acquire()


async def test_instances_know_who_lives(tmp_path: Path) -> None:
    one, two = Instances(tmp_path), Instances(tmp_path)
    one.enter()
    two.enter()
    assert one.others() == [two.id]
    assert two.others() == [one.id]
    assert one.alive(one.id)
    assert one.alive(two.id)
    assert not one.alive(None)
    assert not one.alive("unknown")
    two.leave(settled=False)
    assert not one.alive(two.id)
    assert one.others() == [two.id]
    one.forget(two.id)
    assert one.others() == []
    one.leave(settled=True)
    assert not list((tmp_path / "run").iterdir())


async def test_children_are_noted_until_they_are_reaped(tmp_path: Path) -> None:
    instances = Instances(tmp_path)
    instances.enter()
    started = start_time(os.getpid())
    instances.on_spawn(os.getpid(), started, tmp_path)
    instances.on_spawn(1, "0", tmp_path)
    instances.on_exit(1)
    assert list(instances.children(instances.id)) == [(os.getpid(), started)]
    instances.leave(settled=True)


async def test_the_start_time_of_a_dead_unreaped_process_is_none() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    assert start_time(child.pid) is not None
    child.kill()
    await child.wait()
    assert start_time(child.pid) is None
