"""Responses over a WebSocket: as OpenAI's own client speaks it, and what a client's message may do."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Answer, Observer
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.http import bounds
from cli_session_proxy.http import connection as connections
from cli_session_proxy.http import socket as http_sockets
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.server import Server, create_app
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores import held
from cli_session_proxy.wires.asgi import read_aside
from cli_session_proxy.wires.responses import socket as sockets
from cli_session_proxy.wires.responses.body import ResponsesCall
from cli_session_proxy.wires.responses.dialogues import Dialogues
from turnfault.provider.upstream import Upstream

from ...http.test_connection import ticking
from ...memory_backend import MemoryBackend, echo
from ...serving import serving
from ...until import until
from .conftest import Door, client_of

JSON = dict[str, Any]
KEY = "alices-secret-0123456789"
SOON = 60.0
FINAL = ("response.completed", "response.incomplete", "response.failed", "error")


class Held:
    """A model that waits until it is told to answer, and says so."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, path: Sequence[Message]) -> Any:
        self.asked.set()
        await self.go.wait()
        return await echo(path)


@asynccontextmanager
async def opened(
    tmp_path: Path, model: Callable[[Sequence[Message]], Awaitable[Any]] = echo, **options: Any
) -> AsyncIterator[tuple[Engine, MemoryBackend, str]]:
    """An engine without a CLI behind a server, and the server's `host:port`."""
    settings = Settings(var=tmp_path / "var", port=0, disconnect_grace=0.05, **options)
    backend = MemoryBackend(model)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        async with serving(engine, settings) as url:
            yield engine, backend, url.removeprefix("http://").removesuffix("/v1")
    finally:
        await engine.stop()


def at(place: str, path: str = "/v1/responses", **headers: str) -> connect:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return connect(f"ws://{place}{path}", additional_headers=given, open_timeout=SOON)


async def asked(socket: ClientConnection, **body: Any) -> list[JSON]:
    """All events of the answer to one message."""
    await socket.send(json.dumps({"type": "response.create", "model": "sonnet", **body}))
    return await answered(socket)


async def answered(socket: ClientConnection) -> list[JSON]:
    events: list[JSON] = []
    async with asyncio.timeout(SOON):
        while not events or events[-1]["type"] not in FINAL:
            events.append(json.loads(await socket.recv()))
    return events


def said(events: list[JSON]) -> str:
    return str(events[-1]["response"]["output"][-1]["content"][0]["text"])


async def test_openais_client_talks_over_a_socket_and_goes_on_by_id(door: Door, upstream: Upstream) -> None:
    texts = []
    previous: str | None = None
    async with door.openai.responses.connect() as socket:
        for words in ("Remember: the colour is teal", "recall"):
            given: JSON = {} if previous is None else {"previous_response_id": previous}
            await socket.response.create(model="sonnet", input=words, store=False, **given)
            async for event in socket:
                if event.type == "response.completed":
                    previous = event.response.id
                    texts.append(event.response.output_text)
                    break
    assert texts == ["Noted: colour is teal.", "I remember: colour is teal."]
    assert upstream.requests[-1].user_texts() == ["Remember: the colour is teal", "recall"]
    with pytest.raises(openai.NotFoundError):  # it was not to be stored, and its connection is gone
        await door.openai.responses.retrieve(previous or "")


async def test_the_events_are_those_of_a_stream(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place), at(place) as socket:
        events = await asked(socket, input="hello")
        async with httpx.AsyncClient(trust_env=False) as http:
            streamed = await http.post(
                f"http://{place}/v1/responses", json={"model": "sonnet", "input": "hello", "stream": True}
            )
    over_http = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [event["type"] for event in events] == [event["type"] for event in over_http]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert said(events) == "You said: hello (1)"


async def test_one_token_is_one_token_in_a_conversation_over_a_socket(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, backend, place), at(place) as socket:
        client = client_of(f"http://{place}/v1")
        conversation = (await client.conversations.create()).id
        await client.close()
        cut = await asked(socket, input="hello", conversation=conversation, max_output_tokens=1)
        assert cut[-1]["type"] == "response.incomplete"
        response = cut[-1]["response"]
        assert (response["incomplete_details"]["reason"], response["usage"]["output_tokens"]) == (
            "max_output_tokens",
            1,
        )
        assert said(cut) == "You"
        await asked(socket, input="and then?", conversation=conversation)
    assert [block["text"] for message in backend.seen[-1] for block in message.content] == ["hello", "You", "and then?"]


