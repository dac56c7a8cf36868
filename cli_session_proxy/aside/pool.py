"""Runs work that would block the event loop.

- `thread`: Python code over a request of middling size. It shares the interpreter with the event loop, which gets its
  turn every few milliseconds; one long call into C (`json.loads` of a large body) would block both.
- `reading`, `checking`, `showing`: helper processes, for large work and work that may never end. One that exceeds its
  processor time or memory is killed; the next call gets a new one.

Threads and processes start at their first use, queues are bounded, and `close` leaves no process behind.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .. import logs
from ..errors import ClaudeUnavailable, QueueFull
from ..tasks import Tasks
from .process import Ended, Helper

log = logs.get(__name__)

T = TypeVar("T")

# Threads compete with the event loop for the interpreter: each one may delay it by 5 ms.
THREADS = 2
# The most calls that wait for a thread or a helper, each with its body in memory. More get 503 with Retry-After.
WAITING = 64
# The same for calls of running turns and of dumps: more than there can be at once, so none is refused.
NEVER_FULL = 10_000
# Helper processes for reading, and for checking: while one call uses up its time, the other process serves the rest.
PROCESSES = 2
# Seconds of processor time. A body, or a turn, of 64 MiB takes about 2; JSON of a megabyte is checked in 0.05.
READING_SECONDS = 10.0
CHECKING_SECONDS = 1.0
# Bytes of address space: an image of 48 MiB is in memory about six times while its body is read.
READING_MEMORY = 2 * 1024**3
CHECKING_MEMORY = 1024**3
# Wall-clock time of a call on a loaded machine, as a multiple of its processor time.
PATIENCE = 20.0
# Seconds that an idle helper is kept.
IDLE = 60.0
# After a call of more bytes the process is large: it is ended instead of kept.
LARGE = 8 * 1024**2
# Bytes of an answer that are unpacked on the event loop, in about a millisecond.
SMALL = 32 * 1024
RETRY_AFTER = 1.0


class OutOfBoundsError(Exception):
    """The call exceeded its time or memory. The message says which: "it takes more than …"."""


class Helpers:
    """Processes of one kind. A call's function is importable by its name; arguments and result can be pickled.

    `most`: how many calls run at once. `waiting`: how many more may wait. `seconds` of processor time and bytes of
    `memory`: what one call may take.
    """

    def __init__(self, *, most: int, seconds: float, memory: int, waiting: int = WAITING) -> None:
        self._seconds = seconds
        self._memory = memory
        self._free_places = asyncio.Semaphore(most)
        self._most_calls = most + waiting
        self._calls = 0
        self._no_calls = asyncio.Event()  # is set while no call waits or runs
        self._no_calls.set()
        self._idle: dict[Helper, asyncio.TimerHandle] = {}
        self._busy: set[Helper] = set()
        self._ahead: asyncio.Task[Helper] | None = None  # a process started in advance
        self._tasks = Tasks(expected=(OSError,))
        self._closed = False

    @property
    def processes(self) -> int:
        return len(self._idle) + len(self._busy)

    async def call(self, function: Callable[..., T], *arguments: Any, accepted: bool = False) -> T:
        """The function's result, or what it raises. Raises `OutOfBoundsError`, `QueueFull`, `ClaudeUnavailable`.

        `accepted`: for a turn that was accepted. Such a call is never refused: there are as many as turns run.
        """
        if self._calls >= self._most_calls and not accepted:
            raise QueueFull(
                f"{self._calls} large requests are being read: send this one again later",
                retry_after=RETRY_AFTER,
            )
        self._calls += 1
        self._no_calls.clear()
        try:
            pickled = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
            async with self._free_places:
                answer = await self._answer(pickled)
            # (True, the result) or (False, the exception), written by our own helper
            if len(answer) <= SMALL:
                returned, result = pickle.loads(answer)  # noqa: S301
            else:
                returned, result = await asyncio.to_thread(pickle.loads, answer)
            if returned:
                return result  # type: ignore[no-any-return]  # the function's own
            if isinstance(result, MemoryError):
                raise OutOfBoundsError(f"it takes more than {self._memory // 1024**2} MiB of memory") from result
            raise result
        finally:
            self._calls -= 1
            if not self._calls:
                self._no_calls.set()

    def expect(self) -> None:
        """Start a process in advance for a coming call."""
        starting = self._ahead is not None and not self._ahead.done()
        if not (self.processes or starting or self._closed):
            self._ahead = self._tasks.own(Helper.start(self._memory))
            self._ahead.add_done_callback(self._unclaimed)

    async def _answer(self, pickled: bytes) -> bytes:
        """The pickled answer to a pickled call, from an idle process if there is one, else from a new one."""
        if self._ahead is not None and not self._idle:
            await asyncio.wait([self._ahead])
        idle: Helper | None = None
        if self._idle:
            idle, timer = self._idle.popitem()
            timer.cancel()
        try:
            if idle is not None:
                try:
                    return await self._call(idle, pickled)
                except Ended as exc:
                    if exc.took_too_long or self._closed:
                        raise
            # An idle process may have died before the call. If a new one ends, too, the call is the cause.
            return await self._call(await self._started(), pickled)
        except Ended as exc:
            if self._closed:
                raise _closing_error() from exc
            log.warning("helper_ended", by=exc.by)
            if exc.took_too_long:
                raise self._too_long_error() from exc
            raise OutOfBoundsError("it ends the process that does it") from exc

    async def _call(self, helper: Helper, pickled: bytes) -> bytes:
        self._busy.add(helper)
        is_reusable = False
        try:
            async with asyncio.timeout(self._seconds * PATIENCE):
                answer = await helper.call(pickled, self._seconds)
            is_reusable = len(pickled) + len(answer) <= LARGE
            return answer
        except TimeoutError as exc:
            raise self._too_long_error() from exc
        finally:
            self._busy.discard(helper)
            if is_reusable:
                self._keep(helper)
            else:
                self._tasks.own(helper.end())

    async def _started(self) -> Helper:
        """A new process."""
        if self._closed:
            raise _closing_error()
        starting = self._tasks.own(Helper.start(self._memory))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._unclaimed)
            raise
        except OSError as exc:
            raise ClaudeUnavailable(f"no helper process can be started ({exc.strerror})", retry_after=5.0) from exc

    def _unclaimed(self, started: asyncio.Task[Helper]) -> None:
        """Keep a started process without a caller for the next call."""
        if not started.cancelled() and started.exception() is None:
            self._keep(started.result())

    def _keep(self, helper: Helper) -> None:
        if self._closed:
            self._tasks.own(helper.end())
            return
        self._idle[helper] = asyncio.get_running_loop().call_later(IDLE, self._retire, helper)

    def _retire(self, helper: Helper) -> None:
        if self._idle.pop(helper, None) is not None:
            self._tasks.own(helper.end())

    def _too_long_error(self) -> OutOfBoundsError:
        return OutOfBoundsError(f"it takes more than {self._seconds:g} s of processor time")

    def kill(self) -> None:
        """Kill every process without waiting for its end. Any thread may call this."""
        for helper in [*self._idle, *self._busy]:
            helper.kill()

    async def close(self) -> None:
        """Kill every process, and wait until all have ended."""
        self._closed = True
        for helper in list(self._idle):
            self._idle[helper].cancel()
            self._retire(helper)
        for helper in self._busy:
            helper.kill()
        await self._no_calls.wait()  # each running call now fails, and ends its process in `_call`
        await self._tasks.stop()


def _closing_error() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down: send this again in a moment", retry_after=5.0)


class Aside:
    """The threads and helper processes of one engine. Use it on one event loop.

    `reading`: large bodies and images. `checking`: answers, by a client's JSON Schema. `showing`: turns, for people.
    """

    def __init__(self) -> None:
        self.reading = Helpers(most=PROCESSES, seconds=READING_SECONDS, memory=READING_MEMORY)
        self.checking = Helpers(most=PROCESSES, seconds=CHECKING_SECONDS, memory=CHECKING_MEMORY, waiting=NEVER_FULL)
        self.showing = Helpers(most=1, seconds=READING_SECONDS, memory=READING_MEMORY, waiting=NEVER_FULL)
        self._threads: ThreadPoolExecutor | None = None
        self._thread_calls = 0

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function on a thread. Returns its result, or raises what it raises. Raises `QueueFull`."""
        if self._thread_calls >= THREADS + WAITING:
            raise QueueFull(
                f"{self._thread_calls} requests are being read: send this one again later",
                retry_after=RETRY_AFTER,
            )
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")
        self._thread_calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments))
        finally:
            self._thread_calls -= 1

    def kill(self) -> None:
        """Kill every helper process without waiting for its end. Any thread may call this."""
        for helpers in (self.reading, self.checking, self.showing):
            helpers.kill()

    async def close(self) -> None:
        """End all processes. A thread ends after its present call. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        await asyncio.gather(*(helpers.close() for helpers in (self.reading, self.checking, self.showing)))
