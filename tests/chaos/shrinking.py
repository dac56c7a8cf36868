"""The fewest steps of a history that still break a promise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from turnfault.shrinking import fewest

from .checker import Kind
from .history import History
from .runner import Report

Run = Callable[[History], Awaitable[Report]]


async def shrunk(history: History, run: Run, say: Callable[[str], None], kinds: frozenset[Kind]) -> Report:
    """The report of the smallest part found that still shows a fault of these kinds, or of all that the history has."""
    report = await run(history)
    kinds = kinds or frozenset(fault.kind for fault in report.faults)

    async def failing(part: list[int]) -> Report | None:
        found = await run(history.only(part))
        return found if kinds & {fault.kind for fault in found.faults} else None

    def told(part: list[int], found: Report) -> None:
        say(f"{len(part)} steps: {','.join(map(str, part))}: {found.faults[0]}")

    if not kinds & {fault.kind for fault in report.faults}:
        return report
    smaller = await fewest(len(history.steps), failing, told)
    return report if smaller is None else smaller[1]
