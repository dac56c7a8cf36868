"""Scenarios of what starts no process any more: an edited message, the turn after a failed one, strangers' questions.

The proxy's self-check has seen the CLI rewind, as `serve` has after its first seconds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.until import until

from . import machine
from .client import RefusedError
from .contenders import SPAWNED, body
from .figures import figure
from .plan import Bench, Row
from .servers import HTTPServer
from .turns import SETTLE

CHECKED, FALLS = 60.0, 60.0  # seconds, at most: until it is checked, and until the processes of one-shots are gone
WAYS = ("turn in a warm session", "turn with an edited message", "turn after a failed one")
AT_ONCE, PARALLEL, MANY = 4, 20, 200
SPARES = (
    4  # processes that stay: a spare, of the agent that was asked first, and of two questions that might have gone on
)
RATE, TOGETHER = "one-shots/s", f"{PARALLEL} one-shots at once, each"
MEMORY = "memory with children"
WARM = "proxy, warm turns"
REST = "proxy, max_processes at rest"


async def checked(bench: Bench, folder: str, **options: str | int) -> HTTPServer:
    """A proxy whose self-check has ended."""
    proxy = await bench.proxy(folder, self_check="true", **options)
    await proxy.turn("first", "hello")
    async with asyncio.timeout(CHECKED):
        while True:  # it has no way to tell
            if b'observation="rewind_conversation"} 1' in (await proxy.connections.get("m", "/metrics")).body:
                return proxy
            await asyncio.sleep(SETTLE)


async def edits(bench: Bench) -> list[Row]:
    """Interleaved: a warm turn, one with another last message, one behind a turn that the provider refused."""
    proxy = await checked(bench, "edits")
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    history: dict[str, list[dict[str, Any]]] = {}

    async def said(agent: str, text: str) -> float:
        """The client sends all that was said, and keeps no answer: what it says next stands in the place of this."""
        asked = body(text, stream=False, before=history.get(agent, []))
        answer = await proxy.connections.post(agent, proxy.path(agent), asked)
        if agent not in history:
            message = json.loads(answer.body)["choices"][0]["message"]
            history[agent] = [asked["messages"][0], {"role": "assistant", "content": message["content"]}]
        return answer.timing.whole

    try:
        await said("edited", "hello")
        for n in range(bench.plan.turns + bench.plan.warm_up):
            times = []
            await asyncio.sleep(SETTLE)
            times.append((await proxy.turn("warm", f"turn {n}", stream=False)).whole)
            await asyncio.sleep(SETTLE)
            times.append(await said("edited", f"edit {n}"))
            try:
                await proxy.turn("failing", f"fails=400 {n}", stream=False)
            except RefusedError:
                pass
            else:
                raise AssertionError("the provider was to refuse this")
            await asyncio.sleep(SETTLE)
            times.append((await proxy.turn("failing", f"turn {n}", stream=False)).whole)
            if n >= bench.plan.warm_up:
                for way, one in zip(WAYS, times, strict=True):
                    found[way].append(one)
    finally:
        await proxy.close()
    return [Row(way, proxy.name, "ms", figure(some, 1000)) for way, some in found.items()]


async def one_shots(bench: Bench) -> list[Row]:
    """Questions without a name, four at once; beside them warm turns of four agents, and a CLI for each question."""
    plan = bench.plan
    proxy = await checked(bench, "one-shots", max_processes=8)
    spawned = bench.spawned_cli("one-shots-spawned")
    numbers = iter(range(1 << 30))

    async def stranger(connection: int) -> float:
        asked = body(f"question {next(numbers)}", stream=False)
        answer = await proxy.connections.post(f"stranger-{connection}", "/v1/chat/completions", asked)
        return answer.timing.whole

    async def rate(one: Callable[[int], Awaitable[object]]) -> float:
        """A second, by so many that ask again as soon as they are answered."""
        ends, count = time.perf_counter() + plan.window, 0

        async def asking(number: int) -> None:
            nonlocal count
            while time.perf_counter() < ends:
                await one(number)
                count += 1

        began = time.perf_counter()
        await asyncio.gather(*map(asking, range(AT_ONCE)))
        return count / (time.perf_counter() - began)

    async def warm(number: int) -> None:
        await proxy.turn(f"agent-{number}", "again", stream=False)

    found: dict[str, list[float]] = {WARM: [], "proxy": [], SPAWNED: []}
    try:
        for _ in range(MANY // AT_ONCE):  # nobody goes on from them
            await asyncio.gather(*map(stranger, range(AT_ONCE)))
        after = machine.shared_memory_mb(proxy.pids())
        await until(lambda: len(_clis(proxy)) <= SPARES, FALLS)
        for number in range(plan.windows + 1):
            for name, one in ((WARM, warm), ("proxy", stranger)):
                measured = await rate(one)
                if number:
                    found[name].append(measured)
        found[SPAWNED].append(await rate(lambda number: spawned.turn(f"once-{number}", "hello")))
        together = [one for _ in range(plan.windows) for one in await asyncio.gather(*map(stranger, range(PARALLEL)))]
    finally:
        await asyncio.gather(proxy.close(), spawned.close())
    full = await bench.proxy("one-shots-rest", max_processes=8)
    try:
        for n in range(8 * MANY // AT_ONCE):  # as many turns in each
            await full.turn(f"agent-{n % 8}", "hello", stream=False)
        rest = machine.shared_memory_mb(full.pids())
    finally:
        await full.close()
    rows = [Row(RATE, name, "1/s", figure(some), AT_ONCE) for name, some in found.items()]
    rows.append(Row(TOGETHER, "proxy", "s", figure(together)))
    rows += [Row(MEMORY, "proxy", "MB", figure([after]), MANY), Row(MEMORY, REST, "MB", figure([rest]), MANY)]
    return rows


def _clis(proxy: HTTPServer) -> list[list[str]]:
    return [argv for argv in machine.commands(proxy.process.pid) if "--input-format" in argv]
