"""A uvicorn server that runs in a task of ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

# Seconds between two ticks of uvicorn's, of which there are ten in a second: at every tenth it makes the Date header.
SECOND, TICKS = 1.0, 10
# Turns of the loop in which an idle connection that was closed is gone.
TURNS = 3


class Listening(uvicorn.Server):
    """Sets `ready` when it listens. Installs no signal handlers, because the engine has to be stopped too.

    It ends as soon as `should_exit` is set. uvicorn itself looks ten times a second, and then waits for a tenth of one,
    also where nobody is connected.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self.ready = asyncio.Event()
        self._told = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        return self._told.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._told.set()
        else:
            self._told.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick += TICKS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECOND):
                    await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets=sockets)
            return
        for listener in sockets or ():
            listener.close()
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
