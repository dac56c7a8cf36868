"""All that is SQLite's own: connections, pragmas, the journal file, what its errors mean, copies of the file."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...errors import StoreUnavailable
from ...locks import to_drive
from ..sql.database import Work

T = TypeVar("T")

# Bytes to which the WAL file is cut after a burst.
WAL_KEPT = 64 * 1024 * 1024
# `sqlite3.Error` comes bare from the pragmas of a new connection.
ERRORS = (SQLAlchemyError, sqlite3.Error, UnicodeEncodeError)
# Milliseconds to wait for readers before the WAL is cut: their reads are short.
READERS_WAIT = 500
# The prefix of the error of every write to a moved file, before the new place.
MOVED = "moved to "
# Pages per step of a copy: 64 MB with SQLite's usual pages of 4 KB.
PAGES_AT_ONCE = 16_384
# Seconds between tries to switch a new file to WAL while another program opens it.
WAL_RETRY = 0.02


class Kind(NamedTuple):
    """The purpose of a connection, and how its transactions begin."""

    begin: str
    pragmas: tuple[str, ...]


# secure_delete: deleted data is overwritten. A turn writes no more bytes for it (110.15 MB for 600, either way).
_OF_WRITERS = (f"journal_size_limit={WAL_KEPT}", "secure_delete=ON")
# FULL: an acknowledged turn survives a power cut; macOS needs fullfsync for the same promise.
WRITING = Kind("BEGIN IMMEDIATE", ("synchronous=FULL", "fullfsync=ON", *_OF_WRITERS))
READING = Kind("BEGIN", ("query_only=ON",))
# A statement of more than 64 KB is journaled in memory, and not in TMPDIR, which may be full.
IN_MEMORY = "temp_store=MEMORY"
# Without checkpoints, which wait for the disk: the writer makes them.
QUICK = Kind("BEGIN IMMEDIATE", ("synchronous=NORMAL", "wal_autocheckpoint=0", IN_MEMORY, *_OF_WRITERS))


def cause_of(exc: BaseException) -> tuple[BaseException | None, int]:
    """The driver's exception, and SQLite's primary result code: the low byte (sqlite.org/rescode.html)."""
    cause = exc.orig if isinstance(exc, DBAPIError) else exc
    return cause, getattr(cause, "sqlite_errorcode", 0) & 0xFF


def is_busy(exc: BaseException) -> bool:
    return cause_of(exc)[1] in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_no_text(exc: BaseException) -> bool:
    """A column holds bytes that are called a text: the driver has no code for that, and its words hold them. Read as
    bytes they are one damaged row (`sql.damaged`)."""
    return str(cause_of(exc)[0]).startswith("Could not decode to UTF-8")


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


ADVICE = {
    sqlite3.SQLITE_PERM: "give this user the right to read and write it",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable for this user",
    sqlite3.SQLITE_IOERR: "check the disk and the permissions of its directory",
    sqlite3.SQLITE_CORRUPT: "move it away and put a copy back (chains.sqlite3.v*.bak or your own backup)",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite file; move it away or choose another --var",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_CANTOPEN: "create its directory and make it writable for this user",
    sqlite3.SQLITE_CONSTRAINT: "nothing was changed; a row is missing or already exists",
}


def engine(url: URL, kind: Kind, busy_timeout: float, clock: Callable[[], float]) -> Engine:
    # named: `Prepared` gives the driver its values by name;
    # hide_parameters: a traceback in a log must not show a prompt; NullPool: we hold on to the connections ourselves
    arguments = {"timeout": busy_timeout, "check_same_thread": False, "factory": File}
    made = create_engine(url, hide_parameters=True, connect_args=arguments, poolclass=NullPool, paramstyle="named")

    def connected(dbapi: sqlite3.Connection, _record: object) -> None:
        dbapi.isolation_level = None  # the driver begins no transaction: `transaction` does
        dbapi.create_function("store_clock", 0, clock)
        with closing(dbapi.cursor()) as cursor:
            for pragma in ("foreign_keys=ON", *kind.pragmas):
                cursor.execute(f"PRAGMA {pragma}")

    event.listen(made, "connect", connected)
    return made


class File(sqlite3.Connection):
    def commit_next(self) -> None:
        """Part of `sql.database.Driver`. Nothing to do: statements run at once here."""


def transaction(conn: Connection, kind: Kind, *works: Work[T]) -> list[T]:
    """Run these works one after the other in one transaction. Returns their results.

    SQLAlchemy's own transaction takes ten times as long, and a turn has six; it also leaves the write lock after a
    commit that SQLite refuses.
    """
    dbapi: sqlite3.Connection = conn.connection.dbapi_connection  # type: ignore[assignment]
    dbapi.execute(kind.begin)
    try:
        results = [work(conn) for work in works]
        dbapi.commit()
    except BaseException as exc:
        dbapi.rollback()  # no error if SQLite did it itself, e.g. on a full disk
        if not is_no_text(exc) or dbapi.text_factory is not str:
            raise
        dbapi.text_factory = _text_or_bytes
        try:
            return transaction(conn, kind, *works)
        finally:
            dbapi.text_factory = str
    return results


def driver_of(conn: Connection) -> sqlite3.Connection:
    dbapi = conn.connection.dbapi_connection
    assert isinstance(dbapi, sqlite3.Connection)
    return dbapi


def sync(file: str) -> None:
    """Sync this file to the disk, as SQLite does at a full commit."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        to_drive(fd)
    finally:
        os.close(fd)


