"""Which process serves which session: at most one each, kept warm as long as there is room (see `process_table`).

- A process given out by `checkout` belongs to its caller until `checkin` or `discard`.
- `discard` returns when the process is dead and reaped, so that its transcript may be rewritten then.
- `spares` processes are started ahead of time: the next new session like the last one takes one of them over.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from .... import logs
from ....errors import ClaudeUnavailable, ProxyError, SessionBusy
from ....settings import Settings
from ...base import Counts
from .events import ProcessDied
from .failures import error_for_death
from .process import ClaudeProcess, Launch
from .process_table import START_TIME, OnSpawn, ProcessTable

log = logs.get(__name__)


# A spare's start would compete for a core with the first turn of the session that claimed the last spare. After so
# many seconds that turn only waits for the provider.
FIRST_TURN = 1.0


class Pool:
    """The processes of one proxy. Use it on one event loop; `close` ends them all.

    `ahead` names the directory and TMPDIR of spares; without it there are none. `on_spawn` is told the pid, start time
    and working directory of each process before it gets a prompt, and again when a spare gets another directory;
    `on_exit` the pid when it is gone, `on_first_output` how many seconds it took to its first word. These three must
    not fail.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ahead: Callable[[], tuple[Path, Path]] | None = None,
        on_spawn: OnSpawn = lambda _pid, _start, _cwd: None,
        on_exit: Callable[[int], None] = lambda _pid: None,
        on_first_output: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._spares = settings.spares
        self._ahead = ahead
        self.table = ProcessTable(settings, on_spawn, on_exit, on_first_output)
        self._newest: tuple[Launch, ClaudeProcess] | None = None  # what the last new session asked for, and its process
        self._refused: str | None = None  # the kind of spare that refused its claim
        self._sessions: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

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
        """A process for the session, and whether it is a warm one. Raises QueueFull, SessionBusy, ClaudeUnavailable.

        A session's idle process is reused when the launch asks for the same; otherwise it is closed first. For a new
        session it may be a spare: then the session has the id of that process.
        """
        async with self._session(launch.session_id):
            current = self.peek(launch.session_id)
            if current is not None and current in self.table.in_use:
                raise SessionBusy("a turn of this session is still running: wait for it")
            if current is not None and current.usable and current.launch == launch:
                self.table.take(current)
                try:
                    if await current.adapt(launch):
                        return current, True
                except BaseException:
                    self.table.let_go(current)  # not usable any more: the reaper closes it
                    raise
            await self._discard(launch.session_id)
            process = await self._claimed(launch) or await self.table.spawn(launch)
            if self._spares and self._ahead is not None and launch.kind is not None:
                self._newest = launch, process
                self.table.serve("ahead", self._prepare)
            return process, False

    def take_end(self, session_id: str) -> int | None:
        """The exit code of the session's last process, where that ended by itself while it was idle. Told once."""
        return self.table.ended.pop(session_id, None)

    async def take_waiting(self, launch: Launch) -> ClaudeProcess | None:
        """The session's process, if it waits for results and fits the launch; else None."""
        async with self._session(launch.session_id):
            current = self.peek(launch.session_id)
            if current is None or current in self.table.in_use or not current.waiting:
                return None
            same = current.launch == launch and current.launch.offers == launch.offers
            if not same or current.launch.system_prompt != launch.system_prompt:
                return None
            self.table.take(current)
            return current

    async def checkin(self, process: ClaudeProcess, *, again: bool = True) -> None:
        """Give it back after a turn. One that cannot serve another turn of its session is closed (waited for).

        One that waits for its client's results may do so for `tool_timeout`; its place may be needed before. `again` is
        False where no other turn is expected: it is the first to be evicted, and is not kept for long.
        """
        self.table.give_back(process, again=again)
        fits = (process.usable or process.waiting) and process.session_id == process.launch.session_id
        if self.table.closed or not fits:
            await self.table.close(process)

    async def discard(self, session_id: str) -> None:
        """Close and forget the session's process, in use or not. It is dead when this returns."""
        async with self._session(session_id):
            await self._discard(session_id)

    def kill(self) -> None:
        """End every process at once. Does not wait; safe from any thread, as a last resort."""
        for process in self.table.all():
            process.kill()

    async def close(self) -> None:
        """End every process, at once and waited for. Nothing can be checked out afterwards."""
        await self.table.close_all()

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
        current = self.peek(session_id)
        for process in (*self.table.ending(session_id), *([current] if current else [])):
            await self.table.close(process)

    # --- ahead of time

    async def _claimed(self, launch: Launch) -> ClaudeProcess | None:
        """A spare as this launch's process, under the session id that it has; None where there is none that fits."""
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
            self.table.let_go(spare)  # it is closed by the reaper
            raise
        if taken is False:
            self._refused = kind  # the next one would be refused as well
        log.warning("spare_not_claimed", pid=spare.pid, refused=taken is False)
        await self.table.close(spare)
        return None

    async def _prepare(self) -> None:
        """Keep `spares` processes of the kind last asked for, where there is room beside all sessions.

        At most that many starts for each new session: a spare that dies at once is not started again and again.
        """
        spares = self.table.spares
        newest, starts = None, 0
        while self._newest is not None:
            if newest is not self._newest:
                newest, starts = self._newest, 0
            wanted, first = newest
            await self.table.given_back(first, FIRST_TURN)
            for other in list(spares):
                # Checked again: it may have been claimed while another one was closed.
                if other in spares and (other.launch.kind != wanted.kind or self.table.unusable(other)):
                    await self.table.retire(other)
            if newest is not self._newest:
                continue
            if max(len(spares), starts) >= self._spares or wanted.kind == self._refused:
                return
            try:
                spare = await self.table.spawn_if_free(self._launch_ahead)
            except (ProxyError, ProcessDied) as exc:
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


