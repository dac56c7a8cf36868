"""What is written in one turn of the loop leaves as one piece; and nobody holds a connection, or our memory, for ever.

Over real sockets, on both event loops: `serve` runs on uvloop, a host that embeds the app on asyncio's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cli_session_proxy.http import connection as connections
from cli_session_proxy.http.connection import SLICE, Connection, Corked
from cli_session_proxy.wires.asgi import CLOSED

from ..until import until
from .conftest import SOON, Run

BIG = b"x" * 16 * 1024
MANY = 8192  # of them: more than the kernel takes for a client that does not read
ASK = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(app: App, idle: float = SOON, first: float = SOON, *, key: bool = True) -> AsyncIterator[int]:
    """`idle`: the seconds for the next request, `first`: for the first one. `key`: each request shows one."""

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][CLOSED]["admitted"] = key
        for one in state.connections:
            cast(Any, one).timeout_keep_alive = idle
        await app(scope, receive, send)

    config = uvicorn.Config(cast(Any, admitted), lifespan="off", log_config=None, access_log=False)
    config.timeout_keep_alive = cast(Any, first)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()  # else another one is accepted, which nobody ends
        async with asyncio.timeout(SOON):
            while state.connections:
                for one in list(state.connections):
                    cast(Any, one).transport.abort()
                await asyncio.sleep(0)


async def answer(send: Send, body: bytes = b"hello") -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def hello(_scope: Scope, _receive: Receive, send: Send) -> None:
    await answer(send)


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Wire:
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, _name: str) -> None:
        """It has no socket."""

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """It has no buffer."""

    def is_closing(self) -> bool:
        return self.closed


def corked() -> tuple[Wire, Corked]:
    wire = Wire()
    return wire, Corked(cast(Any, wire))


# --- one piece


async def test_a_head_and_its_body_are_sent_together_and_at_once() -> None:
    wire, connection = corked()
    connection.write(b"head ")
    connection.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    connection.write(b"more")
    await asyncio.sleep(0)
    assert wire.sent == [b"head body", b"more"]


async def test_what_was_written_is_sent_before_the_end() -> None:
    wire, connection = corked()
    connection.write(b"last words")
    connection.close()
    assert wire.sent == [b"last words"]
    assert connection.is_closing()
    await asyncio.sleep(0)
    assert wire.sent == [b"last words"]


def test_what_is_written_as_the_connection_is_lost_is_dropped_without_a_fault(run: Run) -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        faults: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        async with listening(hello) as port:
            transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
            transport.abort()
            Corked(transport).write(b"late")
            for _ in range(5):
                await asyncio.sleep(0)
        assert faults == []

    run(case())


def test_an_answer_written_as_the_client_ends_its_side_is_sent(run: Run) -> None:
    async def case() -> None:
        async with listening(hello) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            writer.write_eof()
            assert (await reader.read()).endswith(b"hello")
            writer.close()

    run(case())


# --- clients that do not read


def deaf(port: int) -> socket.socket:
    """A client that asks and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(ASK)
    return client


