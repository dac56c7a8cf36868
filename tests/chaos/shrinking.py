"""The fewest steps that still break a promise: delta debugging over a history's steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checker import Kind
from .history import History
from .runner import Report

Run = Callable[[History], Awaitable[Report]]
# A fault that needs a race does not show at each run: so often a part is tried before it counts as sound.
TRIES = 2


async def shrunk(history: History, run: Run, say: Callable[[str], None], kinds: frozenset[Kind]) -> Report:
    """The report of the smallest part found that still shows a fault of these kinds, or of all that the history has."""
    report = await run(history)
    kinds = kinds or frozenset(fault.kind for fault in report.faults)
    if not kinds & {fault.kind for fault in report.faults}:
        return report
    kept = list(range(len(history.steps)))
    size = max(1, len(kept) // 2)
    while True:
        at, smaller = 0, False
        while at < len(kept):
            part = kept[:at] + kept[at + size :]
            found = await _failing(history.only(part), run, kinds)
            if found is None:
                at += size
            else:
                kept, report, smaller = part, found, True
                say(f"{len(kept)} steps: {','.join(map(str, kept))}: {report.faults[0]}")
        if size == 1 and not smaller:
            return report
        size = max(1, size // 2)


async def _failing(history: History, run: Run, kinds: frozenset[Kind]) -> Report | None:
    for _ in range(TRIES):
        report = await run(history)
        if kinds & {fault.kind for fault in report.faults}:
            return report
    return None
