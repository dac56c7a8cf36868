"""The process table: every CLI process of one proxy, how many there may be, and which one is evicted for another.

- At most `max_processes`, and no more than `max_memory` holds by measurement; one may always run.
- To make room, idle processes are evicted: spares first, then the least recently used. A busy one never is.
- Places are given in the order of asking.
- Only `max_spawns` start at once. Every wait is bounded by `spawn_timeout`; then it is `QueueFull`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from .... import logs
from ....errors import ClaudeUnavailable, QueueFull
from ....settings import Settings
from ....tasks import Average
from ...base import Process
from .guardian import Guardian
from .process import ClaudeProcess, Launch

log = logs.get(__name__)

T = TypeVar("T")

# A start costs a core for 0.3 (2.1.329) to 1 s (1.0.120), and says nothing before its first prompt.
START_TIME = 2.0
# Seconds a process is assumed to be in use before any turn was measured.
FIRST_GUESS = 2.0
# Seconds between two measurements of memory while processes are used.
WEIGH_EVERY = 10.0
# A spare may evict a process that has been idle for `STALE` seconds, if there are at least `MANY` processes. While more
# agents talk than there are places, no process stays idle that long.
STALE = 5.0
MANY = 4
# A spare is started only after so many seconds without contention: with many active agents a core is always free for
# a moment.
CALM = 0.5
# Exit codes of idle processes that ended by themselves, kept until their session is used again.
REMEMBERED = 1024

OnSpawn = Callable[[int, str | None, Path], None]  # pid, start time, working directory


class ProcessTable:
    """The processes that there are, by session, and how many more there may be.

    `on_first_output` is told how many seconds one took to its first word.
    """

    def __init__(
        self,
        settings: Settings,
        on_spawn: OnSpawn,
        on_exit: Callable[[int], None],
        on_first_output: Callable[[float], None],
    ) -> None:
        self.processes: dict[str, ClaudeProcess] = {}
        self.spares: dict[
            ClaudeProcess, asyncio.Task[bool | None]
        ] = {}  # idle, not yet claimed by a session; with their start-up
        self.ended: dict[str, int] = {}  # sessions whose idle process ended by itself, and with which exit code
        self.closed = False
        self._settings = settings
        self._guardian = Guardian()
        self._on_spawn = on_spawn
        self._on_exit = on_exit
        self._on_first_output = on_first_output
        self.in_use: dict[ClaudeProcess, float] = {}  # processes in use, since when
        self._ending: set[ClaudeProcess] = set()
        self.reserved = 0  # places of processes that are being spawned
        self._queued = 0  # callers that wait for a place or for a start
        self._waiters: deque[object] = deque()  # callers that wait for a place, in order
        self._changed = asyncio.Event()  # set at every change; a waiter clears it first
        self._spawns = asyncio.Semaphore(settings.max_spawns)
        self._tasks: set[asyncio.Task[Any]] = set()  # starts, start-ups and evictions in flight
        self._use = Average(FIRST_GUESS)
        self._memory = Memory(settings.max_memory)
        self._used = asyncio.Event()  # since the processes were weighed
        self.reap_now = asyncio.Event()  # set when an idle process may have become unusable
        self.services: dict[str, asyncio.Task[None]] = {}

    # --- who has what

    def take(self, process: ClaudeProcess) -> None:
        self.in_use[process] = time.monotonic()
        self._changed.set()

    def give_back(self, process: ClaudeProcess, *, again: bool = True) -> None:
        process.last_used = time.monotonic()
        if (since := self.in_use.pop(process, None)) is not None:
            self._use.add(process.last_used - since)
        if not again and not process.waiting:
            process.last_used -= max(0.0, self._settings.process_idle - STALE)
            self.reap_now.set()  # the reaper looks again how long each may stay
        self._used.set()
        self._changed.set()

    def let_go(self, process: ClaudeProcess) -> None:
        """Give back a process that could not be used."""
        self.in_use.pop(process, None)
        self.reap_now.set()
        self._changed.set()

    def note(self, process: ClaudeProcess) -> None:
        """Report a process and its directory; again when a session has claimed a spare."""
        self._on_spawn(process.pid, process.start_time, process.cwd)

    def keep_ahead(self, process: ClaudeProcess) -> None:
        """Keep a process that was taken as a spare: it starts up now."""
        booted = self.spares[process] = self._own(process.boot())
        booted.add_done_callback(lambda _: self.reap_now.set())
        self.let_go(process)

    def unusable(self, process: ClaudeProcess) -> bool:
        """Whether this idle process can never serve a turn again."""
        booted = self.spares.get(process)
        return not process.usable and not process.waiting and (booted is None or booted.done())

    def busy(self) -> int:
        return len(self.in_use)

    def all(self) -> set[ClaudeProcess]:
        return {*self.processes.values(), *self.in_use, *self._ending}

    def idle(self) -> list[ClaudeProcess]:
        return [process for process in self.processes.values() if process not in self.in_use]

    def ending(self, session_id: str | None = None) -> list[ClaudeProcess]:
        """Processes that are being closed and are not dead yet: of this session, or all."""
        return [process for process in self._ending if session_id in (None, process.launch.session_id)]

    def weight(self) -> int:
        """Bytes of all processes, as far as measured; 0 without a limit, which disables measuring."""
        return 0 if self._memory.budget is None else self._memory.of(process.pid for process in self.all())

    def each(self) -> list[Process]:
        """Every process that serves a session or may, and what it weighs as last measured."""
        clock = time.time() - time.monotonic()
        told = []
        for session_id, process in self.processes.items():
            state: Literal["busy", "warm", "spare"] = "spare" if process in self.spares else "warm"
            since = process.last_used
            if process in self.in_use:
                state, since = "busy", self.in_use[process]
            serves = None if state == "spare" else session_id
            told.append(Process(process.pid, state, serves, clock + since, self._memory.measured(process.pid)))
        return told

    # --- one more

    async def spawn(self, launch: Launch) -> ClaudeProcess:
        """A new process, in use. Raises QueueFull, ClaudeUnavailable, and what `ClaudeProcess.spawn` does."""
        self._queued += 1
        try:
            await self._reserve()
            try:
                await self._permit()
            except BaseException:
                self._free()
                raise
        finally:
            self._queued -= 1
            self._changed.set()
        process = await self._begin(launch)
        if self.closed:
            await self.close(process)
            raise _closed()
        self.serve("reaper", self._reap)
        if self._memory.budget is not None:
            self.serve("scales", self._weigh)
        return process

    async def given_back(self, process: ClaudeProcess, within: float) -> None:
        """Wait until it is no longer in use, for at most `within` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while process in self.in_use:
                    await self._change()

    async def spawn_if_free(self, launch: Callable[[], Coroutine[None, None, Launch]]) -> ClaudeProcess | None:
        """A new process, in use, at the lowest priority. None where there is no place for it.

        It waits while every core serves a turn, which it would delay. It may take the place of an idle
        process out of many, once that has not been used for `STALE` seconds.
        """
        while True:
            await self._uncontended()
            if self.has_room():
                break
            least = self._candidate()
            if least is None:
                await self._change()
            elif len(self.processes) < MANY or least in self.spares:
                return None
            elif (left := least.last_used + STALE - time.monotonic()) > 0:
                await asyncio.sleep(left)
            else:
                await self.retire(least)
        self.reserved += 1
        await self._spawns.acquire()  # does not wait: it was free
        try:
            wanted = await launch()
        except BaseException:
            self._spawns.release()
            self._free()
            raise
        return await self._begin(wanted)

    async def _uncontended(self) -> None:
        """Wait for `CALM` seconds without contention."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALM):
                    while not self._contended():
                        await self._change()
            if not self._contended():
                return
            await self._change()

    def _contended(self) -> bool:
        """Contention: a caller waits for a place or a start, or running turns use every core."""
        return bool(self._queued) or self._spawns.locked() or self.busy() >= self._settings.max_spawns

    async def _begin(self, launch: Launch) -> ClaudeProcess:
        """Start a process in the reserved place, with the acquired permit; both are released."""
        try:
            try:
                process = await ClaudeProcess.spawn(launch, self._settings, self._guardian, self.reap_now.set)
                self.note(process)
            except BaseException:
                self._spawns.release()
                raise
            self._own(self._release_when_started(process))
            self.processes[launch.session_id] = process
            self.take(process)
            return process
        finally:
            self._free()

    def _free(self) -> None:
        self.reserved -= 1
        self._changed.set()

    async def _reserve(self) -> None:
        """A place for one more process: a free one, that of an idle one, or the first given back."""
        mine = object()
        self._waiters.append(mine)
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                while not self.closed and not (self._waiters[0] is mine and self.has_room()):
                    await self._make_room()
            if self.closed:
                raise _closed()
            self.reserved += 1
        except TimeoutError as exc:
            raise self._full("every Claude CLI is busy") from exc
        finally:
            self._waiters.remove(mine)
            self._changed.set()

    async def _make_room(self) -> None:
        """Evict an idle process unless enough evictions are in flight; then wait for any change.

        The place to come may be another one's than that of the evicted process.
        """
        short = not self.has_room() and len(self._ending) < len(self._waiters)
        if short and (least := self._candidate()) is not None:
            self._leave(least)
            self._own(self.retire(least))
        await self._change()

    async def _permit(self) -> None:
        """A start costs a core for 0.3 to 1 s; more at once than there are cores only make each other late."""
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                await self._spawns.acquire()
        except TimeoutError as exc:
            raise self._full("too many Claude CLIs are being started") from exc
        if self.closed:
            self._spawns.release()
            raise _closed()

    async def _release_when_started(self, process: ClaudeProcess) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(START_TIME):
                await process.started.wait()
            if process.alive:
                self._on_first_output(time.monotonic() - began)
        except TimeoutError:
            return  # no prompt yet, or stuck: it does not cost a core any more
        finally:
            self._spawns.release()
            self._used.set()
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def has_room(self) -> bool:
        """Room for one more process, by count and by memory."""
        pids = {process.pid for process in self.all()}
        few = len(pids) + self.reserved < self._settings.max_processes
        return few and self._memory.room(pids, self.reserved)

    def _candidate(self) -> ClaudeProcess | None:
        """The next process to evict: one that has ended by itself, a spare, or the least recently used."""
        return min(self.idle(), key=lambda one: (one.alive, one not in self.spares, one.last_used), default=None)

    def _full(self, why: str) -> QueueFull:
        """With the time by which the present queue should have been served."""
        wait = self._use.value * (self._queued + 1) / max(1, self.busy())
        return QueueFull(f"{why}: try again later, or raise max_processes and max_memory", retry_after=max(1.0, wait))

    # --- one less

    async def close(self, process: ClaudeProcess) -> None:
        """End it. Its place is free when it is dead, not before; until then it is among the `ending` ones."""
        died = process.died
        self._leave(process)
        try:
            await process.close()
        finally:
            self._ending.discard(process)
            self.let_go(process)
            if process.returncode is not None:
                self._on_exit(process.pid)
                if died:
                    self.ended[process.launch.session_id] = process.returncode
                    while len(self.ended) > REMEMBERED:
                        del self.ended[next(iter(self.ended))]

    def _leave(self, process: ClaudeProcess) -> None:
        """Take it out of the table, so that it is not given out again."""
        session_id = process.launch.session_id
        if self.processes.get(session_id) is process:
            del self.processes[session_id]
        self.spares.pop(process, None)
        self._ending.add(process)

    async def retire(self, process: ClaudeProcess) -> None:
        """Close it. A process that cannot be killed is logged, not raised."""
        try:
            await self.close(process)
        except ClaudeUnavailable as exc:  # it cannot be killed; go on with the others
            log.warning("process_left", pid=process.pid, error=exc.message)

    async def close_all(self) -> None:
        """End every process, at once and waited for. Nothing can be spawned afterwards."""
        self.closed = True
        self._changed.set()  # wakes the callers that wait for a place
        for service in self.services.values():
            service.cancel()
        if self.services:
            await asyncio.wait(self.services.values())
        while self.reserved or self.all():
            await asyncio.gather(*(self.retire(process) for process in self.all()))
            if self.reserved:  # a spawn is in flight: it ends in the table or in an error
                await self._change()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._guardian.close()

    # --- in the background

    def _own(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Bounded work, awaited by `close_all`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_ended)
        return task

    def serve(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run this service once, until `close_all`."""
        running = self.services.get(name)
        if not self.closed and (running is None or running.done()):
            service = self.services[name] = asyncio.create_task(work())
            service.add_done_callback(_ended)

    async def _weigh(self) -> None:
        """Measure memory after processes were used; evict idle ones while all together are over the limit."""
        while True:
            await self._used.wait()
            self._used.clear()
            # One that is still starting has hardly any memory yet.
            await self._memory.weigh({process.pid for process in self.all() if process.started.is_set()})
            self._changed.set()  # there may be more room now
            while self._memory.over({process.pid for process in self.all()}):
                if (least := self._candidate()) is None:
                    break
                await self.retire(least)
            await asyncio.sleep(WEIGH_EVERY)

    async def _reap(self) -> None:
        """Close processes that were idle for `process_idle`, and unusable ones at once."""
        shortest = min(self._settings.process_idle, self._settings.tool_timeout)
        while True:
            self.reap_now.clear()
            for process in self.idle():
                # Checked again: the process may have been taken while another one was closed.
                if process not in self.in_use and self._time_left(process) <= 0:
                    await self.retire(process)
            left = [self._time_left(process) for process in self.idle()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min([*left, shortest]))):
                    await self.reap_now.wait()

    def _time_left(self, process: ClaudeProcess) -> float:
        """How long this idle process may stay, in seconds."""
        if self.unusable(process):
            return 0.0
        limit = self._settings.tool_timeout if process.waiting else self._settings.process_idle
        return process.last_used + limit - time.monotonic()


