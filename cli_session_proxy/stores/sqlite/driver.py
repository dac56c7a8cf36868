"""All that is SQLite's own: how connections are made, the journal file, the copy of a file, what its errors mean."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...errors import ConfigError

# After a burst the WAL file is cut back to this, so that it does not keep its largest size for ever.
WAL_KEPT = 64 * 1024 * 1024
# `sqlite3.Error` comes bare from the pragmas of a new connection.
ERRORS = (SQLAlchemyError, sqlite3.Error, UnicodeEncodeError)
# How long a log is not cut for the sake of readers (ms): their reads are short.
READERS_WAIT = 500
# How often a first switch to WAL is tried again while another program opens the same new file.
WAL_RETRY = 0.02


class Kind(NamedTuple):
    """What a connection is for: how its transactions begin."""

    begin: str
    pragmas: tuple[str, ...]


# FULL: an acknowledged turn survives a power cut; macOS needs fullfsync for the same promise.
# secure_delete: what is deleted is overwritten. A turn writes not one byte more for it (110.15 MB for 600, either way).
WRITING = Kind(
    "BEGIN IMMEDIATE",
    ("synchronous=FULL", "fullfsync=ON", f"journal_size_limit={WAL_KEPT}", "secure_delete=ON"),
)
READING = Kind("BEGIN", ("query_only=ON",))
# Without checkpoints: they wait for the disk, and the writer makes them.
QUICK = Kind("BEGIN IMMEDIATE", ("synchronous=NORMAL", "wal_autocheckpoint=0", "secure_delete=ON"))


def cause(exc: Exception) -> tuple[BaseException | None, int]:
    """What the driver said, with SQLite's primary result code: the low byte (sqlite.org/rescode.html)."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    return cause, getattr(cause, "sqlite_errorcode", 0) & 0xFF


def is_busy(exc: Exception) -> bool:
    return cause(exc)[1] in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


ADVICE = {
    sqlite3.SQLITE_PERM: "give this user the right to read and write it",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable for this user",
    sqlite3.SQLITE_IOERR: "check the disk and the permissions of its directory",
    sqlite3.SQLITE_CORRUPT: "move it away and put a copy back (chains.sqlite3.v*.bak or your own backup)",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite file; move it away or choose another --var",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_CANTOPEN: "create its directory and make it writable for this user",
    sqlite3.SQLITE_CONSTRAINT: "nothing was changed; a row it refers to is missing or already there",
}


def url_of(url_or_path: str | Path) -> URL:
    text = str(url_or_path)
    url = make_url(text) if "://" in text else URL.create("sqlite", database=os.path.abspath(text))
    if url.get_backend_name() != "sqlite":
        raise ConfigError(f"the store takes a SQLite file so far, not {url.get_backend_name()}: leave the URL out")
    if not url.database or url.database == ":memory:":
        raise ConfigError("the store needs a file: what is only in memory would not survive")
    return url.set(drivername="sqlite+pysqlite")


def engine(url: URL, kind: Kind, busy_timeout: float, clock: Callable[[], float]) -> Engine:
    # named: `Prepared` gives the driver its values by name;
    # hide_parameters: a traceback in a log must not show a prompt; NullPool: we hold on to the connections ourselves
    arguments = {"timeout": busy_timeout, "check_same_thread": False}
    made = create_engine(url, hide_parameters=True, connect_args=arguments, poolclass=NullPool, paramstyle="named")

    def connected(dbapi: sqlite3.Connection, _record: object) -> None:
        dbapi.isolation_level = None  # the driver begins nothing by itself: `transaction` does
        dbapi.create_function("store_clock", 0, clock)
        with closing(dbapi.cursor()) as cursor:
            for pragma in ("foreign_keys=ON", *kind.pragmas):
                cursor.execute(f"PRAGMA {pragma}")

    event.listen(made, "connect", connected)
    return made


@contextmanager
def transaction(conn: Connection, kind: Kind) -> Iterator[sqlite3.Connection]:
    """All of it or nothing.

    Not SQLAlchemy's own, of which a turn has six: it takes ten times as long, and leaves a commit that SQLite refuses
    open, with the write lock.
    """
    dbapi = driver(conn)
    dbapi.execute(kind.begin)
    try:
        yield dbapi
        dbapi.commit()
    except BaseException:
        dbapi.rollback()  # silent where SQLite has done so itself, as it does when the disk is full
        raise


def driver(conn: Connection) -> sqlite3.Connection:
    dbapi = conn.connection.dbapi_connection
    assert isinstance(dbapi, sqlite3.Connection)
    return dbapi


def sync(file: Path) -> None:
    """Have the disk take what was written to this file, as SQLite itself does at a full commit."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone does not reach the disk there
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def use_wal(conn: Connection, deadline: float) -> None:
    """Switch a new file to WAL. SQLite does not wait for this lock by itself, so it is tried until `deadline`."""
    dbapi = driver(conn)
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


def empty_log(conn: Connection) -> bool:
    """Take the WAL file into the database and cut it to nothing: it holds earlier states of pages.

    Not inside a transaction. False while somebody reads an earlier state.
    """
    dbapi = driver(conn)
    (before,) = dbapi.execute("PRAGMA busy_timeout").fetchone()
    dbapi.execute(f"PRAGMA busy_timeout={READERS_WAIT}")
    try:
        (busy, _, _) = dbapi.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        dbapi.execute(f"PRAGMA busy_timeout={before}")
    return not busy


def copy_aside(path: Path, target: Path) -> None:
    """A consistent copy of the last committed state at `target`, replaced as a whole, also under a writer."""
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
    with part.open("rb") as done:
        os.fsync(done.fileno())
    part.replace(target)
