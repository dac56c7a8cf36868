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

Test = Callable[..., Coroutine[Any, Any, None]]

# Seconds that a test whose time is up has for what it puts away: from one signal to the next.
GRACE = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool:
    """No timer of pytest-timeout's own: it would run while a failure is reported, and not while a failed test puts away
    what it has."""
    item.cancel_timeout = lambda: None  # type: ignore[attr-defined]
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item) as limit:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = limit.cancels(item.obj)
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


class Limit:
    """What signals do: the first one cancels a test's coroutine, the next one raises a failure in the main thread. They
    come by the system's own clock: some tests move the one of their loop."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._settings = pytest_timeout._get_item_settings(item)
        self.seconds: float = self._settings.timeout or 0.0  # 0: no limit
        self._cancel: Callable[[], object] | None = None
        self._cancelled = False

    def cancels(self, test: Test) -> Test:
        @functools.wraps(test)
        async def run(*args: Any, **kwargs: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            # A handler runs between any two steps of the loop's own work.
            self._cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
            try:
                await test(*args, **kwargs)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                pytest.fail(f"Timeout (>{self.seconds} s) of the whole test")
            finally:
                self._cancel = None

        return run

    def on_signal(self, *_: object) -> None:
        if self._cancel is not None and not self._cancelled:
            self._cancelled = True
            self._cancel()
        else:
            pytest_timeout.timeout_sigalrm(self._item, self._settings)


@contextmanager
def _limited(item: pytest.Item) -> Iterator[Limit]:
    limit = Limit(item)
    before = signal.signal(signal.SIGALRM, limit.on_signal)
    signal.setitimer(signal.ITIMER_REAL, limit.seconds, GRACE)
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
