"""Each attack of `attacks` against a `serve`: how long somebody else waits meanwhile, and how SIGTERM ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from turnfault.provider.upstream import Upstream

from .attacks import ATTACKS, Attack, Target
from .contenders import STOP, Place
from .figures import figure
from .plan import Bench, Row
from .servers import HTTPServer, start_proxy

HEALTH = "worst /healthz"
TURN = "worst turn of another agent"
END = "SIGTERM to the end, beyond drain_timeout"
QUIET = "nothing"
DRAIN = 1  # seconds
UNDER_WAY = 0.3  # seconds from the start of an attack to SIGTERM
ROOT = Path(__file__).parent.parent


async def freeze(bench: Bench) -> list[Row]:
    """Beside each: the same without an attack."""
    rows = []
    for number, attack in enumerate((None, *ATTACKS[: bench.plan.attacks])):
        name = QUIET if attack is None else attack.name
        health: list[float] = []
        turns: list[float] = []
        ends: list[float] = []
        for repeat in range(bench.plan.repeats):
            async with _attacked(bench, f"freeze-{number}-{repeat}") as (server, target):
                if attack is not None:
                    await attack.prepare(target)
                waited = await _beside(bench, server, target, attack)
                health.append(max(waited["health"]))
                turns.append(max(waited["turn"]))
                ends.append(await _ended(server, target, attack))
        rows.append(Row(HEALTH, name, "ms", figure(health, 1000)))
        rows.append(Row(TURN, name, "ms", figure(turns, 1000)))
        rows.append(Row(END, name, "s", figure(ends)))
    return sorted(rows, key=lambda row: (HEALTH, TURN, END).index(row.measure))


@asynccontextmanager
async def _attacked(bench: Bench, folder: str) -> AsyncIterator[tuple[HTTPServer, Target]]:
    place = bench.place.beside(folder)
    async with Upstream() as upstream:
        server = await start_proxy(
            Place(place.claude, upstream.url, place.folder, place.cores), drain_timeout=DRAIN, spares=0
        )
        try:
            yield server, Target(server.connections.port, place.folder / "config", upstream)
        finally:
            await server.close()


async def _beside(bench: Bench, server: HTTPServer, target: Target, attack: Attack | None) -> dict[str, list[float]]:
    """Seconds that somebody waited while the attack went on for a while, again and again."""
    place = bench.place
    port = str(server.connections.port)
    prober = await place.start(sys.executable, "-m", "bench.prober", port, env=place.environment(), cwd=ROOT)
    assert prober.stdin is not None
    assert prober.stdout is not None
    try:
        assert await prober.stdout.readline() == b"ready\n"
        until = time.monotonic() + bench.plan.window
        while time.monotonic() < until:
            await (asyncio.sleep(bench.plan.window) if attack is None else attack.strike(target))
        prober.stdin.close()
        waited: dict[str, list[float]] = json.loads(await prober.stdout.readline())
        return waited
    finally:
        if prober.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                prober.kill()
        await prober.wait()


async def _ended(server: HTTPServer, target: Target, attack: Attack | None) -> float:
    """Seconds that SIGTERM took in the middle of the attack, less the time that turns have to end."""
    strike = asyncio.ensure_future(asyncio.sleep(0) if attack is None else attack.strike(target))
    try:
        await asyncio.wait({strike}, timeout=UNDER_WAY)
        began = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP):
            await server.process.wait()
        return max(0.0, time.perf_counter() - began - DRAIN)
    finally:
        strike.cancel()
        await asyncio.gather(strike, return_exceptions=True)
