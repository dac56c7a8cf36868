"""Which proxies on one `var/` are alive, and which of them may write an agent.

A proxy writes an agent's turns and sessions while it holds the agent's lease (see `stores.base.Leases`). It keeps the
lease between turns, with the warm process, until another proxy asks for it. The store refuses every write of a holder
that was replaced, so a proxy that was paused for a minute cannot write over its successor.

On one machine the kernel shows at once that a holder has ended: each proxy holds flock(2) on a file of its own while it
lives. A proxy on another `var/` or host is known only by its heartbeats in the store. If these stop, it is replaced
once its lease has expired.

    <var>/run/<instance>.lock        held as long as the proxy lives
    <var>/run/<instance>/<pid>       a CLI of that proxy: its pid, start time and directory (see `recovery`)
    <var>/run/<instance>/<turn>.failed
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import logs
from ..domain.models import Agent, CancelledBy, Turn
from ..errors import LeaseLost, ProxyError, StoreUnavailable
from ..locks import RUN, SUFFIX, is_held
from ..stores.base import Facts, Lease, LeaseHeld, Leases, Proxy, Store
from ..tasks import failures_logged

log = logs.get(__name__)

# A heartbeat is due when this share of the lease has passed: two may be missed before it expires.
HEARTBEAT = 0.3
# Seconds between requests for a lease that another proxy holds: short at first, as most turns are short.
FIRST_WAIT = 0.002
LAST_WAIT = 0.05
# After a lease was handed over, turns here wait so many times `LAST_WAIT` for the other proxy to take it.
TAKE_WAITS = 40
# A reading of the store's clock that took at most so many seconds always replaces the last one. During a longer reading
# this process may have been paused.
EXACT = 1.0
# How often a proxy polls for requests of others, as a share of the lease. It does so even if the store notifies it.
POLL = 0.1
# Ids of proxies and turns.
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
# How often a proxy without peers looks for new peers, in seconds: each look costs a wake-up.
POLL_ALONE = 0.5


def steady_clock() -> Callable[[], float]:
    """A monotonic clock that also counts time asleep (Linux and macOS name it differently)."""
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    clock: int | None = getattr(time, name, None)
    return time.monotonic if clock is None else partial(time.clock_gettime, clock)


_steady = steady_clock()


class Instances:
    """The proxies on this `var/`: this one and all others, alive or dead.

    `elsewhere`: the store, if proxies with another `var/` may use it, too.
    """

    def __init__(self, var: Path, elsewhere: Leases | None = None) -> None:
        self.id = uuid.uuid4().hex
        self._run = var / RUN
        self._elsewhere = elsewhere
        self.spans_hosts = elsewhere is not None
        self._clock_offset: float | None = None  # the store's clock minus this host's steady clock
        self._reading_took = float("inf")  # seconds that the reading of this offset took
        self._fd: int | None = None

    def enter(self) -> None:
        """Count as alive from now on. The lock file gets its name once it is locked."""
        if self._fd is not None:
            return
        self._folder(self.id).mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._run / f".{self.id}.new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self._file(self.id))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def leave(self, *, settled: bool) -> None:
        """Count as dead from now on. With `settled` False another proxy settles the turns left. Idempotent."""
        if self._fd is not None:
            if settled:
                self.forget(self.id)
            os.close(self._fd)
            self._fd = None

    async def set_clock(self) -> None:
        """Read the store's clock, if its proxies may be on several hosts. Raises `StoreUnavailable`."""
        if self._elsewhere is not None:
            before = _steady()
            server_time = await self._elsewhere.clock()
            took = _steady() - before
            if took <= max(EXACT, self._reading_took):
                self._clock_offset, self._reading_took = server_time - before - took / 2, took

    def now(self) -> float:
        """Seconds since 1970 by the store's clock, which all its proxies share: the clocks of hosts may differ by
        hours, and jump."""
        return time.time() if self._clock_offset is None else self._clock_offset + _steady()

    def others(self) -> list[str]:
        """The ids of all other known proxies, alive or dead."""
        with os.scandir(self._run) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
        return [name[: -len(SUFFIX)] for name in names if name != self.id + SUFFIX]

    def alive(self, instance: str | None) -> bool:
        """Whether a proxy on this `var/` lives, according to the kernel."""
        if instance == self.id:
            return self._fd is not None
        if instance is None:
            return False
        return is_held(self._file(instance))

    def has_ended(self, instance: str) -> bool:
        """Whether that proxy has certainly ended. An unknown one may live on another host."""
        known_here = self._elsewhere is None or instance == self.id or self._file(instance).exists()
        return known_here and not self.alive(instance)

    async def is_gone(self, instance: str | None) -> bool:
        """Whether it has ended or, on another `var/`, does not respond. Raises `StoreUnavailable`."""
        if self._elsewhere is None or instance in (None, self.id) or self._file(instance or "").exists():
            return not self.alive(instance)
        return not await self._elsewhere.responds(instance or "")

    async def any_waits(self, followers: Sequence[str]) -> bool:
        """Whether one of these proxies, whose clients wait for an answer, is alive."""
        for proxy in followers:
            if not await self.is_gone(proxy):
                return True
        return False

    def forget(self, instance: str) -> None:
        """Forget a proxy whose turns are all settled."""
        shutil.rmtree(self._folder(instance), ignore_errors=True)
        self._file(instance).unlink(missing_ok=True)

    # turns of this proxy that failed while the store was away

    def failed(self, turn_id: str) -> None:
        """Write a file that says that the turn failed. Its client was told so: an answer in its transcript must not be
        committed."""
        try:
            self._failed(self.id, turn_id).touch()
        except OSError as exc:
            log.warning("failure_not_noted", turn_id=turn_id, error=exc.strerror)

    def has_failed(self, turn: Turn) -> bool:
        return turn.instance is not None and self._failed(turn.instance, turn.id).exists()

    # the CLIs of a proxy

    def on_spawn(self, pid: int, start_time: str | None, cwd: Path) -> None:
        """Write a file about a CLI of this proxy, before its first frame and again when its directory changes."""
        file = self._folder(self.id) / str(pid)
        try:
            file.write_text(json.dumps({"pid": pid, "start_time": start_time, "cwd": str(cwd)}))
        except OSError as exc:  # the CLI may run without it: it ends with this proxy
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def on_exit(self, pid: int) -> None:
        try:
            (self._folder(self.id) / str(pid)).unlink(missing_ok=True)
        except OSError as exc:  # harmless: readers compare the start time
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def children(self, instance: str, cwd: Path | None = None) -> Iterator[tuple[int, str]]:
        """(pid, start time) of each CLI that the proxy `instance` started and has not reaped; with `cwd`, only of
        those in that directory."""
        for path in sorted(self._folder(instance).glob("[0-9]*")):
            try:
                data = json.loads(path.read_text())
                if cwd is None or data.get("cwd") in (None, str(cwd)):
                    yield int(data["pid"]), data["start_time"]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # reaped just now, or its proxy died while it wrote the file: the CLI got no prompt yet

    def _file(self, instance: str) -> Path:
        return self._run / (_file_name(instance) + SUFFIX)

    def _folder(self, instance: str) -> Path:
        return self._run / _file_name(instance)

    def _failed(self, instance: str, turn_id: str) -> Path:
        return self._folder(instance) / f"{_file_name(turn_id)}.failed"


