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

from ..sql.database import Threads

T = TypeVar("T")


class Slots(Threads):
    """Runs at most `number` functions at once, started in order: a quick one on the event loop, any other on a
    thread."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self._free = self._number = number
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any], bool]] = deque()
        self._at_rest = asyncio.Event()

    def run(self, work: Callable[[], T], *, quick: bool = False) -> asyncio.Future[T]:
        """A function that has begun runs to its end, even if cancelled. A `quick` one uses `on_thread` for blocking
        calls."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append((done, work, quick))
        self._begin()
        return done

    async def rest(self) -> None:
        """Wait until all given functions have run."""
        while self._free < self._number:
            self._at_rest.clear()
            await self._at_rest.wait()

    def _begin(self) -> None:
        while self._free and self._waiting:
            done, work, quick = self._waiting.popleft()
            if done.cancelled():
                continue
            self._free -= 1
            if quick:
                OnLoop(self._loop, work, partial(self._tell, done)).resume()
            else:
                self._given.put((done, work))

    def _tell(self, done: asyncio.Future[Any], result: object, fault: BaseException | None) -> None:
        super()._tell(done, result, fault)
        self._free += 1
        self._begin()
        if self._free == self._number:
            self._at_rest.set()


class OnLoop(greenlet):  # type: ignore[misc]  # it has no annotations
    """A function that runs on the event loop as a greenlet. While it waits, the loop runs other things.

    Only code outside the greenlet uses the loop, and it is resumed only by a `call_soon` of its own: libuv keeps
    pointers to its stack around a socket's callbacks, and a greenlet would overwrite that stack.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[], object],
        ended: Callable[[object, BaseException | None], None],
    ) -> None:
        """`ended` gets the result and the exception."""
        super().__init__(work)
        self._loop = loop
        self._ended = ended

    def resume(self, *values: object) -> None:
        """Called outside the greenlet: run it until it waits again or ends. It gets `values` as what it waited for, and
        hands over its result, a blocking call, or a socket to wait for."""
        handed_over: Any = None
        fault: BaseException | None = None
        try:
            handed_over = self.switch(*values)
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            fault = exc
        if self.dead:
            self._ended(handed_over, fault)
            del handed_over, fault  # a fault's traceback holds this frame
        elif callable(handed_over):
            self._loop.run_in_executor(None, handed_over).add_done_callback(self.resume)
        else:
            socket, events = handed_over
            if events & Wait.R:
                self._loop.add_reader(socket, self._is_ready, socket, Ready.R)
            if events & Wait.W:
                self._loop.add_writer(socket, self._is_ready, socket, Ready.W)

    def _is_ready(self, socket: int, ready: Ready) -> None:
        self._loop.remove_reader(socket)
        self._loop.remove_writer(socket)
        self._loop.call_soon(self.resume, ready)

    def until_ready(self, socket: int, events: int) -> int:
        """Called inside: wait for the socket. Both numbers are psycopg's."""
        ready: int = self.parent.switch((socket, events))
        return ready


def here() -> OnLoop | None:
    """The current `OnLoop`, if the caller runs in one."""
    current = getcurrent()
    return current if isinstance(current, OnLoop) else None


def on_thread(work: Callable[[], T]) -> T:
    """Run a blocking call without blocking the event loop."""
    on_loop = here()
    if on_loop is None:
        return work()
    done: asyncio.Future[T] = on_loop.parent.switch(work)  # `resume` runs it on a thread, and comes back here
    return done.result()


def until_ready(socket: int, events: int) -> int:
    """Wait for a socket; returns what it is ready for."""
    on_loop = here()
    if on_loop is not None:
        return on_loop.until_ready(socket, events)
    waiting = select.poll()
    waiting.register(socket, (select.POLLIN if events & Wait.R else 0) | (select.POLLOUT if events & Wait.W else 0))
    ready = waiting.poll()[0][1]
    return (Ready.R if ready & ~select.POLLOUT else 0) | (Ready.W if ready & select.POLLOUT else 0)