async def test_messages_are_answered_in_their_order_and_named_by_their_stream(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place), at(place, X_Agent_Id="ada", X_Chain="new") as socket:
        for number in (1, 2, 3):
            said_now = {"type": "response.create", "model": "sonnet", "input": f"n{number}", "stream_id": f"s{number}"}
            await socket.send(json.dumps(said_now))
        answers = [await answered(socket) for _ in range(3)]
    assert [said(events) for events in answers] == [f"You said: n{number} ({number})" for number in (1, 2, 3)]
    assert [{event["stream_id"] for event in events} for events in answers] == [{"s1"}, {"s2"}, {"s3"}]


async def test_what_was_sent_ahead_is_part_of_what_goes_on_from_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, backend, place), at(place) as socket:
        ahead = await asked(socket, input="first", instructions="Be brief.", generate=False)
        assert [event["type"] for event in ahead] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        assert ahead[-1]["response"]["output"] == []
        assert backend.seen == []  # nobody was asked
        events = await asked(socket, previous_response_id=ahead[-1]["response"]["id"], input="second")
        assert said(events) == "You said: second (2)"
        response = events[-1]["response"]
        assert (response["instructions"], response["previous_response_id"]) == ("Be brief.", None)
        again = await asked(socket, previous_response_id=response["id"], input="third")
    assert said(again) == "You said: third (3)"


