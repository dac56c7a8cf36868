"""The contenders that are servers: the proxy, as a user would start it, and ccproxy-api, its best warm peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from turnfault.ports import free_port

from . import machine
from .client import Connections, RefusedError, Timing
from .contenders import FLAGS, STOP, Place, body

READY = 120.0  # seconds
POLL = 0.005
AFTER = 0.5  # seconds that children have to follow a server that has ended

ROOT = Path(__file__).parent.parent
CCPROXY = "ccproxy-api 0.2.10"
# Everything but the SDK's own way is off; its scheduler and version check would call out.
CCPROXY_TOML = """\
enabled_plugins = ["claude_sdk"]
[server]
host = "127.0.0.1"
port = {port}
[logging]
level = "WARNING"
[plugins.claude_sdk]
builtin_permissions = false
sdk_message_mode = "ignore"
[plugins.permissions]
enabled = false
[scheduler]
enabled = false
version_check_enabled = false
"""
# It finds `claude` on PATH. Agents get a directory each, else its `--continue` gives one the words of another.
CCPROXY_CLAUDE = """\
#!/bin/sh
[ "$1" = -v ] || [ "$1" = --version ] || {{ mkdir -p "$TMPDIR/$$" && cd "$TMPDIR/$$" || exit 1; }}
exec {command} "$@" {flags}
"""


class HTTPServer:
    """A server of the OpenAI wire in a process of its own; `path` has a place for the agent.

    `ready` is how many seconds it took from its start until it answered `GET health` with 200.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, port: int, path: str, ready: float) -> None:
        self.name = name
        self.process = process
        self.ready = ready
        self.left = 0
        self.connections = Connections(port)
        self._path = path

    def pids(self) -> list[int]:
        return [self.process.pid]

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(machine.tree(self.pids()))

    def own_cpu_seconds(self) -> float:
        return machine.own_cpu_seconds(self.process.pid)

    def path(self, agent: str) -> str:
        return self._path.format(agent=agent)

    async def turn(self, agent: str, text: str, *, stream: bool = True, **parameters: int) -> Timing:
        answer = await self.connections.post(agent, self.path(agent), body(text, stream=stream) | parameters)
        return answer.timing

    async def close(self) -> None:
        """SIGTERM, a bounded wait; CLIs that it leaves behind are ended too, and counted in `left`."""
        below = [pid for pid in machine.tree(self.pids()) if pid != self.process.pid]
        self.connections.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await asyncio.sleep(AFTER)
        self.left = machine.kill(below)


def proxy_environment(place: Place, **options: str | int) -> dict[str, str]:
    """The environment of a `serve` with these settings."""
    env = place.environment()
    inner = {
        name: value for name, value in env.items() if name.startswith(("ANTHROPIC", "CLAUDE_CODE", "DISABLE", "HOME"))
    }
    settings = {
        "VAR": str(place.folder / "var"),
        "CLAUDE_BIN": str(place.claude),
        "CLAUDE_CONFIG_DIR": env["CLAUDE_CONFIG_DIR"],
        "CLAUDE_ENV": json.dumps(inner),
        "SELF_CHECK": "false",  # once for a version of the CLI, it takes five seconds of a core: not what is measured
        **{name.upper(): str(value) for name, value in options.items()},
    }
    return env | {f"CLI_SESSION_PROXY_{name}": value for name, value in settings.items()}


async def start_proxy(place: Place, **options: str | int) -> HTTPServer:
    """`serve` as a user would start it, with these settings."""
    port = free_port()
    env = proxy_environment(place, port=port, **options) | {"PYTHONPATH": str(ROOT)}  # of the checkout that is measured
    process, ready = await _started(
        place, sys.executable, "-m", "cli_session_proxy", "serve", env=env, port=port, health="/healthz"
    )
    while not await _healthy(port, "/readyz"):  # it has looked at the CLI: what follows is its idle state
        assert process.returncode is None
        await asyncio.sleep(POLL)
    return HTTPServer("proxy", process, port, "/agents/{agent}/v1/chat/completions", ready)


async def start_ccproxy(place: Place, program: Path) -> HTTPServer:
    """ccproxy with its session pool: the session id in the path makes an agent's turns warm."""
    env = place.environment()
    port = free_port()
    config = place.folder / "ccproxy.toml"
    config.write_text(CCPROXY_TOML.format(port=port))
    claude = place.folder / "bin" / "claude"
    claude.parent.mkdir(exist_ok=True)
    claude.write_text(CCPROXY_CLAUDE.format(command=shlex.quote(str(place.claude)), flags=shlex.join(FLAGS)))
    claude.chmod(0o755)
    # Its workers read the file that CONFIG_FILE names, whatever --config says.
    env |= {"CONFIG_FILE": str(config), "PATH": f"{claude.parent}:{env['PATH']}", "npm_config_offline": "true"}
    process, ready = await _started(
        place, str(program), "serve", "--config", str(config), env=env, port=port, health="/health/live"
    )
    return HTTPServer(CCPROXY, process, port, "/claude/sdk/{agent}/v1/chat/completions", ready)


async def _started(
    place: Place, *argv: str, env: Mapping[str, str], port: int, health: str
) -> tuple[asyncio.subprocess.Process, float]:
    began = time.perf_counter()
    process = await place.start(*argv, env=env, cwd=place.folder, talks=False)
    try:
        async with asyncio.timeout(READY):
            while not await _healthy(port, health):
                assert process.returncode is None, (place.folder / "log").read_text()[-2000:]
                await asyncio.sleep(POLL)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return process, time.perf_counter() - began


async def _healthy(port: int, path: str) -> bool:
    connections = Connections(port)
    try:
        await connections.get("health", path)
    except (OSError, RefusedError, IndexError):
        return False
    finally:
        connections.close()
    return True
