"""A uvicorn server that runs in a task, and limits its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

# uvicorn renews the Date header at every tenth tick of 0.1 s. We count ten ticks once a second.
TICK_INTERVAL, TICKS = 1.0, 10
# Loop iterations after which a closed idle connection is gone.
LOOP_PASSES = 3
# Seconds between two checks for room, or for a free descriptor, while a client waits.
POLL = 0.05
# Seconds without room after which clients are refused. Until then they wait in the kernel's backlog, which needs no
# descriptors of ours. With a limit of 60 descriptors, 14 concurrent agents are all answered.
REFUSE_AFTER = 60.0
# Clients that are accepted together: each takes several loop iterations, which busy connections make long.
TOGETHER = 32


class Listening(uvicorn.Server):
    """Sets `ready` when it listens. Installs no signal handlers, because the engine has to be stopped, too.

    It ends as soon as `should_exit` is set. uvicorn itself polls that ten times a second, and then waits for 0.1 s even
    without connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self.ready = asyncio.Event()
        self._exit = asyncio.Event()
        self._accepting: list[asyncio.Task[None]] = []
        self._full_since: float | None = None
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    def has_room(self, accepted: int = 0) -> bool:  # noqa: ARG002
        """Whether there is room for another connection, beside those that were just accepted."""
        return True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or ()]
        self.ready.set()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client has left
                await asyncio.sleep(POLL)
                continue
            clients = [client]
            try:
                while not self.has_room():
                    self._full_since = self._full_since or loop.time()
                    if loop.time() - self._full_since >= REFUSE_AFTER:
                        break  # refused, like all until there is room
                    await asyncio.sleep(POLL)
                else:
                    self._full_since = None
                with contextlib.suppress(OSError):  # no more of them
                    while len(clients) < TOGETHER and self.has_room(len(clients)):
                        clients.append(listener.accept()[0])
                # A single one needs no task: it is refused before it sends, or its unread bytes would hide the refusal.
                await (asyncio.gather(*map(self._connect, clients)) if clients[1:] else self._connect(client))
            except BaseException:
                for one in clients:
                    one.close()
                raise

    async def _connect(self, client: socket.socket) -> None:
        made: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        connection = partial(made, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(connection, client)
        except OSError:  # it has left meanwhile
            client.close()

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick += TICKS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_INTERVAL):
                    await self._exit.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(LOOP_PASSES):
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
