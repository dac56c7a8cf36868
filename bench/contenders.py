"""Who is measured: each answers one turn of one agent, over the same scripted upstream, with the same CLI.

Every contender is driven from the same event loop with the same care; what it starts, it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIPE_LIMIT = 64 * 1024 * 1024
STOP = 20.0  # seconds a process has to end before it is killed
MODEL = "sonnet"
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Timing:
    """Seconds to the first piece of the answer and to its end."""

    first: float
    whole: float


@dataclass(frozen=True)
class Place:
    """Where a contender works: the CLI, the upstream's address, a folder of its own."""

    claude: Path
    upstream: str
    folder: Path

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

    def argv(self, session: str) -> list[str]:
        return [
            str(self.claude), "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose",
            "--include-partial-messages", session, "--setting-sources", "", "--strict-mcp-config", "--tools", "",
            "--system-prompt-snapshot", "off", "--settings", '{"cleanupPeriodDays":36500}', "--model", MODEL,
            "--system-prompt", SYSTEM,
        ]  # fmt: skip


class BareCLI:
    """The CLI driven directly. `warm`: one process an agent; else one spawn a turn with `--resume`."""

    def __init__(self, place: Place, *, warm: bool) -> None:
        self.place = place
        self.warm = warm
        self._env = place.environment()
        self._sessions: dict[str, str] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.returncode is None]

    async def turn(self, agent: str, text: str) -> Timing:
        began = time.perf_counter()
        process = self._processes.get(agent)
        if process is None:
            known = agent in self._sessions
            session = self._sessions.setdefault(agent, str(uuid.uuid4()))
            process = await self._spawn(f"--resume={session}" if known else f"--session-id={session}")
            self._processes[agent] = process
        timing = await self._ask(process, text, began)
        if not self.warm:
            await self._end(self._processes.pop(agent))
        return timing

    async def _spawn(self, session: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.place.argv(session), cwd=self.place.folder / "cwd", env=self._env, limit=PIPE_LIMIT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

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
        raise RuntimeError("the CLI ended without a result")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        await ended(process)

    async def close(self) -> None:
        await asyncio.gather(*(self._end(process) for process in self._processes.values()))
        self._processes.clear()


class HTTPServer:
    """A server of the OpenAI wire in a process of its own; `path(agent)` names the agent."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, path: str, started: float) -> None:
        self.process = process
        self.port = port
        self.started = started
        self._path = path
        self._connections: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    def pids(self) -> list[int]:
        return [self.process.pid]

    async def turn(self, agent: str, text: str, *, stream: bool = True) -> Timing:
        body = {"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": text}]}
        return await self.post(self._path.format(agent=agent), body, agent)

    async def post(self, path: str, body: dict[str, Any], connection: str) -> Timing:
        data = json.dumps(body).encode()
        began = time.perf_counter()
        reader, writer = await self._connection(connection)
        fixed = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{fixed}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readline()
        fields: dict[bytes, bytes] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip()
        first = 0.0
        if b"content-length" in fields:
            whole = await reader.readexactly(int(fields[b"content-length"]))
        else:
            whole = b""
            while size := int(await reader.readline(), 16):
                piece = await reader.readexactly(size + 2)
                whole += piece
                if not first and b'"content":"' in whole.replace(b'"content": "', b'"content":"'):
                    first = time.perf_counter() - began
            await reader.readline()
        now = time.perf_counter() - began
        assert b" 200 " in status, (status, whole[:500])
        return Timing(first or now, now)

    async def _connection(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if name not in self._connections:
            self._connections[name] = await asyncio.open_connection("127.0.0.1", self.port, limit=PIPE_LIMIT)
        return self._connections[name]

    async def close(self) -> None:
        for _, writer in self._connections.values():
            writer.close()
        self.process.send_signal(signal.SIGTERM)
        await ended(self.process)


async def ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(STOP):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@asynccontextmanager
async def upstream_process() -> AsyncIterator[str]:
    """The scripted upstream in a process of its own, so that its work is not the contender's."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy.testing.upstream", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await ended(process)


async def start_proxy(place: Place, **options: str) -> HTTPServer:
    """`serve` as a user would start it."""
    env = place.environment()
    inner = {
        name: value for name, value in env.items() if name.startswith(("ANTHROPIC", "CLAUDE_CODE", "DISABLE", "HOME"))
    }
    settings = {
        "VAR": str(place.folder / "var"),
        "CLAUDE_BIN": str(place.claude),
        "CLAUDE_CONFIG_DIR": env["CLAUDE_CONFIG_DIR"],
        "CLAUDE_ENV": json.dumps(inner),
        "PORT": "0",
        **{name.upper(): value for name, value in options.items()},
    }
    env |= {f"CLI_SESSION_PROXY_{name}": value for name, value in settings.items()}
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy", "serve", env=env, cwd=place.folder,
        stdout=asyncio.subprocess.PIPE, stderr=None,
    )  # fmt: skip
    assert process.stdout is not None
    while b"listening" not in (line := await process.stdout.readline()):
        assert line, "serve ended before it listened"
    started = time.perf_counter() - began
    port = int(line.split(b"127.0.0.1:")[1].split()[0].split(b"/")[0])
    return HTTPServer(process, port, "/agents/{agent}/v1/chat/completions", started)


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes, their reaped children included."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def tree(pids: list[int]) -> list[int]:
    """These processes and all below them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], list(pids)
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def memory_mb(pids: list[int]) -> float:
    """Proportional set size of these processes and all below them, in MB."""
    total = 0
    for pid in tree(pids):
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024
