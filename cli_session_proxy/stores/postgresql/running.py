"""Where a transaction runs: a quick one on the event loop, as a greenlet; any other on a thread.

A transaction is a plain function that waits for the server several times. On a thread, the switch there and back takes
0.1 to 0.2 ms after a pause. A greenlet (SQLAlchemy's asyncio uses them, too) gives the event loop back while it waits
for its socket. It is not run by a task, so no cancellation ends it half way.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from psycopg.waiting import Ready, Wait

from ..sql.database import ThreadPool

T = TypeVar("T")


class Slots(ThreadPool):
    """Runs at most `number` functions at once, started in order: a quick one on the event loop, any other on a
    thread."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self._free = self._number = number
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any], bool]] = deque()
        self._idle = asyncio.Event()

    def run(self, work: Callable[[], T], *, quick: bool = False) -> asyncio.Future[T]:
        """The function's result. A function that has begun runs to its end, even if this future is cancelled. A `quick`
        function uses `on_thread` for blocking calls."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append((future, work, quick))
        self._start_waiting()
        return future

    async def drain(self) -> None:
        """Wait until all functions that were submitted have run."""
        while self._free < self._number:
            self._idle.clear()
            await self._idle.wait()

    def _start_waiting(self) -> None:
        while self._free and self._waiting:
            future, work, quick = self._waiting.popleft()
            if future.cancelled():
                continue
            self._free -= 1
            if quick:
                LoopGreenlet(self._loop, work, partial(self._finish, future)).resume()
            else:
                self._queue.put((future, work))

    def _finish(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        super()._finish(future, result, error)
        self._free += 1
        self._start_waiting()
        if self._free == self._number:
            self._idle.set()


class LoopGreenlet(greenlet):  # type: ignore[misc]  # it has no annotations
    """A function that runs on the event loop as a greenlet. While it waits, the loop runs other things.

    It never calls the loop itself: code outside the greenlet does. Nor is it resumed inside a socket's callback, but by
    a `call_soon`: libuv keeps pointers to its stack around such a callback, and a greenlet would overwrite that stack.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[], object],
        on_end: Callable[[object, BaseException | None], None],
    ) -> None:
        """`on_end` gets the result and the exception."""
        super().__init__(work)
        self._loop = loop
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None

    def resume(self, *values: object) -> None:
        """Called outside the greenlet: run it until it ends or has to wait. `values`: what it waited for (nothing at
        the start)."""
        yielded: Any = None  # its result; or what it waits for: a blocking call, or a socket with its events
        error: BaseException | None = None
        try:
            yielded = self.switch(*values)
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            error = exc
        if self.dead:
            self._on_end(yielded, error)
            del yielded, error  # an exception's traceback holds this frame
        elif callable(yielded):
            self._loop.run_in_executor(None, yielded).add_done_callback(self.resume)
        else:
            socket, events, longest = yielded
            if events & Wait.R:
                self._loop.add_reader(socket, self._socket_ready, socket, Ready.R)
            if events & Wait.W:
                self._loop.add_writer(socket, self._socket_ready, socket, Ready.W)
            if longest is not None:
                self._timer = self._loop.call_later(longest, self._socket_ready, socket, Ready.NONE)

    def _socket_ready(self, socket: int, ready: Ready) -> None:
        self._loop.remove_reader(socket)
        self._loop.remove_writer(socket)
        if self._timer is not None:
            self._timer.cancel()
        self._loop.call_soon(self.resume, ready)


def current() -> LoopGreenlet | None:
    """The greenlet that the caller runs in, if any."""
    running = getcurrent()
    return running if isinstance(running, LoopGreenlet) else None


def on_thread(work: Callable[[], T]) -> T:
    """Run a blocking call without blocking the event loop."""
    running = current()
    if running is None:  # the caller runs on a thread already
        return work()
    future: asyncio.Future[T] = running.parent.switch(work)  # `resume` runs it on a thread, and comes back here
    return future.result()


def until_ready(socket: int, events: int, longest: float | None) -> int:
    """Wait for a socket; returns what it is ready for, nothing after `longest` seconds. `events` and the result are
    psycopg's `Wait` and `Ready`."""
    running = current()
    if running is not None:
        found: int = running.parent.switch((socket, events, longest))  # `resume` waits, and comes back here
        return found
    poll = select.poll()
    poll.register(socket, (select.POLLIN if events & Wait.R else 0) | (select.POLLOUT if events & Wait.W else 0))
    ready = next((found for _, found in poll.poll(None if longest is None else longest * 1000)), 0)
    return (Ready.R if ready & ~select.POLLOUT else 0) | (Ready.W if ready & select.POLLOUT else 0)
