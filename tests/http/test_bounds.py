"""One owner holds no more than their part: streams, open requests, bytes of bodies; and idle connections give way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import SecretStr

from cli_session_proxy.http import bounds, connection
from cli_session_proxy.http import listening as waiting
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.bounds import Bounds
from cli_session_proxy.http.server import Server
from cli_session_proxy.settings import Settings

from ..engine.test_core import Model, core
from ..fakes import Step, hello
from ..no_cli import no_cli
from ..serving import server_of
from ..serving import serving as serving_engine
from ..until import until
from .test_connection import ASK, answer, listening
from .test_server import HELLO, SOON, Serving, serving

__all__ = ["serving"]  # a fixture

ALICE = {"x-api-key": "alices-secret-0123456789"}
BOB = {"x-api-key": "bobs-secret-0123456789"}
KEYS = {"alice": ALICE["x-api-key"], "bob": BOB["x-api-key"]}


@contextlib.asynccontextmanager
async def opened(http: httpx.AsyncClient, headers: dict[str, str], count: int) -> AsyncIterator[None]:
    """So many open event streams."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            stream = await stack.enter_async_context(http.stream("GET", "/v1/chains/a/events", headers=headers))
            assert stream.status_code == 200
        yield


async def test_one_owners_event_streams_leave_another_theirs(
    tmp_path: Path, made: list[Bounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "EVENT_STREAMS", 3)
    async with (
        no_cli(tmp_path, keys=KEYS) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=SOON) as http,
    ):
        for key in (ALICE, BOB):
            named = {**key, "X-Agent-Id": "a"}
            assert (await http.post("/v1/chat/completions", json=HELLO, headers=named)).status_code == 200
        async with opened(http, ALICE, 3):
            refused = await http.get("/v1/chains/a/events", headers=ALICE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            async with opened(http, BOB, 3):
                pass
        await until(lambda: not made[0].open)
        async with opened(http, ALICE, 1):
            pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Bounds]:
    """The counts of each app that the test makes."""
    found: list[Bounds] = []
    of = Bounds.of

    def noted(settings: Settings) -> Bounds:
        found.append(of(settings))
        return found[-1]

    monkeypatch.setattr(Bounds, "of", staticmethod(noted))
    return found


