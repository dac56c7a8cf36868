"""The process of one CLI: how it is started, how words get in, and how it is ended with everything it started.

`end` returns when the process and its group are dead: a wrapper script that does not `exec` ends before its CLI does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import tempfile
import time
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from pathlib import Path

import psutil

from .... import logs
from ....errors import ClaudeUnavailable, InvalidRequest, ProxyError, SandboxError
from .capability import SYSTEM_PROMPT_FILE, newer
from .guardian import Guardian
from .guardian_program import MARK_VARIABLE, sweep
from .launch import Launch, printable
from .proc import start_time

log = logs.get(__name__)

KILL_WAIT = 10.0  # seconds the kernel gets to end a killed process
GROUP_POLL = 0.005  # seconds between two looks at a killed group: its members are not our children, so no signal comes


class Child:
    """A running process. `pid` and `start_time` together name it beyond a reused pid."""

    def __init__(
        self,
        launch: Launch,
        guardian: Guardian,
        transport: asyncio.SubprocessTransport,
        process: Process,
        stdin: asyncio.StreamWriter,
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.pid = process.pid
        self.start_time = start_time(process.pid)
        self.stdin = stdin
        self.stdout = process.stdout
        self.stderr = process.stderr
        self.input_ended = False
        self.gone = False  # dead and reaped, and its group dead
        self._launch = launch
        self._guardian = guardian
        self._transport = transport
        self._process = process
        self._mark = ""
        self._prompt_file: Path | None = None

    @classmethod
    async def start(cls, launch: Launch, guardian: Guardian, limit: int) -> Child:
        """`limit` is how many bytes of its output are read ahead.

        Raises ClaudeUnavailable, SandboxError, InvalidRequest (see `_cannot_start`).
        """
        await guardian.start()
        mark = guardian.mark()
        loop = asyncio.get_running_loop()
        prompt_file = stdin = None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # A socket, because its shutdown reaches the CLI although the guardian has a copy of our end.
                _, stdin = await asyncio.open_unix_connection(sock=ours)
                # Not in a thread: it is quicker than starting one, and a cancelled caller would leave the file behind.
                prompt_file = write_prompt(launch) if launch.wants_prompt_file else None
                if guardian.death_signal and not os.access(launch.capability.path, os.X_OK):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # `setpriv` would say so too late
                transport, protocol = await loop.subprocess_exec(
                    lambda: SubprocessStreamProtocol(limit=limit, loop=loop),
                    *guardian.death_signal, *launch.argv(prompt_file),
                    stdin=theirs.fileno(), stdout=PIPE, stderr=PIPE, cwd=launch.cwd,
                    env={**dict(launch.env), MARK_VARIABLE: mark}, start_new_session=True,
                )  # fmt: skip
        except BaseException as exc:
            ours.close() if stdin is None else stdin.close()
            if prompt_file is not None:
                prompt_file.unlink(missing_ok=True)
            if isinstance(exc, OSError | ValueError):
                raise _cannot_start(launch, exc) from exc
            raise
        child = cls(launch, guardian, transport, Process(transport, protocol, loop), stdin)
        child._mark, child._prompt_file = mark, prompt_file
        guardian.guard(child.pid, child.start_time, ours)
        return child

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def end_input(self) -> None:
        """Close stdin. The CLI still reads what was written, finishes its turn and exits."""
        self.input_ended = True
        with contextlib.suppress(OSError):  # it is gone
            self.stdin.write_eof()

    def signal(self, number: int) -> None:
        """Signal the whole group. A group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def end(self, *, gently: bool, grace: float) -> None:
        """KILL, and wait. Where `gently`: end of input, wait, TERM, wait, before that. Each wait is bounded by `grace`.

        Gently is only for a CLI between two turns: in a turn the end of its input makes it ask the model again.
        """
        if gently:
            self.end_input()
            await self._exited(grace)
            if self.returncode is None:
                self.signal(signal.SIGTERM)
                await self._exited(grace)
        self.signal(signal.SIGKILL)
        await self._exited(KILL_WAIT)
        if self.returncode is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT):
                while _exists(self.pid):
                    if not await asyncio.to_thread(_members, self.pid):
                        break  # zombies only
                    await asyncio.sleep(GROUP_POLL)
                self.gone = True
        if self._launch.profile.tools:  # the shells of its Bash tool are not in its group
            await asyncio.to_thread(sweep, self._mark)

    async def close(self) -> None:
        """Release its resources, once its output was read."""
        self._transport.close()
        self.stdin.close()
        if self.gone:
            self._guardian.release(self.pid)
        if self._prompt_file is not None:
            await asyncio.to_thread(self._prompt_file.unlink, missing_ok=True)

    async def _exited(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):  # the next step is harsher
            await asyncio.wait_for(self._process.wait(), timeout)


def end_left(pid: int, started: str) -> bool:
    """End a CLI that another proxy has left, with all that it started. Blocks. True when nothing of it lives.

    `pid` and `started` are what that proxy knew of it. Its first process may be gone while others of its group live.
    """
    if start_time(pid) not in (None, started):
        return True  # another process has that pid: the whole group is gone
    members = _members(pid)
    marks = set()
    for member in members:
        with contextlib.suppress(psutil.Error):  # it has ended
            marks.add(member.environ().get(MARK_VARIABLE, ""))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    give_up = time.monotonic() + KILL_WAIT
    while members and time.monotonic() < give_up:
        time.sleep(GROUP_POLL)
        members = _members(pid)
    for mark in marks - {""}:
        sweep(mark)
    return not members


def _exists(group: int) -> bool:
    """Whether the group has a member, zombies included. Costs one system call."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of zombies
        return True
    return True


def _members(group: int) -> list[psutil.Process]:
    """The processes of a group, without zombies: in a container they may never be reaped. Looks at every process."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def write_prompt(launch: Launch) -> Path:
    """The system prompt as a private file in the agent's own TMPDIR, removed when the process is closed."""
    folder = dict(launch.env).get("TMPDIR")
    try:
        handle, name = tempfile.mkstemp(prefix="system-prompt-", suffix=".txt", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(printable(launch.system_prompt or "").encode())
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise SandboxError(
            f"cannot write to {folder} ({exc.strerror}): make it a writable directory of a disk that is not full"
        ) from exc
    return Path(name)


def _cannot_start(launch: Launch, exc: OSError | ValueError) -> ProxyError:
    """The error for a process that the system refused to start."""
    if isinstance(exc, ValueError):
        return InvalidRequest("the system prompt or model holds a character that the Claude CLI cannot be given")
    if exc.errno == errno.E2BIG:
        return InvalidRequest(
            f"the system prompt is too large for the command line of Claude CLI {launch.capability.version}"
            f"{newer(SYSTEM_PROMPT_FILE)}"
        )
    if not launch.cwd.is_dir():
        return SandboxError(f"the sandbox {launch.cwd} is not a directory")
    return ClaudeUnavailable(f"{launch.capability.path} cannot be started ({exc.strerror}): see `doctor`")
