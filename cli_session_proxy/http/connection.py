"""A client's connection, as uvicorn and httptools speak on it, with bounds for clients that do not end what they begin.

What is written in one turn of the event loop leaves at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# What is gathered before it is sent all the same, so that a full transport can say so: its own high-water mark.
GATHERED = 64 * 1024
# A request's line and headers, and what else stands between bodies: uvicorn's httptools parser has no bound of its
# own, and keeps them all. A few KB in the field; nginx takes 32 KB.
HEAD = 64 * 1024
# Seconds in which a client takes not one byte of what waits for it: on this machine or near it, it is stuck.
STALLED = 300.0

HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Corked:
    """A transport that sends what was written in one turn of the loop as one piece.

    An answer's head and body are two writes, and each send wakes the client: together they are there 0.3 to 0.5 ms
    sooner. Nothing waits for more than the turn of the loop it is written in, and no more than `GATHERED` bytes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= GATHERED:
            self.flush()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        # The connection may have been lost since the write: uvloop raises then.
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """One client. Without a request, or with half a head, it is closed after uvicorn's `timeout_keep_alive`."""

    _corked: Corked
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _unparsed = 0  # bytes since the last head or piece of a body
    _wishing = b""  # the head of a request that asks for another protocol, as it is without that

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        self._corked = Corked(transport)
        super().connection_made(cast(asyncio.Transport, self._corked))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_head_timer()
        self._no_stall_timer()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # The transport closes itself now: what was written in this turn of the loop goes first.
        self._corked.flush()

    # --- what it reads

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._unparsed > HEAD:
            if self._idle():
                self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()
        elif self._head_timer is None and self.timeout_keep_alive_task is None and self._idle():
            self._await_head()  # a request has begun, or what is left of one that was answered early still comes

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as wish:
                # A server may go on as if nobody had asked (RFC 9110, 7.8). Java's client asks for HTTP/2 so, and
                # httptools then drops the request's body: the head is read once more without the wish.
                data = self._wishing + data[wish.args[0] :]
                self._wishing = b""

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            version = self.parser.get_http_version().encode()
            fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            self._wishing = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, fields)
            return
        self._no_head_timer()
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if not self._wishing:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._corked.flush()  # nothing comes after it that could go along
        super().on_response_complete()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _no_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- what it writes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._no_stall_timer()
        super().resume_writing()

    def _watch_stall(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALLED, self._stalled, left)

    def _stalled(self, before: int) -> None:
        """Nothing is written while writing is paused: what waits gets less, or nobody reads."""
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_stall()

    def _no_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
