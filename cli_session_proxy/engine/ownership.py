"""Who may write: one proxy an agent at a time, and which of the proxies on one `var/` are alive.

<var>/locks/<agent dir>.lock     held for the whole of a turn
<var>/run/<instance>.lock        held as long as the proxy lives
<var>/run/<instance>/<pid>       a CLI of that proxy: its pid and start time (see `recovery`)
<var>/run/<instance>/<turn>.failed
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from ..domain.models import Agent, Turn
from ..locks import LAST_WAIT, SUFFIX, FileLock
from ..stores.base import Store

log = structlog.get_logger(__name__)


class Instances:
    """The proxies on this `var/`: this one, and which others there are or were."""

    def __init__(self, var: Path) -> None:
        self.id = uuid.uuid4().hex
        self._run = var / "run"
        self._locks = var / "locks"
        self._fd: int | None = None

    def enter(self) -> None:
        """Be alive from now on. The file appears under its name only when it is locked."""
        if self._fd is not None:
            return
        for folder in (self._locks, self._folder(self.id)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """Be dead from now on. Where not every turn has its end in the store, somebody else settles it. Idempotent."""
        if self._fd is not None:
            if settled:
                self.bury(self.id)
            os.close(self._fd)
            self._fd = None

    def others(self) -> list[str]:
        """The ids of all other proxies that have not been buried, alive or dead."""
        with os.scandir(self._run) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
        return [name[: -len(SUFFIX)] for name in names if name != self.id + SUFFIX]

    def alive(self, instance: str | None) -> bool:
        if instance == self.id:
            return self._fd is not None
        if instance is None:
            return False
        try:
            fd = os.open(self._file(instance), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look at once do not see each other
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def bury(self, instance: str) -> None:
        """Forget a proxy: nothing of it is left to settle."""
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

    def born(self, pid: int, start_time: str | None) -> None:
        """Note a CLI of this proxy, before it is given anything to do."""
        note = self._folder(self.id) / str(pid)
        try:
            note.write_text(json.dumps({"pid": pid, "start_time": start_time}))
        except OSError as exc:  # it may run all the same: without us it ends with its input
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def reaped(self, pid: int) -> None:
        note = self._folder(self.id) / str(pid)
        try:
            note.unlink(missing_ok=True)
        except OSError as exc:  # whoever reads it compares the start time
            log.warning("process_not_noted", pid=pid, error=exc.strerror)

    def children(self, instance: str) -> Iterator[tuple[int, str]]:
        """(pid, start time) of every CLI that this proxy noted and did not reap."""
        for path in sorted(self._folder(instance).glob("[0-9]*")):
            try:
                data = json.loads(path.read_text())
                yield int(data["pid"]), data["start_time"]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # reaped just now, or its proxy died while it wrote this: the CLI got no prompt yet

    def _file(self, instance: str) -> Path:
        return self._run / (instance + SUFFIX)

    def _folder(self, instance: str) -> Path:
        return self._run / instance


class Writers:
    """Lets one proxy at a time write an agent's chain and sessions, in the order of acceptance.

    `recover` settles what dead proxies left. It is called where a turn of one of them is in the way.
    """

    def __init__(self, var: Path, store: Store, instances: Instances, recover: Callable[[], Awaitable[None]]) -> None:
        self._folder = var / "locks"
        self._store = store
        self._instances = instances
        self._recover = recover

    @asynccontextmanager
    async def turn(self, agent: Agent, turn: Turn | None) -> AsyncIterator[FileLock]:
        """Hold the agent for this turn (None: for something that has no place in the order).

        Unbounded in time: the caller has the turn's limit around it.
        """
        lock = FileLock(self._folder / f"{agent.dir}{SUFFIX}")
        await lock.acquire()
        try:
            while self._instances.others() and await self._must_wait(agent, turn):
                lock.release()
                await asyncio.sleep(LAST_WAIT)
                await lock.acquire()
            yield lock
        finally:
            lock.release()

    def try_idle(self, agent: Agent) -> FileLock | None:
        """The agent's lock, if nobody has it."""
        lock = FileLock(self._folder / f"{agent.dir}{SUFFIX}")
        return lock if lock.try_acquire() else None

    async def _must_wait(self, agent: Agent, turn: Turn | None) -> bool:
        """Is another proxy's turn first? With the lock in hand, a running one can only be that of a proxy that died.

        A turn that is tried again keeps its old number but stands last in its lane: it holds nobody up.
        """
        for other in await self._store.waiting(agent.key):
            if other.instance == self._instances.id:
                continue
            if not self._instances.alive(other.instance):
                await self._recover()
                return True
            if other.status == "running" or (turn is not None and other.seq < turn.seq and not other.attempts):
                return True
        return False
