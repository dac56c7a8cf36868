"""One database file, two ways in: a writer that takes turns, and readers that never wait for it.

A transaction is a plain function of a SQLAlchemy `Connection`; it runs whole, in one hop, on a thread that is
not the event loop's. Measured for a transaction of 6 statements with synchronous=FULL: 0.95 ms this way, 3.5 ms
through aiosqlite, which hops threads three to four times a statement. It also makes cancellation simple: a
caller that leaves takes only itself away, the transaction still ends as all or nothing.

Everything that is SQLite's own is in this module: engines, pragmas, the copy of a file, the meaning of errors.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..errors import ConfigError, InvalidRequest, ProxyError, StoreUnavailable

T = TypeVar("T")
Work = Callable[[Connection], T]

# Reads are short and mostly from the page cache: more threads than this only queue for the interpreter.
READERS = 4
# After a burst the WAL file is cut back to this, so that it does not keep its largest size for ever.
WAL_KEPT = 64 * 1024 * 1024
# `sqlite3.Error` comes bare from the pragmas of a new connection.
_ERRORS = (SQLAlchemyError, sqlite3.Error, UnicodeEncodeError)
# How often a first switch to WAL is tried again while another program opens the same new file.
WAL_RETRY = 0.02


class Database:
    """Runs transactions on one SQLite file. `busy_timeout` (seconds) bounds the wait for another writer."""

    def __init__(self, url_or_path: str | Path, *, busy_timeout: float) -> None:
        self.url = _url(url_or_path)
        self.path = Path(str(self.url.database).removeprefix("file:"))
        self.busy_timeout = busy_timeout
        self._write_engine: Engine | None = None
        self._read_engine: Engine | None = None
        self._writer: Connection | None = None
        self._write_thread: ThreadPoolExecutor | None = None
        self._read_threads: ThreadPoolExecutor | None = None

    async def open(self, prepare: Work[None]) -> None:
        """Connect, and run `prepare` (the schema) as the first write. Leaves nothing open when it fails."""
        if self._write_thread is not None:
            return
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        try:
            await asyncio.get_running_loop().run_in_executor(self._write_thread, self._connect)
            await self.write(prepare)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let what was submitted end (bounded by its own waits), then disconnect. Idempotent."""
        threads = [t for t in (self._write_thread, self._read_threads) if t is not None]
        self._write_thread = self._read_threads = None
        # shielded: a cancelled close must not leave threads and the file's lock behind
        await asyncio.shield(asyncio.to_thread(self._shut, threads))

    async def write(self, work: Work[T]) -> T:
        """Run `work` as one transaction that holds the write lock from its start. All or nothing."""
        deadline = time.monotonic() + self.busy_timeout
        return await self._run(self._write_thread, lambda: self._write(work, deadline))

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot of the database, beside any writer."""
        return await self._run(self._read_threads, lambda: self._read(work))

    async def _run(self, threads: ThreadPoolExecutor | None, job: Callable[[], T]) -> T:
        if threads is None:
            raise StoreUnavailable("the store is closed: start the proxy again")
        return await asyncio.get_running_loop().run_in_executor(threads, job)

    # --- on the threads ---

    def _connect(self) -> None:
        try:
            self._write_engine = _engine(self.url, "BEGIN IMMEDIATE", self.busy_timeout)
            self._read_engine = _engine(self.url, "BEGIN", self.busy_timeout)
            self._writer = self._write_engine.connect()
            _use_wal(self._writer, time.monotonic() + self.busy_timeout)
        except _ERRORS as exc:
            raise self._unavailable(exc) from exc

    def _write(self, work: Work[T], deadline: float) -> T:
        assert self._writer is not None
        if time.monotonic() > deadline:
            raise self._locked("the writes before this one")
        try:
            with self._writer.begin():
                return work(self._writer)
        except _ERRORS as exc:
            raise self._unavailable(exc) from exc

    def _read(self, work: Work[T]) -> T:
        assert self._read_engine is not None
        try:
            with self._read_engine.begin() as conn:
                return work(conn)
        except _ERRORS as exc:
            raise self._unavailable(exc) from exc

    def _shut(self, threads: list[ThreadPoolExecutor]) -> None:
        for pool in threads:
            pool.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close()
        for engine in (self._read_engine, self._write_engine):
            if engine is not None:
                engine.dispose()
        self._writer = self._read_engine = self._write_engine = None

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
        cause = exc.orig if isinstance(exc, DBAPIError) else exc
        # The low byte is SQLite's primary result code; the rest of it only refines (sqlite.org/rescode.html).
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._locked("another program")
        what = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        advice = _ADVICE.get(code, "see the log, and run `cli-session-proxy doctor`")
        return StoreUnavailable(f"the store {self.path} cannot be used ({what}): {advice}", detail={"sqlite": code})


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


def _engine(url: URL, begin: str, busy_timeout: float) -> Engine:
    writes = begin != "BEGIN"
    pool: dict[str, Any] = {"poolclass": NullPool}
    if not writes:
        pool = {"poolclass": QueuePool, "pool_size": READERS, "max_overflow": 0, "pool_timeout": busy_timeout}
    # hide_parameters: a traceback in a log must not show a prompt
    engine = create_engine(
        url, hide_parameters=True, connect_args={"timeout": busy_timeout, "check_same_thread": False}, **pool
    )

    def connected(dbapi: sqlite3.Connection, _record: object) -> None:
        dbapi.isolation_level = None  # the driver begins nothing by itself: `begun` does
        pragmas = ["foreign_keys=ON"]
        if writes:
            # FULL: an acknowledged turn survives a power cut; macOS needs fullfsync for the same promise
            pragmas += ["synchronous=FULL", "fullfsync=ON", f"journal_size_limit={WAL_KEPT}"]
        else:
            pragmas += ["query_only=ON"]
        with closing(dbapi.cursor()) as cursor:
            for pragma in pragmas:
                cursor.execute(f"PRAGMA {pragma}")

    def begun(conn: Connection) -> None:
        conn.exec_driver_sql(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def _use_wal(conn: Connection, deadline: float) -> None:
    """Switch a new file to WAL. SQLite does not wait for this lock by itself, so it is tried until `deadline`."""
    dbapi = conn.connection.dbapi_connection
    assert isinstance(dbapi, sqlite3.Connection)
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
