"""A client's connection, as uvicorn and httptools speak on it, with bounds for clients that do not end what they begin.

What is written in one turn of the event loop leaves at once. A client may send requests ahead of their answers, up to a
bound: from one that does not take its answers nothing more is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .. import logs
from ..wires.asgi import CLOSED
from .bounds import connections

# Bytes that are gathered at most before they are sent, so that a full transport can say so: its own high-water mark.
GATHERED = 64 * 1024
# A request's line and headers, and what else stands between bodies: uvicorn's httptools parser has no bound of its
# own, and keeps them all. A few KB in the field; nginx takes 32 KB.
HEAD = 64 * 1024
# A client that takes no byte of its answer for so many seconds is stuck: it is on this machine or near it.
STALLED = 300.0
# Requests that are read ahead of the one that is answered. Browsers and SDKs send none ahead.
AHEAD = 16
# Bytes that are parsed at once outside bodies: httptools parses all that it is given, up to 230 requests in these.
SLICE = 4 * 1024
# Bytes that may wait for all clients together. Beyond it the connection that is stalled for longest is aborted.
UNREAD = 64 * 1024 * 1024
# The same for strangers, who have shown no key yet, and for how many seconds they may take nothing. The page's
# files are all that they get; a stranger that sends a second request before the first answer gets that one only.
UNREAD_OF_STRANGERS = 4 * 1024 * 1024
STALLED_STRANGER = 10.0

log = logs.get(__name__)

# Open connections at most; one that waits for nothing gives way to a new one.
MOST = connections()
# Seconds in which a client says what it has connected for: until then its connection is not taken for an idle one. Of
# few connections the oldest may have come just now; of many, a flood of silent ones does not hold up the next.
FIRST_WORD = 1.0 if MOST < 256 else 0.1
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
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
        # asked at each request; the rest goes through `__getattr__`
        self.is_closing, self.get_extra_info = transport.is_closing, transport.get_extra_info

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
        if data and not self.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Unread:
    """The connections whose clients do not read their answers, those that have shown no key first to go."""

    def __init__(self, limit: int = UNREAD, of_strangers: int = UNREAD_OF_STRANGERS) -> None:
        self._limit = limit
        self._of_strangers = of_strangers
        self._stalled: dict[bool, OrderedDict[asyncio.Transport, None]] = {True: OrderedDict(), False: OrderedDict()}

    def add(self, transport: asyncio.Transport, *, stranger: bool) -> None:
        """More waits for this client than its transport takes. Where it is too much, those stalled for longest end."""
        self._stalled[stranger][transport] = None
        sizes = {who: [one.get_write_buffer_size() for one in stalled] for who, stalled in self._stalled.items()}
        self._drop(stranger=True, most=self._of_strangers, sizes=sizes[True])
        left = self._drop(stranger=True, most=self._limit - sum(sizes[False]), sizes=sizes[True])
        self._drop(stranger=False, most=self._limit - left, sizes=sizes[False])

    def _drop(self, *, stranger: bool, most: int, sizes: list[int]) -> int:
        """Those stalled for longest, until no more than `most` bytes wait. What is left of `sizes`, in bytes."""
        while sizes and sum(sizes) > max(0, most):
            self._abort(stranger=stranger, size=sizes.pop(0))
        return sum(sizes)

    def _abort(self, *, stranger: bool, size: int) -> None:
        oldest, _ = self._stalled[stranger].popitem(last=False)
        log.warning("unread_answer_dropped", stranger=stranger, bytes=size)
        oldest.abort()

    @property
    def has_stranger(self) -> bool:
        return bool(self._stalled[True])

    def drop_stranger(self) -> bool:
        """End one stranger's connection to make room; False where there is none."""
        strangers = self._stalled[True]
        if strangers:
            self._abort(stranger=True, size=next(iter(strangers)).get_write_buffer_size())
            return True
        return False

    def remove(self, transport: asyncio.Transport) -> None:
        for stalled in self._stalled.values():
            stalled.pop(transport, None)


