"""One database file, two ways in: a writer that takes turns, and readers that never wait for it.

A transaction is a plain function of a SQLAlchemy `Connection`; it runs whole, in one hop, on a thread that is
not the event loop's. Measured for a transaction of 6 statements with synchronous=FULL: 0.95 ms this way, 3.5 ms
through aiosqlite, which hops threads three to four times a statement. It also makes cancellation simple: a
caller that leaves takes only itself away, the transaction still ends as all or nothing.

Writes that wait while another one runs are committed together: one wait for the disk for all of them. Where one
of such a group fails, the group is rolled back and each runs by itself, as if there had been no group.

An acknowledged turn waits for the disk. What leads up to it (`Urgency.JOURNAL`) survives the end of this process at
once, and a power cut `SOON` later: whoever asked is not answered yet, and no CLI writes a prompt to its disk sooner.

Everything that is SQLite's own is in this module: engines, pragmas, the copy of a file, the meaning of errors.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import structlog
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..errors import ConfigError, InvalidRequest, ProxyError, StoreUnavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")
Work = Callable[[Connection], T]

# Reads are short and mostly from the page cache: more threads than this only queue for the interpreter.
READERS = 4
# After a burst the WAL file is cut back to this, so that it does not keep its largest size for ever.
WAL_KEPT = 64 * 1024 * 1024
# `sqlite3.Error` comes bare from the pragmas of a new connection.
_ERRORS = (SQLAlchemyError, sqlite3.Error, UnicodeEncodeError)
# How many waiting writes are committed together at most; the last of them waits for the work of all.
GROUP = 64
# How long a write that nobody waits for is put off, and a journal entry is not yet on the disk, in seconds.
SOON = 0.01
# How often a first switch to WAL is tried again while another program opens the same new file.
WAL_RETRY = 0.02


class Kind(NamedTuple):
    """What a connection is for."""

    begin: str
    pragmas: tuple[str, ...]


# FULL: an acknowledged turn survives a power cut; macOS needs fullfsync for the same promise.
WRITING = Kind("BEGIN IMMEDIATE", ("synchronous=FULL", "fullfsync=ON", f"journal_size_limit={WAL_KEPT}"))
READING = Kind("BEGIN", ("query_only=ON",))
# Without checkpoints: they wait for the disk, and the writer makes them.
JOTTING = Kind("BEGIN IMMEDIATE", ("synchronous=NORMAL", "wal_autocheckpoint=0"))


class Urgency(Enum):
    """When a write is done. `DURABLE`: it is on the disk. `JOURNAL`: it is in the file. `LATER`: the same, in a moment,
    but before every other write that is asked for after it (only a `jot` goes ahead)."""

    DURABLE = auto()
    JOURNAL = auto()
    LATER = auto()


@dataclass(slots=True, eq=False)
class _Write:
    work: Work[Any]
    urgency: Urgency
    alone: bool
    deadline: float
    done: asyncio.Future[Any]


class Database:
    """Runs transactions on one SQLite file. `busy_timeout` (seconds) bounds the wait for another writer.

    Use it on the event loop that opened it.
    """

    def __init__(self, url_or_path: str | Path, *, busy_timeout: float) -> None:
        self.url = _url(url_or_path)
        self.path = Path(str(self.url.database).removeprefix("file:"))
        self.busy_timeout = busy_timeout
        self._engines: list[Engine] = []
        self._writer: Connection | None = None
        self._readers: SimpleQueue[Connection] = SimpleQueue()
        # the event loop's own: they never wait, neither for a lock nor for the disk
        self._glancer: Connection | None = None
        self._jotter: Connection | None = None
        self._write_thread: ThreadPoolExecutor | None = None
        self._read_threads: ThreadPoolExecutor | None = None
        self._waiting: deque[_Write] = deque()
        self._later: list[_Write] = []
        self._group: asyncio.Future[list[Any]] | None = None  # the writes that run now
        self._timer: asyncio.TimerHandle | None = None
        self._unsynced = False  # the file holds journal entries that the disk may not
        self._full = True  # whether the writer's commits wait for the disk; its thread's own

    async def open(self, prepare: Work[None]) -> None:
        """Connect, and run `prepare` (the schema) as the first write. Leaves nothing open when it fails."""
        if self._write_thread is not None:
            return
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        try:
            await asyncio.get_running_loop().run_in_executor(self._write_thread, self._connect)
            await self.write(prepare, alone=True)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let what was submitted end (bounded by its own waits), then disconnect. Idempotent."""
        # shielded: a cancelled close must not leave threads and the file's lock behind
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        self._hurry()
        if self._timer is not None:
            self._timer.cancel()
        self._write_waiting()
        while self._group is not None:
            await asyncio.wait([self._group])
            await asyncio.sleep(0)  # its callback starts the next group
        threads = [t for t in (self._write_thread, self._read_threads) if t is not None]
        self._write_thread = self._read_threads = None
        await asyncio.to_thread(self._shut, threads)

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot of the database, beside any writer."""
        if self._read_threads is None:
            raise _closed()
        return await asyncio.get_running_loop().run_in_executor(self._read_threads, self._read, work)

    async def glance(self, work: Work[T]) -> T:
        """A read of a few rows that every turn makes, on the event loop itself: 0.1 to 0.2 ms where the hop to a
        thread and back takes more than that again. It never waits for a lock: where it would have to, it is `read`.
        """
        if self._glancer is None:
            raise _closed()
        try:
            with self._glancer.begin():
                return work(self._glancer)
        except _ERRORS as exc:
            if not _is_busy(exc):
                raise self._unavailable(exc) from exc
        return await self.read(work)

    async def jot(self, work: Work[T]) -> T:
        """A journal entry (`Urgency.JOURNAL`), written on the event loop itself while nobody else writes: it does not
        wait for the disk, so the hop to a thread and back would take longer. Else it is `write`."""
        if self._jotter is None:
            raise _closed()
        if self._group is None and not self._waiting:
            try:
                with self._jotter.begin():
                    result = work(self._jotter)
            except _ERRORS as exc:
                if not _is_busy(exc):
                    raise self._unavailable(exc) from exc
            else:
                self._unsynced = True
                self._set_timer()
                return result
        return await self.write(work, Urgency.JOURNAL)

    async def write(self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, alone: bool = False) -> T:
        """Run `work` as one transaction that holds the write lock from its start. All or nothing.

        `alone`: never together with others; for work that is long, or cannot be run a second time.
        """
        if self._write_thread is None:
            raise _closed()
        done = asyncio.get_running_loop().create_future()
        write = _Write(work, urgency, alone, time.monotonic() + self.busy_timeout, done)
        if urgency is Urgency.LATER:
            self._later.append(write)
            self._set_timer()
        else:
            self._hurry()  # what was asked for earlier is done earlier
            self._waiting.append(write)
            self._write_waiting()
        result: T = await done
        return result

    # --- groups of writes, on the event loop ---

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON, self._on_timer)

    def _hurry(self) -> None:
        """Nothing is put off any longer."""
        self._waiting.extend(self._later)
        self._later.clear()

    def _on_timer(self) -> None:
        self._timer = None
        self._hurry()
        self._write_waiting(sync=self._unsynced)

    def _write_waiting(self, *, sync: bool = False) -> None:
        """Start the next group, unless one is under way: its end will. `sync`: what is in the file goes to the disk."""
        if self._group is not None or self._write_thread is None:
            if sync:
                self._set_timer()
            return
        group = self._take()
        if not group and not sync:
            return
        full = sync or any(write.urgency is Urgency.DURABLE for write in group)
        loop = asyncio.get_running_loop()
        self._group = loop.run_in_executor(self._write_thread, self._write_group, group, full)
        self._group.add_done_callback(lambda ended: self._ended(group, ended))
        self._unsynced = not full and (self._unsynced or any(write.urgency is Urgency.JOURNAL for write in group))
        if self._unsynced:
            self._set_timer()

    def _take(self) -> list[_Write]:
        """The writes at the front whose callers are still there: one that goes alone, or those up to the next."""
        group: list[_Write] = []
        while self._waiting and len(group) < GROUP and not (group and self._waiting[0].alone):
            write = self._waiting.popleft()
            if not write.done.cancelled():
                group.append(write)
            if group and group[-1].alone:
                break
        return group

    def _ended(self, group: Sequence[_Write], ended: asyncio.Future[list[Any]]) -> None:
        self._group = None
        fault = ended.exception()
        if fault is not None and not group:
            log.error("store_not_synced", exc_info=fault)
        for n, write in enumerate(group):
            outcome = fault if fault is not None else ended.result()[n]
            if write.done.cancelled():
                continue
            if isinstance(outcome, BaseException):
                write.done.set_exception(outcome)
            else:
                write.done.set_result(outcome)
        self._write_waiting()

    # --- on the threads ---

    def _connect(self) -> None:
        try:
            patient = self.busy_timeout
            kinds = ((WRITING, patient), (READING, patient), (READING, 0.0), (JOTTING, 0.0))
            self._engines = [_engine(self.url, kind, timeout) for kind, timeout in kinds]
            to_write, to_read, to_glance, to_jot = self._engines
            self._writer = to_write.connect()
            _use_wal(self._writer, time.monotonic() + self.busy_timeout)
            for _ in range(READERS):
                self._readers.put(to_read.connect())
            self._glancer, self._jotter = to_glance.connect(), to_jot.connect()
        except _ERRORS as exc:
            raise self._unavailable(exc) from exc

    def _write_group(self, group: Sequence[_Write], full: bool) -> list[Any]:
        """What came of each: its result, or the exception that its caller gets. `full`: all is on the disk then."""
        if not group:
            _sync(Path(f"{self.path}-wal"))
            return []
        if full != self._full:
            assert self._writer is not None
            with closing(_dbapi(self._writer).cursor()) as cursor:
                cursor.execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
            self._full = full
        if len(group) > 1 and all(time.monotonic() <= write.deadline for write in group):
            assert self._writer is not None
            try:
                with self._writer.begin():
                    return [write.work(self._writer) for write in group]
            except Exception as exc:  # noqa: BLE001 - whatever it was, its own caller is told below
                log.debug("writes_one_by_one", writes=len(group), because=type(exc).__name__)
        return [self._write_one(write) for write in group]

    def _write_one(self, write: _Write) -> Any:
        assert self._writer is not None
        if time.monotonic() > write.deadline:
            return self._locked("the writes before this one")
        try:
            with self._writer.begin():
                return write.work(self._writer)
        except _ERRORS as exc:
            error = self._unavailable(exc)
            error.__cause__ = exc
            return error
        except Exception as exc:  # noqa: BLE001 - raised where it is waited for
            return exc

    def _read(self, work: Work[T]) -> T:
        conn = self._readers.get_nowait()  # there is one for each thread
        try:
            with conn.begin():
                return work(conn)
        except _ERRORS as exc:
            raise self._unavailable(exc) from exc
        finally:
            self._readers.put(conn)

    def _shut(self, threads: list[ThreadPoolExecutor]) -> None:
        for pool in threads:
            pool.shutdown(wait=True)
        while not self._readers.empty():
            self._readers.get_nowait().close()
        for conn in (self._glancer, self._jotter, self._writer):
            if conn is not None:
                conn.close()
        for engine in self._engines:
            engine.dispose()
        self._writer = self._glancer = self._jotter = None
        self._engines = []

    # --- what an error means ---

    def _locked(self, by: str) -> StoreUnavailable:
        waited = f"{self.busy_timeout:g} s"
        return StoreUnavailable(
            f"the store {self.path} was locked by {by} for more than {waited}: end what holds it, then try again",
            retry_after=1.0,
        )

    def _unavailable(self, exc: Exception) -> ProxyError:
        """One line that says what to do. Only the driver's own words: the statement's values are prompts."""
        if isinstance(exc, UnicodeEncodeError):
            return InvalidRequest("a name holds half a surrogate pair: send it as well-formed UTF-8")
        if _is_busy(exc):
            return self._locked("another program")
        cause, code = _cause(exc)
        what = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        advice = _ADVICE.get(code, "see the log, and run `cli-session-proxy doctor`")
        return StoreUnavailable(f"the store {self.path} cannot be used ({what}): {advice}", detail={"sqlite": code})


def _cause(exc: Exception) -> tuple[BaseException | None, int]:
    """What the driver said, with SQLite's primary result code: the low byte (sqlite.org/rescode.html)."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    return cause, getattr(cause, "sqlite_errorcode", 0) & 0xFF


