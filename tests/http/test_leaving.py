"""A client leaves and says the same again, before its leaving was noticed or noted: it is one turn.

The proxy may be held up meanwhile, by a pause, a full core or a slow disk: the client is a socket that the test writes
to without giving the loop a turn. On both event loops."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from cli_session_proxy.domain.models import Delivery, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.http import gate as gates
from cli_session_proxy.http.connection import next_byte
from cli_session_proxy.http.socket import CLOSING, Socket
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Lease, Store
from turnfault.provider.script import Big, HeldReply
from turnfault.provider.upstream import Upstream

from ..matrix import half
from ..talking import ask, heard
from ..until import until
from ..without_cli import proxied_without_cli
from .cluster import opened
from .conftest import Run

CHAT = "chat/completions"


class Connection:
    """One client's, over which the same is said whenever it is asked for: "one" in chat, unless told otherwise."""

    def __init__(self, port: int, *, stream: bool = False, key: str = "", path: str = CHAT, **other: Any) -> None:
        self.socket = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        said = other or {"messages": [{"role": "user", "content": "one"}]}
        body = json.dumps({"model": "sonnet", "stream": stream, **said})
        head = f"POST /agents/a/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
        head += f"\r\nIdempotency-Key: {key}" * bool(key)
        self.request = f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode()

    def say(self) -> None:
        self.socket.sendall(self.request)

    async def answer(self) -> bytes:
        self.socket.setblocking(False)
        return await asyncio.get_running_loop().sock_recv(self.socket, 64 * 1024)


class Client:
    """It leaves one connection, and says the same over another one, perhaps to another proxy."""

    def __init__(self, port: int, again_at: int | None = None, *, stream: bool) -> None:
        self.first, self.second = (Connection(at, stream=stream) for at in (port, again_at or port))

    def leave(self) -> None:
        self.first.socket.close()

    def leave_and_say_it_again(self) -> None:
        self.leave()
        self.second.say()


Case = Callable[[Client, Store, pytest.MonkeyPatch], None]


def while_it_runs(client: Client, _store: Store, _patch: pytest.MonkeyPatch) -> None:
    client.leave_and_say_it_again()


def when_it_is_committed(client: Client, store: Store, patch: pytest.MonkeyPatch) -> None:
    """The answer is in the store, and nobody was given it."""
    commit = store.commit

    async def committed(*done: Any, **how: Any) -> Turn:
        patch.undo()
        turn = await commit(*done, **how)
        client.leave_and_say_it_again()
        return turn

    patch.setattr(store, "commit", committed)


def while_a_slow_disk_notes_that_it_left(client: Client, store: Store, patch: pytest.MonkeyPatch) -> None:
    """The next request has read what is known of the turn before its client's leaving is stored."""
    commit, note, arrival = store.commit, store.set_delivery, store.arrival
    looked = asyncio.Event()

    async def committed(*done: Any, **how: Any) -> Turn:
        turn = await commit(*done, **how)
        client.leave()
        return turn

    async def looks(*of: Any) -> Any:
        found = await arrival(*of)
        looked.set()
        return found

    async def noted(turn_id: str, delivery: Delivery, **how: Any) -> None:
        patch.undo()
        patch.setattr(store, "arrival", looks)
        client.second.say()
        await looked.wait()
        await note(turn_id, delivery, **how)

    patch.setattr(store, "commit", committed)
    patch.setattr(store, "set_delivery", noted)


def before_its_answer_is_written_over_that_note(client: Client, store: Store, patch: pytest.MonkeyPatch) -> None:
    """A store that writes side by side may note first that the client left."""
    commit = store.commit

    async def committed(lease: Lease, turn: Turn, *kept: Any, **how: Any) -> Turn:
        patch.undo()
        client.leave()

        async def noted() -> bool:
            now = await store.turn(turn.id)
            return now is not None and now.delivery == "undelivered"

        await until(noted)
        turn = await commit(lease, turn, *kept, **how)
        client.second.say()
        return turn

    patch.setattr(store, "commit", committed)


@asynccontextmanager
async def proxied(var: Path) -> AsyncIterator[tuple[Engine, Upstream, int]]:
    settings = Settings(var=var, port=0)
    async with Upstream() as upstream, proxied_without_cli(settings, upstream) as (engine, root):
        yield engine, upstream, int(root.rpartition(":")[2])


