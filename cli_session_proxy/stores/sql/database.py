"""The seam of the portable store: what it asks of one database. `stores.sqlite` is one answer; another is a folder
beside it.

| what | SQLite | PostgreSQL, on psycopg 3 |
|---|---|---|
| a transaction | a writer thread, groups, reader threads | a pool: READ COMMITTED writes, snapshot reads |
| a turn's statements | run as they come | noted, and sent together when a result is asked for |
| locking of a row | `BEGIN IMMEDIATE` locks the file | `FOR NO KEY UPDATE`, which SQLite's dialect leaves out |
| a row that is new | `InsertNew` | the same text |
| a key that it gives | the driver tells it | RETURNING, by its dialect |
| clock of the leases | `store_clock()`: this machine's, on each connection | `store_clock()`: made with the schema |
| proof of a dead holder | the kernel lets go of its lock (`claim`) | a row that expires |
| lock of migrations | the write lock that `open` holds | an advisory lock of the transaction |
| a copy before them | `<file>.v<n>.bak` | the operator's own |
| what an error means | SQLite's result codes | SQLSTATE: classes 08, 40, 53, 57 |
"""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Delete, Insert, Select, Table, Update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

T = TypeVar("T")

# The body of a transaction. Its `Connection` is SQLAlchemy's; `Prepared` runs statements on its driver.
Work = Callable[[Connection], T]


class Urgency(Enum):
    """When a write is done. `DURABLE`: it survives a power cut. `JOURNAL`: it survives the end of this process, and of
    the database's server. `AHEAD`: it survives the end of this process; that of a server as soon as a `DURABLE` or a
    `JOURNAL` write that follows it does, so that nothing is there that builds on it without it. `LATER`: as `AHEAD`, in
    a moment, but before every other write that is asked for after it (only a `quick` one goes ahead)."""

    DURABLE = auto()
    JOURNAL = auto()
    AHEAD = auto()
    LATER = auto()


class ExclusiveName(Protocol):
    """A name held exclusively by this process, until it is released or this process ends."""

    def release(self) -> None: ...


class Database(Protocol):
    """Runs transactions, each whole or not at all.

    Errors are a `ProxyError` in words that hold no value of a statement (those are prompts): `StoreUnavailable`, or
    `InvalidRequest` for a text that cannot be stored. What `work` raises by itself is passed on.
    """

    @property
    def name(self) -> str:
        """How messages call it. It holds no password."""

    async def open(self, prepare: Work[None]) -> None:
        """Connect, and run `prepare` (the schema) as the first write: no other program is in its own meanwhile.

        Leaves nothing open when it fails.
        """

    async def close(self) -> None:
        """Take nothing new, let what was submitted end, disconnect. Idempotent."""

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        """Run `work` on one snapshot. `quick`: one statement for a few rows that every turn reads, which may run on the
        event loop."""

    async def write(
        self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False, alone: bool = False
    ) -> T:
        """Run `work` as one transaction, maybe together with others, and maybe again where it was rolled back.

        `alone`: never together with others, and once; for work that is long or has effects of its own. `quick`: a few
        rows, not `LATER`, which may run on the event loop.
        """

    def claim(self, name: str) -> ExclusiveName | None:
        """Hold this name among all programs on the database; None while another one holds it. On any thread."""

    def living(self) -> set[str] | None:
        """The ids of the proxies on this host that live, as the kernel proves; None where only heartbeats tell."""

    def back_up(self, version: int, told: Callable[[int, int], None]) -> None:
        """Put a copy aside before a migration from `version`, inside its transaction. `StoreUnavailable` where it
        cannot be made. `told`: so many of its pages are there, of so many."""

    def ring(self, conn: Connection, proxy_id: str) -> None:  # noqa: ARG002 - of a database that can tell
        """Inside a transaction: tell this proxy, once it is committed, that another one asks something of it. Where
        nobody can be told, it looks often enough."""
        return

    def size(self) -> int | None:
        """Bytes on its disk; None where it does not tell. Blocks."""
        return None

    async def purge(self) -> None:
        """After a deletion: leave nothing of it in what the database has freed."""

    def forget_copies(self, owner: str, agent_id: str) -> None:
        """Remove the agent from copies that `back_up` made. `StoreUnavailable` where one resists. Blocks."""


