"""Wakes a proxy by NOTIFY when another one requests something of it. The listener has a connection of its own.

LISTEN needs a connection that always has the same server session. Behind a pooler the server process differs from the
one that was named at the start: then, and while the connection is lost, the proxy polls (`stores.base.ASKED_POLL`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection

from ... import logs

log = logs.get(__name__)

CHANNEL = "cli_session_proxy_asked"
# Seconds until a lost connection is opened again.
AGAIN = 5.0


def send(conn: Connection, proxy_id: str) -> None:
    """Sent at the end of this transaction; this also works through a pooler."""
    conn.exec_driver_sql("SELECT pg_notify(%s, %s)", (CHANNEL, proxy_id))


class Listener:
    """Listens for one proxy. `options`: libpq's, of the store's own connections. Use it on one event loop only."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._notified = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listens = False

    async def wait(self, proxy_id: str, longest: float, poll: float) -> None:
        """Return at a notification, or after `longest` seconds; after `poll` seconds while there is no connection."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(proxy_id))
        if not self.listens:
            await asyncio.sleep(min(poll, longest))
            return
        try:
            async with asyncio.timeout(longest):
                await self._notified.wait()
        except TimeoutError:
            pass
        self._notified.clear()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _listen(self, proxy_id: str) -> None:
        while True:
            try:
                conn = await psycopg.AsyncConnection.connect(**self._options, autocommit=True)
                try:
                    answers = await (await conn.execute("SELECT pg_backend_pid()")).fetchone()
                    if answers is None or answers[0] != conn.info.backend_pid:
                        log.info("not_listening", why="a pooler stands in front of the server")
                        return
                    await conn.execute(f"LISTEN {CHANNEL}")
                    self.listens = True
                    self._notified.set()  # earlier notifications were missed
                    async for note in conn.notifies():
                        if note.payload == proxy_id:
                            self._notified.set()
                finally:  # not `async with`: that waits for the server first, and a task cancelled there leaves it open
                    await conn.close()
            except (psycopg.Error, OSError) as exc:
                log.info("not_listening", why=type(exc).__name__)
            finally:
                self.listens = False
                self._notified.set()
            await asyncio.sleep(AGAIN)
