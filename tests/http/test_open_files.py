"""With few open files: the limit is raised where it may be, and an idle CLI gives way where no file is free."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.http import bounds
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings

# Two or three CLIs find files here, measured.
AGENTS = 8
# Of these, those that are asked again, each after its idle CLI gave way to the next ones.
AGAIN = 2


@asynccontextmanager
async def limited(settings: Settings, cwd: Path, soft: int, hard: int) -> AsyncIterator[tuple[str, int]]:
    """The address and the pid of a `serve` that may open so many files."""
    named = {
        "port": 0, "var": settings.var, "claude_bin": settings.claude_bin, "spares": 1, "max_processes": 16,
        "self_check": False,
        "claude_config_dir": settings.claude_config_dir, "claude_env": json.dumps(settings.claude_env),
    }  # fmt: skip
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    env |= {f"CLI_SESSION_PROXY_{name.upper()}": str(value) for name, value in named.items()}
    command = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" -m cli_session_proxy serve'
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, sys.executable, env=env, cwd=cwd, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(60):
            while b"listening on" not in (line := await process.stdout.readline()):
                said += line
                assert line, said
        rest = asyncio.create_task(process.stdout.read())
        yield line.decode().split("listening on ")[1].split()[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            told = await rest
            await process.wait()
    assert b"task_failed" not in told  # no service has ended


async def told(url: str, agent: int, number: int) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(
            f"{url}/v1/chat/completions",
            headers={"X-Agent-Id": f"agent-{agent}"},
            json={"model": "sonnet", "messages": [{"role": "user", "content": f"remember {agent} = {number}"}]},
        )


@pytest.mark.full
async def test_many_agents_are_answered_over_few_open_files(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """All at once, though there are fewer connections: those beyond wait in the system's queue, and no client has to
    ask again. Then one after the other."""
    assert bounds.max_connections(60) < AGENTS
    async with limited(make_settings(claude_bin=claude_2), tmp_path, 60, 60) as (url, _):
        answers = await asyncio.gather(*(told(url, agent, 0) for agent in range(AGENTS)))
        answers += [await told(url, agent, 1) for agent in range(AGAIN)]
        assert [answer.status_code for answer in answers] == [200] * (AGENTS + AGAIN), [one.text for one in answers]


async def test_the_limit_is_raised_as_far_as_it_may_be(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async with limited(make_settings(claude_bin=claude_2), tmp_path, 256, 4096) as (_, pid):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (4096, 4096)


def test_where_the_system_grants_less_than_it_says_the_largest_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS: the hard limit is unlimited, and what is above kern.maxfilesperproc is refused."""
    granted = [(256, resource.RLIM_INFINITY)]

    def grants(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > 12_288:
            raise ValueError("current limit exceeds maximum limit")
        granted.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: granted[-1])
    monkeypatch.setattr(resource, "setrlimit", grants)
    bounds.raise_open_files()
    bounds.raise_open_files()
    assert granted[1:] == [(10_240, resource.RLIM_INFINITY)]
