"""Waits for what nobody tells: the state of another process, a file, the server of this very loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

# Seconds between two looks, and until nothing more is expected: far beyond what a loaded machine takes.
POLL = 0.01
PATIENCE = 60.0


@overload
async def until(condition: Callable[[], Awaitable[T]], timeout: float = ...) -> T: ...
@overload
async def until(condition: Callable[[], T], timeout: float = ...) -> T: ...
async def until(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """The first true value of the condition, which may be a coroutine function. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(POLL)