class Talking:
    """An app that answers in many pieces, each at once after the other, until its client is gone."""

    def __init__(self) -> None:
        self.sent = 0
        self.begun, self.gone = asyncio.Event(), asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(left(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.sent < MANY and not watching.done():
            await send({"type": "http.response.body", "body": BIG, "more_body": True})
            self.sent += 1
            self.begun.set()
        await watching
        self.gone.set()


def test_an_answer_is_not_gathered_in_memory_for_a_client_that_does_not_read(run: Run) -> None:
    async def case() -> None:
        app = Talking()
        async with listening(app) as port:
            client = await asyncio.to_thread(deaf, port)
            await app.begun.wait()
            assert app.sent < MANY
            client.close()
            await app.gone.wait()

    run(case())


def test_a_client_that_takes_nothing_for_long_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED", 0.05)

    async def case() -> None:
        app = Talking()
        async with listening(app) as port:
            client = await asyncio.to_thread(deaf, port)
            await app.gone.wait()
            client.close()
        assert app.sent < MANY

    run(case())


class Slow(Wire):
    """A transport whose client takes ever more of what waits, then nothing."""

    def __init__(self, *left: int) -> None:
        super().__init__()
        self.left = list(left)
        self.aborted = asyncio.Event()

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.left.pop(0)

    def abort(self) -> None:
        self.aborted.set()


async def test_a_client_that_reads_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_STRANGER", 0.001)  # it asked for nothing yet
    config = uvicorn.Config(cast(Any, hello), lifespan="off", log_config=None, access_log=False)
    connection = Connection(config, ServerState(), {})
    wire = Slow(100, 100, 90, 90, 80, 80, 80)
    connection.connection_made(cast(Any, wire))
    connection.pause_writing()
    await asyncio.wait_for(wire.aborted.wait(), SOON)
    assert wire.left == [], "two looks that found less, then one that found the same"
    connection.connection_lost(None)


# --- clients that ask on and on


async def small(_scope: Scope, _receive: Receive, send: Send) -> None:
    await answer(send, BIG)


async def listens(_scope: Scope, receive: Receive, send: Send) -> None:
    """As a turn does: it watches for its client while it answers, for which uvicorn reads on."""
    watching = asyncio.create_task(left(receive))
    await asyncio.sleep(0)
    await answer(send, BIG)
    await watching


@pytest.mark.parametrize("app", [small, listens])
def test_requests_of_a_client_that_takes_no_answer_are_not_read_for_ever(
    run: Run, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as requests, nor as bytes: the client's own kernel keeps them."""
    most = 0

    class Watched(Connection):
        def data_received(self, data: bytes) -> None:
            nonlocal most
            super().data_received(data)
            most = max(most, len(self.pipeline))

    monkeypatch.setattr(f"{__name__}.Connection", Watched)

    async def case() -> None:
        taken = 0
        async with listening(app) as port:
            client = await asyncio.to_thread(deaf, port)
            client.setblocking(False)
            quiet = 0
            while taken < MANY and quiet < 50:  # it does not take more: nothing for half a second
                try:
                    client.send(ASK * 512)
                    taken, quiet = taken + 1, 0
                except BlockingIOError:
                    quiet += 1
                    await asyncio.sleep(0.01)
            client.close()
        assert taken < MANY
        assert 0 < most < connections.AHEAD + connections.SLICE // len(ASK) + 1

    run(case())


def test_requests_in_a_row_are_all_answered_in_order_however_many_come_at_once(run: Run) -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await answer(send, b"[%b %d]" % (scope["path"].encode(), len(body)))

    async def case() -> None:
        asked = b"".join(
            b"POST /%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (n, size, b"x" * size)
            for n in range(2000)
            for size in [(0, 1, 70_000)[n % 3 if n % 100 == 0 else n % 2]]
        )
        async with listening(echo) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked)
            for n in range(2000):
                size = (0, 1, 70_000)[n % 3 if n % 100 == 0 else n % 2]
                assert (await reader.readuntil(b"]")).endswith(b"[/%d %d]" % (n, size))
            writer.close()

    run(case())


def test_a_connection_whose_requests_had_to_wait_is_not_closed_as_an_idle_one(run: Run) -> None:
    """The time to keep an idle connection must not run on while what waited is answered."""
    gate = asyncio.Event()
    asked = 0

    async def gated(_scope: Scope, _receive: Receive, send: Send) -> None:
        nonlocal asked
        asked += 1
        if asked == connections.AHEAD + 2:
            await gate.wait()
        await answer(send)

    async def case() -> None:
        async with listening(gated, idle=0.1) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK * (connections.AHEAD * 100))
            for _ in range(connections.AHEAD + 1):
                await reader.readuntil(b"hello")
            await asyncio.sleep(0.3)
            gate.set()
            for _ in range(connections.AHEAD * 100 - connections.AHEAD - 1):
                await reader.readuntil(b"hello")
            writer.close()

    run(case())


class Heavy(Wire):
    """A transport with so many bytes that nobody takes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True


def test_what_waits_for_all_is_bounded_and_who_has_waited_longest_goes_first_strangers_before_others() -> None:
    unread = connections.Unread(limit=100, of_strangers=50)
    known, strangers = [Heavy(40) for _ in range(4)], [Heavy(20) for _ in range(4)]

    def add(wire: Heavy) -> None:
        unread.add(cast(Any, wire), stranger=wire in strangers)

    def gone() -> list[list[int]]:
        return [[at for at, wire in enumerate(wires) if wire.aborted] for wires in (known, strangers)]

    add(known[0])
    add(known[1])
    assert gone() == [[], []]
    unread.remove(cast(Any, known[0]))  # it is read again
    add(known[0])
    add(known[2])
    assert gone() == [[1], []]
    add(strangers[0])
    assert gone() == [[1], []]
    add(strangers[1])
    assert gone() == [[1], [0]]
    unread.remove(cast(Any, known[0]))
    add(strangers[2])
    add(strangers[3])
    assert gone() == [[1], [0, 1]], "50 bytes of all strangers"
    add(known[3])
    assert gone() == [[1], [0, 1, 2]], "a stranger gives way to who has shown a key"
    assert unread.drop_stranger()
    assert not unread.drop_stranger()
    for wire in (known[2], known[3]):
        unread.remove(cast(Any, wire))
    assert not any(unread._stalled.values())


def test_clients_that_read_nothing_are_let_go_when_too_much_waits_for_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.UnreadWatch, "unread", connections.Unread(limit=1))

    async def case() -> None:
        apps = [Talking() for _ in range(8)]
        waiting = iter(apps)

        async def each(scope: Scope, receive: Receive, send: Send) -> None:
            await next(waiting)(scope, receive, send)

        async with listening(each) as port:
            clients = [await asyncio.to_thread(deaf, port) for _ in apps]
            await apps[0].gone.wait()
            for client in clients:
                client.close()
            for app in apps:
                await app.gone.wait()

    run(case())


# --- clients that do not ask


@pytest.mark.parametrize("half", [b"", b"\r\n", b"POST / HTTP/1.1\r\nHost: loc"])
@pytest.mark.parametrize("before", [b"", ASK])
def test_a_client_that_says_nothing_or_half_a_head_is_let_go(run: Run, before: bytes, half: bytes) -> None:
    async def case() -> None:
        async with listening(hello, idle=0.05, first=SOON if before else 0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                await reader.readuntil(b"hello")
            writer.write(half)
            with contextlib.suppress(ConnectionResetError):  # where the server had not read the half
                assert await reader.read() == b""
            writer.close()

    run(case())


def test_what_follows_an_early_answer_is_not_read_for_ever(run: Run) -> None:
    """Such as a body beyond the limit, whose client goes on sending it."""

    async def case() -> None:
        async with listening(hello, idle=0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            await reader.readuntil(b"hello")
            with contextlib.suppress(ConnectionError):
                while not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"1\r\nx\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.001)
            writer.close()

    run(case())


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: ",
    ],
    ids=["line", "head", "trailer"],
)
def test_a_head_without_an_end_is_not_kept(run: Run, begin: bytes) -> None:
    async def forever(_scope: Scope, receive: Receive, _send: Send) -> None:
        await left(receive)

    async def case() -> None:
        taken = 0
        async with listening(forever) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begin)
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing() and taken < MANY:
                    writer.write(BIG)
                    await writer.drain()
                    taken += 1
            assert taken < MANY
            writer.close()

    run(case())


def test_a_head_that_is_too_large_is_told_so(run: Run) -> None:
    async def case() -> None:
        async with listening(hello) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * (connections.HEAD + 1))
            assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
            writer.close()

    run(case())


def test_a_head_of_too_many_fields_is_told_so(run: Run) -> None:
    """13,000 of two bytes took 40 ms of each client that had shown no key."""

    async def case() -> None:
        asked = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * connections.FIELDS
        async with listening(hello, key=False) as port:
            for head, said in ((asked, b"HTTP/1.1 200 "), (asked + b"a:\r\n" * 3000, b"HTTP/1.1 431 ")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head + b"\r\n")
                assert (await reader.readline()).startswith(said)
                writer.close()

    run(case())


async def measuring(_scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message["body"])
        more = message["more_body"]
    await answer(send, b"%d" % size)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_would_rather_speak_http_2_is_served_with_its_body(run: Run, at_once: bool) -> None:
    """Java's HttpClient asks so on its first request, with a body or without."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    post = b"POST / HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: 5\r\n\r\n" % wish

    async def case() -> None:
        async with listening(measuring) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                for piece in [post + b"hello"] if at_once else [post[:90], post[90:], b"he", b"llo"]:
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                await reader.readuntil(b"\r\n\r\n5")
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % wish)
                await reader.readuntil(b"\r\n\r\n0")
            writer.close()

    run(case())


