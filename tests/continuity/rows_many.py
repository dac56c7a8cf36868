"""Rows about requests at the same time, and seven ways at once."""

from __future__ import annotations

import asyncio

from .row import BOTH, NEW, Row, void
from .talk import Talk

AT_ONCE = 6


async def six_at_once(talk: Talk) -> None:
    await asyncio.gather(*(talk.tell() for _ in range(AT_ONCE)))


async def six_at_once_and_kills(talk: Talk) -> None:
    """Each of them is killed once, as soon as a CLI has its prompt; the client sends it again."""
    told = [asyncio.create_task(talk.tell(tries=3)) for _ in range(AT_ONCE)]
    try:
        for count in range(1, AT_ONCE, 2):
            await talk.upstream.arrived(len(talk.facts) + count)
            talk.kill()
    finally:
        await asyncio.wait(told)  # all of them: the CLI of one that goes on must not be left to the next row
    for one in told:
        one.result()


CONCURRENCY = "concurrency"
ROWS = (
    Row(CONCURRENCY, "6 at once to one agent", six_at_once, clis=BOTH, quick=NEW, says=({}, void(6, 10))),
    Row(
        CONCURRENCY,
        "6 at once, their CLIs killed",
        six_at_once_and_kills,
        clis=BOTH,
        says={0: r"Attempt 1 failed \(it ended with exit code -9 before the result\); attempt 2 sent the prompt again"},
    ),
)
