"""An ASGI application on one listening socket, in the running event loop: uvicorn's HTTP without its server, which
handles signals and ends tenths of a second after it is told to."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

# Seconds for the requests that are being answered when it stops.
GRACE = 1.0
# Turns of the loop in which a connection that was closed is gone.
TURNS = 3


class Serving:
    """Serves from its creation to `stop`."""

    def __init__(self, server: asyncio.Server, state: ServerState) -> None:
        self._server = server
        self._state = state

    @classmethod
    async def on(cls, listener: socket.socket, app: Any) -> Serving:
        config = uvicorn.Config(
            app, interface="asgi3", lifespan="off", ws="none", log_config=None, log_level="critical", access_log=False,
            proxy_headers=False,
        )  # fmt: skip
        config.load()
        protocol: Any = config.http_protocol_class
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=state, app_state={}), sock=listener
        )
        return cls(server, state)

    async def stop(self) -> None:
        """End idle connections, wait for the others for a bounded time, and cut what is left."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(self._state.tasks, timeout=GRACE)
            for task in late:
                task.cancel()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for _ in range(TURNS):
            await asyncio.sleep(0)