# --- An agent whose CLI keeps dying: after a few deaths in a row the next start waits, each time longer

# Counted by agent, not by session: a session whose first turn dies leaves nothing, and the next one has another id.

# A turn is repeated once by itself, so this many deaths are more than one bad turn.
LIMIT = 3
# How long the next start is refused after the last of them, doubled at each further death. Seconds.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
# Agents that are remembered: beyond it the one that died longest ago gets a fresh start.
KNOWN = 1024


@dataclass(slots=True)
class _Deaths:
    count: int
    until: float
    last: str


class Restarts:
    """The deaths in a row of each agent's processes. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[int, _Deaths] = OrderedDict()

    def check(self, agent_key: int) -> None:
        """Raises `ClaudeUnavailable` while this agent's CLI is not to be started."""
        deaths = self._deaths.get(agent_key)
        if deaths is None or (left := deaths.until - self._clock()) <= 0:
            return
        raise ClaudeUnavailable(
            f"the Claude CLI of this agent has died {deaths.count} times in a row and is not started again before "
            f"{math.ceil(left)} s are over. The last time: {deaths.last}. See `doctor` and the proxy's log",
            retry_after=left,
            detail={"deaths": deaths.count},
        )

    def died(self, agent_key: int, how: ProcessDied) -> None:
        """One more process ended without a result."""
        deaths = self._deaths.setdefault(agent_key, _Deaths(0, 0.0, ""))
        deaths.count += 1
        deaths.last = error_for_death(how).message
        if deaths.count >= LIMIT:
            doubled = min(deaths.count - LIMIT, 32)  # as a float has an end
            deaths.until = self._clock() + min(LONGEST_WAIT, FIRST_WAIT * 2.0**doubled)
        self._deaths.move_to_end(agent_key)
        if len(self._deaths) > KNOWN:
            self._deaths.popitem(last=False)

    def lived(self, agent_key: int) -> None:
        """A turn of this agent was answered."""
        self._deaths.pop(agent_key, None)
