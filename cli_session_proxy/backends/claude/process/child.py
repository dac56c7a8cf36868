"""The process of one CLI: its command line, its start and its end. `frames` has its input and output.

`end` returns when the process and its group are dead: a wrapper script that does not `exec` ends before its CLI does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import IO, BinaryIO

import psutil

from .... import logs
from ....domain.client_tools import SERVER, Offers
from ....domain.models import JSON
from ....errors import ClaudeUnavailable, InvalidRequest, ProxyError, SandboxError
from ....settings import Profile
from ..transcript.files import MEMORY
from ..transcript.projects import project_dir
from . import descriptors, environment, guardian_program, permissions
from .capability import PROMPT_FILE, SYSTEM_PROMPT, Capability
from .frames import printable
from .guardian import MARK, Guardian, start_time
from .guardian_program import MARK_VARIABLE, sweep
from .pipes import ThreadReader

log = logs.get(__name__)

# --- Launch and command line

# At its start a CLI deletes sessions' files older than `cleanupPeriodDays` (default 30): not ours. (1.0.120 goes by the
# directory's own settings.json only: there they are written again.) And it must not compact while it is idle (2.1.286),
# only in a turn, so that the chain knows. Nor does it take messages of other CLIs.
ALWAYS = {"cleanupPeriodDays": 36500, "idleCompaction": False, "crossSessionInbound": "refuse"}
# The first version that can be told where to keep the model's notes (its change log). 2.1.71 cannot, and has notes.
TAKES_NOTES_FOLDER = (2, 1, 74)

# For CLIs without --tools: the names of all tools of 1.x and 2.0 CLIs, to turn them off (run on 1.0.120: `tools` of the
# request is empty; "*" does not work, nor does --permission-mode plan).
KNOWN_TOOLS = (
    "Agent", "AskUserQuestion", "Bash", "BashOutput", "Edit", "EnterPlanMode", "ExitPlanMode", "Glob", "Grep",
    "KillBash", "KillShell", "LS", "LSP", "ListMcpResourcesTool", "Monitor", "MultiEdit", "NotebookEdit",
    "NotebookRead", "Read", "ReadMcpResourceTool", "Skill", "SlashCommand", "Task", "TaskCreate", "TaskGet",
    "TaskList", "TaskOutput", "TaskStop", "TaskUpdate", "TodoRead", "TodoWrite", "ToolSearch", "WebFetch", "WebSearch",
    "Write", "exit_plan_mode",
)  # fmt: skip
# Tools that any MCP server adds; they only read what the profile's servers offer.
MCP_HELPERS = frozenset({"ListMcpResourcesTool", "ReadMcpResourceTool"})
# Off: with these a CLI prompts itself when no client asks (2.1.332). The model's answer would be in no turn.
# `RemoteTrigger`, which a subscription adds, does so in the account's cloud, and lists there what others told it.
ALWAYS_OFF = ("CronCreate", "CronDelete", "CronList", "Monitor", "RemoteTrigger", "ScheduleWakeup", "Workflow")
ALL_TOOLS = "default"  # the word that --tools takes for the whole set
# A spare refuses a directory whose path could be a short name of Windows: `unsafe_path` (2.1.332).
SHORT_NAME = re.compile(r"~\d")


Wrapper = Callable[[], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Launch:
    """The parameters of a start. Two are equal if one running process can serve both: other differences concern only
    the start, or can be changed while it runs (`ClaudeProcess.adapt`).

    `session_id` is created, or resumed if `resume` is set.

    `model`, `system_prompt` and `effort` are final: the caller has resolved the profile's defaults.
    `profile.tools`: plain names become available; rules such as `Bash(git *)` or `mcp__…` are also allowed to run; the
    rest depends on `permission_mode`. `env` is the whole environment.
    `offers`: the client's own tools, which are given to the running process and can be replaced later.
    `ahead`: a spare that waits for a session's directory (`ClaudeProcess.claim`). `wrapper` returns the beginning of a
    confined process's command line (`confine`).
    """

    capability: Capability
    cwd: Path
    session_id: str
    resume: bool = field(compare=False)
    model: str
    profile: Profile
    env: tuple[tuple[str, str], ...] = field(repr=False)
    system_prompt: str | None = field(default=None, compare=False, repr=False)
    effort: str | None = None
    offers: Offers = field(default_factory=Offers, compare=False)
    ahead: bool = field(default=False, compare=False)
    wrapper: Wrapper | None = field(default=None, compare=False, repr=False)

    def argv(self, prompt_file: Path | None = None) -> list[str]:
        """The command line. With `prompt_file` the system prompt is read from there."""
        session = f"--resume={self.session_id}" if self.resume else f"--session-id={self.session_id}"
        argv = ["-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
        argv += [flag for flag in ("--include-partial-messages", "--strict-mcp-config") if self._has(flag)]
        if self._has("--system-prompt-snapshot"):  # else a resumed process ignores a new system prompt
            argv.append("--system-prompt-snapshot=off")
        if self.ahead:
            argv.append("--await-claim")
        return [str(self.capability.path), *argv, session, *self._choices(prompt_file)]

    async def with_boundary(self) -> Launch:
        """The same, with a boundary that is made and checked now. A program of the agent can hold this up, so no permit
        is held meanwhile. Until the start no agent can change the names that the boundary is made of."""
        if self.wrapper is None:
            return self
        words = await self.wrapper()

        async def made() -> tuple[str, ...]:
            return words

        return replace(self, wrapper=made)

    @property
    def confined(self) -> bool:
        """Whether it runs in a sandbox. A summary for a confined agent does so, too, with a profile of its own."""
        return self.profile.confined or self.wrapper is not None

    @property
    def kind(self) -> str | None:
        """Key that a launch shares with spares that can serve it. None: no spare can.

        Only a new session of an agent without the CLI's tools can use a spare: the spare keeps its own TMPDIR, and
        nothing in the agent's directory (settings, MCP servers) may affect its start. The key includes the model:
        changing it in a running process would show the model a `/model` command of the user (run on 2.1.329).
        """
        profile = self.profile
        own = profile.tools or profile.add_dirs or profile.mcp_config or profile.setting_sources or self.confined
        if not self.capability.takes_claim or self.resume or own:
            return None
        if not self.ahead and (not (self.system_prompt or "").strip() or SHORT_NAME.search(str(self.cwd))):
            return None
        choices = replace(self, system_prompt=None)._choices(None)
        env = [(name, value) for name, value in self.env if name != "TMPDIR"]
        return hashlib.sha256(json.dumps((str(self.capability), env, choices), default=str).encode()).hexdigest()

    def spare(self, cwd: Path, tmpdir: Path) -> Launch:
        """The launch of a spare for this `kind`, with temporary directories of its own."""
        env = tuple(sorted((dict(self.env) | {"TMPDIR": str(tmpdir)}).items()))
        session_id = str(uuid.uuid4())
        return replace(
            self, cwd=cwd, env=env, session_id=session_id, system_prompt=None, offers=Offers(), resume=False, ahead=True
        )

    def _has(self, flag: str) -> bool:
        return flag in self.capability.flags

    def _notes(self) -> JSON:
        """Where a CLI with tools keeps the model's notes: beside the agent's sessions. By itself it takes one folder
        for the whole git repository that `var` is in, so each agent would be shown the notes of all (2.1.71, 2.1.332).
        Others keep none."""
        if not self.profile.tools or self.capability.version_tuple < TAKES_NOTES_FOLDER:
            return {"autoMemoryEnabled": False}
        config_dir = environment.config_dir_of(dict(self.env))
        return {"autoMemoryDirectory": str(project_dir(config_dir, self.cwd) / MEMORY)}

    def _choices(self, prompt_file: Path | None) -> list[str]:
        argv = [] if self.model == "default" else [f"--model={self.model}"]
        if self.effort is not None and self._has("--effort"):
            argv.append(f"--effort={self.effort}")
        if self._has("--setting-sources"):
            argv.append(f"--setting-sources={','.join(self.profile.setting_sources)}")
        if self._has("--settings"):
            argv.append("--settings=" + json.dumps({**ALWAYS, **self._notes(), **permissions.settings(self.profile)}))
        if self.profile.permission_mode in self.capability.permission_modes:
            argv.append(f"--permission-mode={self.profile.permission_mode}")
        argv += permissions.arguments(self.profile)
        argv += [f"--add-dir={folder}" for folder in self.profile.add_dirs]
        if self.profile.mcp_config is not None:
            argv.append(f"--mcp-config={self.profile.mcp_config}")
        # Tools
        rules = [f"mcp__{SERVER}"] if self.capability.takes_tools else []
        rules += [tool for tool in self.profile.tools if "(" in tool or tool.startswith("mcp__")]
        if rules:
            argv.append(f"--allowedTools={','.join(rules)}")
        names = list(dict.fromkeys(tool.split("(")[0] for tool in self.profile.tools if not tool.startswith("mcp__")))
        denied: tuple[str, ...] = ALWAYS_OFF if names else ()
        if self.capability.chooses_tools:
            argv.append(f"--tools={','.join(names)}")
        elif ALL_TOOLS not in names:
            denied = tuple(tool for tool in KNOWN_TOOLS if tool not in names)
        if denied:
            argv.append(f"--disallowedTools={','.join(denied)}")
        # System prompt
        if prompt_file is not None:
            argv.append(f"{PROMPT_FILE}={prompt_file}")
        elif self.system_prompt is not None:
            flag = SYSTEM_PROMPT if self._has(SYSTEM_PROMPT) else "--append-system-prompt"
            argv.append(f"{flag}={self.system_prompt}")
        return argv


def check_tools(launch: Launch, init: JSON) -> None:
    """Raises ClaudeUnavailable if the CLI's `init` frame lists tools that the launch does not allow."""
    allowed = {tool.split("(")[0] for tool in launch.profile.tools}
    offered = {str(tool) for tool in init.get("tools") or () if not str(tool).startswith("mcp__")}
    if allowed or offered <= MCP_HELPERS:
        return  # not compared with a profile's tools: newer CLIs rename some
    names = ", ".join(sorted(offered))
    raise ClaudeUnavailable(
        f"Claude CLI {launch.capability.version} offers tools that are off here ({names}): use another version"
    )


