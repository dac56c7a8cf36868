"""A test that takes too long is ended so that it puts away what it started, and surely.

pytest-timeout raises its failure in whatever the main thread runs when its one signal comes. In a test on an event loop
that may be another task or a callback: the loop takes the failure for theirs, and the test goes on for ever. And the
coroutine of a test that it does reach is not told.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]

# Seconds that a test whose time is up has for what it puts away, and from one signal to the next.
GRACE = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool:
    """No timer of pytest-timeout's own: it would run while a failure is reported, and not while a failed test puts away
    what it has."""
    item.cancel_timeout = lambda: None  # type: ignore[attr-defined]
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _signals(item, _seconds(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A coroutine is cancelled when its time is up; the signal comes later."""
    seconds = _seconds(item)
    if seconds and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _limited(item.obj, seconds)
        seconds += GRACE
    with _signals(item, seconds):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _signals(item, _seconds(item)):
        return (yield)


def _seconds(item: pytest.Item) -> float:
    """0: no limit."""
    return pytest_timeout._get_item_settings(item).timeout or 0.0


@contextmanager
def _signals(item: pytest.Item, seconds: float) -> Iterator[None]:
    """After so many seconds, and again until one is heard, the main thread raises a failure."""
    settings = pytest_timeout._get_item_settings(item)._replace(timeout=seconds)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest_timeout.timeout_sigalrm(item, settings))
    signal.setitimer(signal.ITIMER_REAL, seconds, GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _limited(
    test: Callable[..., Coroutine[Any, Any, None]], seconds: float
) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await test(*args, **kwargs)
        except TimeoutError:
            if not limit.expired():
                raise
            pytest.fail(f"Timeout (>{seconds} s) of the whole test")

    return run
