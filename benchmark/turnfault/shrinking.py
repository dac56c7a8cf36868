"""The fewest steps that still break a promise: delta debugging over the steps of a history."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# A fault that needs a race does not show at each run: so often a part is tried before it counts as sound.
TRIES = 2


async def fewest(
    count: int, failing: Callable[[list[int]], Awaitable[T | None]], found: Callable[[list[int], T], None]
) -> tuple[list[int], T] | None:
    """The numbers of the steps of the smallest part found that still fails, of `count`, and what it showed; None where
    no smaller part fails. `failing` runs a part, and `found` hears of each one that fails."""
    kept = list(range(count))
    shown: T | None = None
    size = max(1, count // 2)
    while True:
        at, smaller = 0, False
        while at < len(kept):
            part = kept[:at] + kept[at + size :]
            seen = await _tried(part, failing)
            if seen is None:
                at += size
            else:
                kept, shown, smaller = part, seen, True
                found(kept, seen)
        if size == 1 and not smaller:
            return None if shown is None else (kept, shown)
        size = max(1, size // 2)


async def _tried(part: list[int], failing: Callable[[list[int]], Awaitable[T | None]]) -> T | None:
    for _ in range(TRIES):
        seen = await failing(part)
        if seen is not None:
            return seen
    return None