@pytest.mark.parametrize(
    ("case", "stream"),
    half(
        [
            while_it_runs,
            when_it_is_committed,
            while_a_slow_disk_notes_that_it_left,
            before_its_answer_is_written_over_that_note,
        ],
        [False, True],
    ),
)
@pytest.mark.sample(3)
def test_who_left_unnoticed_and_says_the_same_again_has_said_it_once(
    case: Case, stream: bool, run: Run, tmp_path: Path
) -> None:
    async def talk() -> None:
        async with proxied(tmp_path / "var") as (engine, upstream, port):
            gate, patch = HeldReply(), pytest.MonkeyPatch()
            upstream.when("one", gate)
            client = Client(port, stream=stream)
            client.first.say()
            await gate.reached.wait()
            case(client, engine.store, patch)
            gate.open()
            assert b"200 OK" in await client.second.answer()
            await until(lambda: not engine.progress())
            assert heard(upstream) == ["one"]
            patch.undo()

    run(talk())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "chains/a", ""),
        ("POST", "chains/a/rewind", '{"to": "-1"}'),
        ("POST", "chains/a/cancel", "{}"),
        ("POST", "chains/a/commit", "{}"),
        ("DELETE", "conversations/conv_x61", ""),  # the same agent
        ("POST", "conversations/conv_x61/items", '{"items": [{"type": "message", "role": "user", "content": "two"}]}'),
    ],
)
def test_a_request_to_change_a_chain_whose_client_has_left_changes_nothing(
    method: str, path: str, body: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another proxy may have done it for the client, which has said more since."""
    head = f"{method} /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n" * bool(body)

    async def talk() -> None:
        async with proxied(tmp_path / "var") as (engine, _, port):
            await ask(engine, "one")
            log = Mock()
            monkeypatch.setattr(gates, "log", log)
            changed = AsyncMock()
            for name in ("cancel", "commit"):
                monkeypatch.setattr(engine, name, changed)
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(f"{head}\r\n{body}".encode())
            await until(lambda: call("request") in [call(*told.args) for told in log.info.call_args_list])
            agent = await engine.store.agent("local", "a")
            assert agent is not None
            assert agent.head is not None
            assert await engine.store.items(agent.key) == []
            assert changed.mock_calls == []

    run(talk())


def test_who_left_its_websocket_unnoticed_and_says_the_same_again_has_said_it_once(run: Run, tmp_path: Path) -> None:
    """Its answer counted as delivered: the loop learned only then that the client had gone."""

    async def talk() -> None:
        async with proxied(tmp_path / "var") as (engine, upstream, port):
            url, said = f"ws://127.0.0.1:{port}/v1/responses", {"type": "response.create", "model": "sonnet"}
            commit = engine.store.commit
            async with asyncio.TaskGroup() as opened:
                first, second = (
                    opened.create_task(_opened(url, json.dumps({**said, "input": "one"}))) for _ in range(2)
                )

            async def committed(*done: Any, **how: Any) -> Turn:
                patch.undo()
                turn = await commit(*done, **how)
                leaving = first.result()[0].transport.get_extra_info("socket")
                with socket.socket(fileno=os.dup(leaving.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)
                return turn

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.store, "commit", committed)
                for one in (first, second):
                    client, message = one.result()
                    await client.send(message)
                    with suppress(ConnectionClosed):
                        while "response.completed" not in str(await client.recv()):
                            pass
                    await client.close()
            assert heard(upstream) == ["one"]

    run(talk())


@pytest.mark.parametrize("begun", [False, True])
def test_the_inside_of_a_message_over_a_websocket_is_no_end_of_it(
    begun: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sent its next message while it was answered lost its connection if a byte of that looked so."""
    opened: list[Socket] = []
    begin = Socket.begin

    def begins(self: Socket, handshake: bytes) -> bool:
        opened.append(self)
        return begin(self, handshake)

    monkeypatch.setattr(Socket, "begin", begins)

    async def talk() -> None:
        async with (
            proxied(tmp_path / "var") as (_, _, port),
            connect(f"ws://127.0.0.1:{port}/v1/responses") as client,
        ):
            [server] = opened
            assert not server.is_closed()
            if begun:  # a text of 100 bytes, masked with zeros
                client.transport.write(b"\x81\xe4" + bytes(4) + b"{")
                await until(lambda: server._unfinished() > 0)
            server.transport.pause_reading()
            client.transport.write(CLOSING * 2)
            await until(lambda: next_byte(server.transport) == CLOSING)
            assert server.is_closed() is not begun
            client.transport.abort()
            server.transport.resume_reading()

    run(talk())


async def _opened(url: str, message: str) -> tuple[ClientConnection, str]:
    return await connect(url, additional_headers={"X-Agent-Id": "a"}), message


@pytest.mark.sample(1)
def test_nothing_follows_a_piece_of_a_large_event_that_was_not_read_in_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error event stood in the middle of the event that was cut, and the stream ended as a whole one does."""

    async def talk() -> None:
        async with proxied(tmp_path / "var") as (_, upstream, port):
            upstream.when("one", Big(12 * 1024 * 1024))
            address = f"http://127.0.0.1:{port}/agents/a/v1/{CHAT}"
            said = {"model": "sonnet", "stream": True, "messages": [{"role": "user", "content": "one"}]}
            async with httpx.AsyncClient(headers={"Idempotency-Key": "k"}, timeout=60.0) as client:
                await client.post(address, json=said)
                monkeypatch.setattr(gates, "TAKEN_WITHIN", 0.0)
                async with client.stream("POST", address, json=said) as again:
                    with pytest.raises(httpx.RemoteProtocolError):
                        await again.aread()
                monkeypatch.undo()
                assert (await client.post(address, json=said)).text.endswith("data: [DONE]\n\n")
            assert heard(upstream) == ["one"]

    run(talk())
