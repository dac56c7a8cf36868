"""Scenarios of many agents: turns a second, CPU time and memory, and a crowd on a small budget of processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from turnfault.provider.upstream import Upstream

from . import machine
from .client import RefusedError
from .contenders import Contender, Place
from .figures import Figure, figure
from .plan import Bench, Row
from .servers import HTTPServer, start_proxy

SPARE_PLACES = 4  # processes beyond one an agent, so that no contender has to retire one
LOOK = 0.05  # seconds between two looks at the children
PATIENCE = 0.2  # seconds before a refused request is sent again, where the answer names none


@dataclass
class _Seen:
    rate: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


async def throughput(bench: Bench) -> list[Row]:
    """Turns a second of agents that ask again as soon as they are answered. One contender at a time has the machine:
    idle CLIs of others would take part of it."""
    makers: list[Callable[[str], Awaitable[Contender | None]]] = [
        lambda folder: _ready(bench.warm_cli(folder)),
        lambda folder: bench.proxy(folder, max_processes=max(bench.plan.agents) + SPARE_PLACES),
        bench.peer,
    ]
    seen: dict[tuple[str, int], _Seen] = {}
    for repeat in range(bench.plan.repeats):
        makers = makers[1:] + makers[:1]
        for number, make in enumerate(makers):
            contender = await make(f"many-{repeat}-{number}")
            if contender is not None:
                await _measure(bench, contender, seen)
    cold = bench.spawned_cli("many-spawned")
    few = min(8, max(bench.plan.agents))
    rows = [Row("turns/s", cold.name, "1/s", await _spawned(cold, few, bench.plan.spawns), few)]
    for (name, agents), some in seen.items():
        rows.append(Row("turns/s", name, "1/s", figure(some.rate), agents))
        rows.append(Row("CPU a turn, with children", name, "ms", figure(some.cpu, 1000), agents))
        if some.own:
            rows.append(Row("CPU a turn, its own", name, "ms", figure(some.own, 1000), agents))
        peak = Figure(max(some.memory), min(some.memory), max(some.memory), len(some.memory))
        rows.append(Row("peak memory, with children", name, "MB", peak, agents))
    return rows


async def _ready(contender: Contender) -> Contender:
    return contender


async def _measure(bench: Bench, contender: Contender, seen: dict[tuple[str, int], _Seen]) -> None:
    plan = bench.plan
    try:
        for agents in plan.agents:
            names = [f"agent-{n}" for n in range(agents)]
            await asyncio.gather(*(contender.turn(name, "hello") for name in names))
            some = seen.setdefault((contender.name, agents), _Seen())
            async with asking(contender, names) as count:
                await asyncio.sleep(plan.window / 2)  # warm-up
                for _ in range(plan.windows):
                    await _window(contender, count, plan.window, some)
                for _ in range(plan.windows):  # apart: looking at memory takes time
                    await asyncio.sleep(plan.window / 4)
                    some.memory.append(machine.shared_memory_mb(contender.pids()))
    finally:
        await contender.close()


async def _window(contender: Contender, count: Callable[[], int], seconds: float, some: _Seen) -> None:
    began, turns, cpu = time.perf_counter(), count(), contender.cpu_seconds()
    own = contender.own_cpu_seconds() if isinstance(contender, HTTPServer) else None
    await asyncio.sleep(seconds)
    done = count() - turns
    if not done:
        return
    some.rate.append(done / (time.perf_counter() - began))
    some.cpu.append((contender.cpu_seconds() - cpu) / done)
    if own is not None and isinstance(contender, HTTPServer):
        some.own.append((contender.own_cpu_seconds() - own) / done)


@asynccontextmanager
async def asking(contender: Contender, names: list[str]) -> AsyncIterator[Callable[[], int]]:
    """These agents ask until it is left; the number of answers so far."""
    stop = False
    total = 0

    async def ask(name: str) -> None:
        nonlocal total
        while not stop:
            await contender.turn(name, "and again", stream=False)
            total += 1

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ask(name))
        try:
            yield lambda: total
        finally:
            stop = True


async def _spawned(contender: Contender, agents: int, turns: int) -> Figure:
    names = [f"agent-{n}" for n in range(agents)]
    rates = []
    for _ in range(max(2, turns // 4)):
        began = time.perf_counter()
        await asyncio.gather(*(contender.turn(name, "hello") for name in names))
        rates.append(agents / (time.perf_counter() - began))
    await contender.close()
    return figure(rates)


@dataclass
class Crowd:
    """What a crowd on a small budget met; `forgotten`, `orphans` and what is above the budget should be nothing."""

    agents: int
    turns: int
    budget: int
    answered: int = 0
    forgotten: int = 0
    most_children: int = 0
    most_by_metric: int = 0
    refusals: int = 0
    orphans: int = 0
    seconds: float = 0.0


async def crowd(bench: Bench) -> Crowd:
    """Many agents at once, few processes: was every turn answered, and does the model see each agent's own words?"""
    agents, turns, budget = bench.plan.crowd
    met = Crowd(agents, turns, budget)
    place = bench.place.beside("crowd")
    async with Upstream(keep=2 * agents * turns) as upstream:
        place = Place(place.claude, upstream.url, place.folder, place.cores)
        proxy = await start_proxy(place, max_processes=budget)
        began = time.perf_counter()
        watching = asyncio.create_task(_watch(proxy, met))
        try:
            await asyncio.gather(*(_conversation(proxy, f"agent-{n}", turns, met) for n in range(agents)))
        finally:
            met.seconds = time.perf_counter() - began
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await proxy.close()
        met.orphans = len(machine.running(str(place.folder)))
        met.forgotten = _forgotten(upstream, agents, turns)
    return met


def _said(agent: str, turn: int) -> str:
    return f"This is turn {turn} of {agent}."


async def _conversation(proxy: HTTPServer, agent: str, turns: int, met: Crowd) -> None:
    for turn in range(turns):
        while True:
            try:
                await proxy.turn(agent, _said(agent, turn), stream=turn % 2 == 0)
                met.answered += 1
                break
            except RefusedError as exc:
                if exc.status != 429:
                    raise
                met.refusals += 1
                await asyncio.sleep(exc.retry_after or PATIENCE)


async def _watch(proxy: HTTPServer, met: Crowd) -> None:
    while True:
        clis = [argv for argv in machine.commands(proxy.process.pid) if "--input-format" in " ".join(argv)]
        met.most_children = max(met.most_children, len(clis))
        answer = await proxy.connections.get("watch", "/metrics")
        counted = [row for row in answer.body.decode().splitlines() if row.startswith("cli_session_proxy_processes{")]
        met.most_by_metric = max(met.most_by_metric, round(sum(float(row.split()[-1]) for row in counted)))
        await asyncio.sleep(LOOK)


def _forgotten(upstream: Upstream, agents: int, turns: int) -> int:
    """Turns that the model was not shown exactly once, in order, at an agent's last turn."""
    last = {seen.user_texts()[-1]: seen.user_texts() for seen in upstream.requests if seen.user_texts()}
    missing = 0
    for n in range(agents):
        expected = [_said(f"agent-{n}", turn) for turn in range(turns)]
        shown = last.get(expected[-1], [])
        missing += 0 if shown == expected else max(1, len(set(expected) - set(shown)))
    return missing