async def test_what_was_sent_ahead_is_one_body_and_is_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message added up to 64 MB to what one connection kept, and a small one behind it held everybody up."""
    sizes, made = list[int](), list[bounds.Bounds]()
    of = bounds.Bounds.of

    async def noted(aside: Any, raw: bytes, *more: Any) -> Any:
        sizes.append(len(raw))
        return await read_aside(aside, raw, *more)

    def noted_bounds(settings: Settings) -> bounds.Bounds:
        made.append(of(settings))
        return made[-1]

    monkeypatch.setattr(sockets, "read_aside", noted)
    monkeypatch.setattr(bounds.Bounds, "of", staticmethod(noted_bounds))
    async with opened(tmp_path, max_body=10_000) as (_, _, place):
        async with at(place) as socket:
            first = (await asked(socket, input="x" * 6000, generate=False))[-1]["response"]["id"]
            [error] = await asked(socket, input="y" * 6000, generate=False, previous_response_id=first)
            assert (error["status"], error["code"]) == (413, "request_too_large")
            await until(lambda: 6000 < made[0].bytes["local"] < 6200)  # what is kept counts
            assert said(await asked(socket, input="z", previous_response_id=first)) == "You said: z (2)"
            assert sizes[-1] > 6000
            assert said(await asked(socket, input="another")) == "You said: another (1)"
            assert sizes[-1] < 200
        await until(lambda: not made[0].open)
        async with at(place) as socket:
            for _ in range(3):  # it is replaced
                await asked(socket, input="x" * 9000, generate=False)
            await until(lambda: made[0].bytes["local"] < 10_000)


async def test_only_the_connection_goes_on_from_what_was_not_to_be_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place):
        async with at(place) as socket:
            first = (await asked(socket, input="one", store=False))[-1]["response"]["id"]
            assert said(await asked(socket, input="two", previous_response_id=first)) == "You said: two (2)"
        async with at(place) as socket:
            [error] = await asked(socket, input="two", previous_response_id=first)
            assert (error["status"], error["error"]["code"], error["code"]) == (
                400, "previous_response_not_found", "previous_response_not_found",
            )  # fmt: skip
            assert said(await asked(socket, input="anew")) == "You said: anew (1)"  # it can be used on


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ("{", 400, None),
        ("[]", 400, None),
        ('{"type": "response.cancel"}', 400, "type"),
        ('{"type": "response.create", "input": 1}', 400, "input"),
        ('{"type": "response.create", "input": "x", "background": true}', 400, "background"),
        ('{"type": "response.create", "input": "x", "stream_id": 7}', 400, "stream_id"),
        ('{"type": "response.create", "input": "x", "generate": "no"}', 400, "generate"),
        (b"\xff\x00", 400, None),
    ],
)
async def test_a_message_that_means_nothing_is_an_error_event(
    message: str | bytes, status: int, param: str | None, tmp_path: Path
) -> None:
    async with opened(tmp_path) as (_, _, place), at(place) as socket:
        await socket.send(message)
        [event] = await answered(socket)
        assert (event["type"], event["status"], event["param"]) == ("error", status, param)
        assert event["error"]["message"]
        assert said(await asked(socket, input="hello")) == "You said: hello (1)"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Authorization": f"Bearer {KEY}", "Host": "evil.example"}, 400),
        ({"Authorization": f"Bearer {KEY}", "Origin": "http://evil.example"}, 400),
        ({"Authorization": f"Bearer {KEY}", "Sec-Fetch-Site": "cross-site"}, 400),
    ],
)
async def test_a_handshake_passes_the_gate_of_every_request(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    async with opened(tmp_path, keys={"alice": KEY}) as (_, backend, place):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://{place}/v1/responses", additional_headers=headers, open_timeout=SOON):
                pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["message"]
        assert refused.value.response.headers["x-content-type-options"] == "nosniff"
        with pytest.raises(InvalidStatus) as elsewhere:
            async with at(place, "/v1/chat/completions", Authorization=f"Bearer {KEY}"):
                pass
        assert elsewhere.value.response.status_code == 404
        async with at(place, "/agents/ada/v1/responses", Authorization=f"Bearer {KEY}") as socket:
            await asked(socket, input="hello")
        assert len(backend.seen) == 1


async def test_each_key_has_its_own_responses(tmp_path: Path) -> None:
    other = "bobs-secret-0123456789"
    async with (
        opened(tmp_path, keys={"alice": KEY, "bob": other}) as (_, _, place),
        at(place, Authorization=f"Bearer {KEY}") as alice,
        at(place, Authorization=f"Bearer {other}") as bob,
    ):
        first = (await asked(alice, input="one"))[-1]["response"]["id"]
        [error] = await asked(bob, input="two", previous_response_id=first)
        assert error["code"] == "previous_response_not_found"


async def test_sockets_and_their_messages_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "EVENT_STREAMS", 1)
    monkeypatch.setattr(sockets, "MOST_QUEUED", 2)
    model = Held()
    async with opened(tmp_path, model, max_body=4096) as (_, _, place):
        async with at(place) as socket:
            with pytest.raises(InvalidStatus) as refused:
                async with at(place):
                    pass
            assert refused.value.response.status_code == 429
            await socket.send(json.dumps({"type": "response.create", "input": "hold"}))
            await asyncio.wait_for(model.asked.wait(), SOON)
            for _ in range(3):
                await socket.send(json.dumps({"type": "response.create", "input": "more"}))
            with pytest.raises(ConnectionClosed) as closed:
                await answered(socket)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
        model.go.set()
        async with at(place) as socket:
            await socket.send("x" * 5000)
            with pytest.raises(ConnectionClosed) as too_large:
                await answered(socket)
            assert too_large.value.rcvd is not None
            assert too_large.value.rcvd.code == 1009


async def test_a_client_that_leaves_ends_its_turn(tmp_path: Path) -> None:
    model = Held()
    async with opened(tmp_path, model) as (engine, _, place):
        async with at(place, X_Agent_Id="ada") as socket:
            await socket.send(json.dumps({"type": "response.create", "input": "hold"}))
            await asyncio.wait_for(model.asked.wait(), SOON)
        agent = await engine.store.agent("local", "ada")
        assert agent is not None
        [asked] = [turn async for turn in engine.store.turns(agent.key)]
        async with asyncio.timeout(SOON):
            await engine.ended(asked.id)
        turn = await engine.store.turn(asked.id)
    assert turn is not None
    assert (turn.status, (turn.error or {})["detail"]) == ("cancelled", {"by": "left"})


async def test_a_server_that_stops_ends_its_answers_first_and_lets_idle_sockets_go(tmp_path: Path) -> None:
    model = Held()
    settings = Settings(var=tmp_path / "var", port=0)
    engine = Engine(settings, backend=MemoryBackend(model))
    await engine.start()
    listener = bind(settings)
    server = Server(create_app(engine, settings), settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    async with at(place) as idle, at(place) as busy:
        await busy.send(json.dumps({"type": "response.create", "input": "hold"}))
        await asyncio.wait_for(model.asked.wait(), SOON)
        server.should_exit = True
        with pytest.raises(ConnectionClosed) as let_go:
            await idle.recv()
        assert let_go.value.rcvd is not None
        assert let_go.value.rcvd.code == 1012
        model.go.set()
        assert said(await answered(busy)) == "You said: hold (1)"
        with pytest.raises(ConnectionClosed) as ended:
            await busy.recv()
        assert ended.value.rcvd is not None
        assert ended.value.rcvd.code == 1012
    await asyncio.wait_for(task, SOON)
    await engine.stop()
    listener.close()


async def test_a_client_that_takes_nothing_is_not_read_any_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALLED", 0.05)
    block: Block = {"type": "text", "text": "word " * 2_000_000}

    async def much(_: Sequence[Message]) -> Sequence[Block]:
        return (block,)

    async with opened(tmp_path, much) as (engine, _, place):
        host, port = place.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(
            b"GET /v1/responses HTTP/1.1\r\nHost: %b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nX-Agent-Id: ada\r\n\r\n"
            % place.encode()
        )
        assert b"101" in await asyncio.wait_for(reader.readline(), SOON)
        message = json.dumps({"type": "response.create", "input": "much"}).encode()
        writer.write(bytes([0x81, 0x80 | len(message), 0, 0, 0, 0]) + message)

        async def let_go() -> bool:
            agent = await engine.store.agent("local", "ada")
            turns = [] if agent is None else [turn async for turn in engine.store.turns(agent.key)]
            return [turn.delivery for turn in turns] == ["undelivered"]

        await until(let_go)
        writer.close()


@pytest.mark.parametrize(
    "head", [b"Sec-WebSocket-Version: 7\r\n", b"Sec-WebSocket-Key: x\r\n", b"A: %b\r\n" % (b"a" * 9000)]
)
async def test_a_handshake_that_is_none_is_refused(head: bytes, tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place):
        host, port = place.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/responses HTTP/1.1\r\nHost: %b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%b\r\n"
            % (place.encode(), head)
        )
        assert (await asyncio.wait_for(reader.readline(), SOON)).split()[1] in (b"400", b"426")
        assert await asyncio.wait_for(reader.read(), SOON) is not None  # it is closed
        writer.close()


# --- clients that speak the protocol themselves


def frame(opcode: int, data: bytes = b"", *, last: bool = True) -> bytes:
    """Masked by zeros; of 125 bytes at most, or of 64 KB at most."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else struct.pack("!BH", 0x80 | 126, len(data))
    return bytes([(0x80 if last else 0) | opcode]) + size + bytes(4) + data


