"""The recipe for HAProxy in `deploy/`, by a real HAProxy in front of three hosts that answer with their names."""

from __future__ import annotations

import asyncio
import os
import shutil
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from turnfault.ports import free_port

from ..conftest import ROOT, required
from ..until import until

NAMES = ("ONE", "TWO", "THREE")
RECIPE = ROOT / "deploy" / "haproxy.cfg"
AGENTS = [f"agent {n}/ß" for n in range(24)]


class Host:
    """Answers every request with its name; `ready` is what `/readyz` says. A request to `/held` is not answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = True
        self.held, self.left = asyncio.Event(), asyncio.Event()
        self.server: asyncio.Server

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                if head.startswith("POST /held "):
                    self.held.set()
                    with suppress(ConnectionResetError):
                        await reader.read()
                    self.left.set()
                    return
                asks = head.startswith("GET /readyz ")
                status = "503 Unavailable" if asks and not self.ready else "200 OK"
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(self.name)}\r\n\r\n{self.name}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # HAProxy has closed it
        finally:
            writer.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def end(self) -> None:
        self.server.close()  # not its connections: Python 3.12 would wait for them


@asynccontextmanager
async def balanced() -> AsyncIterator[tuple[dict[str, Host], httpx.AsyncClient]]:
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    program = required(Path(found) if found else None, "make tools", what="HAProxy")
    listen = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        hosts = {name: Host(name) for name in NAMES}
        for host in hosts.values():
            host.server = await asyncio.start_server(host.answer, "127.0.0.1", 0)
            stack.push_async_callback(host.end)
        told = {f"CSP_{name}": host.address for name, host in hosts.items()}
        running = await asyncio.create_subprocess_exec(
            program, "-db", "-f", RECIPE, env={"CSP_LISTEN": listen, **told}, stdout=DEVNULL, stderr=DEVNULL
        )
        stack.push_async_callback(running.wait)
        stack.callback(running.kill)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{listen}", trust_env=False))

        async def serves() -> bool:
            assert running.returncode is None
            try:
                return (await client.get("/")).status_code == 200
            except httpx.TransportError:
                return False

        await until(serves)
        yield hosts, client


async def by_header(client: httpx.AsyncClient, agent: str) -> str:
    named = {"X-Agent-Id": httpx.URL(path=agent).raw_path.decode().replace("/", "%2F")}
    return (await client.post("/v1/chat/completions", headers=named, json={})).text


async def by_path(client: httpx.AsyncClient, agent: str) -> str:
    named = httpx.URL(path=agent).raw_path.decode().replace("/", "%2F")
    return (await client.post(f"/agents/{named}/v1/chat/completions", json={})).text


async def test_an_agent_keeps_to_its_host_however_it_is_named_and_agents_are_spread() -> None:
    async with balanced() as (_, client):
        first = {agent: await by_header(client, agent) for agent in AGENTS}
        for _ in range(3):
            assert {agent: await by_header(client, agent) for agent in AGENTS} == first
            assert {agent: await by_path(client, agent) for agent in AGENTS} == first
        assert set(first.values()) == set(NAMES)
        assert {(await client.get("/v1/models")).text for _ in range(6)} == set(NAMES)


@pytest.mark.parametrize("how", ["gone", "drains"])
async def test_the_agents_of_a_host_that_is_gone_go_elsewhere_and_the_others_stay(how: str) -> None:
    async with balanced() as (hosts, client):
        first = {agent: await by_header(client, agent) for agent in AGENTS}
        if how == "gone":
            await hosts["TWO"].end()
        else:
            hosts["TWO"].ready = False

        async def left() -> bool:
            now = {agent: await by_header(client, agent) for agent in AGENTS}
            assert all(now[agent] == host for agent, host in first.items() if host != "TWO")
            return "TWO" not in now.values()

        await until(left)


async def test_a_host_notices_that_a_client_leaves() -> None:
    """Otherwise its turn runs to the end, and counts as delivered: the same request again is a second turn."""
    async with balanced() as (hosts, client):
        request = asyncio.create_task(client.post("/held", json={}))
        events = [asyncio.create_task(host.held.wait()) for host in hosts.values()]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for task in (request, *events):
            task.cancel()
        (host,) = (host for host in hosts.values() if host.held.is_set())
        await host.left.wait()


async def test_an_error_of_its_own_is_one_that_an_sdk_can_read() -> None:
    async with balanced() as (hosts, client):
        for host in hosts.values():
            await host.end()

        async def refused() -> httpx.Response | None:
            answer = await client.get("/v1/models")
            return answer if answer.status_code == 503 else None

        answer = await until(refused)
        assert answer is not None
        assert answer.json()["error"]["code"] == "no_host"