# --- The running process

KILL_WAIT = 10.0  # seconds for the kernel to end a killed process
GROUP_POLL = 0.005  # seconds between polls of a killed group, whose members are not our children
AT_WORK = 0.05  # share of a processor above which a CLI counts as working; an idle one uses 0.006
BUFFER = 128 * 1024  # least size of the buffer of a socket or pipe, in bytes
LOOK_AGAIN = 0.1  # seconds until a check is repeated that failed for lack of descriptors or threads


class OSProcess:
    """A process started by `subprocess`, whose end can be awaited.

    asyncio's own start is not used: uvloop forks, which blocks the event loop for 7 to 28 ms in a proxy of usual size.
    `subprocess` uses vfork: 0.2 ms.
    """

    def __init__(self, program: subprocess.Popen[bytes]) -> None:
        self.pid = program.pid
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        Thread(target=self._wait, name=f"exit-of-{self.pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return self._program.returncode if self._ended.done() else None

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def _wait(self) -> None:
        self._program.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ended.set_result, None)


class Child:
    """A running process. `pid` and `start_time` together identify it even if the pid is reused.

    Its stdout goes to the protocol that it was started with, its stderr to `stderr`.
    """

    def __init__(
        self,
        launch: Launch,
        guardian: Guardian,
        process: OSProcess,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.ReadTransport,
        stderr: asyncio.StreamReader,
        errors: asyncio.ReadTransport,
    ) -> None:
        self.pid = process.pid
        self.start_time = start_time(process.pid)
        self.stdin = stdin
        self.stderr = stderr
        self.input_ended = False
        self.gone = False  # it is dead and reaped, and so is its process group
        self.unseen: Exception | None = None  # the error, if it is unknown whether its descendants are dead
        self._launch = launch
        self._guardian = guardian
        self._outputs = stdout, errors
        self.process = process
        self._started: list[psutil.Process] = []  # its descendants, listed before it ends some of them itself
        self._killing: asyncio.Task[None] | None = None
        self._mark = ""
        self._prompt_file: Path | None = None

    @classmethod
    async def start(cls, launch: Launch, guardian: Guardian, output: asyncio.Protocol, limit: int) -> Child:
        """`output` reads its stdout; `limit`: bytes of stderr that are buffered.

        Raises ClaudeUnavailable, SandboxError, InvalidRequest (see `_cannot_start`).
        """
        wrapper = () if launch.wrapper is None else await launch.wrapper()
        await guardian.start()
        mark = guardian.mark()
        prompt_file = ours = stdin = heard = stdout = read = errors = program = None
        try:
            ours, theirs = _input_pair()
            with theirs, contextlib.ExitStack() as held:
                # A socket: its shutdown reaches the CLI although the guardian has a copy of our end.
                _, stdin = await asyncio.open_unix_connection(sock=ours)
                # Written without a thread: this is quicker, and a cancelled caller would leave the file behind. A file
                # if possible, because argv is public on the machine and limited (128 KB each on Linux).
                named: Path | None = None
                passed: tuple[int, ...] = ()
                if launch.system_prompt is not None and launch.capability.does("prompt_file"):
                    if launch.confined:
                        passed = (held.enter_context(prompt_in_memory(launch)),)
                        named = Path(f"/proc/self/fd/{passed[0]}")
                    else:
                        named = prompt_file = write_prompt(launch)
                if guardian.death_signal and not os.access(launch.capability.path, os.X_OK):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # before `setpriv` does
                heard, says = _output_pipe()
                with says:
                    # Not asyncio's PIPE: data from that takes one or two more loop iterations.
                    stdout = await _reading(heard, output, launch)
                    stderr = asyncio.StreamReader(limit=limit)
                    program = subprocess.Popen(  # noqa: ASYNC220, S603 - see `OSProcess`; this is the CLI
                        [*guardian.death_signal, *wrapper, *launch.argv(named)], pass_fds=passed,
                        stdin=theirs.fileno(), stdout=says.fileno(), stderr=subprocess.PIPE, bufsize=0,
                        # The wrapper runs outside the sandbox: it must not load a library from the agent's directory.
                        cwd="/" if wrapper else launch.cwd,
                        # The mark comes first, where it is looked for, and no setting replaces it.
                        env={MARK_VARIABLE: mark} | dict(launch.env) | {MARK_VARIABLE: mark}, start_new_session=True,
                    )  # fmt: skip
            read = program.stderr
            assert read is not None
            errors = await _reading(read, asyncio.StreamReaderProtocol(stderr), launch)
            child = cls(launch, guardian, OSProcess(program), stdin, stdout, stderr, errors)
        except BaseException as exc:
            for opened in (stdin or ours, stdout or heard, errors or read):
                if opened is not None:
                    opened.close()
            if program is not None:
                program.kill()
                program.wait()
            _remove_prompt(prompt_file)
            if isinstance(exc, OSError | ValueError | RuntimeError):
                raise _cannot_start(launch, exc) from exc
            raise
        child._mark, child._prompt_file = mark, prompt_file
        guardian.guard(child.pid, child.start_time, ours)
        return child

    def end_input(self) -> None:
        """Close stdin. The CLI still reads earlier input, finishes its turn and exits."""
        self.input_ended = True
        with contextlib.suppress(OSError):  # it is dead
            if not self.stdin.is_closing():  # uvloop raises then
                self.stdin.write_eof()

    def signal(self, number: int) -> None:
        """Signal the whole group. No error if the group is dead."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    @property
    def _starts_others(self) -> bool:
        profile = self._launch.profile
        return bool(profile.tools or profile.mcp_config)

    async def look(self) -> None:
        """List its descendants before it ends some of them itself: those that survive get another parent."""
        if self._starts_others:
            with contextlib.suppress(OSError, RuntimeError):  # out of descriptors or threads
                self._started += await asyncio.to_thread(guardian_program.started_by, self.pid)

    def kill(self) -> None:
        """Kill it with all descendants. `end` still has to be awaited."""
        if not self._starts_others:
            self.signal(signal.SIGKILL)
        elif self._killing is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # called from another thread, as a last resort
                self.signal(signal.SIGKILL)
            else:
                guardian_program.stop(self.pid)
                self._killing = loop.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            self._started += await asyncio.to_thread(guardian_program.stopped, self.pid)
        except (OSError, RuntimeError) as exc:
            log.warning("started_unseen", pid=self.pid, error=str(exc))
        finally:
            guardian_program.kill(self.pid, self._started)

    async def is_at_work(self, seconds: float) -> bool:
        """Whether it uses processor time within so many seconds, or waits for some."""
        before = self.processor_seconds()
        await self._exited(seconds)
        return self.processor_seconds() - before > seconds * AT_WORK

    def processor_seconds(self) -> float:
        """Processor time used, or waited for (Linux), so far; 0.0 once it has ended. A confined CLI's first process is
        bubblewrap, which only waits."""
        used = 0.0
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.pid)
            for one in (first, *(first.children(recursive=True) if self._launch.confined else ())):
                used += sum(one.cpu_times()[:2]) + waited_for_processor(one.pid)
        return used

    async def end(self, *, gently: bool, grace: float) -> None:
        """KILL, and wait. With `gently`, first: end of input, wait, TERM, wait. `grace` limits each wait.

        Only gently between turns: in a turn the end of its input makes it ask the model again.
        """
        if gently:
            await self.look()
            self.end_input()
            await self._exited(grace)
            if self.process.returncode is None:
                self.signal(signal.SIGTERM)
                await self._exited(grace)
        self.kill()
        if self._killing is not None:
            await self._killing
        await self._exited(KILL_WAIT)
        if self.process.returncode is not None:
            await self._end_rest()

    async def _end_rest(self) -> None:
        """End the rest after its first process is dead and its group was killed."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT):
                    while not self.gone and _exists(self.pid):
                        if not await asyncio.to_thread(_members, self.pid):
                            break  # zombies only
                        await asyncio.sleep(GROUP_POLL)
                    self.gone = True
            if self._starts_others:  # shells of its Bash tool have groups of their own
                await asyncio.to_thread(sweep, self._mark)
            self.unseen = None
        except (OSError, RuntimeError) as exc:
            self.unseen = exc

    async def close(self) -> None:
        """Release its resources, after its output was read."""
        self.stdin.close()
        for output in self._outputs:
            output.close()
        clock = asyncio.get_running_loop().time
        give_up = clock() + KILL_WAIT
        while self.unseen is not None and clock() < give_up:
            await asyncio.sleep(LOOK_AGAIN)  # its end frees descriptors
            await self._end_rest()
        if self.unseen is not None:  # the guardian kills the rest when we end
            log.warning("process_unseen", pid=self.pid, error=str(self.unseen))
        elif self.gone:
            self._guardian.release(self.pid)
        _remove_prompt(self._prompt_file)

    async def _exited(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):  # then the next, harsher step
            await asyncio.wait_for(self.process.wait(), timeout)


