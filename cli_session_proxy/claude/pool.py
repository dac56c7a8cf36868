"""Many processes: at most one a session, at most `max_processes` in all, the idle ones kept warm.

- A process given out by `checkout` belongs to its caller until `checkin` or `discard`.
- `discard` returns when the process is dead and reaped, so that its transcript may be rewritten then.
- Every wait is bounded by `spawn_timeout`; what cannot be had in time is `QueueFull`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from ..errors import ClaudeUnavailable, QueueFull, SessionBusy
from ..settings import Settings
from .process import ClaudeProcess, Launch

log = structlog.get_logger(__name__)

RETRY_AFTER = 2.0  # seconds a client should wait when everything is busy: most turns are over by then

# A start costs a core for 0.3 (2.1.329) to 1 s (1.0.120), and says nothing before its first prompt.
START_TIME = 2.0


class Pool:
    """The processes of one proxy. Use it on one event loop; `close` ends them all.

    `born` is told the pid and start time of each before it gets a prompt, `reaped` the pid when it is gone,
    `started` how many seconds it took to its first word.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        born: Callable[[int, str | None], None] = lambda _pid, _start: None,
        reaped: Callable[[int], None] = lambda _pid: None,
        started: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._settings = settings
        self._born = born
        self._reaped = reaped
        self._started = started
        self._processes: dict[str, ClaudeProcess] = {}
        self._out: set[ClaudeProcess] = set()
        self._dying: set[ClaudeProcess] = set()
        self._reserved = 0  # places taken by processes that are being spawned
        self._changed = asyncio.Event()  # set at every change; who waits clears it first
        self._sessions: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._spawns = asyncio.Semaphore(settings.max_spawns)
        self._starting: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._closed = False

    def peek(self, session_id: str) -> ClaudeProcess | None:
        """The session's process, in use or idle."""
        return self._processes.get(session_id)

    async def checkout(self, launch: Launch) -> tuple[ClaudeProcess, bool]:
        """A process for the session, and whether it is a warm one. Raises QueueFull, SessionBusy, ClaudeUnavailable.

        A session's idle process is reused when the launch asks for the same; otherwise it is closed first.
        """
        async with self._session(launch.session_id):
            current = self._processes.get(launch.session_id)
            if current is not None and current in self._out:
                raise SessionBusy("a turn of this session is still running: wait for it")
            if current is not None and current.usable and current.launch.signature == launch.signature:
                self._out.add(current)
                try:
                    if await current.adapt(launch):
                        return current, True
                except BaseException:
                    self._out.discard(current)  # not usable any more: closed at the next use, or by the reaper
                    raise
            await self._discard(launch.session_id)
            process = await self._spawn(launch)
            if self._reaper is None or self._reaper.done():
                self._reaper = asyncio.create_task(self._reap())
            return process, False

    async def take_waiting(self, launch: Launch) -> ClaudeProcess | None:
        """The session's process, where it waits for results and would go on as the launch asks; else None."""
        async with self._session(launch.session_id):
            current = self._processes.get(launch.session_id)
            if current is None or current in self._out or not current.waiting:
                return None
            same = current.launch.signature == launch.signature and current.launch.offers == launch.offers
            if not same or current.launch.system_prompt != launch.system_prompt:
                return None
            self._out.add(current)
            return current

    def counts(self) -> tuple[int, int]:
        """Processes in use, and idle ones that are kept warm."""
        return len(self._out), len(self._idle())

    async def checkin(self, process: ClaudeProcess) -> None:
        """Give it back after a turn. One that cannot serve another turn of its session is closed (waited for).

        One that waits for its client's results may do so for `tool_timeout`; its place may be needed before.
        """
        self._out.discard(process)
        process.last_used = time.monotonic()
        self._changed.set()
        fits = (process.usable or process.waiting) and process.session_id == process.launch.session_id
        if self._closed or not fits:
            await self._close(process)

    async def discard(self, session_id: str) -> None:
        """Close and forget the session's process, in use or not. It is dead when this returns."""
        async with self._session(session_id):
            await self._discard(session_id)

    async def close(self) -> None:
        """End every process, at once and waited for. Nothing can be checked out afterwards."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        while everything := self._all():
            await asyncio.gather(*(self._close(process) for process in everything))
        async with asyncio.timeout(self._settings.spawn_timeout):
            while self._reserved:  # being spawned: closed by the spawn itself
                await self._change()
        if self._starting:
            await asyncio.wait(self._starting)

    # --- one session at a time

    @asynccontextmanager
    async def _session(self, session_id: str) -> AsyncIterator[None]:
        lock = self._sessions.setdefault(session_id, asyncio.Lock())
        self._waiting[session_id] += 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[session_id] -= 1
            if not self._waiting[session_id]:
                del self._waiting[session_id], self._sessions[session_id]

    async def _discard(self, session_id: str) -> None:
        doomed = [process for process in self._dying if process.launch.session_id == session_id]
        current = self._processes.get(session_id)
        for process in (*doomed, *([current] if current else [])):
            await self._close(process)

    async def _close(self, process: ClaudeProcess) -> None:
        """Its place is free when it is dead, not before; until then `_dying` knows it."""
        session_id = process.launch.session_id
        if self._processes.get(session_id) is process:
            del self._processes[session_id]
        self._dying.add(process)
        try:
            await process.close()
            self._reaped(process.pid)
        finally:
            self._dying.discard(process)
            self._out.discard(process)
            self._changed.set()

    # --- places

    async def _spawn(self, launch: Launch) -> ClaudeProcess:
        await self._reserve()
        try:
            await self._permit()
            try:
                process = await ClaudeProcess.spawn(launch, self._settings)
                self._born(process.pid, process.start_time)
            except BaseException:
                self._spawns.release()
                raise
            task = asyncio.create_task(self._release_when_started(process))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
            self._processes[launch.session_id] = process
            self._out.add(process)
        finally:
            self._reserved -= 1
            self._changed.set()
        if self._closed:
            await self._close(process)
            raise _closed()
        return process

    async def _permit(self) -> None:
        """A start costs a core for 0.3 to 1 s; more at once than there are cores only make each other late."""
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                await self._spawns.acquire()
        except TimeoutError as exc:
            raise _full("too many Claude CLIs are being started") from exc

    async def _release_when_started(self, process: ClaudeProcess) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(START_TIME):
                await process.started.wait()
            if process.alive:
                self._started(time.monotonic() - began)
        except TimeoutError:
            return  # no prompt yet, or stuck: it does not cost a core any more
        finally:
            self._spawns.release()

    async def _reserve(self) -> None:
        """A place for one more process: a free one, the least recently used idle one's, or the first given back."""
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                while self._count() >= self._settings.max_processes and not self._closed:
                    idle = self._idle()
                    if idle:
                        await self._close(min(idle, key=lambda process: process.last_used))
                    else:
                        await self._change()
        except TimeoutError as exc:
            raise _full("every Claude CLI is busy") from exc
        if self._closed:
            raise _closed()
        self._reserved += 1

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _count(self) -> int:
        return len(self._all()) + self._reserved

    def _all(self) -> set[ClaudeProcess]:
        return {*self._processes.values(), *self._out, *self._dying}

    def _idle(self) -> list[ClaudeProcess]:
        return [process for process in self._processes.values() if process not in self._out]

    # --- time

    async def _reap(self) -> None:
        """Close what has been idle for `process_idle`, and what died while idle."""
        while True:
            for process in self._idle():
                # Asked again: the process may have been checked out while another one was closed.
                if process not in self._out and self._time_left(process) <= 0:
                    await self._reap_one(process)
            left = [self._time_left(process) for process in self._idle()]
            shortest = min(self._settings.process_idle, self._settings.tool_timeout)
            await asyncio.sleep(max(0.05, min([*left, shortest])))

    def _time_left(self, process: ClaudeProcess) -> float:
        """How long this idle process may stay, in seconds."""
        if not process.usable and not process.waiting:
            return 0.0
        limit = self._settings.tool_timeout if process.waiting else self._settings.process_idle
        return process.last_used + limit - time.monotonic()

    async def _reap_one(self, process: ClaudeProcess) -> None:
        try:
            await self._close(process)
        except ClaudeUnavailable as exc:  # it cannot be killed; the others still have to be looked after
            log.warning("process_left", pid=process.pid, error=exc.message)


def _full(why: str) -> QueueFull:
    return QueueFull(f"{why}: try again soon, or raise max_processes", retry_after=RETRY_AFTER)


def _closed() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down")
