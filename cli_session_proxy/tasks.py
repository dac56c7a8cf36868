"""Tasks that belong to somebody: waited for or cancelled at the end, their faults logged, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from .errors import ProxyError, TurnTimeout
from .stores.base import KeyTaken

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Tasks:
    """Work ends by itself; services run until `stop` cancels them."""

    def __init__(self) -> None:
        self._work: set[asyncio.Task[Any]] = set()
        self._services: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Bounded work, which is never cancelled by us."""
        return self._start(work, self._work, (ProxyError, KeyTaken))  # these are told to a client

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        self._start(work, self._services, ())

    def _start(
        self, work: Coroutine[Any, Any, T], kept: set[asyncio.Task[Any]], expected: tuple[type[Exception], ...]
    ) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        kept.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            kept.discard(task)
            fault = None if task.cancelled() else task.exception()
            if fault is not None and not isinstance(fault, expected):
                log.error("task_failed", exc_info=fault)

        task.add_done_callback(ended)
        return task

    async def stop(self) -> None:
        for task in self._services:
            task.cancel()
        while tasks := self._work | self._services:
            await asyncio.wait(tasks)


@asynccontextmanager
async def limited(deadline: float, message: str) -> AsyncIterator[asyncio.Timeout]:
    """Until `deadline` (the loop's time), then `TurnTimeout`."""
    clock = asyncio.timeout_at(deadline)
    try:
        async with clock:
            yield clock
    except TimeoutError as exc:
        if not clock.expired():
            raise
        raise TurnTimeout(message) from exc


async def uninterrupted(task: asyncio.Task[T]) -> T:
    """The task's result, whoever wants to cancel meanwhile: they come too late."""
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()