def test_who_would_rather_speak_http_2_and_closes_the_connection_is_answered(run: Run) -> None:
    """The parser took nothing more after the head that it had seen first: the client waited for ever."""
    fields = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nConnection: close\r\nContent-Length: 5\r\n"

    async def case() -> None:
        async with listening(measuring) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\n%b\r\nhello" % fields)
            assert (await reader.read()).endswith(b"\r\n\r\n5")
            writer.close()

    run(case())


def test_requests_that_come_at_once_and_ask_for_http_2_are_answered_in_order(run: Run) -> None:
    asked = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    many = 1500  # deeper than Python's stack

    async def case() -> None:
        async with listening(measuring) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked * many)
            for _ in range(many):
                await reader.readuntil(b"\r\n\r\n0")
            writer.close()

    run(case())


@pytest.mark.parametrize("request_line", [b"CONNECT localhost:80 HTTP/1.1", b"GET / HTTP/9", b"\x00"])
def test_what_is_no_request_of_ours_is_refused_and_the_connection_ended(run: Run, request_line: bytes) -> None:
    async def case() -> None:
        async with listening(measuring) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_line + b"\r\nHost: localhost\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(case())


def test_a_long_head_and_a_body_of_many_pieces_are_taken(run: Run) -> None:
    async def case() -> None:
        async with listening(measuring) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"POST / HTTP/1.1\r\nX-Long: %b\r\nContent-Length: %d\r\n\r\n" % (BIG, len(BIG) * 64))
                for _ in range(64):
                    writer.write(BIG)
                    await writer.drain()
                await reader.readuntil(b"\r\n\r\n%d" % (len(BIG) * 64))
            writer.close()

    run(case())


