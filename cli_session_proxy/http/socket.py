"""A client's WebSocket: the protocol of uvicorn and websockets, with the limits of every connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from .connection import Untaken


class Socket(WebSocketsSansIOProtocol):
    """One client. The app finds it in its scope's state as `socket`.

    Nothing more is read from a client that does not read its answers. When the server stops, a `busy` socket finishes
    its answer; then the app closes it (`leaving`).
    """

    _untaken: Untaken

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.app_state = {**self.app_state, "socket": self}
        self.busy = False
        self.leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits()
        self._untaken = Untaken(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._untaken.ends()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self.leaving = True
        if not self.busy:
            super().shutdown()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken.begins()
        self.stop_keepalive()  # we would not read its answer to a ping
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._untaken.ends()
        self.start_keepalive()
        if not self.read_paused:
            self.transport.resume_reading()
        super().resume_writing()
