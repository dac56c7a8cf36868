"""The pool of processes: at most one per session, kept warm while there is room (see `ProcessTable`).

- A process returned by `checkout` belongs to its caller until `checkin` or `discard`.
- `discard` returns when the process is dead and reaped: its transcript may be rewritten then.
- `spares` processes are started in advance, for new sessions like the last new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

from .... import logs
from ....errors import ClaudeUnavailable, ProxyError, QueueFull, SessionBusy
from ....machine import command_to
from ....settings import Settings
from ....tasks import Average, Tasks
from ...base import NO_HOOKS, Counts, Process, ProcessHooks
from . import descriptors
from .events import ProcessDied
from .guardian import Guardian
from .memory import Memory
from .process import ClaudeProcess, Launch

log = logs.get(__name__)

# A start takes a core for 0.3 (2.1.329) to 1 s (1.0.120), without output before the first prompt.
START_TIME = 2.0
# The assumed time of a turn in seconds before one was measured.
FIRST_GUESS = 2.0
# Seconds between two measurements of memory while processes are used.
WEIGH_EVERY = 10.0
# A spare may evict a process that is idle for `STALE` seconds, if there are at least `MANY` processes. If more agents
# talk than there are places, no process is idle that long.
STALE = 5.0
MANY = 4
# A spare is started after so many seconds without contention: even with many active agents a core is free for moments.
CALM = 0.5
# Seconds until a start without free descriptors is tried again, if no process ends before: a connection may.
NONE_FREE_WAIT = 0.1
# How many exit codes of idle processes that ended by themselves are kept, until their session's next use.
REMEMBERED = 1024
# Delay in seconds before a claimed spare is replaced: the start would compete with the claiming session's first turn,
# which after that only waits for the provider.
FIRST_TURN = 1.0


class ProcessEnd(NamedTuple):
    """`exit_code`: of a process that ended by itself while idle. `lost`: it reported that it could not write all of its
    session."""

    exit_code: int | None
    lost: bool


class Pool:
    """The processes of one proxy. Use it on one event loop; `close` ends them all.

    `ahead` names the directory and TMPDIR of spares; without it there are none.
    """

    def __init__(
        self,
        settings: Settings,
        hooks: ProcessHooks = NO_HOOKS,
        *,
        ahead: Callable[[], tuple[Path, Path]] | None = None,
    ) -> None:
        self._spares = settings.spares
        self._ahead = ahead
        self.table = ProcessTable(settings, hooks)
        self._newest: tuple[Launch, ClaudeProcess] | None = None  # of the last new session
        self._refused: str | None = None  # the kind of spare that refused its claim
        # One operation at a time per session. A lock exists while somebody holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def peek(self, session_id: str) -> ClaudeProcess | None:
        """The session's process, in use or idle."""
        return self.table.processes.get(session_id)

    def sessions_in(self, cwd: Path) -> list[str]:
        """The sessions whose processes work in this directory."""
        return [session_id for session_id, process in self.table.processes.items() if process.cwd == cwd]

    def counts(self) -> Counts:
        spare = len(self.table.spares)
        return Counts(self.table.busy(), len(self.table.idle()) - spare, spare, self.table.weight())

    async def checkout(self, launch: Launch) -> tuple[ClaudeProcess, bool]:
        """A process for the session, and whether it is warm. Raises QueueFull, SessionBusy, ClaudeUnavailable.

        A session's idle process is reused if it fits the launch; else it is closed first. A new session may get a
        spare: then the session has the id of that process.
        """
        async with self._locks.setdefault(launch.session_id, asyncio.Lock()):
            current = self.peek(launch.session_id)
            if current is not None and current in self.table.in_use:
                raise SessionBusy("a turn of this session is still running: wait for it")
            if current is not None and current.usable and await self._adapted(current, launch) is not None:
                return current, True
            await self._discard(launch.session_id)
            process = await self._claimed(launch) or await self.table.spawn(launch)
            if self._spares and self._ahead is not None and launch.kind is not None:
                self._newest = launch, process
                self.table.serve("ahead", self._prepare)
            return process, False

    def take_end(self, session_id: str) -> ProcessEnd | None:
        """How the session's last process ended, if by itself or with a failed write. Returned once."""
        return self.table.ended.pop(session_id, None)

    async def take_waiting(self, launch: Launch) -> ClaudeProcess | None:
        """The session's process, if it waits for results and fits the launch; else None."""
        async with self._locks.setdefault(launch.session_id, asyncio.Lock()):
            current = self.peek(launch.session_id)
            if current is None or current in self.table.in_use or not current.waiting:
                return None
            same = current.launch == launch and current.launch.offers == launch.offers
            if not same or current.launch.system_prompt != launch.system_prompt:
                return None
            self.table.take(current)
            return current

    async def take_warm(self, launch: Launch) -> ClaudeProcess | None:
        """The session's idle process, if it fits the launch; else None."""
        async with self._locks.setdefault(launch.session_id, asyncio.Lock()):
            current = self.peek(launch.session_id)
            fits = current is not None and current not in self.table.in_use and current.usable
            return await self._adapted(current, launch) if current is not None and fits else None

    async def _adapted(self, current: ClaudeProcess, launch: Launch) -> ClaudeProcess | None:
        if current.launch != launch:
            return None
        self.table.take(current)
        try:
            if await current.adapt(launch):
                return current
        except BaseException:
            self.table.let_go(current)  # not usable: the reaper closes it
            raise
        self.table.let_go(current)
        return None

    async def checkin(self, process: ClaudeProcess, *, stays: float | None = None) -> None:
        """Give it back after a turn. If it cannot serve another turn, it is closed, and this waits for that.

        A process that waits for its client's results may wait for `tool_timeout`, or until its place is needed.
        `stays`: no other turn is expected soon, so it is evicted first, and kept for at most so many seconds.
        """
        self.table.give_back(process, stays)
        fits = (process.usable or process.waiting) and process.session_id == process.launch.session_id
        if self.table.closed or not fits:
            await self.table.retire(process)

    async def discard(self, session_id: str) -> None:
        """Close and forget the session's process, in use or not. It is dead when this returns."""
        async with self._locks.setdefault(session_id, asyncio.Lock()):
            await self._discard(session_id)

    def kill(self) -> None:
        """Kill every process without waiting. Safe from any thread, as a last resort."""
        for process in self.table.all():
            process.kill()

    async def close(self) -> None:
        """Kill every process, and wait. No checkouts afterwards."""
        await self.table.close_all()

    async def _discard(self, session_id: str) -> None:
        current = self.peek(session_id)
        for process in (*self.table.ending(session_id), *([current] if current else [])):
            await self.table.close(process)

    # --- spares

    async def _claimed(self, launch: Launch) -> ClaudeProcess | None:
        """A spare that has become this launch's process, under its own session id; None if none fits."""
        kind, spares = launch.kind, self.table.spares
        spare = next((one for one in spares if one.alive and one.launch.kind == kind), None)
        if kind is None or spare is None:
            return None
        booted = spares.pop(spare)
        self.table.take(spare)
        try:
            await asyncio.wait([booted], timeout=START_TIME)
            taken = booted.result() if booted.done() else None
            if taken and (taken := await spare.claim(launch)):
                self.table.note(spare)
                return spare
        except BaseException:
            spare.kill()
            self.table.let_go(spare)  # the reaper closes it
            raise
        if taken is False:
            self._refused = kind  # the next one would refuse, too
        log.warning("spare_not_claimed", pid=spare.pid, refused=taken is False)
        await self.table.close(spare)
        return None

    async def _prepare(self) -> None:
        """Keep `spares` processes of the last requested kind, if there is room beside all sessions.

        At most that many starts per new session, so that a spare that dies at once is not restarted for ever.
        """
        spares = self.table.spares
        newest, starts = None, 0
        while self._newest is not None:
            if newest is not self._newest:
                newest, starts = self._newest, 0
            launch, first = newest
            await self.table.until_given_back(first, FIRST_TURN)
            for other in list(spares):
                # Check again: it may have been claimed while another one was closed.
                if other in spares and (other.launch.kind != launch.kind or self.table.unusable(other)):
                    await self.table.retire(other)
            if newest is not self._newest:
                continue
            if max(len(spares), starts) >= self._spares or launch.kind == self._refused:
                return
            try:
                spare = await self.table.spawn_if_free(self._launch_ahead)
            except (ProxyError, ProcessDied, OSError, RuntimeError) as exc:
                log.warning("no_spare", error=str(exc))
                return
            if spare is None:
                return
            starts += 1
            self.table.keep_ahead(spare)

    async def _launch_ahead(self) -> Launch:
        assert self._ahead is not None
        assert self._newest is not None
        cwd, tmpdir = await asyncio.to_thread(self._ahead)
        return self._newest[0].spare(cwd, tmpdir)


