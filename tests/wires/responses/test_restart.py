"""A background response survives the death of the proxy: never stuck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...forked import Forked
from ...serving import START, serve
from .conftest import client_of


@asynccontextmanager
async def served(settings: Settings, cwd: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Forked]]:
    async with serve(settings, cwd) as (url, process), client_of(f"{url}/v1") as client:
        yield client, process


async def test_a_background_response_survives_kill_9_of_the_proxy(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, drain_timeout=5.0)
    async with served(settings, tmp_path) as (client, process):
        first = await client.responses.create(model="sonnet", input="remember a = 1")
        gate = HeldReply()
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
        upstream.next(stuck := HeldReply())
        running = await client.responses.create(model="sonnet", input="go", background=True)
        await asyncio.wait_for(stuck.reached.wait(), START)
    async with served(settings, tmp_path) as (client, _):
        ended = await client.responses.retrieve(running.id)
        assert ended.status == "failed"
        assert ended.error is not None
        assert str(ended.error.code) == "interrupted"
        assert "send it again" in ended.error.message
        told = await client.responses.create(model="sonnet", input="recall", previous_response_id=first.id)
        assert told.output_text == "I remember: a is 1."
