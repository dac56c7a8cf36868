"""Other proxies, as processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from cli_session_proxy.settings import Settings
from tests.conftest import ROOT

# Seconds for any one answer of a proxy.
PATIENCE = 60.0


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again: what other processes do, nobody tells us."""
    async with asyncio.timeout(PATIENCE):
        while not await met():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.02)


class Other:
    """A running proxy (see `proxy`)."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def tell(self, *said: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"say": said, **more}).encode() + b"\n")
        await self.process.stdin.drain()

    async def heard(self) -> dict[str, Any] | None:
        """Its next answer; None when it has died."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self.process.stdout.readline()
        if not line:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, *said: str, **more: Any) -> dict[str, Any] | None:
        await self.tell(*said, **more)
        return await self.heard()

    async def died(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def end(self, number: signal.Signals) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.died()


@asynccontextmanager
async def other_proxy(
    settings: Settings, *, die_at: str | None = None, runs: str = "asyncio", like: str = "here"
) -> AsyncIterator[Other]:
    told = json.dumps({"settings": settings.model_dump(mode="json"), "die_at": die_at, "runs": runs, "like": like})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.recovery.proxy", told,
        stdin=PIPE, stdout=PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    other = Other(process)
    try:
        assert await other.heard() == {"ready": process.pid}
        yield other
    finally:
        await other.end(signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        transport: Any = process._transport  # type: ignore[attr-defined]  # asyncio closes it late otherwise
        transport.close()