class Raw:
    """A connection on which a handshake was sent, and maybe more at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), SOON)).split()[1])

    async def frame(self) -> tuple[int, bytes]:
        """The server's next frame."""
        async with asyncio.timeout(SOON):
            opcode, size = await self.reader.readexactly(2)
            if size == 126:
                (size,) = struct.unpack("!H", await self.reader.readexactly(2))
            return opcode & 0x0F, await self.reader.readexactly(size)


@asynccontextmanager
async def raw(place: str, then: bytes = b"", *fields: bytes) -> AsyncIterator[Raw]:
    host, port = place.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"GET /v1/responses HTTP/1.1\r\nHost: %b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n%b\r\n%b"
        % (place.encode(), b"".join(b"%b\r\n" % field for field in fields), then)
    )
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


CREATE = json.dumps({"type": "response.create", "model": "sonnet", "input": "hi"}).encode()


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(frame(1, b"", last=False) + frame(0, b"", last=False) * 20_000, id="pieces of nothing"),
        pytest.param(frame(9) * 20_000, id="pings"),
    ],
)
async def test_tiny_frames_hold_up_nobody_else(frames: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of them took half a second, and uvloop reads up to 32 times in an iteration: one client of one key
    held up all others for 17 s."""
    monkeypatch.setattr(http_sockets, "PORTION", 0.0, raising=False)
    async with opened(tmp_path) as (_, _, place), raw(place) as client, ticking() as ticks:
        assert await client.status() == 101
        with pytest.MonkeyPatch.context() as patch:
            for name in ("handle_cont", "handle_ping"):
                handle = getattr(http_sockets.Socket, name)

                def noted(socket: Any, *event: Any, handle: Callable[..., None] = handle) -> None:
                    ticks.note()
                    handle(socket, *event)

                patch.setattr(http_sockets.Socket, name, noted)
            reading = asyncio.create_task(client.reader.read(-1))
            client.writer.write(frames)
            await until(lambda: ticks.done.total() == 20_000)
            reading.cancel()
        assert max(ticks.done.values()) <= http_sockets.SLICE // 6 + 1


async def test_nothing_is_read_before_the_key_was_looked_at(tmp_path: Path) -> None:
    """A frame that came with the handshake was parsed before: a fault of the protocol was one of ours."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    unmasked = bytes([0x81, 2]) + b"hi"
    async with opened(tmp_path, keys={"alice": KEY}) as (_, _, place):
        async with raw(place, unmasked) as client:
            assert await client.status() == 401
        async with raw(place, unmasked, b"X-Api-Key: " + KEY.encode()) as client:
            assert await client.status() == 101
            opcode, told = await client.frame()
            assert (opcode, told[:2]) == (8, struct.pack("!H", 1002))
        async with raw(place, frame(1, CREATE), b"X-Api-Key: " + KEY.encode()) as client:
            assert await client.status() == 101
            assert b"response.created" in (await client.frame())[1]
    assert faults == []


async def test_what_no_socket_speaks_is_not_read_from_its_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28,000 names of protocols took its library 30 ms, before a key was looked at."""
    heads: list[bytes] = []
    begin = http_sockets.Socket.begin

    def noted(socket: http_sockets.Socket, handshake: bytes) -> bool:
        heads.append(handshake)
        return begin(socket, handshake)

    monkeypatch.setattr(http_sockets.Socket, "begin", noted)
    offers = (b"Sec-WebSocket-Protocol: a,b", b"sec-websocket-extensions: permessage-deflate", b"X-Other: c")
    async with opened(tmp_path) as (_, _, place), raw(place, b"", *offers) as client:
        assert await client.status() == 101
    (head,) = heads
    assert b"x-other: c" in head
    assert b"a,b" not in head
    assert b"deflate" not in head


async def test_a_message_that_does_not_end_counts_with_its_owners_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 sockets of one key held 64 MB each."""
    monkeypatch.setattr(bounds, "BODIES", 1)
    half = frame(1, b"", last=False) + frame(0, bytes(60_000), last=False) * 10
    async with opened(tmp_path, max_body=1_000_000) as (_, _, place), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw(place)) for _ in range(3)]
        for client in clients:
            assert await client.status() == 101
        for client in clients[:2]:
            client.writer.write(half)
        refused = await one_of(clients[0].frame(), clients[1].frame())
        assert refused[0] == 8
        assert refused[1][:2] == struct.pack("!H", 1013)
        assert b"bytes of bodies already" in refused[1]
        for client in clients[:2]:
            client.writer.transport.abort()

        async def is_free() -> bool:
            async with httpx.AsyncClient(base_url=f"http://{place}", trust_env=False) as http:
                large = {"model": "sonnet", "input": "x" * 900_000}
                return (await http.post("/v1/responses", json=large)).status_code == 200

        await until(is_free)
        for number in range(40):  # whole messages are counted by themselves, and not for ever
            clients[2].writer.write(frame(1, CREATE[:-1] + b" " * 50_000, last=False) + frame(0, b"}"))
            while b"response.completed" not in (told := (await clients[2].frame())[1]):
                assert b'"error":{' not in told, number


