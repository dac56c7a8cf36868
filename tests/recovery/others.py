"""Other proxies, as processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE

from ..files import holding
from ..forked import Forked, forked
from ..until import until
from . import proxy

# Seconds for any one answer of a proxy.
PATIENCE = 120.0


async def paused(process: Process | Forked, store: Path | None) -> None:
    """Stop a proxy in its tracks, unless it ends meanwhile, and not where it holds the write lock of its SQLite store:
    then nobody could write, and every other proxy would say that (`test_store_fails` has a lock that another program
    keeps). None: another store, whose server ends what a client keeps open for too long."""

    async def stopped_and_the_store_is_free() -> bool:
        if process.returncode is not None:
            return True
        process.send_signal(signal.SIGSTOP)
        if not all_threads_stopped(process.pid):
            return False
        if store is None:
            return True
        with closing(sqlite3.connect(store, timeout=0, isolation_level=None)) as conn:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                return False
            conn.execute("ROLLBACK")
            return True

    await until(stopped_and_the_store_is_free)


def store_file(settings: Settings) -> Path | None:
    """Of a SQLite store."""
    return settings.var / FILE if settings.store is None else None


def all_threads_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_bytes().rpartition(b")")[2].split()[0] == b"T" for thread in threads)


class Other:
    """A running proxy (see `proxy`)."""

    def __init__(self, process: Forked) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def tell(self, *said: str, **more: Any) -> None:
        self.process.stdin.write(json.dumps({"say": said, **more}).encode() + b"\n")
        await self.process.stdin.drain()

    async def heard(self) -> dict[str, Any] | None:
        """Its next answer; None when it has died."""
        async with asyncio.timeout(PATIENCE):
            line = await self.process.stdout.readline()
        if not line:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, *said: str, **more: Any) -> dict[str, Any] | None:
        await self.tell(*said, **more)
        return await self.heard()

    async def pause(self, settings: Settings) -> None:
        await paused(self.process, store_file(settings))

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def died(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await self.died()


@asynccontextmanager
async def other_proxy(
    settings: Settings, *, die_at: str | None = None, runs: str = "asyncio", like: str = "here"
) -> AsyncIterator[Other]:
    given = settings.model_dump(mode="json")
    if settings.store is not None:  # masked there
        given["store"] = settings.store.get_secret_value()
    told = json.dumps({"settings": given, "die_at": die_at, "runs": runs, "like": like})
    process = await forked(proxy.run, told, env=os.environ, cwd=Path.cwd())
    other = Other(process)
    try:
        assert await other.heard() == {"ready": process.pid}
        yield other
    finally:
        await other.end(signal.SIGKILL)
        process.close()


async def overwritten(settings: Settings, old: str, new: str) -> None:
    """In place, as soon as the CLI has written it: the same length, so that nothing but its content tells."""
    assert len(old) == len(new)
    (path, *_) = await until(lambda: holding(old, settings.claude_config_dir, "projects/*.jsonl"))
    data = path.read_bytes()
    with path.open("r+b") as file:
        at = data.find(old.encode())
        while at >= 0:
            file.seek(at)
            file.write(new.encode())
            at = data.find(old.encode(), at + 1)
