"""One database file with one writer at a time, and readers that never wait for it.

A transaction is a plain function of a SQLAlchemy `Connection`; it runs as a whole on a thread that is not the event
loop's. Measured for a transaction of 6 statements with synchronous=FULL: 0.95 ms this way, 3.5 ms through aiosqlite,
which switches threads three to four times a statement. It also makes cancellation simple: a cancelled caller leaves,
and the transaction still ends as all or nothing.

Writes that queue while another one runs are committed together, with one wait for the disk. If one of such a group
fails, the group is rolled back and each runs by itself.

An acknowledged turn waits for the disk. Earlier steps of a turn (`JOURNALED`) survive the end of this process at once,
and a power cut `SOON` later: its client has no answer yet, and no CLI writes a prompt to its disk sooner.

What is small (`quick`) is written on the event loop itself while the writer is idle, and the thread only waits for the
disk: a warm turn takes 0.2 to 1.9 ms less so. All of a turn's writes share one connection, and with it its page cache.

`file` has all that is SQLite's own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL, Connection, Engine

from ... import logs
from ...errors import InvalidRequest, ProxyError, StoreUnavailable
from ...locks import RUN, SUFFIX, FileLock, is_held
from ..sql.database import Database, Lifecycle, ThreadPool, Urgency, Work
from ..sql.migrations import moved
from .file import (
    ADVICE,
    ERRORS,
    IN_MEMORY,
    MOVED,
    QUICK,
    READERS_WAIT,
    READING,
    WRITING,
    cause_of,
    clean_copies,
    copy_aside,
    driver_of,
    engine,
    is_busy,
    is_no_text,
    sync,
    transaction,
    use_wal,
)

log = logs.get(__name__)

T = TypeVar("T")

# Reads are short and mostly from the page cache: more threads than this only queue for the interpreter.
READERS = 4
# The most writes in a group. Each waits for the work of all.
GROUP = 64
# Seconds by which a `LATER` write is delayed, and after which a journal entry is on the disk.
SOON = 0.01

# Quick writes between two checkpoints. One has about 10 pages of 4 KB; SQLite itself checkpoints every 1,000 pages.
CHECKPOINT = 100

# Writes that do not wait for the disk. The file has them before all later writes.
JOURNALED = (Urgency.JOURNAL, Urgency.AHEAD)

# The cause of a timeout: what the write waited for.
ANOTHER_PROGRAM = "another program"
EARLIER_WRITES = "the writes before this one"


@dataclass(slots=True, eq=False)
class _Write:
    """A write that waits for its group. `alone`: it shares its transaction with no other. `done` gets its result."""

    work: Work[Any]
    urgency: Urgency
    alone: bool
    deadline: float
    done: asyncio.Future[Any]


class _ToSync(NamedTuple):
    """What was in the file but not on the disk when a group began."""

    unsynced: bool  # as `_unsynced` was
    sync_due: bool  # as `_sync_due` was
    awaiting: list[asyncio.Future[None]]


class SqliteDatabase(Lifecycle, Database):
    """Runs transactions on one SQLite file. `busy_timeout` (seconds) bounds the wait for another writer.

    Use it on the event loop that opened it.

        <file>.import-<name>    a claim: flock(2), see `locks`
        <file>.v<n>.bak         a copy from before a migration
    """

    def __init__(self, path: str | Path, *, busy_timeout: float, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(os.path.abspath(path))
        self.url = URL.create("sqlite+pysqlite", database=str(self.path))
        self.busy_timeout = busy_timeout
        self._clock = clock
        self._engines: list[Engine] = []
        self._writer: Connection | None = None
        self._readers: SimpleQueue[Connection] = SimpleQueue()
        # Used on the event loop, so it never waits for a lock or the disk. A turn's small reads and writes share it and
        # its page cache.
        self._quick: Connection | None = None
        self._write_thread: ThreadPool | None = None
        self._read_threads: ThreadPool | None = None
        self._waiting: deque[_Write] = deque()  # the queue for the next groups
        self._delayed: list[_Write] = []  # of `Urgency.LATER`: queued when the timer fires, or before another write
        self._group: asyncio.Future[list[Any]] | None = None  # the writes that run now
        self._only_syncs = False  # the group has no writes, and so holds no lock: it syncs earlier ones
        self._awaiting_sync: list[asyncio.Future[None]] = []  # quick writes that wait for the disk
        self._quick_writes = 0  # since the last checkpoint
        self._timer: asyncio.TimerHandle | None = None
        self._unsynced = False  # writes that are in the file may not be on the disk yet
        self._sync_due = False  # the next group must put them there
        # Used by the writer thread; the event loop reads them only between two groups.
        self._commits_sync = True  # the next commit waits for the disk
        self._in_memory = False  # a statement of the writer is journaled in memory
        self._group_synced = False  # the group synced everything before it
        self._has_gap = False  # see `_close_gap`
        self._waited_for = EARLIER_WRITES

    @property
    def name(self) -> str:
        return str(self.path)

    async def open(self, prepare: Work[None]) -> None:
        await self._finished_closing()
        if self._write_thread is not None:
            return
        self._write_thread, self._read_threads = ThreadPool(1, "store-write"), ThreadPool(READERS, "store-read")
        try:
            await self._write_thread.run(self._connect)
            self._open = True
            await self.write(prepare, alone=True)
        except BaseException:
            await self.close()
            raise

    async def _end(self) -> None:
        self._queue_delayed()
        await self._until_no_group()
        self._sync_due = self._unsynced  # closing syncs nothing while another proxy has the file open
        await self._until_no_group()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        threads = [t for t in (self._write_thread, self._read_threads) if t is not None]
        self._write_thread = self._read_threads = None
        await asyncio.to_thread(self._shut, threads)

    async def _until_no_group(self) -> None:
        """Wait until no group runs or waits."""
        self._write_waiting()
        while self._group is not None:
            await asyncio.wait([self._group])  # `_ended` has then started the next group

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        """Runs on a thread, concurrently with writes. A `quick` read runs on the event loop: 0.1 to 0.2 ms; switching
        threads would double that. If it would have to wait for a lock, it runs on a thread, too.
        """
        if not self._open or self._read_threads is None:
            raise self._closed()
        if self._moved_to is not None:
            raise moved(str(self.path), self._moved_to)
        if quick:
            assert self._quick is not None
            try:
                return work(self._quick)  # one statement, so it needs no transaction around it
            except ERRORS as exc:
                if not is_busy(exc) and not is_no_text(exc):
                    raise self._unavailable(exc) from exc
        return await self._read_threads.run(partial(self._read, work))

    async def write(
        self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False, alone: bool = False
    ) -> T:
        """A transaction with the write lock from its start. A `quick` one runs on the event loop while nobody else
        writes: switching threads would take longer, and another connection would have to read changed pages again. If
        it is `DURABLE`, a thread then waits for the disk."""
        if not self._open:
            raise self._closed()
        if quick and (self._group is None or self._only_syncs) and not self._waiting:
            assert self._quick is not None
            self._quick_writes += 1
            try:
                (written,) = transaction(self._quick, QUICK, work)
            except ERRORS as exc:
                if not is_busy(exc):
                    raise self._unavailable(exc) from exc
            else:
                self._unsynced = True
                if urgency in JOURNALED:
                    self._set_timer()
                else:
                    self._awaiting_sync.append(on_disk := asyncio.get_running_loop().create_future())
                    self._sync_due = True
                    self._write_waiting()
                    await on_disk
                return written
        done = asyncio.get_running_loop().create_future()
        write = _Write(work, urgency, alone, time.monotonic() + self.busy_timeout, done)
        if urgency is Urgency.LATER:
            self._delayed.append(write)
            self._set_timer()
        else:
            self._queue_delayed()  # earlier writes first
            self._waiting.append(write)
            self._write_waiting()
        result: T = await done
        return result

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A new connection in autocommit mode for work beside the turns, also while this is not open. Blocks."""
        try:
            made = engine(self.url, WRITING, self.busy_timeout, self._clock)
            with made.connect() as conn:
                use_wal(conn, time.monotonic() + self.busy_timeout)
                yield conn
        except ERRORS as exc:
            raise self._unavailable(exc) from exc

    def claim(self, name: str) -> Callable[[], None] | None:
        """A file lock. The kernel releases it when this process ends, however it ends."""
        lock = FileLock(self.path.with_name(f"{self.path.name}.import-{name}"))
        return lock.release if lock.try_acquire() else None

    def living(self) -> set[str]:
        run = self.path.parent / RUN
        return {file.name.removesuffix(SUFFIX) for file in run.glob(f"*{SUFFIX}") if is_held(file)}

    def back_up(self, version: int, report: Callable[[int, int], None]) -> None:
        target = self.path.with_name(f"{self.path.name}.v{version}.bak")
        try:
            copy_aside(self.path, target, report)
        except (OSError, sqlite3.Error) as exc:
            raise StoreUnavailable(f"no copy of the store could be put at {target} ({exc}): free space there") from exc

    def forget_copies(self, owner: str, agent_id: str) -> None:
        clean_copies(self.path, owner, agent_id)

    def size(self) -> int:
        beside = (".search", ".search-wal")
        files = [self.path.with_name(self.path.name + end) for end in ("", "-wal", *beside)]
        return sum(file.stat().st_size for file in files if file.exists())

    async def purge(self) -> None:
        """Truncate the WAL, which has earlier pages. While a reader uses it, a later write does it."""
        if not self._open or self._write_thread is None:
            raise self._closed()
        if not await self._write_thread.run(self._empty_log):
            log.info("store_log_in_use")

    # --- groups of writes, on the event loop ---

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON, self._on_timer)

    def _queue_delayed(self) -> None:
        """Put the delayed writes into the queue."""
        self._waiting.extend(self._delayed)
        self._delayed.clear()

    def _on_timer(self) -> None:
        self._timer = None
        if self._delayed and (self._group is None or self._only_syncs) and not self._waiting:
            self._write_delayed()
        self._queue_delayed()
        self._sync_due = self._sync_due or self._unsynced
        self._write_waiting()

    def _write_delayed(self) -> None:
        """Run the delayed writes on the event loop. If one fails, all are left to the thread."""
        assert self._quick is not None
        writes = [write for write in self._delayed if not write.done.cancelled()]
        self._quick_writes += 1
        try:
            results = transaction(self._quick, QUICK, *[write.work for write in writes])
        except Exception as exc:  # noqa: BLE001 - whatever it was, its own caller is told by the thread
            log.debug("writes_one_by_one", writes=len(writes), because=type(exc).__name__)
            return
        self._delayed.clear()
        for write, result in zip(writes, results, strict=True):
            write.done.set_result(result)

    def _write_waiting(self) -> None:
        """Start the next group, unless one is running: its end starts the next."""
        if self._group is not None or self._write_thread is None:
            return
        # The first writes whose callers are not cancelled: a single `alone` one, or those before the next `alone` one.
        group: list[_Write] = []
        while self._waiting and len(group) < GROUP and not (group and self._waiting[0].alone):
            write = self._waiting.popleft()
            if not write.done.cancelled():
                group.append(write)
            if group and group[-1].alone:
                break
        if not group and not self._sync_due:
            return
        to_sync = _ToSync(self._unsynced, self._sync_due, self._awaiting_sync)
        full = self._sync_due or any(write.urgency is Urgency.DURABLE for write in group)
        self._unsynced = self._sync_due = self._group_synced = False
        self._awaiting_sync = []
        self._only_syncs = not group
        work = partial(self._write_group, group, full)
        if not group:
            work = partial(self._sync, checkpoint=self._quick_writes >= CHECKPOINT)
            self._quick_writes %= CHECKPOINT
        self._group = self._write_thread.run(work)
        self._group.add_done_callback(partial(self._ended, group, to_sync))

    def _ended(self, group: Sequence[_Write], to_sync: _ToSync, outcomes: asyncio.Future[list[Any]]) -> None:
        """Tell the callers of a group how it ended, and start the next. `to_sync`: what the group had to sync."""
        self._group = None
        group_error = outcomes.exception()
        for n, write in enumerate(group):
            outcome = group_error if group_error is not None else outcomes.result()[n]
            if write.done.cancelled():
                continue
            if isinstance(outcome, BaseException):
                write.done.set_exception(outcome)
            else:
                write.done.set_result(outcome)
        sync_error = group_error if not group else None  # a group without writes only syncs
        if not self._group_synced:  # what was not on the disk before is still not, nor are this group's own writes
            if to_sync.unsynced or any(write.urgency in JOURNALED for write in group):
                self._unsynced = True
            if sync_error is not None:  # the next write tries again
                log.error("store_not_synced", exc_info=sync_error)
            elif to_sync.sync_due:  # the next group syncs it
                self._sync_due, self._awaiting_sync = True, to_sync.awaiting + self._awaiting_sync
            elif self._unsynced:
                self._set_timer()
        if self._group_synced or sync_error is not None:
            for on_disk in to_sync.awaiting:
                if on_disk.cancelled():
                    continue
                if sync_error is None:
                    on_disk.set_result(None)
                else:
                    on_disk.set_exception(self._unavailable(sync_error))
        self._write_waiting()

    # --- on the threads ---

    def _connect(self) -> None:
        try:
            # A quick transaction runs on the event loop, so it never waits for a lock.
            kinds = ((WRITING, self.busy_timeout), (READING, self.busy_timeout), (QUICK, 0.0))
            self._engines = [engine(self.url, kind, timeout, self._clock) for kind, timeout in kinds]
            to_write, to_read, to_be_quick = self._engines
            self._writer, self._commits_sync, self._in_memory = to_write.connect(), True, False
            use_wal(self._writer, time.monotonic() + self.busy_timeout)
            for _ in range(READERS):
                self._readers.put(to_read.connect())
            self._quick = to_be_quick.connect()
        except ERRORS as exc:
            raise self._unavailable(exc) from exc

    def _empty_log(self) -> bool:
        """Checkpoint the WAL file and truncate it: it has earlier states of pages. False while somebody reads one."""
        assert self._writer is not None
        try:
            driver = driver_of(self._writer)
            (usual_timeout,) = driver.execute("PRAGMA busy_timeout").fetchone()
            driver.execute(f"PRAGMA busy_timeout={READERS_WAIT}")
            try:
                (busy, _, _) = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                driver.execute(f"PRAGMA busy_timeout={usual_timeout}")
        except ERRORS as exc:
            raise self._unavailable(exc) from exc
        return not busy

    def _write_group(self, group: Sequence[_Write], full: bool) -> list[Any]:
        """For each write its result, or its caller's exception. `full`: wait for the disk."""
        if len(group) > 1 and all(time.monotonic() <= write.deadline for write in group):
            try:
                return self._together(group, full)
            except Exception as exc:  # noqa: BLE001 - whatever it was, its own caller is told below
                log.debug("writes_one_by_one", writes=len(group), because=type(exc).__name__)
        outcomes: list[Any] = []
        for write in group:
            if time.monotonic() > write.deadline:
                outcomes.append(self._locked(self._waited_for))
                continue
            try:
                outcomes += self._together([write], full)
            except ERRORS as exc:
                error = self._unavailable(exc)
                error.__cause__ = exc
                outcomes.append(error)
            except Exception as exc:  # noqa: BLE001 - raised where it is waited for
                outcomes.append(exc)
        return outcomes

    def _sync(self, *, checkpoint: bool) -> list[Any]:
        """Wait until all writes so far are on the disk."""
        if self._has_gap:
            self._close_gap()
        else:
            try:
                sync(f"{self.path}-wal")
            except OSError:
                self._has_gap = True
                raise
        self._group_synced = True
        if checkpoint:
            assert self._writer is not None
            try:
                driver_of(self._writer).execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error as exc:  # the writes are on the disk: the next checkpoint takes them
                self._has_gap |= cause_of(exc)[1] == sqlite3.SQLITE_IOERR
                log.warning("store_log_not_taken_over", error=str(exc))
        return []

    def _close_gap(self) -> None:
        """Write the WAL again, where it is: the disk has refused a part of it. The kernel says so once, and keeps the
        part in memory only: after a power cut all that was written behind it would be lost, although it was synced. A
        checkpoint would not do: it waits for readers, and a power cut in it leaves old pages above newer ones."""
        assert self._writer is not None
        file = f"{self.path}-wal"
        driver = driver_of(self._writer)
        driver.execute(WRITING.begin)  # nobody else may write it, or begin it anew
        try:
            with open(file, "rb") as kept, open(file, "r+b") as again:
                shutil.copyfileobj(kept, again)
            sync(file)
        except OSError as exc:
            raise self._unavailable(exc) from exc
        finally:
            driver.rollback()
        self._has_gap = False

    def _together(self, group: Sequence[_Write], full: bool) -> list[Any]:
        """Run these writes in one transaction. Returns their results."""
        assert self._writer is not None
        if self._has_gap:
            self._close_gap()
        if full != self._commits_sync:
            self._sync_commits(full)
        if self._in_memory == group[0].alone:  # what runs alone may change more than fits into memory
            driver_of(self._writer).execute("PRAGMA temp_store=FILE" if group[0].alone else f"PRAGMA {IN_MEMORY}")
            self._in_memory = not group[0].alone
        self._waited_for = EARLIER_WRITES
        file: Any = self._writer.connection.dbapi_connection
        changes_before = file.total_changes
        try:
            results = transaction(self._writer, WRITING, *[write.work for write in group])
        except sqlite3.OperationalError as exc:
            if is_busy(exc):
                self._waited_for = ANOTHER_PROGRAM
            self._has_gap |= cause_of(exc)[1] == sqlite3.SQLITE_IOERR
            raise
        finally:
            if not full:
                with suppress(sqlite3.Error):  # now, while no client waits; if it fails, before the next commit
                    self._sync_commits(True)
        # A commit without changes does not wait for the disk, so it does not prove that earlier writes are on it.
        if full and file.total_changes > changes_before:
            self._group_synced = True
        return results

    def _sync_commits(self, full: bool) -> None:
        """Set whether the writer's commits wait for the disk. A change takes 0.05 ms after a pause."""
        assert self._writer is not None
        driver_of(self._writer).execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
        self._commits_sync = full

    def _read(self, work: Work[T]) -> T:
        conn = self._readers.get_nowait()  # there is one per thread
        try:
            (result,) = transaction(conn, READING, work)
            return result
        except ERRORS as exc:
            raise self._unavailable(exc) from exc
        finally:
            self._readers.put(conn)

    def _shut(self, threads: list[ThreadPool]) -> None:
        for pool in threads:
            pool.stop()
        while not self._readers.empty():
            self._readers.get_nowait().close()
        for conn in (self._quick, self._writer):
            if conn is not None:
                conn.close()
        for of_kind in self._engines:
            of_kind.dispose()
        self._writer = self._quick = None
        self._engines = []

    # --- what an error means ---

    def _locked(self, by: str) -> StoreUnavailable:
        """`by`: what held the lock, for the message."""
        waited = f"{self.busy_timeout:g} s"
        return StoreUnavailable(
            f"the store {self.path} was locked by {by} for more than {waited}: end what holds it, then try again",
            retry_after=1.0,
        )

    def _unavailable(self, exc: BaseException) -> ProxyError:
        """An error whose message says in one line what to do. It has the driver's message and not SQLAlchemy's, which
        has the values of the statement: these are prompts."""
        if isinstance(exc, StoreUnavailable):
            return exc
        if isinstance(exc, UnicodeEncodeError):
            return InvalidRequest("a name holds half a surrogate pair: send it as well-formed UTF-8")
        if is_busy(exc):
            return self._locked(ANOTHER_PROGRAM)
        cause, code = cause_of(exc)
        if getattr(cause, "sqlite_errorcode", 0) == sqlite3.SQLITE_CONSTRAINT_TRIGGER and str(cause).startswith(MOVED):
            self._moved_to = str(cause).removeprefix(MOVED)
            return moved(str(self.path), self._moved_to)
        what = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        advice = ADVICE.get(code, "see the log, and run `cli-session-proxy doctor`")
        return StoreUnavailable(f"the store {self.path} cannot be used ({what}): {advice}", detail={"sqlite": code})
