"""A client's connection: uvicorn's httptools protocol with limits against slow and greedy clients.

All writes of one loop iteration are sent together. Clients may pipeline a bounded number of requests; nothing more is
read from a client that does not read its answers. In one loop iteration each connection is read and parsed for a
bounded time: bytes that cost a parser much, such as chunks of one byte, hold up nobody else.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .. import logs
from ..wires.asgi import CLOSED
from .bounds import connection_limit

# The most bytes that are gathered before sending: the transport's high-water mark, so that flow control works.
GATHERED = 64 * 1024
# The most bytes between bodies, mainly a request's head: uvicorn's httptools parser has no limit. Usually a few KB;
# nginx takes 32 KB.
HEAD = 64 * 1024
# The most fields of a head: 13,000 of them took 40 ms before a key was looked at. HAProxy takes 101.
FIELDS = 128
# Seconds without reading a byte of its answer after which a client counts as stuck.
STALLED = 300.0
# Pipelined requests that are accepted. Browsers and SDKs send none.
AHEAD = 16
# Offers of a handshake that are never taken: lists of 28,000 took its library 30 ms, before a key was looked at.
NOT_SPOKEN = frozenset({b"sec-websocket-protocol", b"sec-websocket-extensions"})
# Bytes given to the parser at once, outside bodies: it parses all of them, up to 57 requests.
SLICE = 1024
# Seconds for which one connection is parsed in a loop iteration. At least one slice is parsed; the worst, chunks of one
# byte, takes about this long. With 50 such clients of one key, others waited 0.5 s, and with four times as much 1.5 s.
PORTION = 0.0003
# Bytes of one read after which a connection is read again only in the next loop iteration: uvloop reads a fast
# sender up to 32 times in one.
PIECE = 64 * 1024
# The most unread bytes of all clients. Beyond it the connection that is stalled for longest is aborted.
UNREAD = 64 * 1024 * 1024
# The same for clients that have not sent a key yet, and their timeout in seconds. They only get the page's files, and
# cannot pipeline.
UNREAD_OF_STRANGERS = 4 * 1024 * 1024
STALLED_STRANGER = 10.0

log = logs.get(__name__)

# The most open connections; an idle one is closed for a new one.
MOST = connection_limit()
# Seconds for a client to send its first request; until then its connection does not count as idle. With many open
# connections it does, so that a flood of silent ones does not block new clients.
FIRST_WORD = 1.0 if MOST < 256 else 0.1
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Corked:
    """A transport that sends all writes of one loop iteration together.

    An answer's head and body are two writes, and each send wakes the client: together they arrive 0.3 to 0.5 ms sooner.
    Nothing is delayed beyond the loop iteration, or beyond `GATHERED` bytes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []
        self._size = 0
        # called at each request; the rest goes through `__getattr__`
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
    """Connections whose clients do not read their answers. Those without a key are closed first."""

    def __init__(self, limit: int = UNREAD, of_strangers: int = UNREAD_OF_STRANGERS) -> None:
        self._limit = limit
        self._of_strangers = of_strangers
        self._stalled: dict[bool, OrderedDict[asyncio.Transport, None]] = {True: OrderedDict(), False: OrderedDict()}

    def add(self, transport: asyncio.Transport, *, stranger: bool) -> None:
        """Add a connection whose transport is full. If all of these have too much, close those stalled for longest."""
        self._stalled[stranger][transport] = None
        sizes = {key: [one.get_write_buffer_size() for one in stalled] for key, stalled in self._stalled.items()}
        self._drop(stranger=True, most=self._of_strangers, sizes=sizes[True])
        left = self._drop(stranger=True, most=self._limit - sum(sizes[False]), sizes=sizes[True])
        self._drop(stranger=False, most=self._limit - left, sizes=sizes[False])

    def _drop(self, *, stranger: bool, most: int, sizes: list[int]) -> int:
        """Close those stalled for longest until at most `most` bytes wait. Returns the remaining bytes."""
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
        """Close one connection without a key to make room; False if there is none."""
        strangers = self._stalled[True]
        if strangers:
            self._abort(stranger=True, size=next(iter(strangers)).get_write_buffer_size())
            return True
        return False

    def remove(self, transport: asyncio.Transport) -> None:
        for stalled in self._stalled.values():
            stalled.pop(transport, None)