class Ticks:
    """Counts the iterations of the event loop, and how much is done in each."""

    def __init__(self) -> None:
        self.now = 0
        self.done: Counter[int] = Counter()

    def note(self, amount: int = 1) -> None:
        self.done[self.now] += amount

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    ticks = Ticks()
    counting = asyncio.create_task(ticks.count())
    try:
        yield ticks
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


@pytest.mark.parametrize("key", [True, False])
def test_chunks_of_a_byte_hold_up_nobody_else(run: Run, monkeypatch: pytest.MonkeyPatch, key: bool) -> None:
    """One read of 256 KB of them took 65 ms, and uvloop reads up to 32 times in one iteration of its loop."""
    monkeypatch.setattr(connections, "PORTION", 0.0, raising=False)

    async def case() -> None:
        async with listening(left_alone, key=key) as port, ticking() as ticks:
            with pytest.MonkeyPatch.context() as patch:
                on_body = Connection.on_body

                def noted(one: Connection, body: bytes) -> None:
                    ticks.note()
                    on_body(one, body)

                patch.setattr(Connection, "on_body", noted)
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(CHUNKED + b"1\r\nx\r\n" * 100_000)
                await until(lambda: ticks.done.total() >= 100_000)
                writer.close()
            assert max(ticks.done.values()) <= 2 * SLICE // 6 + 2  # uvloop may read a rest at once

    run(case())


def test_a_client_that_sends_fast_is_read_once_in_an_iteration(run: Run) -> None:
    """uvloop read megabytes of one client before it looked at another one."""

    async def case() -> None:
        async with listening(left_alone) as port, ticking() as ticks:
            with pytest.MonkeyPatch.context() as patch:
                data_received = Connection.data_received

                def noted(one: Connection, data: bytes) -> None:
                    if len(data) >= connections.PIECE:
                        ticks.note()
                    data_received(one, data)

                patch.setattr(Connection, "data_received", noted)
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 99999999") + BIG * 2048)
                await writer.drain()
                await until(lambda: bool(ticks.done))
                writer.close()
            assert max(ticks.done.values()) == 1

    run(case())


