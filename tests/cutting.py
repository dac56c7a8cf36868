"""A stream of the provider's that is cut where the test says: when the proxy, or its client, has words of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cli_session_proxy.domain.models import BlockDelta
from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import Cut

from .talking import claude
from .until import until


@asynccontextmanager
async def let_go(*cuts: Cut, engine: Engine, stream: bool) -> AsyncIterator[None]:
    """Cut, one after another, when the proxy has words of the attempt; with `stream`, when a client was given all."""

    async def drop() -> None:
        for cut in cuts:
            await cut.reached.wait()
            await quiet([process.pid for process in claude(engine).pool.table.all()])
            await until(lambda: any(_heard(engine, given=stream)))
            cut.open()

    async with asyncio.TaskGroup() as group:
        dropping = group.create_task(drop())
        yield
        dropping.cancel()


def _heard(engine: Engine, *, given: bool) -> list[bool]:
    said = [turn for turn in engine._live.values() if any(isinstance(event, BlockDelta) for event in turn._events)]
    return [turn._received == len(turn._events) or not given for turn in said]


async def quiet(pids: list[int]) -> None:
    """Wait until these processes wait: asleep, and without any CPU time between two looks.

    CLI 1.0.120 asks again only for a cut that it meets while it waits for more. One that comes with the words it takes
    for the end of the answer (`test_half_an_answer_is_no_answer`). Linux only: elsewhere there is no /proc.
    """
    before: list[tuple[str, ...]] = []
    while (now := [_looks(pid) for pid in pids]) != before or any(state == "R" for state, *_ in now):
        before = now
        await asyncio.sleep(0.2)


def _looks(pid: int) -> tuple[str, ...]:
    """Its state, and the time that it has used so far."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, *fields[10:12]
    return ("",)


def held(cut: Cut) -> Cut:
    return Cut(cut.after, cut.reply, held=True)
