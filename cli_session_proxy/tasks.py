"""Tasks that are awaited or cancelled at shutdown, time limits, and average durations."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from . import logs
from .errors import ProxyError, TurnTimeout

log = logs.get(__name__)

# Seconds by which the two clocks may differ although the machine did not sleep.
SLEPT = 1.0

T = TypeVar("T")


class Tasks:
    """Tasks that `stop` ends: it waits for work, and cancels services. Exceptions are logged, unless they are
    `expected`: whoever awaits the task handles those."""

    def __init__(self, expected: tuple[type[Exception], ...] = (ProxyError,)) -> None:
        self._expected = expected
        self._work: set[asyncio.Task[Any]] = set()
        self._services: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, T], *, service: bool = False) -> asyncio.Task[T]:
        """Start bounded work. `stop` waits for it, but cancels it only if it is a service."""
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


# By loop and folder: held by the thread that works there.
_AT_WORK: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Path, asyncio.Lock]] = WeakKeyDictionary()


async def in_thread_at(folder: Path, function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that looks or writes into this folder of an agent, in a thread of its own.

    A program of a confined agent can hold it up for as long as the program lives, and removing files may take minutes.
    The few threads of `asyncio.to_thread` would run out. There is one such thread at a time for each folder, also if
    its caller was cancelled: so there are at most as many as folders of running CLIs, and of turns that run. This
    process can end before they do.
    """
    loop = asyncio.get_running_loop()
    lock = _AT_WORK.setdefault(loop, WeakValueDictionary()).setdefault(folder, asyncio.Lock())
    await lock.acquire()
    context = copy_context()  # what it logs tells its request
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    try:
        Thread(target=_run, args=(done, context.run, function, *arguments), name="folder", daemon=True).start()
    except BaseException:  # the system has no more threads
        lock.release()
        raise
    work = asyncio.wrap_future(done)
    work.add_done_callback(lambda _: lock.release())
    try:
        return await asyncio.shield(work)
    finally:
        del done, work  # see `_run`


def _run(done: Future[T], function: Callable[..., T], *arguments: Any) -> None:
    try:
        done.set_result(function(*arguments))
    except BaseException as exc:  # noqa: BLE001 - its caller gets it
        done.set_exception(exc)
        # The exception has this frame, which must not have the exception. Else what it has read stays in memory, and
        # has its place (`transcript.at_once`), until a collection, which is rare.
        del done


def works_at(folder: Path) -> bool:
    """Whether a thread is at work in this folder, see `in_thread_at`."""
    locks = _AT_WORK.get(asyncio.get_running_loop())
    lock = None if locks is None else locks.get(folder)
    return lock is not None and lock.locked()


@contextmanager
def failures_logged(event: str, **fields: object) -> Iterator[None]:
    """Log an exception of the body as this event with these fields, and go on after the body. For services: a failure
    at one agent must not stop the work for others."""
    try:
        yield
    except ProxyError as exc:
        log.warning(event, error=exc.message, **fields)
    except Exception:
        log.exception(event, **fields)


def awake_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """A clock that stops while the machine sleeps. On macOS uvloop's clock runs on during sleep, and `time.monotonic`
    stops; on Linux both stop."""
    return time.monotonic if sys.platform == "darwin" else loop.time


class TimeLimit:
    """An async context manager that raises `TurnTimeout` at `deadline` (by the awake clock)."""

    timer: asyncio.TimerHandle

    def __init__(self, deadline: float, message: str) -> None:
        self._until = deadline
        self._message = message
        self._expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled_before = task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._now = awake_clock(self._loop)
        now = self._now()
        self._allowed, self._slept = self._until - now, self._loop.time() - now
        self._arm()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        self.timer.cancel()
        # As `asyncio.timeout`: a cancellation by others passes unchanged.
        if self._expired and self._task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
            raise TurnTimeout(self._message) from raised

    def _arm(self) -> None:
        self._due = self._until
        self.timer = self._loop.call_later(self._until - self._now(), self._look)

    def _look(self) -> None:
        if self._until <= self._now():
            self._expired = True
            self._task.cancel()
        else:
            self._arm()


class IdleLimit(TimeLimit):
    """A time limit that is moved at every sign of life. To move it later only assigns: the timer is set again when it
    fires. If the machine has slept meanwhile, the whole time starts again."""

    def move(self, until: float) -> None:
        self._until = until
        if until < self._due:
            self.timer.cancel()
            self._arm()

    def _look(self) -> None:
        slept = self._loop.time() - self._now()
        if slept - self._slept > SLEPT:
            self._slept, self._until = slept, max(self._until, self._now() + self._allowed)
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


# --- average durations, from which a client's Retry-After is computed

# The weight of the newest value in the running mean.
SMOOTHING = 0.2


@dataclass(slots=True)
class Average:
    """A running mean in seconds. `value`: an estimate until the first measurement."""

    value: float
    _known: bool = False

    def add(self, seconds: float) -> None:
        self.value += (SMOOTHING if self._known else 1.0) * (seconds - self.value)
        self._known = True