@pytest.mark.parametrize("before", [0, 1])
def test_a_body_that_the_app_does_not_take_is_not_read_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Each pause for the other connections ended with reading on: a client without a key that took no answer could
    send 300 MB a second into memory. `before`: requests that the app answers first."""
    size, held = 16 * 1024 * 1024, 0
    on_body = Connection.on_body

    def noted(one: Connection, body: bytes) -> None:
        nonlocal held
        on_body(one, body)
        held = max(held, len(one.cycle.body))

    monkeypatch.setattr(Connection, "on_body", noted)

    async def case() -> None:
        may_take = asyncio.Event()
        taken: list[int] = []

        async def late(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] != "/first":
                await may_take.wait()
            count, more = 0, True
            while more:
                message = await receive()
                count += len(message["body"])
                more = message["more_body"]
            taken.append(count)
            await answer(send)

        async with listening(late) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK.replace(b"/", b"/first", 1))
            await reader.readuntil(b"hello")
            writer.write(ASK * before + ASK.replace(b"Length: 0", b"Length: %d" % size) + b"x" * size + ASK)
            await until(lambda: held > 0)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert held < 1024 * 1024
            may_take.set()
            for _ in range(before + 2):
                await reader.readuntil(b"hello")
            assert taken == [0, *[0] * before, size, 0]
            writer.close()

    run(case())


async def left_alone(_scope: Scope, receive: Receive, _send: Send) -> None:
    await left(receive)


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_trailer_is_no_header(run: Run) -> None:
    """It was one as soon as it had come: a hop forwarded it as a field that this proxy had not looked at."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await answer(send, b",".join(name for name, _ in scope["headers"]))

    async def case() -> None:
        async with listening(named) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for end in (b"", b"X-Agent-Id: sly\r\n"):
                writer.write(CHUNKED + b"1\r\nx\r\n0\r\n" + end + b"\r\n")
                assert b"content-length: 22\r\n" in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(22) == b"host,transfer-encoding"
            writer.close()

    run(case())


def test_a_handshake_behind_an_answer_that_is_not_read_makes_no_socket(run: Run) -> None:
    """The watch over the unread answer went on beside the socket's own, and ended it much later."""
    kinds: list[str] = []

    async def large(scope: Scope, _receive: Receive, send: Send) -> None:
        kinds.append(scope["type"])
        await answer(send, b"x" * 16 * 1024 * 1024)

    async def case() -> None:
        async with listening(large) as port:
            client = await asyncio.to_thread(deaf, port)
            await until(lambda: kinds == ["http"] and any(connections.UnreadWatch.unread._stalled.values()))
            client.sendall(
                b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
            )
            await until(lambda: len(kinds) == 2)
            client.close()
        assert kinds == ["http", "http"]

    run(case())


def test_a_place_is_not_made_twice_by_one_connection_that_cannot_close() -> None:
    """It waits for its client to read. It counted as the one to close for every new one, so there was no bound."""
    ended: list[str] = []

    class Stuck(Wire):
        def close(self) -> None:
            self.closed = True  # not before its client reads
            ended.append("closed")

        def abort(self) -> None:
            ended.append("aborted")

    idle, new = Connection.__new__(Connection), Connection.__new__(Connection)
    for one in (idle, new):
        one.transport = cast(Any, Stuck())
        one.cycle = cast(Any, None)
        one.flow = connections.Intake(one.transport)
        one.connections = {idle, new}
    for _ in range(2):
        new._make_room()
    assert ended == ["closed", "aborted"]


# --- strangers: clients that have shown no key


