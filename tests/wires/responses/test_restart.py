"""A background response survives the death of the proxy: never stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from cli_session_proxy.settings import Settings
from cli_session_proxy.testing.script import Gate
from cli_session_proxy.testing.upstream import Upstream

from ...conftest import MakeSettings
from .conftest import client_of

START = 30.0


@asynccontextmanager
async def served(settings: Settings, cwd: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, asyncio.subprocess.Process]]:
    """A real `serve` in a process of its own, in the built-up environment of the test."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "CLI_SESSION_PROXY_PORT": "0",
        "CLI_SESSION_PROXY_VAR": str(settings.var),
        "CLI_SESSION_PROXY_CLAUDE_BIN": str(settings.claude_bin),
        "CLI_SESSION_PROXY_CLAUDE_CONFIG_DIR": str(settings.claude_config_dir),
        "CLI_SESSION_PROXY_CLAUDE_ENV": json.dumps(settings.claude_env),
        "CLI_SESSION_PROXY_DRAIN_TIMEOUT": "5",
        "CLI_SESSION_PROXY_TURN_TIMEOUT": "60",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy", "serve",
        env=env, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START):
            while b"listening on" not in (line := await process.stdout.readline()):
                assert line, "serve ended before it listened"
        url = line.decode().split("listening on ")[1].split()[0]
        async with client_of(f"{url}/v1") as client:
            yield client, process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), START)


async def test_a_background_response_survives_kill_9_of_the_proxy(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with served(settings, tmp_path) as (client, process):
        first = await client.responses.create(model="sonnet", input="remember a = 1")
        gate = Gate()
        upstream.next(gate)
        running = await client.responses.create(
            model="sonnet", input="recall", previous_response_id=first.id, background=True
        )
        queued = await client.responses.create(
            model="sonnet", input="list", previous_response_id=first.id, background=True
        )
        await asyncio.wait_for(gate.reached.wait(), START)
        assert (await client.responses.retrieve(running.id)).status == "in_progress"
        process.kill()
        await process.wait()
    gate.open()
    async with served(settings, tmp_path) as (client, _):
        for response in (running, queued):
            after = await client.responses.retrieve(response.id)
            async with asyncio.timeout(START):
                while after.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.1)
                    after = await client.responses.retrieve(response.id)
            assert after.status in ("completed", "failed")
            assert after.output_text or (after.error and after.error.message)
        # a proxy that is told to stop ends what it cannot finish, and says so
        upstream.next(stuck := Gate())
        running = await client.responses.create(model="sonnet", input="go", background=True)
        await asyncio.wait_for(stuck.reached.wait(), START)
    async with served(settings, tmp_path) as (client, _):
        ended = await client.responses.retrieve(running.id)
        assert ended.status == "failed"
        assert ended.error is not None
        assert "shutting down" in ended.error.message
        told = await client.responses.create(model="sonnet", input="recall", previous_response_id=first.id)
        assert told.output_text == "I remember: a is 1."
