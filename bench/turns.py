"""Scenarios of single turns: how long one takes, a first one, a long answer, and how soon a server is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from tests.postgres import Postgres

from . import machine
from .client import Timing
from .contenders import BARE, Contender
from .figures import figure
from .hosts import POSTGRESQL, postgresql
from .plan import Bench, Row
from .servers import HTTPServer

CHUNKS = 1000
# Seconds between two turns that are timed: what one leaves to be done (the CLI writes its transcript, the proxy looks
# ahead) must not be counted as the next one's. `agents` measures with everything counted.
SETTLE = 0.05


async def warm_turns(bench: Bench) -> list[Row]:
    """One turn at a time, interleaved in a drawn order, so that the machine's moods, and what the turn before leaves to
    be done, hit all alike; in rounds with new processes, so that no single start decides."""
    whole: dict[str, list[Timing]] = {}
    streamed: dict[str, list[Timing]] = {}
    with postgresql(bench.place.cores) as postgres:
        for number in range(bench.plan.rounds):
            await _round(bench, f"turn-{number}", postgres, whole, streamed)
    spawned = bench.spawned_cli("turn-spawned")
    try:
        cold = [await spawned.turn("a", f"turn {n}") for n in range(bench.plan.spawns + 1)][1:]
    finally:
        await spawned.close()
    added = [ours.first - bare.first for ours, bare in zip(streamed["proxy"], streamed[BARE], strict=True)]
    whole[spawned.name] = streamed[spawned.name] = cold
    rows = [_row("turn", name, [one.whole for one in some]) for name, some in whole.items()]
    rows += [_row("turn, streamed", name, [one.whole for one in some]) for name, some in streamed.items()]
    rows += [_row("first token", name, [one.first for one in some]) for name, some in streamed.items()]
    return [*rows, _row("first token added by the proxy", "proxy", added)]


async def _round(
    bench: Bench,
    folder: str,
    postgres: Postgres | None,
    whole: dict[str, list[Timing]],
    streamed: dict[str, list[Timing]],
) -> None:
    plan, drawn = bench.plan, random.Random(folder)
    async with AsyncExitStack() as stack:
        contenders: list[Contender] = []

        def take(contender: Contender) -> None:
            stack.push_async_callback(contender.close)
            contenders.append(contender)

        take(bench.warm_cli(f"{folder}-warm"))
        take(await bench.proxy(f"{folder}-proxy"))
        if (peer := await bench.peer(f"{folder}-ccproxy")) is not None:
            take(peer)
        if postgres is not None:
            proxy = await bench.proxy(f"{folder}-postgresql", store=postgres.new_url())
            proxy.name = POSTGRESQL
            take(proxy)
        for n in range(plan.round_turns + plan.warm_up):
            for timings, stream in ((whole, False), (streamed, True)):
                for contender in drawn.sample(contenders, len(contenders)):
                    await asyncio.sleep(SETTLE)
                    timing = await contender.turn("a", f"turn {n}", stream=stream)
                    if n >= plan.warm_up:
                        timings.setdefault(contender.name, []).append(timing)


def _row(measure: str, name: str, seconds: Sequence[float]) -> Row:
    return Row(measure, name, "ms", figure(seconds, 1000))


async def parameters(bench: Bench) -> list[Row]:
    """A warm turn whose parameters are not those of the turn before, and one without any: the proxy's, and those of the
    bare CLI, which is told them by a control request before the turn."""
    bare, proxy = bench.warm_cli("told-bare"), await bench.proxy("told-proxy")
    whole: dict[tuple[str, str], list[float]] = {}
    control: list[float] = []
    try:
        for agent in ("plain", "others"):
            await bare.turn(agent, "hello")
        for n in range(bench.plan.turns + bench.plan.warm_up):
            limit = 30_000 + n
            turns = [("plain", bare.name), ("others", proxy.name), ("others", bare.name), ("plain", proxy.name)]
            for agent, name in turns[n % 4 :] + turns[: n % 4]:
                await asyncio.sleep(SETTLE)
                told = 0.0
                if name == bare.name:
                    if agent == "others":
                        told = await bare.told(agent, {"env": {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(limit)}})
                    timing = await bare.turn(agent, f"turn {n}", stream=False)
                else:
                    wanted = {"max_tokens": limit} if agent == "others" else {}
                    timing = await proxy.turn(agent, f"turn {n}", stream=False, **wanted)
                if n >= bench.plan.warm_up:
                    whole.setdefault((agent, name), []).append(told + timing.whole)
                    control += [told] if told else []
    finally:
        await asyncio.gather(bare.close(), proxy.close())
    measures = {"plain": "turn without parameters", "others": "turn with other parameters"}
    rows = [_row(measures[agent], name, found) for (agent, name), found in sorted(whole.items())]
    return [*rows, _row("control round trip", bare.name, control)]


async def first_turns(bench: Bench) -> list[Row]:
    """The first turn of a new agent: arriving `pause` seconds apart, and back to back."""
    plan = bench.plan
    bare = bench.warm_cli("first-bare")
    proxy, peer = await bench.proxy("first-proxy"), await bench.peer("first-ccproxy")
    apart: dict[str, list[float]] = {}
    together: dict[str, list[float]] = {}
    contenders: list[Contender] = [bare, proxy, *([peer] if peer else [])]
    try:
        for contender in contenders:
            await contender.turn("known", "hello")
        for n in range(plan.newcomers):
            contenders = contenders[1:] + contenders[:1]
            for contender in contenders:
                await asyncio.sleep(plan.pause / len(contenders))  # as people arrive
                timing = await contender.turn(f"new-{n}", "hello")
                apart.setdefault(contender.name, []).append(timing.whole)
        for contender in contenders:
            for n in range(plan.newcomers):
                timing = await contender.turn(f"next-{n}", "hello")
                together.setdefault(contender.name, []).append(timing.whole)
    finally:
        await asyncio.gather(*(contender.close() for contender in contenders))
    rows = [_row("first turn of a new agent", name, some) for name, some in apart.items()]
    return rows + [_row("first turns back to back", name, some) for name, some in together.items()]


async def long_answers(bench: Bench) -> list[Row]:
    """An answer of 1,000 chunks: the clock, and the server's own CPU time."""
    bare = bench.warm_cli("long-bare")
    proxy, peer = await bench.proxy("long-proxy"), await bench.peer("long-ccproxy")
    servers = [proxy, *([peer] if peer else [])]
    contenders: list[Contender] = [bare, *servers]
    clock: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    cpu: dict[str, list[float]] = {server.name: [] for server in servers}
    try:
        for n in range(bench.plan.answers + 2):
            contenders = contenders[1:] + contenders[:1]
            for contender in contenders:
                before = contender.own_cpu_seconds() if isinstance(contender, HTTPServer) else 0.0
                timing = await contender.turn("a", f"{n}: deltas={CHUNKS}")
                await asyncio.sleep(SETTLE)
                if n < 2:
                    continue
                clock[contender.name].append(timing.whole)
                if isinstance(contender, HTTPServer):
                    cpu[contender.name].append(contender.own_cpu_seconds() - before)
    finally:
        await asyncio.gather(*(contender.close() for contender in contenders))
    rows = [_row(f"answer of {CHUNKS:,} chunks", name, some) for name, some in clock.items()]
    return rows + [_row(f"own CPU, answer of {CHUNKS:,} chunks", name, some) for name, some in cpu.items()]


async def starts(bench: Bench) -> list[Row]:
    """From the start of a server until it says that it is there, and what it holds then."""
    ready: dict[str, list[float]] = {}
    resident: dict[str, list[float]] = {}
    for n in range(bench.plan.starts + 1):
        for server in (await bench.proxy(f"start-{n}"), await bench.peer(f"start-cc-{n}")):
            if server is None:
                continue
            if n:  # the first one fills the disk's cache
                ready.setdefault(server.name, []).append(server.ready)
                resident.setdefault(server.name, []).append(machine.resident_mb(server.process.pid))
            await server.close()
    rows = [Row("ready", name, "s", figure(some)) for name, some in ready.items()]
    return rows + [Row("RSS without children", name, "MB", figure(some)) for name, some in resident.items()]
