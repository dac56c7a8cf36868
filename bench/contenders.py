"""Who is measured: each answers turns of agents over the same scripted upstream, with the same CLI and flags.

Every contender is driven from the same event loop with the same care; what it starts, it ends.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from . import machine
from .client import LIMIT, Timing
from .machine import Cores

STOP = 20.0  # seconds a process has to end before it is killed
BARE = "bare warm CLI"
SPAWNED = "bare CLI, a spawn a turn"
MODEL = "sonnet"
SYSTEM = "You are a helpful assistant."
# Flags that decide how much the CLI does at a turn: the same for everybody.
FLAGS = ("--strict-mcp-config", "--tools", "", "--system-prompt-snapshot", "off", "--settings",
         '{"cleanupPeriodDays":36500}', "--system-prompt", SYSTEM)  # fmt: skip


class Contender(Protocol):
    """Answers turns. An agent is known from its first turn on."""

    name: str

    async def turn(self, agent: str, text: str, *, stream: bool = True) -> Timing:
        """One turn, in seconds, seen from the client."""

    def pids(self) -> list[int]:
        """What it started itself and is alive; the CLIs are these or below these."""

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far, with those that ended."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a contender works: the CLI, the upstream's address, a folder of its own, its cores."""

    claude: Path
    upstream: str
    folder: Path
    cores: Cores

    def environment(self) -> dict[str, str]:
        """Built up, never inherited: no account can be reached from here."""
        for name in ("home", "config", "tmp", "cwd"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "CLAUDE_CONFIG_DIR": str(self.folder / "config"),
            "TMPDIR": str(self.folder / "tmp"),
            "LANG": "C.UTF-8",
            "ANTHROPIC_API_KEY": "sk-ant-fake-bench",
            "ANTHROPIC_BASE_URL": self.upstream,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def beside(self, name: str) -> Place:
        return Place(self.claude, self.upstream, self.folder / name, self.cores)

    async def start(
        self, *argv: str, env: Mapping[str, str], cwd: Path, talks: bool = True
    ) -> asyncio.subprocess.Process:
        """A process of a contender, on its cores; `talks`: over pipes. What it logs goes to `log` in its folder."""
        pipe = asyncio.subprocess.PIPE
        with self.cores.for_contender(), (self.folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *argv, cwd=cwd, env=dict(env), limit=LIMIT, stderr=log,
                stdin=pipe if talks else asyncio.subprocess.DEVNULL, stdout=pipe if talks else log,
            )  # fmt: skip


def bundled() -> Path:
    """The CLI of the installed claude-agent-sdk."""
    spec = find_spec("claude_agent_sdk")
    assert spec is not None, "pip install '.[claude]'"
    assert spec.origin is not None
    return Path(spec.origin).parent / "_bundled" / "claude"


class BareCLI:
    """The CLI driven directly. `warm`: one process an agent; else one spawn a turn with `--resume`.

    `sessions` are those that agents go on with: an id, or the path of a transcript.
    """

    def __init__(self, place: Place, *, warm: bool, sessions: Mapping[str, str] | None = None) -> None:
        self.name = BARE if warm else SPAWNED
        self.place = place
        self._warm = warm
        self._env = place.environment()
        self._sessions: dict[str, str] = dict(sessions or {})
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._reaped = _reaped_cpu()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.returncode is None]

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(machine.tree(self.pids())) + _reaped_cpu() - self._reaped

    async def turn(self, agent: str, text: str, *, stream: bool = True) -> Timing:  # noqa: ARG002 - the CLI always streams
        began = time.perf_counter()
        process = self._processes.get(agent)
        if process is None:
            process = self._processes[agent] = await self._spawn(agent)
        timing = await self._ask(process, text, began)
        if not self._warm:
            await end(self._processes.pop(agent))
        return timing

    async def _spawn(self, agent: str) -> asyncio.subprocess.Process:
        known = agent in self._sessions
        session = self._sessions.setdefault(agent, str(uuid.uuid4()))
        argv = [
            str(self.place.claude), "-p", "--input-format", "stream-json", "--output-format", "stream-json",
            "--verbose", "--include-partial-messages", f"--resume={session}" if known else f"--session-id={session}",
            "--setting-sources", "", "--model", MODEL, *FLAGS,
        ]  # fmt: skip
        return await self.place.start(*argv, env=self._env, cwd=self.place.folder / "cwd")

    async def _ask(self, process: asyncio.subprocess.Process, text: str, began: float) -> Timing:
        assert process.stdin is not None
        assert process.stdout is not None
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        frame = {"type": "user", "uuid": str(uuid.uuid4()), "client_composed": True, "message": message}
        process.stdin.write(json.dumps(frame).encode() + b"\n")
        first = 0.0
        async for line in process.stdout:
            now = time.perf_counter() - began
            data = json.loads(line)
            if not first and data.get("type") == "stream_event" and data["event"]["type"] == "content_block_delta":
                first = now
            if data.get("type") == "result":
                assert not data["is_error"], data
                return Timing(first, now)
        raise RuntimeError(f"the CLI ended without a result: {(self.place.folder / 'log').read_text()[-2000:]}")

    async def told(self, agent: str, settings: Mapping[str, Any]) -> float:
        """One control round trip: how long the agent's process takes to take these settings, in seconds."""
        process = self._processes[agent]
        assert process.stdin is not None
        assert process.stdout is not None
        began = time.perf_counter()
        request = {"subtype": "apply_flag_settings", "settings": settings}
        frame = {"type": "control_request", "request_id": str(uuid.uuid4()), "request": request}
        process.stdin.write(json.dumps(frame).encode() + b"\n")
        async for line in process.stdout:
            if json.loads(line).get("type") == "control_response":
                return time.perf_counter() - began
        raise RuntimeError("the CLI ended without an answer")

    async def close(self) -> None:
        await asyncio.gather(*(end(process) for process in self._processes.values()))
        self._processes.clear()


def _reaped_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask by closing its input, wait, kill."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def body(text: str, *, stream: bool, before: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A chat completion that asks this, after these messages."""
    return {"model": MODEL, "stream": stream, "messages": [*(before or []), {"role": "user", "content": text}]}
