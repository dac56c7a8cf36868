"""What a dead proxy leaves is killed by its guardian, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from cli_session_proxy.backends.claude.process import guardian as module
from cli_session_proxy.backends.claude.process.child import end_stray
from cli_session_proxy.backends.claude.process.guardian import Guardian, start_time
from cli_session_proxy.backends.claude.process.guardian_program import MARK_VARIABLE, mark_of, status, sweep

from ....talking import events
from ....until import until
from .conftest import Fake, Start
from .helpers import ask, free_descriptors, group, is_gone, said

SLEEP = [sys.executable, "-c", "print(flush=True); input()"]


class Sleeper:
    """A process in a session of its own that ends with its input."""

    def __init__(self, command: list[str] = SLEEP, env: dict[str, str] | None = None) -> None:
        self.stdin, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        theirs.close()
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().decode()

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.stdin.close()
        self.process.communicate()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    sleeper = Sleeper()
    yield sleeper
    sleeper.end()


@pytest.fixture
def another() -> Iterator[Sleeper]:
    sleeper = Sleeper()
    yield sleeper
    sleeper.end()


@pytest.fixture
async def started(guardian: Guardian) -> Guardian:
    await guardian.start()
    return guardian


async def test_what_is_guarded_dies_with_the_proxy_and_what_was_released_does_not(
    started: Guardian, sleeper: Sleeper, another: Sleeper
) -> None:
    for one in (sleeper, another):
        started.guard(one.pid, start_time(one.pid), one.stdin)
    started.release(another.pid)
    await started.close()  # for the program that is what the death of the proxy is: the end of its input
    assert sleeper.process.wait(60) == -signal.SIGKILL
    assert another.process.poll() is None


async def test_where_this_user_sent_too_many_descriptors_it_is_told_without_one(
    started: Guardian, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts them for all of a user's programs, a confined agent's too."""
    send = socket.send_fds

    def refused(line: socket.socket, said: list[bytes], fds: list[int]) -> int:
        if fds:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send(line, said, fds)

    monkeypatch.setattr(socket, "send_fds", refused)
    pid = started.pid
    started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
    assert started.pid == pid
    await started.close()
    assert sleeper.process.wait(60) == -signal.SIGKILL


def test_a_start_time_does_not_move_with_the_clock(sleeper: Sleeper, macos: None) -> None:
    first = psutil.Process(sleeper.pid).create_time()
    assert psutil.Process(sleeper.pid).create_time() != first
    assert start_time(sleeper.pid) == start_time(sleeper.pid)
    assert start_time(os.getpid()) != start_time(sleeper.pid)


async def test_a_process_that_got_the_pid_of_a_guarded_one_is_left_alone(started: Guardian, sleeper: Sleeper) -> None:
    before = start_time(sleeper.pid)
    assert before is not None
    started.guard(sleeper.pid, str(int(before) - 1), sleeper.stdin)
    await started.close()
    assert sleeper.process.poll() is None


async def test_a_group_whose_first_process_has_ended_is_killed(started: Guardian) -> None:
    leader = Sleeper(["sh", "-c", "sleep 3600 >&2 & echo $!; read ended"])
    try:
        started.guard(leader.pid, start_time(leader.pid), leader.stdin)
        os.kill(leader.pid, signal.SIGTERM)
        leader.process.wait(60)
        assert len(group(leader.pid)) == 1
        await started.close()
        await until(lambda: group(leader.pid) == [])
    finally:
        leader.end()


async def test_what_went_into_another_session_is_killed_by_its_mark(started: Guardian, sleeper: Sleeper) -> None:
    stray = Sleeper(env={MARK_VARIABLE: started.mark()})
    stranger = Sleeper(env={MARK_VARIABLE: Guardian().mark()})
    try:
        started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
        await started.close()
        assert stray.process.wait(60) == -signal.SIGKILL
        assert stranger.process.poll() is None
    finally:
        stray.end()
        stranger.end()