def waited_for_processor(pid: int) -> float:
    """Seconds that its first thread was ready to run, and others ran; 0.0 where the kernel does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def end_stray(pid: int, started: str) -> bool:
    """End a CLI that another proxy left behind, with all descendants. Blocks. True if all are dead.

    `pid` and `started` are from that proxy's record. Its first process may be dead while others of its group live.
    """
    if start_time(pid) not in (None, started):
        return True  # the pid was reused: the whole group is dead
    members = _members(pid)
    marks = {guardian_program.mark_of(member) for member in members}
    guardian_program.kill(pid, guardian_program.stopped(pid))
    give_up = time.monotonic() + KILL_WAIT
    while members and time.monotonic() < give_up:
        time.sleep(GROUP_POLL)
        members = _members(pid)
    for mark in filter(MARK.fullmatch, marks):
        sweep(mark)
    return not members


def _exists(group: int) -> bool:
    """Whether the group has a member, zombies included. One system call."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS raises this for zombies
        return True
    return True


def _members(group: int) -> list[psutil.Process]:
    """The processes of a group, without zombies, which may never be reaped in a container. Scans all processes."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _input_pair() -> tuple[socket.socket, socket.socket]:
    """Our end and the CLI's, which only reads: a program could else send descriptors over it. The event loop would
    close them while it reads, which blocks if one is a TCP socket that lingers.

    With a large buffer: macOS has 8 KB by default, so a long frame would need hundreds of reads."""
    ours, theirs = socket.socketpair()
    for one, size in ((ours, socket.SO_SNDBUF), (theirs, socket.SO_RCVBUF)):
        if one.getsockopt(socket.SOL_SOCKET, size) < BUFFER:
            one.setsockopt(socket.SOL_SOCKET, size, BUFFER)
    ours.shutdown(socket.SHUT_RD)
    return ours, theirs


def _output_pipe() -> tuple[BinaryIO, BinaryIO]:
    """A pipe, not a socket: see `_input_pair`."""
    heard, says = os.pipe()
    with contextlib.suppress(OSError):  # this user's pipes have much memory already
        if sys.platform == "linux":
            fcntl.fcntl(says, fcntl.F_SETPIPE_SZ, BUFFER)
    return os.fdopen(heard, "rb", 0), os.fdopen(says, "wb", 0)


async def _reading(pipe: IO[bytes], protocol: asyncio.Protocol, launch: Launch) -> asyncio.ReadTransport:
    """Read this output of the CLI from now on."""
    if launch.confined:
        return ThreadReader(pipe, protocol)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return transport


def write_prompt(launch: Launch) -> Path:
    """Write the system prompt to a private file in the agent's TMPDIR. Removed when the process is closed."""
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
        if exc.errno in descriptors.NONE_FREE:
            raise
        raise SandboxError(
            f"cannot write to {folder} ({exc.strerror}): make it a writable directory of a disk that is not full"
        ) from exc
    return Path(name)


