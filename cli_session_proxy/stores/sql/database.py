"""The interface between the portable store and one database. `stores.sqlite` and `stores.postgresql` implement it.

| what | SQLite | PostgreSQL, on psycopg 3 |
|---|---|---|
| a transaction | a writer thread, groups, reader threads | a pool: READ COMMITTED writes, snapshot reads |
| a turn's statements | run at once | collected, and sent together when a result is asked for |
| locking of a row | `BEGIN IMMEDIATE` locks the file | `FOR NO KEY UPDATE`, which SQLite's dialect leaves out |
| a row that is new | `InsertNew` | the same text |
| a generated key | from the driver | RETURNING, by its dialect |
| clock of the leases | `store_clock()`: this machine's, on each connection | `store_clock()`: made with the schema |
| proof of a dead holder | the kernel releases its lock (`claim`) | a row that expires |
| lock of migrations | the write lock that `open` holds | an advisory lock of the transaction |
| a copy before them | `<file>.v<n>.bak` | left to the operator |
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

from ...errors import StoreUnavailable

T = TypeVar("T")

# The body of a transaction. Its `Connection` is SQLAlchemy's; `Prepared` runs statements on its driver.
Work = Callable[[Connection], T]


class Urgency(Enum):
    """What a write survives when it returns. `DURABLE`: a power cut. `JOURNAL`: the end of this process and of the
    database's server. `AHEAD`: the end of this process; a server's end once a later `DURABLE` or `JOURNAL` write does,
    so that no write is there without those before it. `LATER`: as `AHEAD`, but written in a moment, before all writes
    that are requested after it (except `quick` ones)."""

    DURABLE = auto()
    JOURNAL = auto()
    AHEAD = auto()
    LATER = auto()


class Database(Protocol):
    """Runs transactions, each whole or not at all.

    Raises `StoreUnavailable`, or `InvalidRequest` for a text that cannot be stored. Their messages never contain a
    statement's parameters, which may be prompts. What `work` raises by itself is passed on.
    """

    @property
    def name(self) -> str:
        """Its name in messages, without a password."""

    async def open(self, prepare: Work[None]) -> None:
        """Connect, and run `prepare` (the schema) as the first write, while no other program runs its own.

        Leaves nothing open if it fails.
        """

    async def close(self) -> None:
        """Refuse new work, finish what was submitted, disconnect. Idempotent."""

    async def read(self, work: Work[T], *, quick: bool = False) -> T:
        """Run `work` on one snapshot. `quick`: one statement for a few rows that every turn reads, which may run on the
        event loop."""

    async def write(
        self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False, alone: bool = False
    ) -> T:
        """Run `work` as one transaction, maybe together with others, and maybe again where it was rolled back.

        `alone`: never together with others, and once; for work that is long or has effects of its own. `quick`: for
        a few rows; may run on the event loop. Not with `LATER`.
        """

    def claim(self, name: str) -> Callable[[], None] | None:
        """Hold this name among all programs on the database, until the returned function is called or this process
        ends. None while another program holds the name. On any thread."""

    # The methods below do nothing by default.

    def living(self) -> set[str] | None:
        """The ids of the proxies on this host that live, as the kernel proves; None where only heartbeats tell."""
        return None

    def back_up(self, version: int, report: Callable[[int, int], None]) -> None:  # noqa: ARG002 - as above
        """Make a copy before a migration from `version`, inside its transaction. Raises `StoreUnavailable`. `report`
        gets the pages copied and all pages. By default copies are left to the operator: a migration is one transaction,
        so it succeeds or changes nothing."""
        return

    def ring(self, conn: Connection, proxy_id: str) -> None:  # noqa: ARG002 - as above
        """Inside a transaction: notify this proxy at the commit that another one requests something of it. Without
        notifications, proxies poll."""
        return

    def size(self) -> int | None:
        """Bytes on its disk; None if unknown. Blocks."""
        return None

    async def purge(self) -> None:
        """After a deletion: overwrite what the database has freed."""
        return

    def forget_copies(self, owner: str, agent_id: str) -> None:  # noqa: ARG002 - as above
        """Remove the agent from copies that `back_up` made. Raises `StoreUnavailable`. Blocks."""
        return


class Lifecycle:
    """Opening and closing of a database: `_end` runs once, however often `close` is called, and a new `open` waits for
    its end."""

    _open = False
    _moved_to: str | None = None  # the new place, once a write was refused: reads would lack what is written there
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
        """Finish what was submitted, and disconnect."""
        raise NotImplementedError

    @staticmethod
    def _closed() -> StoreUnavailable:
        return StoreUnavailable("the store is closed: start the proxy again")


class ThreadPool:
    """Threads that run functions for the event loop that made them, started in order.

    An empty function takes 0.08 ms after a pause; with `concurrent.futures`, which has futures of its own and more
    locks, 0.20 ms.
    """

    def __init__(self, number: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Daemons: a store that was not closed must not keep a program alive, and transactions are atomic.
        self._threads = [Thread(target=self._work, name=f"{name}_{n}", daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """The function's result. If this future is cancelled before a thread takes the function, it is not run."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((future, work))
        return future

    def stop(self) -> None:
        """Wait until all functions that were submitted have run. Blocks; `run` may not be called any more."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            error: BaseException | None = None
            result = None
            if not future.cancelled():
                try:
                    result = work()
                except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
                    error = exc
            if self._loop.is_closed():  # nobody waits any more
                return
            self._loop.call_soon_threadsafe(self._finish, future, result, error)
            del item, future, work, result, error  # do not keep them until the next function

    def _finish(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        """Runs on the event loop when a function has ended."""
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


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
    """The part of a driver's cursor (PEP 249) that is used here. A driver may only collect statements, and run all of
    them when a result is asked for: so run independent statements first, then ask. Read a selected row before raising
    anything: until then SQLite holds its lock."""

    @property
    def rowcount(self) -> int: ...

    @property
    def lastrowid(self) -> int | None: ...

    def fetchone(self) -> Any: ...


class Driver(Protocol):
    """The part of a driver's connection that is used here: PEP 249 with extensions of `sqlite3`."""

    def execute(self, sql: str, values: Values, /) -> Cursor: ...

    def executemany(self, sql: str, rows: Sequence[Values], /) -> object: ...

    def commit_next(self) -> None:
        """No more writes follow: the commit may be sent together with the statements so far. Exceptions raised later do
        not roll back."""


