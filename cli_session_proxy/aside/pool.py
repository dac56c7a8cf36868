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
# The same for running turns and dumps (checking an answer, showing a turn): more than can run at once, so none is
# refused.
BEGUN_WAITING = 10_000
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
    """Processes of one kind. A call's function is importable by its name; arguments and result can be pickled."""

    def __init__(self, *, most: int, seconds: float, memory: int, waiting: int = WAITING) -> None:
        self._seconds = seconds
        self._memory = memory
        self._free = asyncio.Semaphore(most)
        self._limit = most + waiting
        self._calls = 0
        self._quiet = asyncio.Event()  # no call is running
        self._quiet.set()
        self._idle: dict[Helper, asyncio.TimerHandle] = {}
        self._busy: set[Helper] = set()
        self._ahead: asyncio.Task[Helper] | None = None  # a process started in advance
        self._tasks = Tasks(expected=(OSError,))
        self._closed = False

    @property
    def processes(self) -> int:
        return len(self._idle) + len(self._busy)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, or what it raises. Raises `OutOfBoundsError`, `QueueFull`, `ClaudeUnavailable`."""
        if self._calls >= self._limit:
            raise QueueFull(
                f"{self._calls} large requests are being read: send this one again later",
                retry_after=RETRY_AFTER,
            )
        self._calls += 1
        self._quiet.clear()
        try:
            given = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
            async with self._free:
                answer = await self._answer(given)
            if len(answer) <= SMALL:
                done, result = _unpacked(answer)
            else:
                done, result = await asyncio.to_thread(_unpacked, answer)
            if done:
                return result  # type: ignore[no-any-return]  # the function's own
            if isinstance(result, MemoryError):
                raise OutOfBoundsError(f"it takes more than {self._memory // 1024**2} MiB of memory") from result
            raise result
        finally:
            self._calls -= 1
            if not self._calls:
                self._quiet.set()

    def expect(self) -> None:
        """Start a process in advance for a coming call."""
        starting = self._ahead is not None and not self._ahead.done()
        if not (self.processes or starting or self._closed):
            self._ahead = self._tasks.own(Helper.start(self._memory))
            self._ahead.add_done_callback(self._unclaimed)

    async def _answer(self, given: bytes) -> bytes:
        idle = await self._kept()
        try:
            return await self._asked(idle or await self._started(), given)
        except Ended as exc:
            # An idle process may have died before the call. If the second one dies, the call is the cause.
            if idle is None or exc.took_too_long or self._closed:
                raise self._why(exc) from exc
        try:
            return await self._asked(await self._started(), given)
        except Ended as exc:
            raise self._why(exc) from exc

    async def _asked(self, helper: Helper, given: bytes) -> bytes:
        self._busy.add(helper)
        fit = False
        try:
            async with asyncio.timeout(self._seconds * PATIENCE):
                answer = await helper.call(given, self._seconds)
            fit = len(given) + len(answer) <= LARGE
            return answer
        except TimeoutError as exc:
            raise self._too_long() from exc
        finally:
            self._busy.discard(helper)
            if fit:
                self._keep(helper)
            else:
                self._tasks.own(helper.end())

    def _why(self, ended: Ended) -> Exception:
        if self._closed:
            return _closing()
        log.warning("helper_ended", by=ended.by)
        return self._too_long() if ended.took_too_long else OutOfBoundsError("it ends the process that does it")

    async def _kept(self) -> Helper | None:
        """An idle or starting process, if any."""
        if self._ahead is not None and not self._idle:
            await asyncio.wait([self._ahead])
        if not self._idle:
            return None
        helper, timer = self._idle.popitem()
        timer.cancel()
        return helper

    async def _started(self) -> Helper:
        if self._closed:
            raise _closing()
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

    def _too_long(self) -> OutOfBoundsError:
        return OutOfBoundsError(f"it takes more than {self._seconds:g} s of processor time")

    def kill(self) -> None:
        """End every process at once. Nothing is waited for; any thread may ask for it."""
        for helper in [*self._idle, *self._busy]:
            helper.kill()

    async def close(self) -> None:
        """Kill them all and wait for it."""
        self._closed = True
        for helper in list(self._idle):
            self._idle[helper].cancel()
            self._retire(helper)
        for helper in self._busy:
            helper.kill()
        await self._quiet.wait()  # callers get an error, and end their processes
        await self._tasks.stop()


def _unpacked(answer: bytes) -> tuple[bool, Any]:
    done, result = pickle.loads(answer)  # noqa: S301 - our own helper wrote it
    return done, result


def _closing() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down: send this again in a moment", retry_after=5.0)


class Aside:
    """One for each engine. Use it on one event loop."""

    def __init__(self) -> None:
        self.reading = Helpers(most=PROCESSES, seconds=READING_SECONDS, memory=READING_MEMORY)
        self.checking = Helpers(most=PROCESSES, seconds=CHECKING_SECONDS, memory=CHECKING_MEMORY, waiting=BEGUN_WAITING)
        self.showing = Helpers(most=1, seconds=READING_SECONDS, memory=READING_MEMORY, waiting=BEGUN_WAITING)
        self._threads: ThreadPoolExecutor | None = None
        self._in_threads = 0

    async def thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, or what it raises. Raises `QueueFull`."""
        if self._in_threads >= THREADS + WAITING:
            raise QueueFull(
                f"{self._in_threads} requests are being read: send this one again later",
                retry_after=RETRY_AFTER,
            )
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")
        self._in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments))
        finally:
            self._in_threads -= 1

    def kill(self) -> None:
        """See `Helpers.kill`."""
        for helpers in (self.reading, self.checking, self.showing):
            helpers.kill()

    async def close(self) -> None:
        """End all threads and processes. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        await asyncio.gather(*(helpers.close() for helpers in (self.reading, self.checking, self.showing)))
