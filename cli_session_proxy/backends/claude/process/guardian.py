"""Makes sure that no CLI outlives its proxy, however the proxy ends. The proxy's side of `guardian_program`.

- The guardian program kills every registered process group when the proxy is gone, on Linux and macOS, also behind a
wrapper script that does not `exec`. A guardian that dies is restarted, and gets all registrations again.
- On Linux the CLI itself, or the wrapper in its place, also gets a parent-death signal (`setpriv --pdeathsig KILL`,
  0.4 ms a start). It works while there is no guardian, and fires when the *thread* that started the CLI ends: that is
  the thread of the event loop, which outlives the pool.

Not covered: a program without a readable mark whose parent has already ended; and, without /proc, a group id that was
reused between the end of its last process and our `-`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import socket
import sys
import uuid
import weakref
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import NamedTuple

import psutil

from .... import logs
from ....machine import interpreter
from . import descriptors, guardian_program
from .guardian_program import GUARD, NONE_LEFT, RECORD, RELEASE

log = logs.get(__name__)

# Seconds: a guardian that ran longer is restarted at once; after an earlier end the delay grows.
STABLE = 5.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 60.0
# Seconds for a guardian without work to end, and for `setpriv` to print its version.
END_WAIT = 5.0
SETPRIV_WAIT = 5.0
LAST_WORDS = 2000  # bytes of its stderr that are logged
# Temporary errors of a start: out of descriptors, processes or memory.
SHORTAGES = (*descriptors.NONE_FREE, errno.EAGAIN, errno.ENOMEM)

# The format of `Guardian.mark`. A program could write any other text into its environment, e.g. a prefix of all marks.
MARK = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}\.")


class _Guarded(NamedTuple):
    started: int
    stdin: socket.socket


class Guardian:
    """One for each pool, on its event loop. It is started with the first CLI.

    `guard` and `release` never block or fail: a guardian that does not read is replaced.
    """

    def __init__(self) -> None:
        self.death_signal: tuple[str, ...] = ()  # the command prefix for a parent-death signal, if available
        self._id = uuid.uuid4().hex
        self._guarded: dict[int, _Guarded] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()  # a start was tried
        self._closing = asyncio.Event()
        self._program: Process | None = None
        self._line: socket.socket | None = None
        _guardians.add(self)

    @property
    def pid(self) -> int | None:
        """The program's pid, while it is connected."""
        return self._program.pid if self._program is not None and self._line is not None else None

    async def start(self) -> None:
        """Wait until it runs, or its start has failed."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        await self._tried.wait()

    def mark(self) -> str:
        """A new CLI's mark. No other mark begins with it, and marks are not predictable."""
        return f"{self._id}.{uuid.uuid4().hex}."

    def guard(self, pid: int, start_time: str | None, stdin: socket.socket) -> None:
        """Register a process group to be killed when we end. `stdin`: our end of its input."""
        ticks = int(start_time) if start_time is not None and start_time.isdigit() else 0
        self._guarded[pid] = _Guarded(ticks, stdin)
        self._tell(GUARD, pid)

    def release(self, pid: int) -> None:
        """Unregister a dead process group."""
        if self._guarded.pop(pid, None) is not None:
            self._tell(RELEASE, pid)

    async def close(self) -> None:
        """End the guardian. Registered groups are killed."""
        self._closing.set()
        self._hang_up()
        if self._keeping is None:
            return
        done, _ = await asyncio.wait({self._keeping}, timeout=END_WAIT)
        if not done:
            self._kill()
            await asyncio.wait({self._keeping})

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause = 0.0
        asked = failing = False
        try:
            while not self._closing.is_set():
                began = loop.time()
                try:
                    if not asked:
                        self.death_signal = await _death_signal()
                        asked = True
                    await self._run()
                    failing = False
                except Exception as exc:  # no such program; or out of descriptors, processes or threads
                    if not failing:
                        trace = not isinstance(exc, OSError | RuntimeError)
                        log.warning("no_guardian", program=interpreter(), error=str(exc), exc_info=trace)
                    failing = True
                self._tried.set()
                pause = 0.0 if loop.time() - began > STABLE else min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
        finally:
            self._tried.set()

    async def _run(self) -> None:
        """Run the program once. Raises OSError, RuntimeError if it cannot be started."""
        program = str(Path(guardian_program.__file__))
        directory = str(Path(psutil.__file__).parent.parent)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(True)  # despite any default timeout
        try:
            with theirs:
                descriptors.check()
                self._program = await asyncio.create_subprocess_exec(
                    interpreter(), "-I", "-S", program, f"{self._id}.", directory,
                    stdin=theirs.fileno(), stdout=DEVNULL, stderr=PIPE, cwd="/", start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        self._line = ours
        for pid in self._guarded:
            self._tell(GUARD, pid)
        if self._closing.is_set():
            self._hang_up()
        self._tried.set()
        try:
            assert self._program.stderr is not None
            words = await self._program.stderr.read(LAST_WORDS)
            code = await self._program.wait()
        finally:
            self._hang_up()
        if not self._closing.is_set():
            log.warning("guardian_ended", exit_code=code, stderr=words.decode(errors="replace"))

    def _tell(self, operation: bytes, pid: int) -> None:
        """Send without blocking. If it fails, nothing is queued: the next guardian gets all registrations."""
        if self._line is None:
            return
        guarded = self._guarded.get(pid)
        record = RECORD.pack(operation, pid, guarded.started if guarded else 0)
        # Its end may be closed already, if the CLI was asked to end.
        open_ = [guarded.stdin] if guarded is not None and guarded.stdin.fileno() >= 0 else []
        try:
            try:
                sent = socket.send_fds(self._line, [record], [one.fileno() for one in open_])
            except OSError as exc:  # too many descriptors in flight of this user's programs, agents included
                if exc.errno != errno.ETOOMANYREFS:
                    raise
                sent = self._line.send(record)
        except OSError as exc:
            log.warning("guardian_unreachable", error=exc.strerror)
            sent = 0
        if sent < len(record):
            self._hang_up()
            self._kill()

    def _kill(self) -> None:
        if self._program is not None and self._program.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                self._program.kill()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if self._closing.is_set() and not self._guarded:
            with contextlib.suppress(OSError):  # it then searches for survivors, and finds none
                line.send(RECORD.pack(NONE_LEFT, 0, 0))
        line.close()


async def _death_signal() -> tuple[str, ...]:
    """The command prefix that lets a process get SIGKILL when its parent dies; empty if not available.

    Raises OSError if this cannot be determined now.
    """
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None:
        return ()
    command = (setpriv, "--pdeathsig", "KILL", "--")  # in util-linux since 2.33, not in other implementations
    try:
        descriptors.check()
        check = await asyncio.create_subprocess_exec(
            *command, setpriv, "--version", stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
    except OSError as exc:
        if exc.errno in SHORTAGES:
            raise
        return ()
    try:
        async with asyncio.timeout(SETPRIV_WAIT):
            await check.wait()
    except TimeoutError:
        check.kill()
        await check.wait()
    return command if check.returncode == 0 else ()


# A fork of ours must not hold these sockets open, or guardians would wait for its end.
_guardians: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _forked() -> None:
    for guardian in list(_guardians):
        guardian._hang_up()


os.register_at_fork(after_in_child=_forked)


# --- A process's start time, which with the pid identifies it

_DEAD = "ZX"  # process states: dead, not reaped


def start_time(pid: int) -> str | None:
    """The start time of a process; None if there is none with this pid."""
    if sys.platform == "linux":
        # In clock ticks since boot. psutil converts them to a time of day, which changes when the clock is set.
        now = guardian_program.status(pid)
        return None if now is None or now[0] in _DEAD else str(now[1])
    try:
        process = psutil.Process(pid)
        # psutil's own identity of a process; `create_time` changes when the clock is set.
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process._ident[1])
    except psutil.NoSuchProcess:
        return None