class ProcessTable:
    """All CLI processes of one proxy by session, their limits, and evictions.

    - At most `max_processes`, by measurement at most `max_memory`, and as many as free descriptors allow; one may
    always run. One more may be ending; its memory counts until it is dead.
    - To make room, idle processes are evicted: spares first, then the least recently used. A busy one never is.
    - Places are given first come, first served.
    - Only `max_spawns` start at once. Every wait is bounded by `spawn_timeout`; then it is `QueueFull`.
    """

    def __init__(self, settings: Settings, hooks: ProcessHooks) -> None:
        self.processes: dict[str, ClaudeProcess] = {}
        # Unclaimed spares, with their start-up.
        self.spares: dict[ClaudeProcess, asyncio.Task[bool | None]] = {}
        self.ended: dict[str, ProcessEnd] = {}  # by session, the newest
        self.closed = False
        self._settings = settings
        self._guardian = Guardian()
        self._hooks = hooks
        self.in_use: dict[ClaudeProcess, float] = {}  # processes in use, since when
        self._ending: set[ClaudeProcess] = set()
        self.reserved = 0  # places of processes that are being spawned
        self._queued = 0  # callers that wait for a place or for a start
        self._waiters: deque[object] = deque()  # callers that wait for a place, in order
        self._changed = asyncio.Event()  # set at every change; a waiter clears it first
        self._spawns = asyncio.Semaphore(settings.max_spawns)
        self._tasks = Tasks(expected=())  # starts, start-ups and evictions in flight, and the services
        self._use = Average(FIRST_GUESS)
        self._memory = Memory(settings.max_memory)
        self._used = asyncio.Event()  # set when a process was used since the last measurement
        self.reap_now = asyncio.Event()  # set when an idle process may have become unusable
        self.services: dict[str, asyncio.Task[None]] = {}

    # --- bookkeeping

    def take(self, process: ClaudeProcess) -> None:
        self.in_use[process] = time.monotonic()
        self._changed.set()

    def give_back(self, process: ClaudeProcess, stays: float | None = None) -> None:
        process.last_used = time.monotonic()
        if (since := self.in_use.pop(process, None)) is not None:
            self._use.add(process.last_used - since)
        if stays is not None and not process.waiting:
            process.last_used -= max(0.0, self._settings.process_idle - stays)
            self.reap_now.set()  # the reaper computes its next deadline
        self._used.set()
        self._changed.set()

    def let_go(self, process: ClaudeProcess) -> None:
        """Give back a process that was not usable."""
        self.in_use.pop(process, None)
        self.reap_now.set()
        self._changed.set()

    def note(self, process: ClaudeProcess) -> None:
        """Call the hook with a process and its directory; again when a session has claimed a spare."""
        self._hooks.on_spawn(process.pid, process.start_time, process.cwd)

    def keep_ahead(self, process: ClaudeProcess) -> None:
        """Keep a new process as a spare, and begin its start-up."""
        booted = self.spares[process] = self._tasks.own(process.boot())
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
        """Processes that are being closed and not dead yet, of this session or of all."""
        return [process for process in self._ending if session_id in (None, process.launch.session_id)]

    def weight(self) -> int:
        """Bytes of all processes, as last measured; 0 without a limit, as nothing is measured then."""
        return 0 if self._memory.budget is None else self._memory.of(process.pid for process in self.all())

    def each(self) -> list[Process]:
        """All processes with their state and memory, as last measured."""
        clock = time.time() - time.monotonic()
        processes = []
        for session_id, process in self.processes.items():
            state: Literal["busy", "warm", "spare"] = "spare" if process in self.spares else "warm"
            since = process.last_used
            if process in self.in_use:
                state, since = "busy", self.in_use[process]
            serves = None if state == "spare" else session_id
            processes.append(Process(process.pid, state, serves, clock + since, self._memory.measured(process.pid)))
        return processes

    # --- starting

    async def spawn(self, launch: Launch) -> ClaudeProcess:
        """A new process, in use. Raises QueueFull, ClaudeUnavailable, and what `ClaudeProcess.spawn` does."""
        try:
            bounded = await launch.with_boundary()
        except descriptors.NoneFree:  # a place needs more of them: an idle process is ended
            await self._reserve()
            self._free()
            bounded = await launch.with_boundary()
        process = await self._begin_in_turn(bounded)
        if self.closed:
            await self.close(process)
            raise _closed()
        self.serve("reaper", self._reap)
        if self._memory.budget is not None:
            self.serve("scales", self._weigh)
        return process

    async def _begin_in_turn(self, launch: Launch) -> ClaudeProcess:
        """Wait for a place, and start it. If there are no descriptors then, try again when some are free."""
        until = time.monotonic() + self._settings.spawn_timeout
        while True:
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
            try:
                return await self._begin(launch)
            except descriptors.NoneFree:
                if not (self.all() or self.reserved) or time.monotonic() > until:
                    raise  # nothing here will free any
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + NONE_FREE_WAIT):
                        await self._change()

    async def until_given_back(self, process: ClaudeProcess, within: float) -> None:
        """Wait until it is no longer in use, for at most `within` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while process in self.in_use:
                    await self._change()

    async def spawn_if_free(self, launch: Callable[[], Coroutine[None, None, Launch]]) -> ClaudeProcess | None:
        """A new process, in use, at the lowest priority. None without a place for it.

        Waits while all cores serve turns. If there are many processes, it may evict one that is idle for `STALE`
        seconds.
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
            spare = await launch()
        except BaseException:
            self._spawns.release()
            self._free()
            raise
        return await self._begin(spare)

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
            self._tasks.own(self._release_when_started(process))
            self.processes[launch.session_id] = process
            self.take(process)
            return process
        finally:
            self._free()

    def _free(self) -> None:
        self.reserved -= 1
        self._changed.set()

    async def _reserve(self) -> None:
        """Reserve a place: a free one, that of an evicted process, or the first given back."""
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
        """Evict an idle process unless enough evictions are in flight, and wait for a change if there is no room yet.

        The place that becomes free first may be another one's than the evicted process's.
        """
        coming = len(self._ending) - (not self._has_place())  # one ending place is already used
        short = not self.has_room() and coming < len(self._waiters)
        if short and (least := self._candidate()) is not None:
            self._leave(least)
            self._tasks.own(self.retire(least))
            self._changed.set()
            if self.has_room():
                return
        await self._change()

    async def _permit(self) -> None:
        """Wait for a start permit. A start takes a core for 0.3 to 1 s, so more than one per core would delay each
        other."""
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
                self._hooks.on_first_output(time.monotonic() - began)
        except TimeoutError:
            return  # waits for its prompt, or is stuck: it uses no core
        finally:
            self._spawns.release()
            self._used.set()
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def has_room(self) -> bool:
        """Whether there is room for another process, by count, memory and free descriptors."""
        pids = {process.pid for process in self.all()}
        if not self._has_place() or not self._memory.room(pids, self.reserved):
            return False
        # Without any process there is nothing to wait for: let the start fail with the reason.
        return not (pids or self.reserved) or descriptors.are_free(self.reserved + 1)

    def _has_place(self) -> bool:
        """Whether there is room by count. An ending process does not count: it takes 50 ms, and the next start
        longer."""
        return len(self.all()) + self.reserved - bool(self._ending) < self._settings.max_processes

    def _candidate(self) -> ClaudeProcess | None:
        """The next process to evict: a dead one, a spare, or the least recently used."""
        return min(self.idle(), key=lambda one: (one.alive, one not in self.spares, one.last_used), default=None)

    def _full(self, why: str) -> QueueFull:
        """The error, with the estimated time for the present queue."""
        wait = self._use.value * (self._queued + 1) / max(1, self.busy())
        files = command_to("allow more open files")
        advice = f"try again later, or raise max_processes, max_memory and the limit of open files ({files})"
        return QueueFull(f"{why}: {advice}", retry_after=max(1.0, wait))

    # --- ending

    async def close(self, process: ClaudeProcess) -> None:
        """End it. It counts as `ending` until it is dead."""
        died = process.died
        self._leave(process)
        try:
            await process.close()
        finally:
            self._ending.discard(process)
            self.let_go(process)
            if (why := process.writes_lost) is not None:  # the next turn repairs its file
                context = {"session": process.session_id, "cwd": str(process.cwd), "error": why}
                log.warning("claude_could_not_write", cli=process.launch.capability.name, **context)
            if process.returncode is not None:
                self._hooks.on_exit(process.pid)
                if died or why is not None:
                    code = process.returncode if died else None
                    self.ended[process.launch.session_id] = ProcessEnd(code, why is not None)
                    while len(self.ended) > REMEMBERED:
                        del self.ended[next(iter(self.ended))]

    def _leave(self, process: ClaudeProcess) -> None:
        """Remove it from the table."""
        session_id = process.launch.session_id
        if self.processes.get(session_id) is process:
            del self.processes[session_id]
        self.spares.pop(process, None)
        self._ending.add(process)

    async def retire(self, process: ClaudeProcess) -> None:
        """Close it. Errors are only logged, because others have to be closed, too, or a turn is committed."""
        try:
            await self.close(process)
        except Exception as exc:  # ClaudeUnavailable: not killable
            trace = not isinstance(exc, ClaudeUnavailable)
            log.warning("process_left", pid=process.pid, error=str(exc), exc_info=trace)

    async def close_all(self) -> None:
        """Kill every process, and wait. Nothing can be spawned afterwards."""
        self.closed = True
        self._changed.set()  # wakes the callers that wait for a place
        for service in self.services.values():
            service.cancel()
        if self.services:
            await asyncio.wait(self.services.values())
        while self.reserved or self.all():
            await asyncio.gather(*(self.retire(process) for process in self.all()))
            if self.reserved:  # a start is in flight: it ends in the table or fails
                await self._change()
        await self._tasks.stop()
        await self._guardian.close()

    # --- in the background

    def serve(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run this service once, until `close_all`."""
        running = self.services.get(name)
        if not self.closed and (running is None or running.done()):
            self.services[name] = self._tasks.own(work(), service=True)

    async def _weigh(self) -> None:
        """Measure memory after processes were used, and evict idle ones while the total is over the limit."""
        while True:
            await self._used.wait()
            self._used.clear()
            # A starting process has little memory yet.
            try:
                await self._memory.weigh({process.pid for process in self.all() if process.started.is_set()})
            except (OSError, RuntimeError) as exc:  # out of descriptors or threads: keep the last sizes
                log.warning("not_weighed", error=str(exc))
            self._changed.set()  # there may be more room now
            while self._memory.over({process.pid for process in self.all()}):
                if (least := self._candidate()) is None:
                    break
                await self.retire(least)
            await asyncio.sleep(WEIGH_EVERY)

    async def _reap(self) -> None:
        """Close processes that are idle for `process_idle`, and unusable ones at once."""
        shortest = min(self._settings.process_idle, self._settings.tool_timeout)
        while True:
            self.reap_now.clear()
            for process in self.idle():
                # Check again: it may have been taken while another one was closed.
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


def _closed() -> ClaudeUnavailable:
    return ClaudeUnavailable("the proxy is shutting down")
