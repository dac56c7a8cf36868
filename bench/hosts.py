"""Proxies on PostgreSQL: the server that they share, and what a turn costs two hosts beside one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from tests.postgres import Postgres, programs, server

from . import machine
from .agents import SPARE_PLACES, asking
from .contenders import Place
from .figures import figure
from .machine import Cores
from .plan import Bench, Row
from .servers import HTTPServer, start_proxy

POSTGRESQL = "proxy on PostgreSQL"
ONE, TWO = "one host", "two hosts"
CPU = "CPU a turn on PostgreSQL, with children"


@contextmanager
def postgresql(cores: Cores) -> Iterator[Postgres | None]:
    """A server of its own on a unix socket, on the contenders' cores and on the disk; None where not installed."""
    if programs() is None:
        print("PostgreSQL is not installed: what it takes is left out", file=sys.stderr, flush=True)
        yield None
        return
    with server("-c", "shared_buffers=128MB", start=False, memory=False) as postgres:
        with cores.for_contender():
            postgres.start()
        yield postgres


async def hosts(bench: Bench) -> list[Row]:
    """Two proxies, each with agents of its own and half of the cores, beside one such proxy, which has first the one
    half and then the other: what does a turn cost more where two hosts share the store?"""
    found: dict[tuple[str, str, str], list[float]] = {}
    usable = sorted(bench.place.cores.contenders)
    low, high = usable[: (len(usable) + 1) // 2], usable[len(usable) // 2 :]
    at = bench.plan.host_agents
    with postgresql(bench.place.cores) as postgres:
        if postgres is None:
            return []
        runs = [(ONE, [low]), (TWO, [low, high]), (ONE, [high])]
        for repeat in range(bench.plan.repeats):
            for number, (name, halves) in enumerate(runs[:: -1 if repeat % 2 else 1]):
                folder = f"hosts-{repeat}-{number}"
                async with AsyncExitStack() as stack:
                    proxies = []
                    url = postgres.new_url()
                    for host, half in enumerate(halves):
                        place = bench.place.beside(f"{folder}-{host}")
                        cores = Cores(place.cores.load, frozenset(half))
                        place = Place(place.claude, place.upstream, place.folder, cores)
                        proxies.append(await start_proxy(place, store=url, max_processes=at + SPARE_PLACES))
                        stack.push_async_callback(proxies[-1].close)
                    for measure, unit, value in await _windows(bench, proxies, postgres.pid):
                        found.setdefault((measure, name, unit), []).append(value)
    return [Row(measure, name, unit, figure(values), at) for (measure, name, unit), values in sorted(found.items())]


async def _windows(bench: Bench, proxies: list[HTTPServer], postgres: int) -> list[tuple[str, str, float]]:
    """Measures of some windows, each with its unit and value, while all agents ask."""
    measures: list[tuple[str, str, float]] = []
    async with AsyncExitStack() as stack:
        counts: list[Callable[[], int]] = []
        for number, proxy in enumerate(proxies):
            names = [f"agent-{number}-{n}" for n in range(bench.plan.host_agents)]
            await asyncio.gather(*(proxy.turn(name, "hello") for name in names))
            counts.append(await stack.enter_async_context(asking(proxy, names)))

        def used() -> tuple[float, int, float, float]:
            theirs = machine.cpu_seconds(machine.tree([postgres]))
            return time.perf_counter(), sum(one() for one in counts), sum(one.cpu_seconds() for one in proxies), theirs

        await asyncio.sleep(bench.plan.window / 2)  # warm-up
        for _ in range(bench.plan.windows):
            before = used()
            await asyncio.sleep(bench.plan.window)
            seconds, turns, cpu, server_cpu = (now - then for now, then in zip(used(), before, strict=True))
            if turns:
                measures.append((CPU, "ms", cpu / turns * 1000))
                measures.append(("PostgreSQL's own CPU a turn", "ms", server_cpu / turns * 1000))
                measures.append(("turns/s on PostgreSQL, half of the cores a host", "1/s", turns / seconds))
    return measures