class Intake(FlowControl):
    """Flow control with two reasons not to read. Reading resumes once neither is left.

    `read_paused`: uvicorn's own, such as a body that the app has not taken. `held`: the connection's: enough unanswered
    requests are queued, or it is another connection's turn.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.held = False

    def resume_reading(self) -> None:
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()

    def hold(self) -> None:
        self.held = True
        self._transport.pause_reading()

    def let_go(self) -> None:
        self.held = False
        if not self.read_paused:
            self._transport.resume_reading()


class UnreadWatch:
    """Watches a client for which data waits. Its connection is aborted if it reads nothing for too long."""

    unread = Unread()  # shared by all connections of this process

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._patience = STALLED
        self._timer: asyncio.TimerHandle | None = None

    def start(self, *, stranger: bool = False) -> None:
        """The transport is full: watch whether its client reads, until `stop`."""
        self._patience = STALLED_STRANGER if stranger else STALLED
        self._watch()
        self.unread.add(self._transport, stranger=stranger)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.unread.remove(self._transport)

    def _watch(self) -> None:
        unread = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._check_progress, unread)

    def _check_progress(self, unread_before: int) -> None:
        if self._transport.get_write_buffer_size() >= unread_before:  # the client has read nothing
            self._transport.abort()
        else:
            self._watch()


def next_byte(transport: asyncio.Transport) -> bytes | None:
    """The next byte that a client has sent; b"" if it has closed its end, None if neither. It asks the kernel: the
    event loop may have been blocked since."""
    if transport.is_closing():
        return b""
    wrapped = transport.get_extra_info("socket")  # the transport's socket object cannot read
    if wrapped is None:
        return None
    peeking = socket.socket(wrapped.family, wrapped.type, wrapped.proto, wrapped.fileno())
    try:
        peeking.setblocking(False)  # despite any default timeout
        return peeking.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:  # reset by the client
        return b""
    finally:
        peeking.detach()  # the descriptor is still the transport's: it must not be closed


class Connection(HttpToolsProtocol):
    """One client. Without a request, or with half a head, it is closed after uvicorn's `timeout_keep_alive`.

    A WebSocket's handshake is handed over to `Socket`, with the transport.
    """

    flow: Intake
    _corked: Corked
    _unread_watch: UnreadWatch
    _head_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0
    _unparsed = 0  # bytes since the last head or piece of a body
    _waiting: bytearray  # not parsed yet: too many requests come before, or the rest is for the next loop iteration
    _goes_on: asyncio.Handle | None = None  # that next loop iteration
    _in_message = False  # the parser has a head, and not the end of its body
    _body_left = 0  # missing bytes of the present body, if declared
    _head_without_upgrade = b""  # the head of a request whose `Upgrade` is ignored, without that header
    _handshake = b""  # the head of a request that asks for a WebSocket
    _handed_over = False
    _for_gate: dict[str, Any]  # functions for the gate, and its result: a key was sent, or none is needed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        self._corked = Corked(transport)
        super().connection_made(cast(asyncio.Transport, self._corked))
        self.flow = Intake(cast(asyncio.Transport, self._corked))
        self._unread_watch = UnreadWatch(self.transport)
        self._waiting = bytearray()
        self._for_gate = {
            "is_closed": lambda: next_byte(self.transport) == b"",
            "flush": self._corked.flush,
            "admitted": False,
        }
        # Without a key, an answer counts as unread once the kernel's buffer is full.
        self.transport.set_write_buffer_limits(high=0)
        self._idle_since = self.loop.time()
        if len(self.connections) > MOST:
            self._make_room()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._unread_watch.stop()
        self._waiting.clear()
        if self._goes_on is not None:
            self._goes_on.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # The transport closes now: first send the writes of this loop iteration.
        self._corked.flush()

    def _make_room(self) -> None:
        """One connection too many: close the one that is idle for longest, else one without a key that does not read,
        else this one."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one._idle()]
        oldest = min(others, key=lambda one: one._idle_since, default=None)
        if oldest is not None:
            # Abort: a close waits for its client to read the last answer.
            is_stuck = oldest.flow.write_paused or oldest.transport.is_closing()
            oldest.transport.abort() if is_stuck else oldest.transport.close()
        elif not self._unread_watch.unread.drop_stranger():
            self.transport.write(TOO_MANY)
            self.transport.close()

    @staticmethod
    def has_room(connections: Collection[object], accepted: int) -> bool:
        """Whether another connection would be accepted, beside those that were just accepted."""
        if accepted:  # no connection is closed for several at once
            return len(connections) + accepted < MOST
        if len(connections) < MOST or UnreadWatch.unread.has_stranger:
            return True
        before = asyncio.get_running_loop().time() - FIRST_WORD
        idle = (one for one in connections if isinstance(one, Connection) and one._idle())
        return any(one.cycle is not None or one._idle_since < before for one in idle)

    # --- reading

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if not self.flow.held:
            self._read_on()
            if len(data) >= PIECE and not self.flow.held and not self._handed_over:
                self._rest()

    def _rest(self) -> None:
        """Serve the other connections before this one is read again."""
        self.flow.hold()
        self._goes_on = self.loop.call_soon(partial(self._answers_taken, rested=True))

    def _read_on(self) -> None:
        """Parse the received bytes for a short time, until enough unanswered requests are queued."""
        if self._waiting:
            self._unset_keepalive_if_required()
        until = None
        while self._waiting and not self.transport.is_closing():
            ahead = AHEAD if self._for_gate["admitted"] else 1
            if self.pipeline and (
                len(self.pipeline) >= ahead or self.flow.write_paused or len(self.cycle.body) > HIGH_WATER_LIMIT
            ):
                self.flow.hold()
                return
            if until is not None and time.monotonic() >= until:
                self._rest()
                return
            until = until or time.monotonic() + PORTION
            size = max(SLICE, self._body_left)
            data = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._unparsed += len(data)
            try:
                self._parse(data)
            except httptools.HttpParserError:
                if not self.transport.is_closing():
                    self.send_400_response("Invalid HTTP request received.")
                return
            if self._handed_over:
                return
            if self._unparsed > HEAD:
                self._refuse_head()
                return
        if self._head_timer is None and self.timeout_keep_alive_task is None and self._idle():
            self._await_head()  # a request has begun, or the rest of one that was answered early

    def _refuse_head(self) -> None:
        """Close the connection: what comes between two bodies is too large."""
        if self._idle() and not self._in_message:
            self.transport.write(HEAD_TOO_LARGE)
        self.transport.close()

    def _answers_taken(self, *, rested: bool = False) -> None:
        """Resume reading: there may be room for more requests. `rested`: the others were served."""
        if rested:
            self._goes_on = None
        elif self._goes_on is not None:
            return
        self.flow.held = False
        self._read_on()
        if not self.flow.held and not self._handed_over:
            self.flow.let_go()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as wish:
                if self._handshake:
                    self._become_socket(data[wish.args[0] :])
                    return
                # A server may ignore `Upgrade` (RFC 9110, 7.8). Java's client asks for HTTP/2 like this, and httptools
                # then drops the request's body: parse the head again without it.
                # It would take nothing more if that head said `Connection: close`, so another parser does.
                data = self._head_without_upgrade + data[wish.args[0] :]
                self._head_without_upgrade = b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _become_socket(self, rest: bytes) -> None:
        """Hand the connection over to a WebSocket protocol, as uvicorn does. `rest`: the bytes after the handshake."""
        from .socket import Socket  # noqa: PLC0415 - its library is loaded by the first handshake

        self._stop_head_timer()
        self.connections.discard(self)
        self._handed_over = True
        websocket = Socket(config=self.config, server_state=self.server_state, app_state=self.app_state)
        websocket.connection_made(self.transport)
        self.transport.set_protocol(websocket)
        if not websocket.begin(self._handshake):  # its library refused the head
            self.send_400_response("Invalid HTTP request received.")
        elif unread := rest + self._waiting:
            websocket.data_received(unread)
        self._waiting.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_message:  # a trailer: a field of the head would be forwarded that this proxy has not checked
            return
        if len(self.headers) >= FIELDS:
            self._refuse_head()
            raise ValueError("too many fields")  # ends the parser, too
        super().on_header(name, value.rstrip(b" \t"))  # not part of the value (RFC 9112, 5.1); httptools keeps it

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            version = self.parser.get_http_version().encode()
            is_free = self._idle() and not self.flow.write_paused
            if (method, version, self._get_upgrade()) == (b"GET", b"1.1", b"websocket") and is_free:
                fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] not in NOT_SPOKEN)
                self._handshake = b"GET %b HTTP/1.1\r\n%b\r\n" % (self.url, fields)
                return  # `_parse` hands the connection over
            fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            self._head_without_upgrade = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, fields)
            return  # `_parse` parses this head instead
        self._stop_head_timer()
        self._in_message = True
        self._unparsed = 0
        self._body_left = 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
        self.scope["extensions"] = cast(Any, {CLOSED: self._for_gate})
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body_left > 0 or self._for_gate["admitted"] or not self._idle():  # else chunks that nobody wants
            self._unparsed = 0
        self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = self._body_left = 0
        self._in_message = False
        if not self._head_without_upgrade and not self._handshake:  # else the request's head was only set aside
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._corked.flush()  # no more writes to join
        self._idle_since = self.loop.time()
        if not self._for_gate["admitted"] and (self.pipeline or (self._waiting and not self._in_message)):
            self.pipeline.clear()  # without a key no pipelining; the rest of this request's body is none
            self.transport.close()
        super().on_response_complete()
        if self.flow.held:
            self._answers_taken()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        stranger = not self._for_gate["admitted"]
        if stranger and len(self._waiting) > HEAD:
            self.transport.abort()
            return
        if not stranger:
            self.transport.set_write_buffer_limits()
        self._unread_watch.start(stranger=stranger)

    def resume_writing(self) -> None:
        self._unread_watch.stop()
        super().resume_writing()
        if self.flow.held:
            self._answers_taken()