async def test_a_message_behind_the_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ten seconds one socket took `max_body` that nobody counted."""
    kept, taken = 0, 0
    data_received = http_sockets.Socket.data_received

    def noted(one: http_sockets.Socket, data: bytes) -> None:
        nonlocal kept, taken
        data_received(one, data)
        kept, taken = max(kept, sum(map(len, one.frames))), taken + len(data)

    monkeypatch.setattr(http_sockets.Socket, "data_received", noted)
    monkeypatch.setattr(sockets, "MOST_QUEUED", 0)
    async with opened(tmp_path) as (_, _, place), raw(place) as client:
        assert await client.status() == 101
        client.writer.write(frame(1, CREATE))
        assert (await client.frame())[0] == 8
        client.writer.write(frame(1, b"", last=False) + frame(0, bytes(60_000), last=False) * 100)
        for _ in range(1000):
            await asyncio.sleep(0)
        await until(lambda: taken > kept)
        assert kept < 200_000


async def one_of(*waiting: Awaitable[Any]) -> Any:
    tasks = [asyncio.ensure_future(one) for one in waiting]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return done.pop().result()


async def test_a_message_in_pieces_of_a_byte_is_one_message(tmp_path: Path) -> None:
    pieces = [frame(0 if at else 1, CREATE[at : at + 1], last=at == len(CREATE) - 1) for at in range(len(CREATE))]
    for opcode in (1, 2):
        pieces[0] = frame(opcode, CREATE[:1], last=False)
        async with opened(tmp_path / str(opcode)) as (_, _, place), raw(place, b"".join(pieces)) as client:
            assert await client.status() == 101
            while b"response.completed" not in (told := (await client.frame())[1]):
                assert told
            assert b"You said: hi" in told


@pytest.mark.parametrize("other", ["5", "null", '"x"'])
async def test_a_message_that_ends_what_it_stands_in_is_refused_in_words(other: str, tmp_path: Path) -> None:
    """It was a 500 of ours."""
    async with opened(tmp_path) as (_, _, place), at(place) as socket:
        ahead = (await asked(socket, input="one", generate=False))[-1]["response"]["id"]
        message = {"type": "response.create", "input": "two", "previous_response_id": ahead}
        await socket.send(f'{json.dumps(message)},"deferred":{other}')
        (event,) = await answered(socket)
        assert (event["status"], event["error"]["param"]) == (400, "deferred")


async def test_a_request_behind_another_one_has_no_trace_of_that_one(tmp_path: Path) -> None:
    """Over a connection that several owners share, as between two proxies, one's turn was part of another's trace."""
    traces: list[tuple[str, str] | None] = []

    class Noted(Observer):
        def turn_ended(self, turn: Any, links: Any, requested: Any, at: float, /) -> None:
            traces.append(requested.trace_context)

    async with opened(tmp_path) as (engine, _, place):
        engine.observers.append(Noted())
        host, port = place.split(":")
        body = b'{"model":"sonnet","input":"hi"}'
        head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
        parent = b"Traceparent: 00-11111111111111111111111111111111-2222222222222222-01\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + parent + b"\r\n" + body + head + b"Connection: close\r\n\r\n" + body)
        assert (await asyncio.wait_for(reader.read(), SOON)).count(b"HTTP/1.1 200") == 2
        writer.close()
        await until(lambda: len(traces) == 2)
    assert [trace is None for trace in traces] == [False, True]


async def test_a_turn_that_fails_is_an_event_and_tells_no_words(tmp_path: Path) -> None:
    async def broken(_: Sequence[Message]) -> Sequence[Block]:
        raise RuntimeError("the PROMPT was in here")

    async with opened(tmp_path, broken) as (_, _, place), at(place) as socket:
        events = await asked(socket, input="hello")
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "upstream_error"
        assert "PROMPT" not in json.dumps(events)


async def test_each_message_holds_what_it_reads_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection held what a refused message had read, and nothing of the messages behind its first turn."""
    submit = Dialogues.submit
    async with opened(tmp_path) as (engine, _, place), at(place) as socket:
        sizes: list[int] = []

        async def reading(self: Dialogues, call: ResponsesCall, **more: Any) -> Answer:
            await held.about_to_read(50)
            sizes.append(engine.holds.bytes.total())
            if len(sizes) == 1:
                raise QueueFull("full")
            return await submit(self, call, **more)

        monkeypatch.setattr(Dialogues, "submit", reading)
        assert (await asked(socket, input="one"))[-1]["type"] == "error"
        assert not engine.holds.bytes
        for words in ("two", "three"):
            assert said(await asked(socket, input=words)) == f"You said: {words} (1)"
        assert sizes == [50, 50, 50]


async def test_a_client_of_responses_finds_the_response_of_a_socket(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, place), at(place) as socket:
        kept = (await asked(socket, input="one"))[-1]["response"]
        client = client_of(f"http://{place}/v1")
        assert (await client.responses.retrieve(kept["id"])).output_text == "You said: one (1)"
        await client.close()
