"""Who may write: which proxies on one `var/` are alive, and which one of them writes an agent.

A proxy writes an agent's turns and sessions while it holds the agent's lease (see `stores.base.Leases`). It keeps the
lease between turns, with the warm process, until another proxy asks for it. The store refuses every write of a holder
that was replaced, so a proxy that was paused for a minute cannot write over its successor.

On one machine the kernel says at once that a holder has ended: a proxy holds flock(2) on a file of its own as long
as it lives. Of proxies on another `var/` or host only their heartbeats in the store tell: one that does not respond is
replaced when its lease has expired.

    <var>/run/<instance>.lock        held as long as the proxy lives
    <var>/run/<instance>/<pid>       a CLI of that proxy: its pid, start time and directory (see `recovery`)
    <var>/run/<instance>/<turn>.failed
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
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
from ..tasks import survived

log = logs.get(__name__)

# A heartbeat is due when this share of the lease has passed: two may be missed before it expires.
HEARTBEAT = 0.3
# How often a lease that another proxy holds is asked for: soon at first, as most turns are short. Seconds.
FIRST_WAIT = 0.002
LAST_WAIT = 0.05
# So many times `LAST_WAIT` the turns here wait until the proxy that a lease was handed over to has taken it.
GAP = 40
# A reading of the store's clock that took no longer (seconds) replaces any other: in a longer one this process may have
# been paused.
EXACT = 1.0
# A proxy that is told when others ask something of it looks by itself when this share of the lease has passed, too.
LOOK = 0.1
# A proxy that has no peers looks so often, in seconds, whether one has come: to look costs a wake-up.
ALONE = 0.5


def steady_clock() -> Callable[[], float]:
    """A monotonic clock that also counts time asleep (Linux and macOS name it differently)."""
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    clock: int | None = getattr(time, name, None)
    return time.monotonic if clock is None else partial(time.clock_gettime, clock)


_steady = steady_clock()


class Instances:
    """The proxies on this `var/`: this one, and which others there are or were.

    `elsewhere`: a store on which there may be proxies with another `var/`, too.
    """

    def __init__(self, var: Path, elsewhere: Leases | None = None) -> None:
        self.id = uuid.uuid4().hex
        self._run = var / RUN
        self._elsewhere = elsewhere
        self.spans_hosts = elsewhere is not None
        self._ahead: float | None = None  # the store's clock less the steady one of this host
        self._took = float("inf")  # how long it took to read that, in seconds
        self._fd: int | None = None

    def enter(self) -> None:
        """Count as alive from now on. The file appears under its name only when it is locked."""
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
        """Count as dead from now on. If some turn has no stored end, another proxy settles it. Idempotent."""
        if self._fd is not None:
            if settled:
                self.forget(self.id)
            os.close(self._fd)
            self._fd = None

    async def set_clock(self) -> None:
        """Learn what time it is on the store, where its proxies may be on several hosts. Raises `StoreUnavailable`."""
        if self._elsewhere is not None:
            asked = _steady()
            server_time = await self._elsewhere.clock()
            took = _steady() - asked
            if took <= max(EXACT, self._took):
                self._ahead, self._took = server_time - asked - took / 2, took

    def now(self) -> float:
        """Seconds since 1970, by a clock that all proxies of the store share, so that the age of another host's turn is
        true: the clocks of hosts may differ by hours, and jump."""
        return time.time() if self._ahead is None else self._ahead + _steady()

    def others(self) -> list[str]:
        """The ids of all other proxies that are not forgotten yet, alive or dead."""
        with os.scandir(self._run) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
        return [name[: -len(SUFFIX)] for name in names if name != self.id + SUFFIX]

    def alive(self, instance: str | None) -> bool:
        """A proxy on this `var/`, by the kernel."""
        if instance == self.id:
            return self._fd is not None
        if instance is None:
            return False
        return is_held(self._file(instance))

    def has_ended(self, instance: str) -> bool:
        """Whether this proxy has certainly ended. One on another host may live, though nothing is known of it here."""
        known_here = self._elsewhere is None or instance == self.id or self._file(instance).exists()
        return known_here and not self.alive(instance)

    async def is_gone(self, instance: str | None) -> bool:
        """It has ended; of one that is elsewhere: it does not respond. Raises `StoreUnavailable`."""
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

    # turns of this proxy that failed while the store could not be told

    def failed(self, turn_id: str) -> None:
        """Remember it beside the store: its client was told that it was not kept, whatever its transcript holds."""
        try:
            (self._folder(self.id) / f"{turn_id}.failed").touch()
        except OSError as exc:
            log.warning("failure_not_noted", turn_id=turn_id, error=exc.strerror)

    def has_failed(self, turn: Turn) -> bool:
        return turn.instance is not None and (self._folder(turn.instance) / f"{turn.id}.failed").exists()

    # the CLIs of a proxy

    def on_spawn(self, pid: int, start_time: str | None, cwd: Path) -> None:
        """Note a CLI of this proxy, before it is given anything to do; again when it gets another directory."""
        note = self._folder(self.id) / str(pid)
        try:
            note.write_text(json.dumps({"pid": pid, "start_time": start_time, "cwd": str(cwd)}))
        except OSError as exc:  # it may run all the same: it dies with us
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def on_exit(self, pid: int) -> None:
        note = self._folder(self.id) / str(pid)
        try:
            note.unlink(missing_ok=True)
        except OSError as exc:  # its readers compare the start time
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def children(self, instance: str, cwd: Path | None = None) -> Iterator[tuple[int, str]]:
        """(pid, start time) of every CLI it noted and did not reap; with `cwd`, of those that work there."""
        for path in sorted(self._folder(instance).glob("[0-9]*")):
            try:
                data = json.loads(path.read_text())
                if cwd is None or data.get("cwd") in (None, str(cwd)):
                    yield int(data["pid"]), data["start_time"]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # reaped just now, or its proxy died while it wrote this: the CLI got no prompt yet

    def _file(self, instance: str) -> Path:
        return self._run / (instance + SUFFIX)

    def _folder(self, instance: str) -> Path:
        return self._run / instance


class Ownership:
    """The leases of this proxy. One per engine.

    - `settle(agent, lease)` ends what former holders left unfinished: their processes and turns of this agent.
    - `leave(agent, lease)` stores what only this proxy knows, before the lease is handed over.
    - `retire(agent)` ends this proxy's idle processes of an agent, before the lease is handed over.
    - `fenced(agent_key)` is told of a lease that was lost: whatever runs for this agent here has to stop.
    - `busy()`: turns wait or run here, `in_lane(agent_key)`: turns of this agent; `end(turn_id, by)` ends one of them,
      as another proxy wants.
    """

    def __init__(
        self,
        store: Store,
        instances: Instances,
        lease: float,
        *,
        settle: Callable[[Agent, Lease], Awaitable[None]],
        leave: Callable[[Agent, Lease], Awaitable[None]],
        retire: Callable[[Agent], Awaitable[None]],
        fenced: Callable[[int], None],
        busy: Callable[[], bool],
        in_lane: Callable[[int], bool],
        end: Callable[[str, CancelledBy], None],
        address: str | None = None,
    ) -> None:
        self._store = store
        self._instances = instances
        self.proxy = Proxy(instances.id, socket.gethostname(), lease, address)
        self._settle = settle
        self._leave = leave
        self._retire = retire
        self._fenced = fenced
        self._busy = busy
        self._in_lane = in_lane
        self._end = end
        self._held: dict[int, _Holding] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._users: Counter[int] = Counter()  # of these locks
        self._asked: dict[int, float] = {}  # since when others ask for these leases, by the loop's time
        self._lost: list[Agent] = []  # agents that another proxy has taken over, with a process of ours left perhaps
        self._renewed = 0.0  # the loop's time of the last heartbeat that was stored
        self._pauses = PauseWatch(self.proxy.lease)

    async def keep(self) -> None:
        """Renew the leases. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT * self.proxy.lease)
            if self._held or self._instances.spans_hosts:  # other hosts need a heartbeat for turns that wait here, too
                try:
                    await self._renew()
                except StoreUnavailable as exc:
                    log.warning("lease_not_renewed", error=exc.message)

    async def hand_over(self) -> None:
        """Hand over leases that other proxies ask for once no turn uses them, and end turns that they cancel. Runs
        until it is cancelled."""
        looks, peers = True, True
        while True:
            longest = LOOK * self.proxy.lease
            if peers:
                await self._store.until_asked(self.proxy.id, longest)
            else:
                await asyncio.sleep(min(ALONE, longest))
            self._pauses.was_awake()
            lost, self._lost = self._lost, []
            await asyncio.gather(*(self._retire_lost(agent) for agent in lost))
            try:
                peers = self._instances.spans_hosts or bool(self._instances.others())
                if not peers or not (self._held or self._busy()):
                    continue
                asked = await self._store.asked(self.proxy.id)
            except (ProxyError, OSError) as exc:  # OSError: no descriptor is free
                if looks:  # logged once, however long it lasts
                    log.warning("leases_not_looked_at", error=str(exc))
                looks = False
                continue
            looks = True
            now = asyncio.get_running_loop().time()
            self._asked = {agent_key: self._asked.get(agent_key, now) for agent_key in asked.leases}
            for turn_id, by in asked.cancels:
                self._end(turn_id, by)
            await asyncio.gather(*(self._release_unused(agent_key) for agent_key in asked.leases))

    async def stop(self) -> None:
        """Release every lease. Called when no turn and no process of ours runs any more."""
        self._held.clear()
        await self._store.resign(self.proxy.id)

    async def introduce(self, facts: Facts) -> None:
        """Tell the store this host's facts, and log what differs on other hosts. Raises `StoreUnavailable`."""
        await self.appear()
        await self._store.introduce(self.proxy.id, facts)
        for what, values in differences(await self._store.hosts()).items():
            log.warning("hosts_differ", what=what, values=values)

    async def appear(self) -> None:
        """Be known to respond, before a turn is accepted here: the other proxies give way to it only then."""
        if asyncio.get_running_loop().time() - self._renewed >= HEARTBEAT * self.proxy.lease:
            await self._renew()

    def unused(self, agent_key: int) -> Unused | None:
        """The agent's lease while nobody here writes under it: what is read of the agent from now on stays true until
        then (`since`)."""
        held = self._held.get(agent_key)
        if held is None or not held.settled or self._users[agent_key]:
            return None
        return Unused(held.lease, held.uses)

    def since(self, unused: Unused | None) -> bool:
        """Nobody wrote the agent since then but who holds it now."""
        held = None if unused is None else self._held.get(unused.lease.agent_key)
        return held is not None and unused == Unused(held.lease, held.uses - 1)

    @asynccontextmanager
    async def hold(
        self, agent: Agent, turn: Turn | None = None, *, first: Unused | None = None
    ) -> AsyncIterator[Lease]:
        """Write this agent, in the turn's place in the order of acceptance (None: it has none). `first`: when the turn
        was accepted no other proxy had an unfinished one.

        Another holder is asked to hand over, and waited for. One that has ended is replaced at once, one that does not
        respond when its lease has expired. Unbounded in time: the caller has the turn's limit around it.
        """
        async with self._exclusively(agent.key):
            if agent.key in self._asked:
                await self._give_way(agent.key)
            wait = FIRST_WAIT
            while (lease := await self._acquired(agent)) is None or not (
                self.since(first) or await self._is_first(agent, lease, turn)
            ):
                if lease is not None:
                    await self._release(agent.key)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_WAIT)
            try:
                yield lease
            except LeaseLost:
                if self.holds(lease):  # the next turn asks for it anew, and does not wait for a heartbeat to find out
                    del self._held[agent.key]
                raise

    @asynccontextmanager
    async def hold_if_free(self, agent: Agent) -> AsyncIterator[Lease | None]:
        """The agent's lease where nobody uses it here and no other proxy holds it; else None.

        Its holder is not asked for it: that would end a warm process for nothing.
        """
        if self._users[agent.key]:
            yield None
            return
        async with self._exclusively(agent.key):
            yield await self._acquired(agent, asks=False)

    def holds(self, lease: Lease) -> bool:
        """Whether this proxy holds the lease, as far as it knows."""
        held = self._held.get(lease.agent_key)
        return held is not None and held.lease == lease

    def has(self, agent_key: int) -> bool:
        """This proxy holds the agent's lease, as far as it knows."""
        return agent_key in self._held

    async def verify(self, lease: Lease) -> None:
        """Raise `LeaseLost` unless the lease is still ours. Asked before files are written: a proxy that was paused may
        have been replaced."""
        await self.appear()
        if not self.holds(lease):
            raise LeaseLost("another proxy has taken this agent over: send it again", retry_after=1.0)

    # --- one lease

    @asynccontextmanager
    async def _exclusively(self, agent_key: int) -> AsyncIterator[None]:
        lock = self._locks.setdefault(agent_key, asyncio.Lock())
        self._users[agent_key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[agent_key] -= 1
            if not self._users[agent_key]:
                del self._users[agent_key], self._locks[agent_key]

    async def _acquired(self, agent: Agent, *, asks: bool = True) -> Lease | None:
        """The lease, once a former holder's turns are settled. None while another proxy has it, which it may ask."""
        held = self._held.get(agent.key)
        if held is None:
            got = await self._store.acquire(agent.key, self.proxy, awake=self._pauses.was_awake, asks=asks)
            if isinstance(got, LeaseHeld) and self._instances.has_ended(got.holder):
                got = await self._store.acquire(
                    agent.key, self.proxy, dead=(got.holder,), awake=self._pauses.was_awake, asks=asks
                )
            if isinstance(got, LeaseHeld):
                return None
            self._renewed = asyncio.get_running_loop().time()
            held = self._held[agent.key] = _Holding(got.lease, agent, settled=got.taken_from is None)
            if got.taken_from is not None:
                log.warning("agent_taken_over", agent=agent.agent_id, epoch=got.lease.epoch, former=got.taken_from)
        if not held.settled:
            await self._settle(agent, held.lease)
            held.settled = True
        held.uses += 1
        return held.lease

    async def _is_first(self, agent: Agent, lease: Lease, turn: Turn | None) -> bool:
        """Whether no turn of another proxy comes before this one.

        A turn that is tried again keeps its old number but is last in its lane, so it does not count; neither does one
        of a proxy that does not respond. A turn that runs elsewhere without the lease has lost it.
        """
        if not (self._instances.spans_hosts or self._instances.others()):
            return True
        for other in await self._store.unfinished_of(agent.key, excluding=self._instances.id):
            if other.instance is None:
                continue
            if other.status == "running" or await self._instances.is_gone(other.instance):
                await self._settle(agent, lease)
                return await self._is_first(agent, lease, turn)
            in_place = not other.attempts or other.limit_wait is not None
            before = turn is not None and other.seq < turn.seq and in_place
            if before and await self._store.responds(other.instance):
                return False
        return True

    async def _release_unused(self, agent_key: int) -> None:
        # A turn that uses the lease checks for requests when it ends. One in the lane runs first, or gives it back.
        if self._users[agent_key] or self._in_lane(agent_key):
            return
        async with self._exclusively(agent_key):
            with survived("lease_not_handed_over"):  # tried again at the next look: the other agents do not wait
                await self._release(agent_key)

    async def _give_way(self, agent_key: int) -> None:
        """Hand the lease over before the next turn here, where others have asked for it as long as a lease lasts: while
        turns follow each other without a pause, `hand_over` never finds it unused.

        Another proxy's turn needs none of this: it comes in the order of acceptance (`_is_first`), unless it is tried
        again.
        """
        clock = asyncio.get_running_loop().time
        if clock() - self._asked[agent_key] < self.proxy.lease or agent_key not in self._held:
            return
        try:
            waiting = await self._store.unfinished_of(agent_key)
            if any(turn.instance not in (None, self._instances.id) and not turn.attempts for turn in waiting):
                return
            await self._release(agent_key)
            for _ in range(GAP):
                if (await self._store.whereabouts(agent_key)).holder is not None:
                    return
                await asyncio.sleep(LAST_WAIT)
        except ProxyError as exc:  # it is asked for once more
            log.warning("lease_not_handed_over", error=exc.message)

    async def _retire_lost(self, agent: Agent) -> None:
        """End the process of an agent that goes on elsewhere: its memory is not the path any more."""
        if self._users[agent.key] or agent.key in self._held:  # whoever uses it compares it with the path
            return
        async with self._exclusively(agent.key):
            # Its next turn here compares it with the path, and ends it.
            with survived("process_not_retired", agent=agent.agent_id):
                await self._retire(agent)

    async def _release(self, agent_key: int) -> None:
        """Give the lease back, when no process of ours is left on the agent's sessions."""
        held = self._held.pop(agent_key, None)
        if held is None:
            return
        try:
            await self._leave(held.agent, held.lease)
            await self._retire(held.agent)
            await self._store.release(held.lease)
            self._asked.pop(agent_key, None)
        except BaseException:
            # Still ours in the store: kept, so that the next look hands it over, or the next heartbeat finds it gone.
            self._held[agent_key] = held
            raise

    async def _renew(self) -> None:
        before = dict(self._held)
        began = asyncio.get_running_loop().time()
        now = {held.lease.agent_key: held.lease for held in await self._store.renew(self.proxy)}
        self._renewed = began
        for agent_key, held in before.items():
            if now.get(agent_key) != held.lease and self._held.get(agent_key) is held:
                del self._held[agent_key]
                log.warning("lease_lost", agent=held.agent.agent_id, epoch=held.lease.epoch)
                self._fenced(agent_key)
                self._lost.append(held.agent)
        await self._instances.set_clock()  # last: a lease that is lost is told at once, and whatever comes of this


def differences(hosts: Iterable[tuple[str, Facts]]) -> dict[str, dict[str, list[str]]]:
    """What is not the same on all hosts: of each fact that differs, its values ("": none), and the hosts with each."""
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
    """Whether this process was paused within the last `lease` seconds. It finds out by being asked, at least once in
    `HEARTBEAT` of these, from any thread.

    If the machine slept, so did the other proxies: that their heartbeats have expired says nothing until they had the
    time for new ones.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._ran = time.time()  # when this process was last seen to run
        self._woke = 0.0  # when it woke up from its last pause

    def was_awake(self) -> bool:
        now = time.time()
        if abs(now - self._ran) > HEARTBEAT * self._lease:
            self._woke = now
        self._ran = now
        return now - self._woke >= self._lease


@dataclass(slots=True, eq=False)
class _Holding:
    """A lease of this proxy. `settled`: nothing of a former holder is left to settle."""

    lease: Lease
    agent: Agent
    settled: bool
    uses: int = 0  # how often it was written under


@dataclass(frozen=True, slots=True)
class Unused:
    """A lease that nobody writes under, after so many uses."""

    lease: Lease
    uses: int