def _ended(task: asyncio.Task[Any]) -> None:
    fault = None if task.cancelled() else task.exception()
    if fault is not None:
        log.error("task_failed", exc_info=fault)


def _closed() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down")


# --- How much memory the CLIs take, against a budget

# On Linux by proportional set sizes, so that what they share counts once; elsewhere by what each has for itself.

# One more CLI beside others, while none was weighed: 10 idle ones were 1,156 MB, one alone 186 MB (2.1.329).
FIRST_WEIGHT = 200 * 1024 * 1024


class Memory:
    """The weights last measured. One that was not weighed yet counts as the mean of the others."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._weights: dict[int, int] = {}
        self._expected = FIRST_WEIGHT

    async def weigh(self, pids: Collection[int]) -> None:
        """Measure these processes with all that they started, and forget the others. Costs 4 to 5 ms of a core each."""
        self._weights = await asyncio.to_thread(weigh, pids)
        if self._weights:
            self._expected = sum(self._weights.values()) // len(self._weights)

    def of(self, pids: Iterable[int]) -> int:
        """Bytes, as far as measured."""
        return sum(self._weights.get(pid, self._expected) for pid in pids)

    def measured(self, pid: int) -> int:
        """Bytes of one; 0 where it was not weighed yet."""
        return self._weights.get(pid, 0)

    def over(self, pids: Collection[int]) -> bool:
        return self.budget is not None and self.of(pids) > self.budget

    def room(self, pids: Collection[int], starting: int) -> bool:
        """Is there room for one more beside these and those being started? For the first there always is."""
        if self.budget is None or not (pids or starting):
            return True
        return self.of(pids) + (starting + 1) * self._expected <= self.budget


def weigh(pids: Collection[int]) -> dict[int, int]:
    """Bytes of each process with all its descendants; a process that is gone is left out."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    living = {}
    for process in psutil.process_iter(["ppid"]):
        living[process.pid] = process
        children[process.info["ppid"]].append(process)
    found = {}
    for pid in pids:
        family, sizes = [living[pid]] if pid in living else [], []
        while family:
            one = family.pop()
            family += children.pop(one.pid, ())  # once: a pid that was given anew meanwhile could close a circle
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                info = one.memory_full_info()
                sizes.append(getattr(info, "pss", info.uss))
        if sizes:
            found[pid] = sum(sizes)
    return found
