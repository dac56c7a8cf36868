"""Somebody who is served beside an attack: asks /healthz and has turns of its own, and tells how long they took.

    python -m bench.prober PORT

Until its stdin ends; then it prints one line of JSON, {"health": […], "turn": […]}, in seconds. It is a process of its
own because the program that attacks is busy itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable

from .client import Connections
from .contenders import body

HEALTH_EVERY = 0.05  # seconds
TURN_EVERY = 0.2
LONGEST = 60.0  # nobody waits longer; the number says so


async def _again(every: float, do: Callable[[], Awaitable[object]], took: list[float], stop: asyncio.Event) -> None:
    while not stop.is_set():
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST):
                await do()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(every)


async def probe(port: int) -> dict[str, list[float]]:
    connections = Connections(port)
    path = "/agents/prober/v1/chat/completions"
    health: list[float] = []
    turns: list[float] = []

    async def turn() -> None:
        await connections.post("turn", path, body("hello", stream=False))

    await turn()  # its process is there
    print("ready", flush=True)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_again(HEALTH_EVERY, lambda: connections.get("health", "/healthz"), health, stop))
        group.create_task(_again(TURN_EVERY, turn, turns, stop))
        await asyncio.to_thread(sys.stdin.read)
        stop.set()  # what is asked just now counts as well
    connections.close()
    return {"health": health, "turn": turns}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(int(sys.argv[1])))), flush=True)
