"""Other proxies, as processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE
from tests.conftest import ROOT

# Seconds for any one answer of a proxy.
PATIENCE = 60.0


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

    def pause(self, settings: Settings) -> None:
        """Stop it between two writes: a process that stops in the middle of one keeps the store locked for all."""
        store = sqlite3.connect(settings.var / FILE, isolation_level=None, timeout=PATIENCE)
        try:
            store.execute("BEGIN IMMEDIATE")
            self.process.send_signal(signal.SIGSTOP)
            stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped is not None
            store.execute("ROLLBACK")
        finally:
            store.close()

    async def end(self, number: signal.Signals) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.died()


@asynccontextmanager
async def other_proxy(settings: Settings, *, die_at: str | None = None, runs: str = "asyncio") -> AsyncIterator[Other]:
    told = json.dumps({"settings": settings.model_dump(mode="json"), "die_at": die_at, "runs": runs})
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
