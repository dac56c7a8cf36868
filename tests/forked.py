"""Processes of ours that are forked from one that has imported the proxy: to start an interpreter that imports it takes
most of a second of a processor, a fork some milliseconds. What a start itself does is for tests that start one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from asyncio.streams import FlowControlMixin
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

# What `serve` and a proxy of `tests.recovery` have imported when they are ready.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["cli_session_proxy.cli", "cli_session_proxy.http.server", "cli_session_proxy.commands.prerequisites",
     "cli_session_proxy.commands.terminal", "anyio.streams.tls", "uvicorn.lifespan.off", "tests.recovery.proxy"]
)  # fmt: skip


class Forked:
    """One such process, with what `asyncio.subprocess.Process` has of it."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self.returncode: int | None = None
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end)

    async def open(self, stdin: int, stdout: int) -> None:
        """Our ends of its pipes."""
        loop = asyncio.get_running_loop()
        self.stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self.stdout)
        self._reading, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(stdout, "rb", 0))
        writing, flow = await loop.connect_write_pipe(FlowControlMixin, os.fdopen(stdin, "wb", 0))
        self.stdin = asyncio.StreamWriter(writing, flow, None, loop)

    def close(self) -> None:
        self.stdin.close()
        self._reading.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.returncode = self._process.exitcode
        self._ended.set()

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


async def forked(
    main: Callable[[], None], *argv: str, env: Mapping[str, str], cwd: Path, stderr: bool = False
) -> Forked:
    """A process that calls `main` with these arguments in `sys.argv`, in a session of its own, with nothing in its
    environment but `env`. `stderr`: it goes to its stdout too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.delenv("HOME", raising=False)  # it is of no test's own
        forkserver.ensure_running()
    theirs_in, stdin = os.pipe()
    stdout, theirs_out = os.pipe()
    theirs = Connection(theirs_in, writable=False), Connection(theirs_out, readable=False)
    process = _CONTEXT.Process(target=_run, args=(main, argv, dict(env), cwd, *theirs, stderr), daemon=True)
    await asyncio.to_thread(process.start)  # the first one waits for the imports
    for end in theirs:
        end.close()
    made = Forked(process)
    await made.open(stdin, stdout)
    return made


def fork_server() -> int | None:
    """Its pid, where one runs."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _run(
    main: Callable[[], None], argv: tuple[str, ...], env: dict[str, str], cwd: Path, stdin: Connection,
    stdout: Connection, stderr: bool,
) -> None:  # fmt: skip
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    if stderr:
        os.dup2(1, 2)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = [sys.argv[0], *argv]
    main()