def test_the_rest_of_a_body_is_no_request_ahead_of_an_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, a connection was closed if a part of its body was left for the next iteration of the loop."""
    monkeypatch.setattr(connections, "PORTION", 0.0)

    async def case() -> None:
        async with listening(hello, key=False) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(CHUNKED + b"1000\r\n%b\r\n0\r\n\r\n" % BIG[:4096])
                await reader.readuntil(b"hello")
            writer.close()

    run(case())


def test_chunks_after_the_answer_to_a_stranger_are_not_read_for_long(run: Run) -> None:
    async def case() -> None:
        taken = 0
        async with listening(hello, key=False) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED)
            said = await reader.readuntil(b"hello")
            with contextlib.suppress(ConnectionError):
                while not (reader.at_eof() or writer.is_closing()) and taken < MANY:
                    writer.write(b"400\r\n%b\r\n" % BIG[:1024] * 16)
                    await writer.drain()
                    taken += 1
            with contextlib.suppress(ConnectionError):
                said += await reader.read()
            assert taken < MANY
            assert said.count(b"HTTP/1.1") == 1
            writer.close()

    run(case())


GET = b"GET /ui/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "body", [BIG * 32, pytest.param(BIG * 128, marks=pytest.mark.full)], ids=["half a megabyte", "two"]
)
@pytest.mark.sample(1)
def test_strangers_that_read_nothing_hold_few_megabytes_and_give_way_soon(
    run: Run, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 connections with 300 requests each: an answer at a time, and no more than the bound in all."""
    monkeypatch.setattr(connections, "STALLED_STRANGER", 1.0)
    most = 0

    class Measured(connections.Unread):
        def add(self, transport: asyncio.Transport, *, stranger: bool) -> None:
            nonlocal most
            super().add(transport, stranger=stranger)
            assert stranger
            most = max(most, sum(one.get_write_buffer_size() for one in self._stalled[True]))

    unread = Measured()
    monkeypatch.setattr(connections.UnreadWatch, "unread", unread)

    async def asset(_scope: Scope, _receive: Receive, send: Send) -> None:
        await answer(send, body)

    async def case() -> None:
        async with listening(asset, key=False) as port:
            clients = []
            for _ in range(600):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(("127.0.0.1", port))
                clients.append(client)
            await asyncio.sleep(0)
            for client in clients:
                await asyncio.get_running_loop().sock_sendall(client, GET * 300)
            await until(lambda: most and not any(unread._stalled.values()))
            for client in clients:
                client.close()

    run(case())
    assert 0 < most <= connections.UNREAD_OF_STRANGERS


def test_a_stranger_that_does_not_read_gives_its_place_to_a_new_client(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 3)
    monkeypatch.setattr(connections.UnreadWatch, "unread", connections.Unread())

    async def large(scope: Scope, _receive: Receive, send: Send) -> None:
        await answer(send, b"x" * (8 * 1024 * 1024 if scope["path"] == "/ui/main.js" else 5))

    async def case() -> None:
        monkeypatch.setattr(connections, "UNREAD_OF_STRANGERS", 1 << 30)
        connections.UnreadWatch.unread = connections.Unread(1 << 30, 1 << 30)
        async with listening(large, key=False) as port:
            deaf_ones = []
            for _ in range(3):
                client = socket.create_connection(("127.0.0.1", port))
                client.sendall(GET)
                deaf_ones.append(client)
            await until(lambda: len(connections.UnreadWatch.unread._stalled[True]) == 3)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            for client in deaf_ones:
                client.close()

    run(case())


def test_a_stranger_that_sends_without_an_end_what_nobody_reads_is_let_go(run: Run) -> None:
    async def case() -> None:
        async with listening(small, key=False) as port:
            client = await asyncio.to_thread(deaf, port)
            client.setblocking(False)
            sent = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(SOON):
                    while True:
                        await asyncio.get_running_loop().sock_sendall(client, GET * 512)
                        sent += 1
            client.close()
        assert sent * 512 * len(GET) < 64 * 1024 * 1024

    run(case())


def test_a_stranger_that_asks_ahead_of_its_answer_gets_that_one_only(run: Run) -> None:
    async def case() -> None:
        for key, answers in ((False, 1), (True, 50)):
            async with listening(hello, key=key) as port:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GET * 49 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                assert (await reader.read()).count(b"hello") == answers
                writer.close()

    run(case())