async def test_a_cli_that_was_started_just_as_its_proxy_died_is_killed_although_nobody_told_of_it(
    tmp_path: Path,
) -> None:
    program = tmp_path / "starts.py"
    program.write_text(textwrap.dedent(STARTS))
    host = Sleeper([sys.executable, str(program)], {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert host.process.wait(60) == -signal.SIGKILL
    left = int(host.said)
    try:
        await until(lambda: is_gone(left))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
        host.end()


async def test_a_proxy_that_leaves_nothing_does_not_wait_for_a_search(
    started: Guardian,
) -> None:
    stray = Sleeper(env={MARK_VARIABLE: started.mark()})
    try:
        await started.close()
        assert stray.process.poll() is None  # it was not looked for: the proxy said that it has left none
    finally:
        stray.end()


async def test_one_cli_s_strays_are_told_from_another_s(guardian: Guardian) -> None:
    marks = [guardian.mark() for _ in range(10)]
    strays = [Sleeper(env={MARK_VARIABLE: mark}) for mark in (marks[0], marks[9])]
    try:
        await asyncio.to_thread(sweep, marks[0])
        assert [is_gone(stray.pid) for stray in strays] == [True, False]
    finally:
        for stray in strays:
            stray.end()


async def test_what_another_proxy_left_is_ended_with_all_that_it_started(guardian: Guardian) -> None:
    mark = {MARK_VARIABLE: guardian.mark()}
    left, stray = Sleeper(["sh", "-c", "sleep 3600 >&2 & echo $!; read ended"], mark), Sleeper(env=mark)
    try:
        known = start_time(left.pid)
        assert known is not None
        assert await asyncio.to_thread(end_stray, left.pid, str(int(known) - 1))  # that pid is another process's now
        assert len(group(left.pid)) == 2
        os.kill(left.pid, signal.SIGKILL)  # its first process is gone, and not reaped: its proxy is paused
        await until(lambda: start_time(left.pid) is None)
        assert await asyncio.to_thread(end_stray, left.pid, known)
        assert group(left.pid) == []
        assert is_gone(stray.pid)
    finally:
        left.end()
        stray.end()


async def test_nobody_tells_anothers_mark_from_their_own(guardian: Guardian) -> None:
    """They were counted once: who knew one knew them all."""
    own = guardian.mark()
    left = Sleeper(env={MARK_VARIABLE: f"{own.partition('.')[0]}.2."})
    other = Sleeper(env={MARK_VARIABLE: guardian.mark()})
    try:
        assert await asyncio.to_thread(end_stray, left.pid, start_time(left.pid) or "")
        assert start_time(other.pid) is not None
    finally:
        left.end()
        other.end()


@pytest.mark.parametrize("length", [1, 8, 33])
async def test_a_mark_that_a_program_made_up_ends_nobody_else(guardian: Guardian, length: int) -> None:
    """Of the first characters of another's mark, in a process that a proxy has left."""
    mark = guardian.mark()
    left, other = Sleeper(env={MARK_VARIABLE: mark[:length]}), Sleeper(env={MARK_VARIABLE: mark})
    try:
        assert await asyncio.to_thread(end_stray, left.pid, start_time(left.pid) or "")
        assert start_time(left.pid) is None
        assert start_time(other.pid) is not None
    finally:
        left.end()
        other.end()


async def test_a_guarded_one_does_not_see_the_end_of_its_input_while_there_is_a_guardian(
    started: Guardian, sleeper: Sleeper
) -> None:
    assert started.pid is not None
    os.kill(started.pid, signal.SIGSTOP)  # however slow it is
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        started.guard(sleeper.pid, start_time(sleeper.pid), ours)
        ours.close()  # as a dying proxy's is
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        os.kill(started.pid, signal.SIGCONT)
        started.release(sleeper.pid)
        await asyncio.to_thread(theirs.setblocking, True)
        assert await asyncio.to_thread(theirs.recv, 1) == b""


async def test_a_guardian_that_dies_is_replaced_and_told_everything(started: Guardian, sleeper: Sleeper) -> None:
    started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
    first = started.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: started.pid not in (None, first))
    assert is_gone(first)
    await started.close()
    assert sleeper.process.wait(60) == -signal.SIGKILL


async def test_a_guardian_that_does_not_listen_holds_nobody_up_and_is_replaced(
    started: Guardian, sleeper: Sleeper, another: Sleeper
) -> None:
    first = started.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    started.guard(another.pid, start_time(another.pid), another.stdin)
    while started.pid is not None:  # until its pipe is full: nothing here waits
        started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
        started.release(sleeper.pid)
    await until(lambda: started.pid is not None)
    assert is_gone(first)
    await started.close()
    assert another.process.wait(60) == -signal.SIGKILL
    assert sleeper.process.poll() is None


async def test_a_moment_without_descriptors_leaves_no_proxy_without_a_guardian(
    started: Guardian, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
    first, tries = started.pid, 0
    assert first is not None

    def none(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short:
        short.setattr(socket, "socketpair", none)
        os.kill(first, signal.SIGKILL)
        await until(lambda: tries == 3)
        await started.start()  # nobody who starts a CLI waits for it
    await until(lambda: started.pid not in (None, first))
    assert [event["event"] for event in events(caplog)].count("no_guardian") == 1
    await started.close()
    assert sleeper.process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.sample(1)
def test_however_few_descriptors_are_free_its_start_leaves_none_open(run: Callable[..., None]) -> None:
    async def main() -> None:
        first = Guardian()
        await first.start()  # a loop's first process opens more: what it hears of the end of all of them
        await first.close()
        before, without = psutil.Process().num_fds(), 0
        for number in range(24):
            guardian = Guardian()
            with free_descriptors(number):
                await guardian.start()
                without += guardian.pid is None
                await guardian.close()
            await until(lambda: psutil.Process().num_fds() == before)
        assert 0 < without < 24

    run(main())


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no parent-death signal")
async def test_where_nothing_can_be_started_for_a_moment_the_parent_death_signal_is_looked_for_again(
    guardian: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def none(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short:
        short.setattr(asyncio, "create_subprocess_exec", none)
        await guardian.start()
    assert (guardian.pid, guardian.death_signal) == (None, ())
    assert asyncio.create_subprocess_exec is start
    await until(lambda: guardian.pid is not None)
    assert guardian.death_signal


async def test_signals_that_are_meant_for_the_proxy_do_not_end_it(started: Guardian, sleeper: Sleeper) -> None:
    pid = started.pid
    assert pid is not None
    started.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
    await until(lambda: (status(pid) or ("", 0))[0] == "S")  # it waits for records: its handlers are set
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    await started.close()
    assert sleeper.process.wait(60) == -signal.SIGKILL


async def test_where_it_cannot_be_started_the_clis_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, start: Start
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    process = await start(await fake())
    assert said(await ask(process)) == "2 hi"


async def test_in_a_program_that_embeds_python_it_runs_on_the_systems_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guardian: Guardian, sleeper: Sleeper
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "uwsgi"))  # would be started, and is none
    (tmp_path / "python3").symlink_to(Path(sys.prefix) / "bin" / "python3")
    monkeypatch.setenv("PATH", str(tmp_path))
    await guardian.start()
    guardian.guard(sleeper.pid, start_time(sleeper.pid), sleeper.stdin)
    await guardian.close()
    assert sleeper.process.wait(60) == -signal.SIGKILL


FORKS = """
    import asyncio, os, sys
    from cli_session_proxy.backends.claude.process.guardian import Guardian

    async def main():
        guardian = Guardian()
        await guardian.start()
        print(guardian.pid, flush=True)
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        os.kill(os.getpid(), 9)

    asyncio.run(main())
"""


STARTS = """
    import asyncio, os, subprocess, sys
    from cli_session_proxy.backends.claude.process.guardian import Guardian
    from cli_session_proxy.backends.claude.process.guardian_program import MARK_VARIABLE

    async def main():
        guardian = Guardian()
        await guardian.start()
        cli = subprocess.Popen(["sleep", "3600"], env={**os.environ, MARK_VARIABLE: guardian.mark()})
        print(cli.pid, flush=True)
        os.kill(os.getpid(), 9)

    asyncio.run(main())
"""


async def test_a_process_forked_from_the_proxy_does_not_keep_the_guardian_waiting(tmp_path: Path) -> None:
    program = tmp_path / "forks.py"
    program.write_text(textwrap.dedent(FORKS))
    host = Sleeper([sys.executable, str(program)], {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert host.process.wait(60) == -signal.SIGKILL
        await until(lambda: is_gone(int(host.said)))
    finally:
        host.end()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
async def test_a_cli_gets_the_parent_death_signal_and_its_pid_is_the_one_we_know(fake: Fake, start: Start) -> None:
    process = await start(await fake(env={"FAKE_CLI": "death-signal"}))
    assert said(await ask(process)) == f"{process.pid} {int(signal.SIGKILL)}"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are asked for the whole environment")
async def test_the_mark_of_a_cli_is_found_however_much_the_settings_add_to_its_environment(
    fake: Fake, start: Start
) -> None:
    added = {f"MORE_{number}": "x" * 100_000 for number in range(3)}
    process = await start(await fake(env=added))
    assert said(await ask(process))
    assert mark_of(psutil.Process(process.pid)) == process._child._mark != ""


async def test_no_setting_changes_the_mark_of_a_cli(fake: Fake, start: Start) -> None:
    """A proxy that runs in another one's CLI may be told to pass on every variable."""
    process = await start(await fake(env={MARK_VARIABLE: "of another proxy"}))
    assert said(await ask(process))
    assert mark_of(psutil.Process(process.pid)) == process._child._mark != ""


async def test_without_setpriv_there_is_no_such_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "setpriv"
    old.write_text("#!/bin/sh\necho unknown option >&2\nexit 1\n")
    old.chmod(0o755)
    for path in (tmp_path, tmp_path / "empty"):
        monkeypatch.setenv("PATH", str(path))
        assert await module._death_signal() == ()
