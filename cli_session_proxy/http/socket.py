"""A client's WebSocket: the protocol of uvicorn and websockets, with the limits of every connection."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from ..errors import QueueFull
from .bounds import RequestHold
from .connection import HEAD, PORTION, UnreadWatch, next_byte

# Bytes given to the parser at once: at most 85 frames, which take less than a millisecond.
SLICE = 512
# Close code of IANA's registry: try again later.
TRY_AGAIN_LATER = 1013
# The first byte of a close frame.
CLOSING = b"\x88"


class Socket(WebSocketsSansIOProtocol):
    """One client. The app finds it in its scope's state as `socket`.

    Nothing is read before the app has accepted it, and nothing more from a client that does not read its answers. In
    one loop iteration it is parsed for a bounded time. When the server stops, a `busy` socket finishes its answer; then
    the app closes it (`leaving`). `hold` counts the bytes of an unfinished message, once the app has set it.
    """

    _unread_watch: UnreadWatch
    _waiting = b""  # not parsed yet
    _goes_on: asyncio.Handle | None = None  # the next loop iteration, if the rest is for that one
    hold: RequestHold | None = None

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.app_state = {**self.app_state, "socket": self}
        self.busy = False
        self.leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits()
        self._unread_watch = UnreadWatch(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread_watch.stop()
        self._waiting = b""
        if self._goes_on is not None:
            self._goes_on.cancel()
        super().connection_lost(exc)

    def is_closed(self) -> bool:
        """Whether the client has closed its end, or is about to. Within a message, any byte may be the next one."""
        begun = self._waiting or self._unfinished()
        return next_byte(self.transport) in ((b"",) if begun else (b"", CLOSING))

    def flush(self) -> None:
        """Send what was written in this loop iteration."""
        cast(Any, self.transport).flush()

    # --- reading

    def begin(self, handshake: bytes) -> bool:
        """Take the head of the handshake. False if the library refused it."""
        super().data_received(handshake)
        return self.handshake_initiated

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        self._read_on()

    def _read_on(self, *, rested: bool = False) -> None:
        """Parse the received bytes for a short time, then serve the other connections. `rested`: they were served."""
        if rested:
            self._goes_on = None
        elif self._goes_on is not None:
            return
        until = time.monotonic() + PORTION
        data, self._waiting, parsed = self._waiting, b"", 0
        while parsed < len(data) and self._may_parse() and (not parsed or time.monotonic() < until):
            super().data_received(data[parsed : parsed + SLICE])
            parsed += SLICE
            self._count()
        self._waiting = data[parsed:]
        if self._waiting and self._may_parse():
            self._goes_on = self.loop.call_soon(partial(self._read_on, rested=True))
        if self._waiting or not self._may_parse():
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _may_parse(self) -> bool:
        """Whether the socket is accepted, the app has taken the last message, and the client has read its answers."""
        is_open = self.handshake_complete and not self.transport.is_closing()
        if self.close_sent and self._unfinished() > HEAD:  # only the client's close frame is awaited: more is not read
            return False
        return is_open and not self.read_paused and self.writable.is_set()

    def _unfinished(self) -> int:
        """The bytes of a message that has not ended."""
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    def _count(self) -> None:
        """Count the unfinished message with the owner's bodies."""
        if self.hold is None or self.close_sent:
            return
        try:
            self.hold.body(self._unfinished() - self.hold.bytes)
        except QueueFull as full:
            self.conn.send_close(TRY_AGAIN_LATER, full.message)
            self.handle_parser_exception()

    def handle_cont(self, event: Frame) -> None:
        # One buffer: a list of tiny pieces takes many times their bytes.
        if not isinstance(self.frames[0], bytearray):
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]
        self.frames[0] += event.data
        if event.fin:
            self.frames = [bytes(self.frames[0])]
            self.send_receive_event_to_app()

    # --- the app's side

    def shutdown(self) -> None:
        self.leaving = True
        if not self.busy:
            super().shutdown()

    async def receive(self) -> Any:
        message = await super().receive()
        self._read_on()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] != "websocket.send":  # accepted: reading begins; or closed: the client's close frame is read
            self._read_on()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_watch.start()
        self.stop_keepalive()  # we would not read its answer to a ping
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._unread_watch.stop()
        self.start_keepalive()
        super().resume_writing()
        self._read_on()
