"""A CLI that waits for results of its client's tools is ended without asking the model again, whoever ends it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.backends.base import Called
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.domain.client_tools import Offers, ToolPolicy
from cli_session_proxy.domain.models import Tool, ToolChoice
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....until import until
from .conftest import MakeLaunch
from .helpers import is_gone, unchecked

OFFERS = Offers.of((Tool("get_weather"),))
Ends = Callable[[Pool, ClaudeProcess, MakeLaunch, Path], Awaitable[object]]


async def discarded(pool: Pool, process: ClaudeProcess, real: MakeLaunch, binary: Path) -> None:
    await pool.discard(process.launch.session_id)


async def retired_for_another(pool: Pool, process: ClaudeProcess, real: MakeLaunch, binary: Path) -> None:
    await pool.checkout(await real(binary))  # there is one place
    await until(lambda: is_gone(process.pid))


async def retired_after_tool_timeout(pool: Pool, process: ClaudeProcess, real: MakeLaunch, binary: Path) -> None:
    process.last_used -= 3600
    pool.table.reap_now.set()  # the reaper looks
    await until(lambda: is_gone(process.pid))


async def launched_differently(pool: Pool, process: ClaudeProcess, real: MakeLaunch, binary: Path) -> None:
    await pool.checkout(await real(binary, session_id=process.session_id, resume=True, model="opus"))


async def closed(pool: Pool, process: ClaudeProcess, real: MakeLaunch, binary: Path) -> None:
    await pool.close()


@pytest.mark.parametrize(
    "ends", [discarded, retired_for_another, retired_after_tool_timeout, launched_differently, closed]
)
@pytest.mark.sample(3)
async def test_no_other_request_reaches_the_model(
    ends: Ends, claude_2: Path, upstream: Upstream, real: MakeLaunch, make_settings: MakeSettings
) -> None:
    upstream.when("", ToolUse([("mcp__client__get_weather", {"city": "Rome"})]), times=None)
    pool = Pool(make_settings(claude_bin=claude_2, max_processes=1))
    try:
        process, _ = await pool.checkout(await real(claude_2, offers=OFFERS))
        content = [{"type": "text", "text": "where"}]
        events = [
            event
            async for event in process.turn(str(uuid.uuid4()), content, ToolPolicy(OFFERS, ToolChoice(), unchecked))
        ]
        assert isinstance(events[-1], Called)
        await pool.checkin(process)
        async with asyncio.timeout(60):
            await upstream.requests[0].done.wait()
            await ends(pool, process, real, claude_2)
        assert is_gone(process.pid)
        async with httpx.AsyncClient(trust_env=False) as client:  # what it sent before it died has been read now
            await client.get(upstream.url)
        assert [seen.prompt for seen in upstream.requests] == ["where"]
    finally:
        await pool.close()