def _file_name(known: str) -> str:
    """The id of a proxy or a turn as a file's name. A row of the store may have a path in its place: then a name that
    no file has."""
    return known if _ID.fullmatch(known) else "~"


class Ownership:
    """The leases of this proxy. One per engine.

    - `settle(agent, lease)` ends what former holders left unfinished: their processes and turns of this agent.
    - `flush(agent, lease)` stores what only this proxy knows, before the lease is handed over.
    - `retire(agent)` ends this proxy's idle processes of an agent, before the lease is handed over.
    - `lease_lost(agent_key)` is called when another proxy got a lease of ours: the agent's turns here have to stop.
    - `busy()`: whether turns wait or run here; `in_lane(agent_key)`: whether turns of this agent do.
    - `end(turn_id, by)` ends a turn here that another proxy cancelled.
    """

    def __init__(
        self,
        store: Store,
        instances: Instances,
        lease: float,
        *,
        settle: Callable[[Agent, Lease], Awaitable[None]],
        flush: Callable[[Agent, Lease], Awaitable[None]],
        retire: Callable[[Agent], Awaitable[None]],
        lease_lost: Callable[[int], None],
        busy: Callable[[], bool],
        in_lane: Callable[[int], bool],
        end: Callable[[str, CancelledBy], None],
        address: str | None = None,
    ) -> None:
        self._store = store
        self._instances = instances
        self.proxy = Proxy(instances.id, socket.gethostname(), lease, address)
        self._settle = settle
        self._flush = flush
        self._retire = retire
        self._lease_lost = lease_lost
        self._busy = busy
        self._in_lane = in_lane
        self._end = end
        self._held: dict[int, _HeldLease] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._users: Counter[int] = Counter()  # of these locks
        self._requested: dict[int, float] = {}  # when other proxies first asked for a lease, by agent; the loop's time
        self._taken_over: list[Agent] = []  # by another proxy; a process of such an agent may be left here
        self._renewed = 0.0  # the loop's time of the last heartbeat that was stored
        self._pauses = PauseWatch(self.proxy.lease)

    async def renew_leases(self) -> None:
        """Send heartbeats, which renew the leases. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT * self.proxy.lease)
            # Other proxies need heartbeats even if turns only wait here, or are forwarded.
            if self._held or self._instances.spans_hosts or self.proxy.address is not None:
                try:
                    await self._renew()
                except StoreUnavailable as exc:
                    log.warning("lease_not_renewed", error=exc.message)

    async def serve_requests(self) -> None:
        """Hand over leases that other proxies ask for, once no turn uses them, and end turns that others cancel. Runs
        until it is cancelled."""
        is_failing, has_peers = False, True  # peers: other proxies on this store
        while True:
            longest = POLL * self.proxy.lease
            if has_peers:
                await self._store.until_asked(self.proxy.id, longest)
            else:
                await asyncio.sleep(min(POLL_ALONE, longest))
            self._pauses.was_awake()
            taken_over, self._taken_over = self._taken_over, []
            await asyncio.gather(*(self._retire_taken_over(agent) for agent in taken_over))
            try:
                has_peers = self._instances.spans_hosts or bool(self._instances.others())
                if not has_peers or not (self._held or self._busy()):  # nobody can ask, or there is nothing to ask for
                    continue
                requests = await self._store.asked(self.proxy.id)
            except (ProxyError, OSError) as exc:  # OSError: e.g. out of descriptors
                if not is_failing:  # logged once, however long it lasts
                    log.warning("leases_not_looked_at", error=str(exc))
                is_failing = True
                continue
            is_failing = False
            now = asyncio.get_running_loop().time()
            # Keep the time of the first request; a lease that nobody asks for any more is dropped.
            self._requested = {agent_key: self._requested.get(agent_key, now) for agent_key in requests.leases}
            for turn_id, by in requests.cancels:
                self._end(turn_id, by)
            await asyncio.gather(*(self._release_unused(agent_key) for agent_key in requests.leases))

    async def stop(self) -> None:
        """Release every lease. Called when no turn and no process of ours runs any more."""
        self._held.clear()
        await self._store.resign(self.proxy.id)

    async def compare_hosts(self, facts: Facts) -> None:
        """Store this host's facts, and log those that differ on other hosts. Raises `StoreUnavailable`."""
        await self.ensure_heartbeat()
        await self._store.introduce(self.proxy.id, facts)
        for what, values in differences(await self._store.hosts()).items():
            log.warning("hosts_differ", what=what, values=values)

    async def ensure_heartbeat(self) -> None:
        """Send a heartbeat if the last one is old. A turn is accepted only after one: others hand over only to a proxy
        that responds."""
        if asyncio.get_running_loop().time() - self._renewed >= HEARTBEAT * self.proxy.lease:
            await self._renew()

    def unused(self, agent_key: int) -> UnusedLease | None:
        """The agent's lease, if no turn here uses it now. What is read of the agent now stays valid as long as
        `not_used_since` returns True."""
        held = self._held.get(agent_key)
        if held is None or not held.settled or self._users[agent_key]:
            return None
        return UnusedLease(held.lease, held.uses)

    def not_used_since(self, unused: UnusedLease | None) -> bool:
        """Whether no turn has used the lease since then, except the one that uses it now."""
        held = None if unused is None else self._held.get(unused.lease.agent_key)
        return held is not None and unused == UnusedLease(held.lease, held.uses - 1)

    @asynccontextmanager
    async def hold(
        self, agent: Agent, turn: Turn | None = None, *, at_acceptance: UnusedLease | None = None
    ) -> AsyncIterator[Lease]:
        """Take the agent's lease, for a turn once it is next in the order of acceptance. `at_acceptance`: the unused
        lease when the turn was accepted, if no other proxy had an unfinished turn of the agent then. If the lease was
        not used since, the turn is next.

        Another holder is asked to hand over. A holder that has ended is replaced at once; one that does not respond,
        when its lease has expired. Waits without a limit: the caller bounds it.
        """
        async with self._locked(agent.key):
            if agent.key in self._requested:
                await self._let_others_first(agent.key)
            wait = FIRST_WAIT
            while True:
                lease = await self._acquire(agent)
                if lease is not None:
                    if self.not_used_since(at_acceptance) or await self._is_next(agent, lease, turn):
                        break
                    await self._release(agent.key)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_WAIT)
            try:
                yield lease
            except LeaseLost:
                if self.holds(lease):  # forget the lost lease, so that the next turn asks for it at once
                    del self._held[agent.key]
                raise

    @asynccontextmanager
    async def hold_if_free(self, agent: Agent) -> AsyncIterator[Lease | None]:
        """The agent's lease, if nobody uses it here and no other proxy holds it; else None.

        Another holder is not asked for it: that would end a warm process for nothing.
        """
        if self._users[agent.key]:
            yield None
            return
        async with self._locked(agent.key):
            yield await self._acquire(agent, request=False)

    def holds(self, lease: Lease) -> bool:
        """Whether this proxy holds the lease, as far as it knows."""
        held = self._held.get(lease.agent_key)
        return held is not None and held.lease == lease

    def has(self, agent_key: int) -> bool:
        """Whether this proxy holds the agent's lease, as far as it knows."""
        return agent_key in self._held

    async def verify(self, lease: Lease) -> None:
        """Raise `LeaseLost` unless the store says that the lease is ours. Called before files are written: this proxy
        may have been paused, and replaced."""
        await self.ensure_heartbeat()
        if not self.holds(lease):
            raise LeaseLost("another proxy has taken this agent over: send it again", retry_after=1.0)

    # --- one lease

    @asynccontextmanager
    async def _locked(self, agent_key: int) -> AsyncIterator[None]:
        lock = self._locks.setdefault(agent_key, asyncio.Lock())
        self._users[agent_key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[agent_key] -= 1
            if not self._users[agent_key]:
                del self._users[agent_key], self._locks[agent_key]

    async def _acquire(self, agent: Agent, *, request: bool = True) -> Lease | None:
        """Take the lease, and settle the turns of its last holder if that has ended. None while another proxy has it:
        that one is asked to hand it over if `request`."""
        held = self._held.get(agent.key)
        if held is None:
            acquire = partial(self._store.acquire, agent.key, self.proxy, awake=self._pauses.was_awake, asks=request)
            result = await acquire()
            if isinstance(result, LeaseHeld) and self._instances.has_ended(result.holder):
                result = await acquire(dead=(result.holder,))
            if isinstance(result, LeaseHeld):
                return None
            self._renewed = asyncio.get_running_loop().time()
            held = self._held[agent.key] = _HeldLease(result.lease, agent, settled=result.taken_from is None)
            if result.taken_from is not None:
                holder = result.taken_from
                log.warning("agent_taken_over", **agent.named_in_logs, epoch=result.lease.epoch, former=holder)
        if not held.settled:
            await self._settle(agent, held.lease)
            held.settled = True
        held.uses += 1
        return held.lease

    async def _is_next(self, agent: Agent, lease: Lease, turn: Turn | None) -> bool:
        """Whether no turn of another proxy comes before this one in the order of acceptance.

        Two kinds of turns do not count: a turn that is tried again, because it keeps its old number but is last in its
        lane; and a turn of a proxy that does not respond. A turn that runs elsewhere, without the lease, has lost the
        lease: it is settled.
        """
        if not (self._instances.spans_hosts or self._instances.others()):
            return True
        for other in await self._store.unfinished_of(agent.key, excluding=self._instances.id):
            if other.instance is None:
                continue
            if other.status == "running" or await self._instances.is_gone(other.instance):
                await self._settle(agent, lease)
                return await self._is_next(agent, lease, turn)
            keeps_its_place = not other.attempts or other.limit_wait is not None
            is_before = turn is not None and other.seq < turn.seq and keeps_its_place
            if is_before and await self._store.responds(other.instance):
                return False
        return True

    async def _release_unused(self, agent_key: int) -> None:
        # The next turn of the lane hands over before it runs, if others have waited long enough (`_let_others_first`).
        if self._users[agent_key] or self._in_lane(agent_key):
            return
        async with self._locked(agent_key):
            with failures_logged("lease_not_handed_over"):  # tried again at the next poll
                await self._release(agent_key)

    async def _let_others_first(self, agent_key: int) -> None:
        """Hand the lease over before the next turn here, if another proxy has waited for it for `lease` seconds: while
        turns follow each other without a pause, `serve_requests` never finds the lease unused.

        New turns of other proxies do not need this: they have their place in the order of acceptance (`_is_next`).
        """
        clock = asyncio.get_running_loop().time
        if clock() - self._requested[agent_key] < self.proxy.lease or agent_key not in self._held:
            return
        try:
            waiting = await self._store.unfinished_of(agent_key)
            if any(turn.instance not in (None, self._instances.id) and not turn.attempts for turn in waiting):
                return
            await self._release(agent_key)
            for _ in range(TAKE_WAITS):
                if (await self._store.whereabouts(agent_key)).holder is not None:
                    return
                await asyncio.sleep(LAST_WAIT)
        except ProxyError as exc:  # the other proxy asks again
            log.warning("lease_not_handed_over", error=exc.message)

    async def _retire_taken_over(self, agent: Agent) -> None:
        """End this proxy's process of an agent that another proxy has taken over: it no longer has the path. A deletion
        ends the lease, too. A new agent of the same name then works in the same directory: its process goes on."""
        if self._users[agent.key] or agent.key in self._held:  # a turn here compares the process with the path
            return
        async with self._locked(agent.key):
            # If this fails, the agent's next turn here compares the process with the path, and ends it.
            with failures_logged("process_not_retired", **agent.named_in_logs):
                named = await self._store.agent(agent.owner, agent.agent_id)
                if named is None or named.key == agent.key:
                    await self._retire(agent)

    async def _release(self, agent_key: int) -> None:
        """Give the lease back, after this proxy's processes of the agent have ended."""
        held = self._held.pop(agent_key, None)
        if held is None:
            return
        try:
            await self._flush(held.agent, held.lease)
            await self._retire(held.agent)
            await self._store.release(held.lease)
            self._requested.pop(agent_key, None)
        except BaseException:
            # This proxy is still the holder in the store. The next poll hands over, or a heartbeat finds the loss.
            self._held[agent_key] = held
            raise

    async def _renew(self) -> None:
        """Send a heartbeat. It shows which leases were lost."""
        held_before = dict(self._held)
        began = asyncio.get_running_loop().time()
        renewed = {held.lease.agent_key: held.lease for held in await self._store.renew(self.proxy)}
        self._renewed = began
        lost: list[_HeldLease] = []
        for agent_key, held in held_before.items():
            if renewed.get(agent_key) != held.lease and self._held.get(agent_key) is held:
                del self._held[agent_key]
                lost.append(held)
                self._lease_lost(agent_key)
                self._taken_over.append(held.agent)
        for agent_key, lease in renewed.items():
            if agent_key not in self._held and not self._users[agent_key]:
                # This proxy does not know of the grant: the turn was cancelled meanwhile, or a backup was restored.
                async with self._locked(agent_key):
                    await self._store.release(lease)
        for held in lost:
            if await self._store.agent_by_key(held.agent.key) is not None:  # a deleted agent's name is in no log
                log.warning("lease_lost", **held.agent.named_in_logs, epoch=held.lease.epoch)
        await self._instances.set_clock()  # last, so that a failure here does not hide a lost lease


def differences(hosts: Iterable[tuple[str, Facts]]) -> dict[str, dict[str, list[str]]]:
    """The facts that differ between hosts: for each its values ("": none), and for each value its hosts."""
    known = list(hosts)
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted({name for _, facts in known for name in facts}):
        values: dict[str, list[str]] = {}
        for host, facts in known:
            values.setdefault(facts.get(name, ""), []).append(host)
        if len(values) > 1:
            found[name] = values
    return found


class PauseWatch:
    """Notices that this process was paused: `was_awake` is called at least every `HEARTBEAT * lease` seconds, from any
    thread, and a longer time between two calls was a pause.

    If the machine slept, the other proxies did, too: their expired heartbeats mean nothing until they had time to renew
    them.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._last_call = time.time()
        self._pause_ended = 0.0

    def was_awake(self) -> bool:
        """Whether there was no pause within the last `lease` seconds."""
        now = time.time()
        if abs(now - self._last_call) > HEARTBEAT * self._lease:
            self._pause_ended = now
        self._last_call = now
        return now - self._pause_ended >= self._lease


@dataclass(slots=True, eq=False)
class _HeldLease:
    """A lease of this proxy."""

    lease: Lease
    agent: Agent
    settled: bool  # the turns and processes that the former holder left are ended
    uses: int = 0  # how often turns have used it


@dataclass(frozen=True, slots=True)
class UnusedLease:
    """A lease while no turn used it, with its count of uses so far."""

    lease: Lease
    uses: int
