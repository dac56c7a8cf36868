"""Owned tasks (awaited or cancelled at shutdown, their exceptions logged), their deadlines, and how long work takes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from . import logs
from .errors import ProxyError, TurnTimeout

log = logs.get(__name__)

# Seconds that two clocks may drift apart without a sleep.
SLEPT = 1.0

T = TypeVar("T")


class Tasks:
    """Work ends by itself; services run until `stop` cancels them. `expected`: what a caller of `own` handles."""

    def __init__(self, expected: tuple[type[Exception], ...] = (ProxyError,)) -> None:
        self._expected = expected
        self._work: set[asyncio.Task[Any]] = set()
        self._services: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, T], *, service: bool = False) -> asyncio.Task[T]:
        """Start bounded work. It is never cancelled from here, unless it is a service."""
        task = asyncio.create_task(work)
        group = self._services if service else self._work
        expected = () if service else self._expected
        group.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            group.discard(task)
            fault = None if task.cancelled() else task.exception()
            if fault is not None and not isinstance(fault, expected):
                log.error("task_failed", exc_info=fault)

        task.add_done_callback(ended)
        return task

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        self.own(work, service=True)

    async def stop(self) -> None:
        for task in self._services:
            task.cancel()
        while tasks := self._work | self._services:
            await asyncio.wait(tasks)


async def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Its result, from a thread of its own: what an agent's programs left may take minutes to remove, and the threads
    that all share are as few as processors."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="apart")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: function(*arguments))
    finally:
        thread.shutdown(wait=False)


@contextmanager
def survived(event: str, **about: object) -> Iterator[None]:
    """What fails in here is logged under this name, and the caller goes on. For what a service does for one agent: it
    goes on for the others."""
    try:
        yield
    except ProxyError as exc:
        log.warning(event, error=exc.message, **about)
    except Exception:
        log.exception(event, **about)


def awake_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's time, less what the machine has slept: on macOS uvloop's clock runs on in sleep, and `time.monotonic`
    stands still. On Linux both stand still."""
    return time.monotonic if sys.platform == "darwin" else loop.time


class Limited:
    """`async with` this: until `deadline` (by the awake clock), then `TurnTimeout`.

    A class, as every turn has several: a generator costs the event loop more.
    """

    timer: asyncio.TimerHandle

    def __init__(self, deadline: float, message: str) -> None:
        self._until = deadline
        self._clock = asyncio.timeout_at(None)
        self._message = message

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._now = awake_clock(self._loop)
        now = self._now()
        self._window, self._slept = self._until - now, self._loop.time() - now
        self._arm()
        await self._clock.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self.timer.cancel()
        try:
            await self._clock.__aexit__(*raised)
        except TimeoutError as exc:  # its own: any other goes on as it came
            raise TurnTimeout(self._message) from exc

    def _arm(self) -> None:
        self._due = self._until
        self.timer = self._loop.call_later(self._until - self._now(), self._look)

    def _look(self) -> None:
        if self._until <= self._now():
            self._clock.reschedule(self._loop.time())
        else:
            self._arm()


class LimitedByLife(Limited):
    """Its deadline moves at every sign of life. To move it later costs an assignment: its timer is only set again when
    the last one has passed. Where the machine has slept meanwhile, all that may take begins anew."""

    def move(self, until: float) -> None:
        self._until = until
        if until < self._due:
            self.timer.cancel()
            self._arm()

    def _look(self) -> None:
        slept = self._loop.time() - self._now()
        if slept - self._slept > SLEPT:
            self._slept, self._until = slept, max(self._until, self._now() + self._window)
        super()._look()


async def uninterrupted(task: asyncio.Task[T]) -> T:
    """The task's result. A cancellation of the caller is ignored until then."""
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


# --- What something takes, from how long it took: for clients that are told when to come again

# How much the newest weighs in the running mean.
SMOOTHING = 0.2


@dataclass(slots=True)
class Average:
    """A running mean in seconds. Until the first measurement it is the guess."""

    value: float
    _known: bool = False

    def add(self, seconds: float) -> None:
        self.value += (SMOOTHING if self._known else 1.0) * (seconds - self.value)
        self._known = True
