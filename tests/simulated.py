"""A loop whose clock only waiting moves: what takes an hour takes no time, and the same time in every run."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Clock(selectors.SelectSelector):
    """Sleeps by moving the clock on. It stands still while threads work, however late they come to run."""

    now = 0.0
    at_work = 0

    def select(self, timeout: float | None = None) -> Any:
        if self.at_work and timeout != 0:
            return super().select()
        self.now += timeout or 0.0
        return super().select(0)


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, *work: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = super().run_in_executor(*work)
        self.clock.at_work += 1
        done.add_done_callback(self._worked)
        return done

    def _worked(self, _: object) -> None:
        self.clock.at_work -= 1


async def still() -> None:
    """Everybody has gone as far as it goes without time."""
    for _ in range(50):
        await asyncio.sleep(0)