def _is_busy(exc: Exception) -> bool:
    return _cause(exc)[1] in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _closed() -> StoreUnavailable:
    return StoreUnavailable("the store is closed: start the proxy again")


_ADVICE = {
    sqlite3.SQLITE_PERM: "give this user the right to read and write it",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable for this user",
    sqlite3.SQLITE_IOERR: "check the disk and the permissions of its directory",
    sqlite3.SQLITE_CORRUPT: "move it away and put a copy back (chains.sqlite3.v*.bak or your own backup)",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite file; move it away or choose another --var",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_CANTOPEN: "create its directory and make it writable for this user",
    sqlite3.SQLITE_CONSTRAINT: "nothing was changed; a row it refers to is missing or already there",
}


def _url(url_or_path: str | Path) -> URL:
    text = str(url_or_path)
    url = make_url(text) if "://" in text else URL.create("sqlite", database=os.path.abspath(text))
    if url.get_backend_name() != "sqlite":
        raise ConfigError(f"the store takes a SQLite file so far, not {url.get_backend_name()}: leave the URL out")
    if not url.database or url.database == ":memory:":
        raise ConfigError("the store needs a file: what is only in memory would not survive")
    return url.set(drivername="sqlite+pysqlite")


def _engine(url: URL, kind: Kind, busy_timeout: float) -> Engine:
    # hide_parameters: a traceback in a log must not show a prompt; NullPool: we hold on to the connections ourselves
    arguments = {"timeout": busy_timeout, "check_same_thread": False}
    engine = create_engine(url, hide_parameters=True, connect_args=arguments, poolclass=NullPool)

    def connected(dbapi: sqlite3.Connection, _record: object) -> None:
        dbapi.isolation_level = None  # the driver begins nothing by itself: `begun` does
        with closing(dbapi.cursor()) as cursor:
            for pragma in ("foreign_keys=ON", *kind.pragmas):
                cursor.execute(f"PRAGMA {pragma}")

    def begun(conn: Connection) -> None:
        conn.exec_driver_sql(kind.begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def _dbapi(conn: Connection) -> sqlite3.Connection:
    dbapi = conn.connection.dbapi_connection
    assert isinstance(dbapi, sqlite3.Connection)
    return dbapi


def _sync(file: Path) -> None:
    """Have the disk take what was written to this file, as SQLite itself does at a full commit."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone does not reach the disk there
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _use_wal(conn: Connection, deadline: float) -> None:
    """Switch a new file to WAL. SQLite does not wait for this lock by itself, so it is tried until `deadline`."""
    dbapi = _dbapi(conn)
    while True:
        try:
            with closing(dbapi.cursor()) as cursor:
                cursor.execute("PRAGMA journal_mode")
                if cursor.fetchone() != ("wal",):
                    cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(WAL_RETRY)  # on the store's own thread; there is no event to wait for


def copy_aside(path: Path, target: Path) -> None:
    """A consistent copy of the last committed state at `target`, replaced as a whole, also under a writer."""
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
    with part.open("rb") as done:
        os.fsync(done.fileno())
    part.replace(target)
