"""Each attack of `bench.attacks` against a real `serve`: others are served meanwhile, and SIGTERM ends it.

Nothing is timed: the bounds are those of a test that hangs. `bench freeze` measures.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from bench import machine
from bench.attacks import ATTACKS, Attack, Target
from bench.client import Connections
from bench.contenders import Place
from bench.servers import HTTPServer, start_proxy
from turnfault.provider.upstream import Upstream

# Seconds. What is frozen stays frozen for minutes or for ever; what is slow on a loaded machine does not take these.
SERVED = 30.0
ENDED = 40.0
ANSWERED = 90.0
# One in the service, and one in a helper process; the other places that can be busy in `make full`.
BUSY = frozenset({"a slow pattern in a schema", "19,000 messages"})
# Eight at once is each of two others more often than there are helpers: aside/test_pool.py says who waits then.
# SIGTERM comes into 19,000 messages below. What nobody reads: http/test_connection.py; media: engine/test_fitting.py.
IN_FULL = frozenset({"eight bombs at once", "19,000 messages", "answers that nobody reads", "bombs in images and PDFs"})
# In order, or by the watchdog, where what runs cannot end in `drain_timeout`, as on a loaded machine.
ENDED_BY_ITSELF = frozenset({0, 1})


@asynccontextmanager
async def attacked(
    claude: Path, upstream: Upstream, folder: Path, exits: frozenset[int] = frozenset({0})
) -> AsyncIterator[tuple[HTTPServer, Target]]:
    place = Place(claude, upstream.url, folder, machine.cores())
    server = await start_proxy(place, drain_timeout=1, stop_grace=1, spares=0, max_processes=16)
    try:
        yield server, Target(server.connections.port, folder / "config", upstream)
        if server.process.returncode is None:
            server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(ENDED):
            assert await server.process.wait() in exits
    finally:
        if server.process.returncode is None:
            server.process.kill()
            await server.process.wait()
        await server.close()


async def is_served(port: int) -> None:
    """The service is alive, and an agent gets its answer: a new one the first time, whose CLI is started."""
    connections = Connections(port)
    try:
        async with asyncio.timeout(SERVED):
            await connections.get("health", "/healthz")
            body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
            answer = await connections.post("other", "/agents/other/v1/chat/completions", body)
            assert b"You said: hello" in answer.body
    finally:
        connections.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(claude_2: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    """One service for one attack after the other: what an attack leaves behind must not keep it from anything."""
    async with Upstream() as upstream, attacked(claude_2, upstream, tmp_path_factory.mktemp("attacked")) as (_, made):
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "attack",
    [pytest.param(one, id=one.name, marks=pytest.mark.full if one.name in IN_FULL else ()) for one in ATTACKS],
)
@pytest.mark.sample(5)
async def test_others_are_served_while_it_runs_and_it_ends_in_words(attack: Attack, target: Target) -> None:
    await attack.prepare(target)
    struck = asyncio.ensure_future(attack.strike(target))
    try:
        for _ in range(3):
            await is_served(target.port)
        async with asyncio.timeout(ANSWERED):
            statuses = await struck
    finally:
        struck.cancel()
        await asyncio.gather(struck, return_exceptions=True)
        target.upstream.heal()
    assert attack.expected >= set(statuses), statuses
    await is_served(target.port)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "attack",
    [pytest.param(one, id=one.name, marks=() if one.name in BUSY else pytest.mark.full) for one in ATTACKS],
)
@pytest.mark.sample(1)
async def test_sigterm_ends_the_service_while_it_runs(
    attack: Attack, claude_2: Path, upstream: Upstream, tmp_path: Path
) -> None:
    async with attacked(claude_2, upstream, tmp_path, ENDED_BY_ITSELF) as (server, target):
        await attack.prepare(target)
        struck = asyncio.ensure_future(attack.strike(target))
        try:
            # Until it is under way: a service that is frozen gives no sign that could be waited for.
            await asyncio.wait({struck}, timeout=1.0)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(ENDED):
                await server.process.wait()
        finally:
            struck.cancel()
            await asyncio.gather(struck, return_exceptions=True)
