"""How many CLI processes there may be, and which one has to go when there are too many.

- At most `max_processes`, and no more than `max_memory` holds by measurement; one may always run.
- To make room, idle processes are evicted: spares first, then the least recently used. A busy one never is.
- Places are given in the order of asking.
- Only `max_spawns` start at once. Every wait is bounded by `spawn_timeout`; then it is `QueueFull`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from .... import logs
from ....domain.estimates import Average
from ....errors import ClaudeUnavailable, QueueFull
from ....settings import Settings
from .guardian import Guardian
from .memory import Memory
from .process import ClaudeProcess, Launch

log = logs.get(__name__)

T = TypeVar("T")

# A start costs a core for 0.3 (2.1.329) to 1 s (1.0.120), and says nothing before its first prompt.
START_TIME = 2.0
# How long a process is in use, while no turn was measured. Seconds.
FIRST_GUESS = 2.0
# How often the processes are weighed, at most, while they are used. Seconds.
WEIGH_EVERY = 10.0
# What nobody has used for so long gives its place to a spare, where there are so many that one is hardly missed:
# while more agents talk than there are places, no idle process gets that old. Seconds, processes.
STALE = 5.0
MANY = 4
# A spare is started when no turn was short of a core for so long, in seconds: among many agents that talk at once
# there is always a moment in which one is free.
CALM = 0.5
# Of how many processes that ended by themselves the exit code is kept until their session is used again.
REMEMBERED = 1024

Born = Callable[[int, str | None, Path], None]  # pid, start time, working directory


class ProcessTable:
    """The processes that there are, by session, and how many more there may be.

    `started` is told how many seconds one took to its first word.
    """

    def __init__(
        self,
        settings: Settings,
        born: Born,
        reaped: Callable[[int], None],
        started: Callable[[float], None],
    ) -> None:
        self.processes: dict[str, ClaudeProcess] = {}
        self.spares: dict[ClaudeProcess, asyncio.Task[bool | None]] = {}  # idle ones of no session yet, with their boot
        self.ended: dict[str, int] = {}  # sessions whose idle process ended by itself, and with which exit code
        self.closed = False
        self._settings = settings
        self._guardian = Guardian()
        self._born = born
        self._reaped = reaped
        self._started = started
        self._out: dict[ClaudeProcess, float] = {}  # those in use, since when
        self._ending: set[ClaudeProcess] = set()
        self.reserved = 0  # places taken by processes that are being spawned
        self._queued = 0  # who waits for a place or a start
        self._line: deque[object] = deque()  # of those, who waits for a place, in order
        self._changed = asyncio.Event()  # set at every change; who waits clears it first
        self._spawns = asyncio.Semaphore(settings.max_spawns)
        self._tasks: set[asyncio.Task[Any]] = set()  # starts, boots and ends that are under way
        self._use = Average(FIRST_GUESS)
        self._memory = Memory(settings.max_memory)
        self._used = asyncio.Event()  # since the processes were weighed
        self.useless_ones = asyncio.Event()  # an idle one may have become useless
        self.services: dict[str, asyncio.Task[None]] = {}

    # --- who has what

    def take(self, process: ClaudeProcess) -> None:
        self._out[process] = time.monotonic()
        self._changed.set()

    def give_back(self, process: ClaudeProcess) -> None:
        process.last_used = time.monotonic()
        if (since := self._out.pop(process, None)) is not None:
            self._use.add(process.last_used - since)
        self._used.set()
        self._changed.set()

    def let_go(self, process: ClaudeProcess) -> None:
        """It was taken, and nothing came of it."""
        self._out.pop(process, None)
        self.useless_ones.set()
        self._changed.set()

    def note(self, process: ClaudeProcess) -> None:
        """Tell which process this is, and whose: again where a spare has become a session's."""
        self._born(process.pid, process.start_time, process.cwd)

    def keep_ahead(self, process: ClaudeProcess) -> None:
        """It was taken, and starts up now for a session that is to come."""
        booted = self.spares[process] = self._own(process.boot())
        booted.add_done_callback(lambda _: self.useless_ones.set())
        self.let_go(process)

    def useless(self, process: ClaudeProcess) -> bool:
        """No turn will be had from this idle process any more."""
        booted = self.spares.get(process)
        return not process.usable and not process.waiting and (booted is None or booted.done())

    def taken(self, process: ClaudeProcess) -> bool:
        return process in self._out

    def busy(self) -> int:
        return len(self._out)

    def all(self) -> set[ClaudeProcess]:
        return {*self.processes.values(), *self._out, *self._ending}

    def idle(self) -> list[ClaudeProcess]:
        return [process for process in self.processes.values() if process not in self._out]

    def ending(self, session_id: str | None = None) -> list[ClaudeProcess]:
        """Those that are told to end and are not dead yet: of this session, or all."""
        return [process for process in self._ending if session_id in (None, process.launch.session_id)]

    def weight(self) -> int:
        """Bytes of all processes, as far as measured; 0 without a limit, as nobody measures then."""
        return 0 if self._memory.budget is None else self._memory.of(process.pid for process in self.all())

    # --- one more

    async def spawn(self, launch: Launch) -> ClaudeProcess:
        """A new process, taken. Raises QueueFull, ClaudeUnavailable, and what `ClaudeProcess.spawn` does."""
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
        """Wait until it is not in use any more, for so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.taken(process):
                    await self._change()

    async def spawn_if_free(self, launch: Callable[[], Coroutine[None, None, Launch]]) -> ClaudeProcess | None:
        """A new process, taken, that nobody waits for: everybody else comes first. None where there is no place for it.

        While every core has a turn to serve it is put off: those would be later by it. It may take the place of an idle
        process out of many, once that has not been used for `STALE` seconds.
        """
        while True:
            await self._calm()
            if self.has_room():
                break
            least = self._least_used()
            if least is None:
                await self._change()
            elif len(self.processes) < MANY or least in self.spares:
                return None
            elif (left := least.last_used + STALE - time.monotonic()) > 0:
                await asyncio.sleep(left)
            else:
                await self.retire(least)
        self.reserved += 1
        await self._spawns.acquire()  # at once: nobody had it
        try:
            wanted = await launch()
        except BaseException:
            self._spawns.release()
            self._free()
            raise
        return await self._begin(wanted)

    async def _calm(self) -> None:
        """Wait until everybody has had what they need for `CALM` seconds, and has it now."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALM):
                    while not self._pressed():
                        await self._change()
            if not self._pressed():
                return
            await self._change()

    def _pressed(self) -> bool:
        """Somebody waits for a place or a start, or no core is left beside the turns that run."""
        return bool(self._queued) or self._spawns.locked() or self.busy() >= self._settings.max_spawns

    async def _begin(self, launch: Launch) -> ClaudeProcess:
        """Start it in the place that was reserved, with the permit that was got; both are given back."""
        try:
            try:
                process = await ClaudeProcess.spawn(launch, self._settings, self._guardian, self.useless_ones.set)
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
        self._line.append(mine)
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                while not self.closed and not (self._line[0] is mine and self.has_room()):
                    await self._make_room()
            if self.closed:
                raise _closed()
            self.reserved += 1
        except TimeoutError as exc:
            raise self._full("every Claude CLI is busy") from exc
        finally:
            self._line.remove(mine)
            self._changed.set()

    async def _make_room(self) -> None:
        """Evict an idle process unless enough evictions are in flight; then wait for any change.

        The place to come may be another one's than that of the evicted process.
        """
        short = not self.has_room() and len(self._ending) < len(self._line)
        if short and (least := self._least_used()) is not None:
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
                self._started(time.monotonic() - began)
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
        """For one process more, by count and by memory."""
        pids = {process.pid for process in self.all()}
        few = len(pids) + self.reserved < self._settings.max_processes
        return few and self._memory.room(pids, self.reserved)

    def _least_used(self) -> ClaudeProcess | None:
        """Who goes first: one that has ended by itself, a spare, the one not used for the longest time."""
        return min(self.idle(), key=lambda one: (one.alive, one not in self.spares, one.last_used), default=None)

    def _full(self, why: str) -> QueueFull:
        """With the time in which those who wait now should have had their turn."""
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
                self._reaped(process.pid)
                if died:
                    self.ended[process.launch.session_id] = process.returncode
                    while len(self.ended) > REMEMBERED:
                        del self.ended[next(iter(self.ended))]

    def _leave(self, process: ClaudeProcess) -> None:
        """From now on nobody gets it."""
        session_id = process.launch.session_id
        if self.processes.get(session_id) is process:
            del self.processes[session_id]
        self.spares.pop(process, None)
        self._ending.add(process)

    async def retire(self, process: ClaudeProcess) -> None:
        """End it where nobody waits for that."""
        try:
            await self.close(process)
        except ClaudeUnavailable as exc:  # it cannot be killed; the others still have to be looked after
            log.warning("process_left", pid=process.pid, error=exc.message)

    async def close_all(self) -> None:
        """End every process, at once and waited for. Nothing can be spawned afterwards."""
        self.closed = True
        self._changed.set()  # whoever waits for a place is told
        for service in self.services.values():
            service.cancel()
        if self.services:
            await asyncio.wait(self.services.values())
        while self.reserved or self.all():
            await asyncio.gather(*(self.retire(process) for process in self.all()))
            if self.reserved:  # its place is given back when it is one of us, or has failed
                await self._change()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._guardian.close()

    # --- in the background

    def _own(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """A task that ends by itself, and is waited for when everything is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_ended)
        return task

    def serve(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Have this running, once, until everything is closed."""
        running = self.services.get(name)
        if not self.closed and (running is None or running.done()):
            service = self.services[name] = asyncio.create_task(work())
            service.add_done_callback(_ended)

    async def _weigh(self) -> None:
        """Weigh the processes after they were used, and retire idle ones while all together are too heavy."""
        while True:
            await self._used.wait()
            self._used.clear()
            # One that is still starting weighs next to nothing yet.
            await self._memory.weigh({process.pid for process in self.all() if process.started.is_set()})
            self._changed.set()  # there may be more room than was thought
            while self._memory.over({process.pid for process in self.all()}):
                if (least := self._least_used()) is None:
                    break
                await self.retire(least)
            await asyncio.sleep(WEIGH_EVERY)

    async def _reap(self) -> None:
        """Retire what has been idle for `process_idle`, and at once what is of no use."""
        shortest = min(self._settings.process_idle, self._settings.tool_timeout)
        while True:
            self.useless_ones.clear()
            for process in self.idle():
                # Asked again: the process may have been taken while another one was closed.
                if process not in self._out and self._time_left(process) <= 0:
                    await self.retire(process)
            left = [self._time_left(process) for process in self.idle()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min([*left, shortest]))):
                    await self.useless_ones.wait()

    def _time_left(self, process: ClaudeProcess) -> float:
        """How long this idle process may stay, in seconds."""
        if self.useless(process):
            return 0.0
        limit = self._settings.tool_timeout if process.waiting else self._settings.process_idle
        return process.last_used + limit - time.monotonic()


def _ended(task: asyncio.Task[Any]) -> None:
    fault = None if task.cancelled() else task.exception()
    if fault is not None:
        log.error("task_failed", exc_info=fault)


def _closed() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down")