async def test_one_owners_open_requests_leave_another_theirs(
    serving: Serving, made: list[Bounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SPARE_REQUESTS", 1)
    never = asyncio.Event()

    def script(request: Any) -> list[Step]:
        return [*([never] if request.owner == "alice" else []), *hello()]

    async with serving(script, keys=KEYS, queue_limit=1, max_turns=1) as door:
        waiting = [asyncio.create_task(door.post(headers=ALICE)) for _ in range(3)]
        await until(lambda: len(door.engine.requests) == 3)
        refused = await door.post(headers=ALICE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await door.http.get("/v1/models", headers=BOB)).status_code == 200
        assert (await door.http.get("/healthz", headers=ALICE)).status_code == 200
        never.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200, 200]
        assert (await door.http.get("/v1/models", headers=ALICE)).status_code == 200
    assert made[0].open == {}


async def test_one_owners_waiting_turns_leave_another_a_place(tmp_path: Path) -> None:
    """They need no open request: their client has been told that they wait. All places were one owner's."""
    keys = {name: SecretStr(key) for name, key in KEYS.items()}
    settings = Settings(
        var=tmp_path / "var", claude_config_dir=tmp_path, port=0, keys=keys, queue_limit=20, max_turns=2
    )
    model = Model()
    model.open.clear()
    async with (
        core(settings, model) as (engine, _),
        serving_engine(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=SOON) as http,
    ):

        async def asks(key: dict[str, str], agent: str) -> int:
            body = {"model": "sonnet", "input": "x", "background": True}
            return (await http.post("/responses", json=body, headers={**key, "X-Agent-Id": agent})).status_code

        assert [await asks(ALICE, f"a{n}") for n in range(24)] == [200] * 17 + [429] * 7
        assert [await asks(BOB, f"b{n}") for n in range(6)] == [200] * 5 + [429]
        model.open.set()


async def test_one_owners_requests_leave_another_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sent no body held all of them for five minutes, where few files may be open."""
    monkeypatch.setattr(bounds, "connection_limit", lambda: 8)
    monkeypatch.setattr(connection, "MOST", 8)
    async with no_cli(tmp_path, keys=KEYS) as url:
        host, port = httpx.URL(url).host, httpx.URL(url).port
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {ALICE['x-api-key']}\r\n"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(12):
                _, writer = await asyncio.open_connection(host, port)
                stack.callback(writer.close)
                writer.write(f"{head}Content-Length: 9\r\n\r\n".encode())
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=SOON) as http:
                assert (await http.get("/v1/models", headers=BOB)).status_code == 200


async def test_one_owners_bodies_leave_another_theirs(serving: Serving, made: list[Bounds]) -> None:
    """Bodies that never end, each within what one may have."""
    async with serving(keys=KEYS, max_body=2048) as door:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2048\r\nx-api-key: "
        writers = []
        for _ in range(bounds.BODIES):
            _, writer = await door.raw(head + ALICE["x-api-key"].encode() + b"\r\n\r\n" + b"x" * 2047)
            writers.append(writer)
        await until(lambda: made[0].bytes["alice"] == bounds.BODIES * 2047)
        refused = await door.post({**HELLO, "user": "x" * 100}, headers=ALICE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert (await door.post(headers=BOB)).status_code == 200
        for writer in writers:
            writer.close()
        await until(lambda: not made[0].open)
        assert (await door.post(headers=ALICE)).status_code == 200


def test_what_was_held_is_given_back_however_a_request_ends(tmp_path: Path) -> None:
    counts = Bounds.of(Settings(var=tmp_path / "var"))
    with contextlib.suppress(RuntimeError), counts.request("a") as held:
        held.stream()
        held.body(10)
        raise RuntimeError
    assert (counts.open, counts.streams, counts.bytes) == ({}, {}, {})


# --- connections


async def test_a_connection_that_waits_for_nothing_gives_way_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST", 3)
    never, busy = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            busy.set()
            await never.wait()
        await answer(send)

    async with listening(app) as port:
        slow, first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        slow[1].write(ASK.replace(b"POST /", b"POST /slow"))
        await asyncio.wait_for(busy.wait(), SOON)
        for reader, writer in (first, second):  # the first is idle for longer from here on
            writer.write(ASK)
            assert b"200" in await asyncio.wait_for(reader.readline(), SOON)
            await reader.readuntil(b"hello")
        newcomer = await asyncio.open_connection("127.0.0.1", port)
        newcomer[1].write(ASK)
        assert b"200" in await asyncio.wait_for(newcomer[0].readline(), SOON)
        assert await asyncio.wait_for(first[0].read(), SOON) == b""
        second[1].write(ASK)
        assert b"200" in await asyncio.wait_for(second[0].readline(), SOON)
        never.set()
        assert b"200" in await asyncio.wait_for(slow[0].readline(), SOON)
        for _, writer in (slow, first, second, newcomer):
            writer.close()


async def test_where_all_connections_are_in_use_a_new_one_is_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MOST", 1)
    never, busy = asyncio.Event(), asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        busy.set()
        await never.wait()
        await answer(send)

    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK)
        await asyncio.wait_for(busy.wait(), SOON)
        told, other = await asyncio.open_connection("127.0.0.1", port)
        assert (await asyncio.wait_for(told.read(), SOON)).startswith(b"HTTP/1.1 503")
        never.set()
        assert b"200" in await asyncio.wait_for(reader.readline(), SOON)
        writer.close()
        other.close()


@contextlib.asynccontextmanager
async def served(app: Any, tmp_path: Path) -> AsyncIterator[int]:
    settings = Settings(var=tmp_path / "var", port=0)
    with contextlib.closing(bind(settings)) as listener:
        async with server_of(app, settings, listener):
            yield listener.getsockname()[1]


@pytest.mark.parametrize("patience", [60.0, 0.0])
async def test_the_server_lets_a_new_one_wait_for_room_without_a_descriptor_and_refuses_it_in_the_end(
    patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST", 1)
    monkeypatch.setattr(connection, "FIRST_WORD", SOON)  # until it was read
    monkeypatch.setattr(waiting, "REFUSE_AFTER", patience)
    go, busy = asyncio.Event(), asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        busy.set()
        await go.wait()
        await answer(send)

    async with served(app, tmp_path) as port:
        first = await asyncio.open_connection("127.0.0.1", port)
        first[1].write(ASK)
        await asyncio.wait_for(busy.wait(), SOON)
        before = psutil.Process().num_fds()
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, writer in others:
            if patience:
                writer.write(ASK)
                continue
            # What it had sent by now would hide the refusal.
            assert (await asyncio.wait_for(reader.read(), SOON)).startswith(b"HTTP/1.1 503")
        assert psutil.Process().num_fds() - before - len(others) <= 1
        go.set()
        for reader, writer in [first, *(others if patience else ())]:
            assert b"200" in await asyncio.wait_for(reader.readline(), SOON)
            writer.close()
        for _, writer in others:
            writer.close()


async def test_clients_that_come_together_are_accepted_together_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each waited for several iterations of the loop: 20 s behind 50 clients that flooded it."""
    monkeypatch.setattr(connection, "MOST", 8)
    now, most = 0, 0
    connect = Server._connect

    async def counted(server: Server, client: socket.socket) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await connect(server, client)
        now -= 1

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await answer(send)

    monkeypatch.setattr(Server, "_connect", counted)
    async with served(app, tmp_path) as port, contextlib.AsyncExitStack() as stack:
        for _ in range(20):  # the kernel takes them, before the server runs
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        await until(lambda: bool(most))
    assert most == 8


def test_the_bound_is_within_what_this_process_may_have_open() -> None:
    assert 16 <= bounds.connection_limit() <= bounds.MOST_CONNECTIONS