class Intake(FlowControl):
    """uvicorn resumes reading at every answer and every look at a body; not while the connection holds."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Untaken:
    """What waits for one client. The connection is aborted when it takes nothing of it for long."""

    unread = Unread()  # of all connections of this process

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._patience = STALLED
        self._timer: asyncio.TimerHandle | None = None

    def begins(self, *, stranger: bool = False) -> None:
        """More waits than the transport takes: nothing is written until it is less."""
        self._patience = STALLED_STRANGER if stranger else STALLED
        self._watch()
        self.unread.add(self._transport, stranger=stranger)

    def ends(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.unread.remove(self._transport)

    def _watch(self) -> None:
        left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._stalled, left)

    def _stalled(self, before: int) -> None:
        if self._transport.get_write_buffer_size() >= before:
            self._transport.abort()
        else:
            self._watch()


class Connection(HttpToolsProtocol):
    """One client. Without a request, or with half a head, it is closed after uvicorn's `timeout_keep_alive`.

    A WebSocket's handshake is handed over to `Socket`, with the transport.
    """

    flow: Intake
    _corked: Corked
    _untaken: Untaken
    _head_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0
    _unparsed = 0  # bytes since the last head or piece of a body
    _waiting = b""  # bytes that are not parsed yet, as too many requests are before them
    _body_left = 0  # bytes of the present body that are still to come, where its head says so
    _wishing = b""  # the head of a request that asks for another protocol, as it is without that
    _handshake = b""  # the head of a request that asks for a WebSocket
    _handed_over = False
    _told: dict[str, Any]  # what the gate asks of this connection, and says of it: a key was shown, or none is needed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        self._corked = Corked(transport)
        super().connection_made(cast(asyncio.Transport, self._corked))
        self.flow = Intake(cast(asyncio.Transport, self._corked))
        self._untaken = Untaken(self.transport)
        self._told = {"is_closed": self._is_closed, "admitted": False}
        # A stranger's answer counts as unread as soon as the kernel does not take all of it.
        self.transport.set_write_buffer_limits(high=0)
        self._idle_since = self.loop.time()
        if len(self.connections) > MOST:
            self._make_room()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_head_timer()
        self._untaken.ends()
        self._waiting = b""
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # The transport closes itself now: what was written in this turn of the loop goes first.
        self._corked.flush()

    def _make_room(self) -> None:
        """One connection too many: the one that has been idle for the longest time goes, else a stranger that does not
        read, else this one."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one._idle()]
        oldest = min(others, key=lambda one: one._idle_since, default=None)
        if oldest is not None:
            # Its client may not have read its last answer: to close would wait for that.
            oldest.transport.abort() if oldest.flow.write_paused else oldest.transport.close()
        elif not self._untaken.unread.drop_stranger():
            self.transport.write(TOO_MANY)
            self.transport.close()

    @staticmethod
    def has_room(connections: Collection[object]) -> bool:
        """Whether one more beside these would not be refused."""
        if len(connections) < MOST or Untaken.unread.has_stranger:
            return True
        before = asyncio.get_running_loop().time() - FIRST_WORD
        idle = (one for one in connections if isinstance(one, Connection) and one._idle())
        return any(one.cycle is not None or one._idle_since < before for one in idle)

    # --- what it reads

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if not self.flow.held:
            self._read_on()

    def _read_on(self) -> None:
        """Parse the received bytes, until enough unanswered requests are queued."""
        if self._waiting:
            self._unset_keepalive_if_required()
        while self._waiting and not self.transport.is_closing():
            ahead = AHEAD if self._told["admitted"] else 1
            if self.pipeline and (len(self.pipeline) >= ahead or self.flow.write_paused):
                self.flow.held = True
                self.flow.pause_reading()
                return
            size = max(SLICE, self._body_left)
            data, self._waiting = self._waiting[:size], self._waiting[size:]
            self._unparsed += len(data)
            try:
                self._parse(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            if self._handed_over:
                return
            if self._unparsed > HEAD:
                if self._idle():
                    self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
                return
        if self._head_timer is None and self.timeout_keep_alive_task is None and self._idle():
            self._await_head()  # a request has begun, or what is left of one that was answered early still comes

    def _answers_taken(self) -> None:
        """Resume reading: there may be room for more requests."""
        self.flow.held = False
        self._read_on()
        self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as wish:
                if self._handshake:
                    self._become_socket(data[wish.args[0] :])
                    return
                # A server may go on as if nobody had asked (RFC 9110, 7.8). Java's client asks for HTTP/2 so, and
                # httptools then drops the request's body: the head is read once more without the wish.
                data = self._wishing + data[wish.args[0] :]
                self._wishing = b""

    def _become_socket(self, rest: bytes) -> None:
        """What is said from here on is a WebSocket's. It is made known to the server as uvicorn does it."""
        from .socket import Socket  # noqa: PLC0415 - its library is loaded by the first handshake

        self._no_head_timer()
        self.connections.discard(self)
        self._handed_over = True
        web = Socket(config=self.config, server_state=self.server_state, app_state=self.app_state)
        web.connection_made(self.transport)
        self.transport.set_protocol(web)
        web.data_received(self._handshake)
        if not web.handshake_initiated:  # a head that its library does not take
            self.send_400_response("Invalid HTTP request received.")
        elif said := rest + self._waiting:
            web.data_received(said)
        self._waiting = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(b" \t"))  # no part of it (RFC 9112, 5.1), and httptools leaves it there

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            version = self.parser.get_http_version().encode()
            if (method, version, self._get_upgrade()) == (b"GET", b"1.1", b"websocket") and self._idle():
                fields = b"".join(b"%b: %b\r\n" % field for field in self.headers)
                self._handshake = b"GET %b HTTP/1.1\r\n%b\r\n" % (self.url, fields)
                return
            fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            self._wishing = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, fields)
            return
        self._no_head_timer()
        self._unparsed = 0
        self._body_left = 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
        self.scope["extensions"] = cast(Any, {CLOSED: self._told})
        super().on_headers_complete()

    def _is_closed(self) -> bool:
        """The client has closed its end. The kernel knows it before the event loop, which may have been held up."""
        if self.transport.is_closing():
            return True
        theirs = self.transport.get_extra_info("socket")  # the transport's own object does not read
        if theirs is None:
            return False
        peeking = socket.socket(theirs.family, theirs.type, theirs.proto, theirs.fileno())
        try:
            peeking.setblocking(False)  # whatever the program's default is
            return not peeking.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # neither a byte nor an end
            return False
        except OSError:
            return True
        finally:
            peeking.detach()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = self._body_left = 0
        if not self._wishing and not self._handshake:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._corked.flush()  # nothing comes after it that could go along
        self._idle_since = self.loop.time()
        if not self._told["admitted"] and (self.pipeline or self._waiting):
            self.pipeline.clear()  # strangers send one request at a time
            self.transport.close()
        super().on_response_complete()
        if self.flow.held:
            self._answers_taken()

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
        stranger = not self._told["admitted"]
        if stranger and len(self._waiting) > HEAD:
            self.transport.abort()
            return
        if not stranger:
            self.transport.set_write_buffer_limits()
        self._untaken.begins(stranger=stranger)

    def resume_writing(self) -> None:
        self._untaken.ends()
        super().resume_writing()
        if self.flow.held:
            self._answers_taken()