class Prepared:
    """One statement. The names of the values are those of its `bindparam`s, and of the columns that it sets."""

    def __init__(self, statement: Select[Any] | Insert | Update | Delete) -> None:
        self.statement = statement
        # the values decide which columns are set
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

    def rows(self, ran: Cursor) -> list[Any]:
        """The remaining rows, as `first` gives them."""
        return list(iter(partial(self.first, ran), None))

    def all(self, conn: Connection, values: Values) -> list[Any]:
        return self.rows(self.run(conn, values))

    def run(self, conn: Connection, values: Values, *, last: bool = False) -> Cursor:
        """Run it. For an insert `lastrowid` is the generated key, from RETURNING or from the driver (8 µs less on
        SQLite), as the dialect decides. `last`: see `Driver.commit_next`."""
        made, driver = self._ready(conn, values)
        ran = driver.execute(made.sql, {**made.constants, **values} if made.constants else values)
        if last:
            driver.commit_next()
        return ran

    def run_each(self, conn: Connection, rows: Sequence[Values]) -> None:
        """Run it once for each of these, which have equal names."""
        if rows:
            made, driver = self._ready(conn, rows[0])
            each = [{**made.constants, **row} for row in rows] if made.constants else rows
            driver.executemany(made.sql, each)

    def _ready(self, conn: Connection, values: Values) -> tuple[_Made, Driver]:
        """The statement compiled for the connection's dialect, and its driver."""
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
    constants: Values  # values that the statement itself has


class InsertNew(Insert):
    """Insert a row unless it exists; then `rowcount` is 0.

    Both databases have the same syntax, but SQLAlchemy has it only in each dialect's `insert`. Run it by `Prepared`.
    """

    inherit_cache = False

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._inline = True  # no RETURNING of a generated key


class InsertOrAdd(InsertNew):
    """Insert a row or, if it exists, add the numbers to it; for columns `most_…` keep the maximum."""

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
