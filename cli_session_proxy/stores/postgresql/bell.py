"""Tells a proxy that another one asks something of it: NOTIFY, heard on a connection of its own.

That needs a connection that leads to one session of the server. Behind a pooler it may not: the process that a
connection was told of at its start is then not the one that answers it. There nothing is listened to, and a proxy looks
by itself (`stores.base.ASKED_POLL`); so it does while this connection is lost.
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
# Seconds until a lost connection is made anew.
AGAIN = 5.0


def ring(conn: Connection, proxy_id: str) -> None:
    """At the end of this transaction, any pooler's too."""
    conn.exec_driver_sql("SELECT pg_notify(%s, %s)", (CHANNEL, proxy_id))


class Bell:
    """Rung for one proxy. `options`: libpq's, of the store's own connections. Use it on the loop of `open`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listens = False

    async def wait(self, proxy_id: str, longest: float, poll: float) -> None:
        """Until it rings, `longest` seconds at most; where nothing is heard, `poll` seconds."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(proxy_id))
        if not self.listens:
            await asyncio.sleep(min(poll, longest))
            return
        try:
            async with asyncio.timeout(longest):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _listen(self, proxy_id: str) -> None:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(**self._options, autocommit=True) as conn:
                    answers = await (await conn.execute("SELECT pg_backend_pid()")).fetchone()
                    if answers is None or answers[0] != conn.info.backend_pid:
                        log.info("not_listening", why="a pooler stands in front of the server")
                        return
                    await conn.execute(f"LISTEN {CHANNEL}")
                    self.listens = True
                    self._rung.set()  # what was asked until now was not heard
                    async for note in conn.notifies():
                        if note.payload == proxy_id:
                            self._rung.set()
            except (psycopg.Error, OSError) as exc:
                log.info("not_listening", why=type(exc).__name__)
            finally:
                self.listens = False
                self._rung.set()
            await asyncio.sleep(AGAIN)
