"""Proxies on several hosts, each with a `var/` of its own and a server on a port of its own, on one PostgreSQL."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from turnfault.ports import free_port

from ..engine.test_core import Model, words
from ..memory_backend import MemoryBackend
from ..serving import serving

KEY = "the-key-of-this-cluster"
PATIENCE = 60.0

# What a test opened and need not close itself: done after it.
opened = ExitStack()


class Host:
    """A proxy on the in-memory backend; `http` is a client of its server, once it is up. `silence`: it waits so long
    for a word of another host, and not `lease` seconds, within which a slow machine might not renew one."""

    http: httpx.AsyncClient

    def __init__(self, url: str, var: Path, silence: float | None = None, **more: Any) -> None:
        self.silence = silence
        port = more.pop("port", None) or free_port()
        told: dict[str, Any] = {"advertise": f"http://127.0.0.1:{port}", "cluster_key": SecretStr(KEY), **more}
        told.setdefault("disconnect_grace", 0.01)
        self.settings = Settings(store=SecretStr(url), var=var, claude_config_dir=var, port=port, **told)
        self.model = Model()
        self.backend = MemoryBackend(self.model)
        self.store = PostgresqlStore(url)
        self.engine = Engine(self.settings, self.store, self.backend)

    @property
    def asked(self) -> list[list[str]]:
        """The words that each turn here was asked, and those before them."""
        return [words(path) for path in self.backend.seen]

    async def chat(
        self, *said: str, agent: str | None = "a", headers: dict[str, str] | None = None, **more: Any
    ) -> Any:
        """The answer to a chat request; texts alternate between the user's and the assistant's."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        body = {"model": "sonnet", "messages": messages, **more}
        named = {"X-Agent-Id": agent} if agent is not None else {}
        return await self.http.post("/v1/chat/completions", json=body, headers={**named, **(headers or {})})

    async def turns(self, agent_id: str = "a") -> list[Turn]:
        agent = await self.store.agent("local", agent_id)
        assert agent is not None
        return [turn async for turn in self.store.turns(agent.key)]


@asynccontextmanager
async def cluster(
    url: str, tmp_path: Path, count: int = 2, each: Sequence[dict[str, Any]] = (), **more: Any
) -> AsyncIterator[Sequence[Host]]:
    """`each`: settings of the first hosts alone."""
    own = [*each, *({} for _ in range(count - len(each)))]
    hosts = [Host(url, tmp_path / f"host{at}", **more | told) for at, told in enumerate(own)]
    async with AsyncExitStack() as stack:
        for host in hosts:
            await stack.enter_async_context(up(host))
        try:
            yield hosts
        finally:
            for host in hosts:
                host.model.open.set()


@asynccontextmanager
async def up(host: Host) -> AsyncIterator[None]:
    await host.engine.start()
    try:
        await host.engine._ownership.ensure_heartbeat()  # from here on the others know it
        waits = {} if host.silence is None else {"lease": host.silence}
        async with serving(host.engine, host.settings.model_copy(update=waits)) as address:
            base = address.removesuffix("/v1")
            async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=PATIENCE) as host.http:
                yield
    finally:
        await host.engine.stop()


def lose_the_next_commit(host: Host, patch: pytest.MonkeyPatch) -> None:
    """The store's next commit of a turn succeeds, and its answer is lost."""
    commit = host.store.commit

    async def lost(*given: Any, **how: Any) -> None:
        await commit(*given, **how)
        patch.setattr(host.store, "commit", commit)
        raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

    patch.setattr(host.store, "commit", lost)


class Line:
    """A line to a host, or to what listens at the path `to`. Where it is cut, or carries nothing any more, that does
    not notice."""

    def __init__(self, port: int, to: Path | None = None) -> None:
        self.port = port
        self.to = to
        self.address = ""
        self.carries = asyncio.Event()
        self.carries.set()
        self._writers: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._lost: set[asyncio.StreamWriter] = set()

    def lose(self) -> None:
        """What is connected now carries nothing any more, as behind a router that forgot it; new connections do."""
        self._lost |= {writer for pair in self._writers for writer in pair}

    def lose_answers(self) -> None:
        """What is connected now goes there, and nothing comes back."""
        self._lost |= {near for near, _ in self._writers}

    def cut(self) -> None:
        for near, _ in self._writers:
            near.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        await self.carries.wait()
        if self.to is None:
            answers, far = await asyncio.open_connection("127.0.0.1", self.port)
        else:
            answers, far = await asyncio.open_unix_connection(self.to)
        self._writers.append((near, far))
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, far), self._pump(answers, near))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.carries.wait()
            if writer not in self._lost:
                writer.write(data)

    async def close(self) -> None:
        await _closed([writer for pair in self._writers for writer in pair])


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    """A server's answer with its body: who is given a part of one waits for the rest."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"^content-length: *(\d+)", head, re.I | re.M)
    assert length, head
    return head + await reader.readexactly(int(length[1]))


@asynccontextmanager
async def line(tls: ssl.SSLContext | None = None, to: Path | None = None) -> AsyncIterator[Line]:
    """`tls`: as behind a reverse proxy that ends it."""
    made = Line(free_port(), to)
    server = await asyncio.start_server(made.carry, "127.0.0.1", 0, ssl=tls)
    made.address = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.carries.set()
        server.close()
        await made.close()
        await server.wait_closed()


@asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """The address of a program that takes connections and says nothing, as the kernel does for one that is paused."""
    taken: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await _closed(taken)
        await server.wait_closed()


async def _closed(writers: Sequence[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