@contextlib.contextmanager
def prompt_in_memory(launch: Launch) -> Iterator[int]:
    """A descriptor of a file with the system prompt, for a confined CLI. It is nowhere in the agent's TMPDIR: a program
    that lists a folder can hold up whoever makes a file there, for minutes."""
    with open(os.memfd_create("system-prompt"), "wb") as file:
        file.write(printable(launch.system_prompt or "").encode())
        file.flush()
        yield file.fileno()


def _remove_prompt(file: Path | None) -> None:
    """Remove our own file only: the agent can write in this directory, and may have replaced it."""
    try:
        if file is not None:
            file.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("prompt_file_left", file=str(file), error=exc.strerror)


def _cannot_start(launch: Launch, exc: OSError | ValueError | RuntimeError) -> ProxyError:
    """The error if the system refused to start a process. A `RuntimeError` means that there was no thread."""
    if isinstance(exc, ValueError):
        return InvalidRequest("the system prompt or model holds a character that the Claude CLI does not take")
    if isinstance(exc, RuntimeError):
        return ClaudeUnavailable(f"{launch.capability.path} cannot be started ({exc}): raise the limit of processes")
    if exc.errno in descriptors.NONE_FREE:
        return descriptors.unavailable(exc)
    if exc.errno == errno.E2BIG:
        return InvalidRequest(
            "the system prompt is too large for a command line, and "
            + launch.capability.cannot("prompt_file", "read it from a file")
        )
    if not launch.cwd.is_dir():
        return SandboxError(f"the sandbox {launch.cwd} is not a directory")
    return ClaudeUnavailable(f"{launch.capability.path} cannot be started ({exc.strerror}): see `doctor`")