class Life:
    """How a database is opened and closed: `_end` closes it once, whoever asks, and it is opened again only behind
    that."""

    _open = False
    _ending: asyncio.Task[None] | None = None

    async def _finished_closing(self) -> None:
        """Wait until an earlier `close` is over."""
        if self._ending is not None:
            await asyncio.shield(self._ending)
            self._ending = None

    async def close(self) -> None:
        self._open = False
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        # shielded: a cancelled close must not leave threads, connections and locks behind
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        """Let what was submitted end, and disconnect."""
        raise NotImplementedError


class Threads:
    """Threads that run functions for the event loop that made them, in the order in which they are given.

    Around a function that does nothing this takes 0.08 ms after a pause, an executor of `concurrent.futures` 0.20: it
    has a future of its own, and more locks.
    """

    def __init__(self, number: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._given: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Daemons: a store that was not closed keeps no program from its end, and a transaction is whole or nothing.
        self._threads = [Thread(target=self._work, name=f"{name}_{n}", daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What is cancelled before a thread has come to it is not run."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._given.put((done, work))
        return done

    def stop(self) -> None:
        """Wait until all that was given has run. Blocks; nothing is given any more."""
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (given := self._given.get()) is not None:
            done, work = given
            fault: BaseException | None = None
            result = None
            if not done.cancelled():
                try:
                    result = work()
                except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
                    fault = exc
            if self._loop.is_closed():  # nobody waits any more
                return
            self._loop.call_soon_threadsafe(self._tell, done, result, fault)
            del given, done, work, result, fault  # not kept until the next one comes

    def _tell(self, done: asyncio.Future[Any], result: object, fault: BaseException | None) -> None:
        """On the event loop, whenever a thread is free again."""
        if done.cancelled():
            return
        if fault is None:
            done.set_result(result)
        else:
            done.set_exception(fault)


# --- Statements that every turn runs

# They are written with SQLAlchemy, made SQL once for each dialect, and then run by the driver. All others go through
# `Connection.execute`, as SQLAlchemy is meant to be used. These do not, because most of the work of a statement that
# touches one row by its key is what SQLAlchemy does around it. The store's share of a turn (arrival, accept, standing,
# begin, commit), on SQLite, by the driver and by `Connection.execute`: 0.93 and 1.53 ms of processor time; accept 0.17
# and 0.26 ms, agent_state 0.09 and 0.19 ms, commit with its wait for the disk 0.64 and 0.86 ms.
#
# Values are given and rows come as the driver has them: JSON is text, and SQLite has 0 and 1 for a bool.

Values = Mapping[str, Any]


class Cursor(Protocol):
    """Of a driver's cursor what is used here (PEP 249). A driver that has only noted the statement runs it, with all
    that it has noted, as soon as a result is asked for: run first what does not depend on each other, then ask. Of a
    row that is selected ask before anything is raised: until then SQLite keeps what it has locked."""

    @property
    def rowcount(self) -> int: ...

    @property
    def lastrowid(self) -> int | None: ...

    def fetchone(self) -> Any: ...


class Driver(Protocol):
    """Of a driver's connection what is used here; more than PEP 249 has, as `sqlite3` has it."""

    def execute(self, sql: str, values: Values, /) -> Cursor: ...

    def executemany(self, sql: str, rows: Sequence[Values], /) -> object: ...

    def commit_next(self) -> None:
        """Nothing is written behind what was run so far: the commit may go out with it, before a result is asked for.
        What is raised from here on undoes nothing."""


class Prepared:
    """One statement. The names of the values are those of its `bindparam`s, and of the columns that it sets."""

    def __init__(self, statement: Select[Any] | Insert | Update | Delete) -> None:
        self.statement = statement
        # which columns are set is decided by the values
        self._made: dict[tuple[str, ...], _Made] = {}
        columns = [column.key for column in statement.exported_columns if column.key is not None]
        row: Any = namedtuple("_Row", columns)  # type: ignore[misc]  # its fields are known only here
        self._row = row._make

    def one(self, conn: Connection, values: Values) -> Any | None:
        return self.first(self.run(conn, values))

    def first(self, ran: Cursor) -> Any | None:
        """The first row, or the next, as a named tuple of its columns."""
        row = ran.fetchone()
        return None if row is None else self._row(row)

    def all(self, conn: Connection, values: Values) -> list[Any]:
        ran = self.run(conn, values)
        return list(iter(partial(self.first, ran), None))

    def run(self, conn: Connection, values: Values, *, last: bool = False) -> Cursor:
        """Insert a row: `lastrowid` is the key that the database gave it. The dialect knows whether RETURNING tells it
        or the driver does, which takes SQLite 8 µs less. `last`: see `Driver.commit_next`."""
        made, driver = self._ready(conn, values)
        ran = driver.execute(made.sql, {**made.constants, **values} if made.constants else values)
        if last:
            driver.commit_next()
        return ran

    def run_each(self, conn: Connection, rows: Sequence[Values]) -> None:
        """Once for each of these, which have the same names."""
        if rows:
            made, driver = self._ready(conn, rows[0])
            each = [{**made.constants, **row} for row in rows] if made.constants else rows
            driver.executemany(made.sql, each)

    def _ready(self, conn: Connection, values: Values) -> tuple[_Made, Driver]:
        """The statement as the connection's dialect writes it, and its driver."""
        key = (conn.dialect.name, *values)
        made = self._made.get(key)
        if made is None:
            names = list(values)
            compiled = self.statement.compile(dialect=conn.dialect, column_keys=names)
            constants = {name: value for name, value in compiled.params.items() if name not in values}
            made = self._made[key] = _Made(str(compiled), constants)
        driver: Any = conn.connection.dbapi_connection
        return made, driver


class _Made(NamedTuple):
    sql: str
    constants: Values  # values that stand in the statement itself


class InsertNew(Insert):
    """Insert a row, unless it is there: the `rowcount` is 0 then.

    Both databases write it alike, but SQLAlchemy has it only in the `insert` of each dialect. Run it by `Prepared`.
    """

    inherit_cache = False

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._inline = True  # no RETURNING of a key that the database gives


class InsertOrAdd(InsertNew):
    """Insert a row, or add its numbers to those of the row that is there; of those named `most_…` the greater stays."""

    inherit_cache = False


@compiles(InsertNew)
def _insert_new(statement: InsertNew, compiler: SQLCompiler, **options: Any) -> str:
    insert = compiler.visit_insert(statement, **options)  # type: ignore[no-untyped-call]  # it has no annotations
    return f"{insert} ON CONFLICT DO NOTHING"


@compiles(InsertOrAdd)
def _insert_or_add(statement: InsertOrAdd, compiler: SQLCompiler, **options: Any) -> str:
    insert = compiler.visit_insert(statement, **options)  # type: ignore[no-untyped-call]  # it has no annotations
    table = statement.table
    keys = ", ".join(column.name for column in table.primary_key)
    grown = []
    for name in (column.name for column in table.columns if not column.primary_key):
        old, new = f"{table.name}.{name}", f"excluded.{name}"
        most = f"CASE WHEN {new} > {old} THEN {new} ELSE {old} END"
        grown.append(f"{name} = {most if name.startswith('most_') else f'{old} + {new}'}")
    return f"{insert} ON CONFLICT ({keys}) DO UPDATE SET {', '.join(grown)}"