def use_wal(conn: Connection, deadline: float) -> None:
    """Switch a new file to WAL. SQLite does not wait for this lock, so it is retried until `deadline`."""
    dbapi = driver_of(conn)
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
            time.sleep(WAL_RETRY)  # on a thread of the store; SQLite has no event for it


def copy_aside(path: Path, target: Path, report: Callable[[int, int], None] | None = None) -> None:
    """Make a consistent copy of the last committed state at `target`, replaced atomically. Each concurrent write
    restarts the copy, so a long one needs the write lock."""
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
        progress = None if report is None else lambda _, left, total: report(total - left, total)
        source.backup(copy, pages=PAGES_AT_ONCE, progress=progress)
    with part.open("rb") as done:
        to_drive(done.fileno())
    part.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system that cannot
            to_drive(folder)  # sync the name, too, before the database is migrated
    finally:
        os.close(folder)


def clean_copies(database: Path, owner: str, agent_id: str) -> None:
    """Remove a deleted agent from the copies that migrations made (`<database>.v<n>.bak`). A copy has an older schema:
    its tables are inspected for their columns. Raises `StoreUnavailable` for one that cannot be cleaned."""
    for copy in sorted(database.parent.glob(f"{database.name}.v*.bak")):
        try:
            with closing(
                sqlite3.connect(f"{copy.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
            ) as conn:
                _remove_agent(conn, owner, agent_id)
        except sqlite3.Error as exc:
            raise StoreUnavailable(
                f"nothing was deleted: the copy {copy} cannot be cleaned ({exc}); remove it if it is not needed, "
                "then try again"
            ) from exc


def _remove_agent(conn: sqlite3.Connection, owner: str, agent_id: str) -> None:
    conn.execute("PRAGMA journal_mode=DELETE")  # no second file beside it
    conn.execute("PRAGMA secure_delete=ON")
    conn.execute("BEGIN IMMEDIATE")
    tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
    columns = {table: {row[1] for row in conn.execute(f"PRAGMA table_info({table})")} for (table,) in tables}
    key_row = conn.execute("SELECT key FROM agents WHERE owner = ? AND agent_id = ?", (owner, agent_id)).fetchone()
    if key_row is None:
        conn.execute("ROLLBACK")
        return
    own = "SELECT id FROM turns WHERE agent_key = ?"
    for table, names in columns.items():
        if "turn_id" in names and "agent_key" not in names:
            conn.execute(f"DELETE FROM {table} WHERE turn_id IN ({own})", key_row)  # noqa: S608 - names of its own tables
    for table, names in columns.items():
        if "agent_key" in names and table != "turns":
            conn.execute(f"DELETE FROM {table} WHERE agent_key = ?", key_row)  # noqa: S608 - as above
    if {"images", "image_refs"} <= columns.keys():
        conn.execute("DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM image_refs)")
    conn.execute("DELETE FROM turns WHERE agent_key = ?", key_row)
    conn.execute("DELETE FROM agents WHERE key = ?", key_row)
    conn.execute("COMMIT")
