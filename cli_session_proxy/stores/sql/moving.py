"""Moves a whole store into another database while its proxies run.

1. Triggers in the source note each row that is written from now on in the table `moving` (`Side.watch`).
2. Every table is copied page by page. The target stores the progress in the same transaction as the rows.
3. Every row is compared by its SHA-256. Rows written meanwhile are copied again, until few are left.
4. When the mover holds every agent's lease, it locks the source, copies the rest, compares the counts and marks the
   source as moved, in one transaction. From then on the source database refuses every write.
5. The target is opened for proxies.

If this stops anywhere before the end of 4, the source goes on serving, and the next try continues. Nothing here is
asynchronous: a move has a thread and connections of its own.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    LargeBinary,
    MetaData,
    Row,
    Table,
    Text,
    and_,
    func,
    literal,
    select,
    tuple_,
)

from ...errors import InvalidRequest, StoreUnavailable
from .migrations import version_of
from .tables import COMING_IN, MOVED_TO, agents, cancels, followers, leases, meta, metadata, proxies

# The tables to copy, in an order in which referenced rows come first.
COPIED = tuple(table for table in metadata.sorted_tables if table.name not in {
    "meta", "proxies", "followers", "cancels", "leases",
})  # fmt: skip
# Leases are copied last, when they no longer change.
LAST = (leases,)
# Not copied, because it is about the source's own proxies: schema version, proxies, followers, cancels.
LEFT = (meta, proxies, followers, cancels)

# The size of a page: rows, and their characters or bytes, unless one row has more.
PAGE = 500
PAGE_SIZE = 4 * 1024 * 1024

# The row of `meta` in the source with the id of the move. The source's table `changes` has the same name.
MOVING = "moving"
_beside = MetaData()  # a store that is not moved has no such table
# Rows written since the move began: the table's name, and the primary key as JSON. `n` grows with each write of a row.
changes = Table(
    MOVING,
    _beside,
    Column("name", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("n", BigInteger, nullable=False),
)

# Gets the progress: done, total. It may raise an exception to end the move.
ReportProgress = Callable[[int, int], None]
# The values of a row's primary key.
Key = tuple[Any, ...]


class Side(Protocol):
    """One of the two databases of a move: operations that differ between databases.

    `name` is for messages, without a password. `connection` opens a connection in autocommit mode, beside those of a
    store; its errors become `StoreUnavailable`.
    """

    name: str
    connection: Callable[[], AbstractContextManager[Connection]]

    def __init__(self, name: str, connection: Callable[[], AbstractContextManager[Connection]]) -> None:
        self.name = name
        self.connection = connection

    def prepare(self, conn: Connection) -> None:
        """For the target: create the schema, in the caller's transaction."""

    def begin(self, conn: Connection) -> None:
        """Begin a write transaction."""

    def lock(self, conn: Connection, tables: Sequence[Table]) -> None:
        """Begin a transaction during which nobody else writes these tables."""

    def watch(self, conn: Connection, table: Table) -> None:
        """After this transaction, each written row of the table is noted in `changes`."""

    def unwatch(self, conn: Connection, table: Table) -> None: ...

    def refuse(self, conn: Connection, table: Table, place: str) -> None:
        """After this transaction, every write of this table raises `StoreUnavailable`, with the new place."""

    def drop_foreign_keys(self, conn: Connection) -> None:
        """For the target: allow a row that refers to one which is not there yet."""

    def restore_foreign_keys(self, conn: Connection) -> None:  # noqa: ARG002 - by default nothing is left to do
        """For the target: check references between rows again."""
        return

    def last_key(self, conn: Connection, column: Column[Any]) -> int:
        """The highest key ever generated for this column, deleted rows included."""

    def set_last_key(self, conn: Connection, column: Column[Any], value: int) -> None: ...


class NotHeld(Exception):
    """There are new agents, whose leases the mover does not hold."""

    def __init__(self, agent_keys: Sequence[int]) -> None:
        super().__init__(f"{len(agent_keys)} agents")
        self.agent_keys = agent_keys


@dataclass(slots=True)
class MovedRows:
    """What a move has copied: rows by table. `place`: where the target is, in words for a person."""

    place: str
    rows: dict[str, int]


@dataclass(slots=True)
class _State:
    """The progress of a move, stored in `meta` of the target.

    `id`: of this move, drawn when it begins. `source`: its name. `copied`: the tables that are finished; `after`: the
    last copied key of each table; `rows`: how many rows were copied. `whole`: everything was copied. It is set just
    before the source is marked as moved, so after a crash the source may have that mark or not.
    """

    id: str
    source: str
    after: dict[str, list[Any]] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    rows: int = 0
    whole: bool = False

    def as_text(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


@contextmanager
def committed(side: Side, conn: Connection, tables: Sequence[Table] = ()) -> Iterator[None]:
    """One transaction. `tables` are locked against other writers."""
    if tables:
        side.lock(conn, tables)  # begins the transaction, too
    else:
        side.begin(conn)
    try:
        yield
        conn.exec_driver_sql("COMMIT")
    except BaseException:
        conn.exec_driver_sql("ROLLBACK")
        raise


class Move:
    """One move. Call its methods in their order, on one thread at a time."""

    def __init__(self, source: Side, target: Side, report: ReportProgress) -> None:
        self.source = source
        self.target = target
        self._report = report
        self._state = _State("", source.name)
        self._done = self._total = 0

    def was_marked(self) -> bool:
        """Whether an earlier try has marked the source: then only `open_target` is left. Raises `StoreUnavailable` if
        the source was moved to another place."""
        with self.source.connection() as conn:
            if version_of(conn, self.source.name) is None:
                return False
            place, move = _meta_value(conn, MOVED_TO), _meta_value(conn, MOVING)
        if place is None:
            return False
        with self.target.connection() as conn:
            state = None if version_of(conn, self.target.name) is None else _state_of(conn)
        if state is None or state.id != move or not state.whole:
            raise StoreUnavailable(f"the store {self.source.name} was moved to {place} already: see there")
        self._state = state
        return True

    def begin(self) -> None:
        """Watch the source, and create the target. Raises `InvalidRequest` if the target is in use."""
        with self.target.connection() as target:
            version = version_of(target, self.target.name)
            earlier = None if version is None else _state_of(target)
            with self.source.connection() as source:
                if version is not None and (earlier is None or version != version_of(source, self.source.name)):
                    raise InvalidRequest(
                        f"{self.target.name} holds a store already: name a new place, or move that one away first"
                    )
                if earlier is not None and _meta_value(source, MOVING) == earlier.id:
                    self._state = earlier
                else:
                    earlier = None
                    self._state = _State(uuid.uuid4().hex, self.source.name)
                    self._forget_changes(source)
                    with committed(self.source, source):
                        changes.create(source)
                        _set_meta(source, MOVING, self._state.id)
                    for table in COPIED:  # one by one: locking several could deadlock
                        with committed(self.source, source, [table]):
                            self.source.watch(source, table)
            with committed(self.target, target):
                if version is None:
                    self.target.prepare(target)
                elif earlier is None:  # the rows are of another move, which was given up
                    for table in reversed([*COPIED, *LAST]):
                        target.execute(table.delete())
                _set_meta(target, COMING_IN, self._state.as_text())

    def give_up(self) -> None:
        """Stop watching the source. The target is not usable."""
        with self.source.connection() as source:
            with committed(self.source, source):
                source.execute(meta.delete().where(meta.c.name == MOVING))
            self._forget_changes(source)

    def copy(self) -> None:
        """Copy every table, continuing an earlier try."""
        with self.source.connection() as source, self.target.connection() as target:
            self.target.drop_foreign_keys(target)
            self._total = 2 * sum(_count(source, table) for table in COPIED)
            self._step(self._state.rows)
            for table in COPIED:
                if table.name in self._state.copied:
                    continue
                after = self._state.after.get(table.name)
                end = self._last_key(source, table)
                for rows in _pages(source, table, None if after is None else tuple(after), end):
                    with committed(self.target, target):
                        _insert(target, table, rows)
                        self._state.after[table.name] = list(_key(table, rows[-1]))
                        self._state.rows += len(rows)
                        _set_meta(target, COMING_IN, self._state.as_text())
                    self._step(len(rows))
                self._state.copied.append(table.name)

    def verify(self) -> None:
        """Compare every row by its hash. Raises an error for a difference that is no noted change."""
        with self.source.connection() as source, self.target.connection() as target:
            for table in COPIED:
                for rows in _pages(source, table, None, self._last_key(source, table)):
                    differing = _differing(target, table, rows)
                    if differing:  # rows that were written meanwhile are copied again later
                        written = source.scalars(select(changes.c.key).where(changes.c.name == table.name))
                        for key in differing.difference(tuple(json.loads(text)) for text in written):
                            raise self._difference(table, f"the row {key} is not the same")
                    self._step(len(rows))

    def catch_up(self) -> None:
        """Copy noted changes until less than a page is left, or as long as they become fewer: writes end when the mover
        holds the leases."""
        with self.source.connection() as source, self.target.connection() as target:
            self.target.drop_foreign_keys(target)
            before, left = 0, _count(source, changes)
            while left >= PAGE and (before == 0 or left < before / 2):
                before = left
                while left > 0:
                    left -= self._copy_changes(source, target) or left
                    self._report(self._done, self._total)
                left = _count(source, changes)

    def finish(self, holder: str) -> MovedRows:
        """Lock the source, copy the rest, mark the source as moved. Raises `NotHeld`, with everything as it was."""
        with self.source.connection() as source, self.target.connection() as target:
            self.target.drop_foreign_keys(target)
            with committed(self.source, source, [*metadata.sorted_tables, changes]):
                held = select(leases.c.agent_key).where(leases.c.holder == holder)
                free = list(source.scalars(select(agents.c.key).where(agents.c.key.not_in(held))))
                if free:
                    raise NotHeld(free)
                while self._copy_changes(source, target):
                    pass
                with committed(self.target, target):
                    for table in LAST:
                        target.execute(table.delete())
                for table in LAST:
                    for rows in _pages(source, table, None):
                        with committed(self.target, target):
                            _insert(target, table, rows)
                        if _differing(target, table, rows):
                            raise self._difference(table, "a row is not the same")
                counts = {table.name: _count(source, table) for table in (*COPIED, *LAST)}
                for table in (*COPIED, *LAST):
                    number = _count(target, table)
                    if number != counts[table.name]:
                        raise self._difference(table, f"{counts[table.name]} rows and {number}")
                self._state.whole = True
                with committed(self.target, target):
                    for table in COPIED:
                        column = table.autoincrement_column
                        if column is not None:
                            self.target.set_last_key(target, column, self.source.last_key(source, column))
                    _set_meta(target, COMING_IN, self._state.as_text())
                _set_meta(source, MOVED_TO, self.target.name)
                for table in metadata.sorted_tables:
                    self.source.refuse(source, table, self.target.name)
        return self.open_target()

    def open_target(self) -> MovedRows:
        """The last step: let proxies use the target."""
        with self.target.connection() as target, committed(self.target, target):
            self.target.restore_foreign_keys(target)
            target.execute(meta.delete().where(meta.c.name == COMING_IN))
            return MovedRows(self.target.name, {table.name: _count(target, table) for table in (*COPIED, *LAST)})

    def _copy_changes(self, source: Connection, target: Connection) -> int:
        """Copy at most a page of noted changes. Returns how many rows that were.

        A row that is written again meanwhile gets another number, and stays noted.
        """
        changed = source.execute(select(changes).order_by(changes.c.name, changes.c.key).limit(PAGE)).all()
        keys_of_tables: dict[str, list[Key]] = {}
        for row in changed:
            keys_of_tables.setdefault(row.name, []).append(tuple(json.loads(row.key)))
        for table in COPIED:
            keys = keys_of_tables.get(table.name, [])
            while keys:  # as many at a time as fit into memory
                sizes = source.execute(select(*table.primary_key, _size(table)).where(_is_one_of(table, keys))).all()
                later = {tuple(row[:-1]) for row in sizes}.difference(_cut(sizes))
                now = [key for key in keys if key not in later]
                rows = source.execute(select(table).where(_is_one_of(table, now))).all()
                with committed(self.target, target):
                    target.execute(table.delete().where(_is_one_of(table, now)))
                    _insert(target, table, rows)
                if _differing(target, table, rows):
                    raise self._difference(table, "a row is not the same")
                keys = list(later)
        for row in changed:
            same = and_(changes.c.name == row.name, changes.c.key == row.key, changes.c.n == row.n)
            source.execute(changes.delete().where(same))
        return len(changed)

    def _last_key(self, source: Connection, table: Table) -> int | None:
        """The last key of the table now. Later rows are in `changes`; without this bound copying might never end."""
        column = table.autoincrement_column
        return None if column is None else self.source.last_key(source, column)

    def _forget_changes(self, source: Connection) -> None:
        for table in COPIED:
            with committed(self.source, source, [table]):
                self.source.unwatch(source, table)
        with committed(self.source, source):
            changes.drop(source, checkfirst=True)

    def _step(self, rows: int) -> None:
        self._done += rows
        self._report(self._done, self._total)

    def _difference(self, table: Table, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.target.name} differs from {self.source.name}: {why} in {table.name}; nothing was moved, and the "
            "store goes on serving: empty the new place, then try again"
        )


# --- meta


def _meta_value(conn: Connection, name: str) -> str | None:
    """The value of a row of `meta`."""
    value: str | None = conn.scalar(select(meta.c.value).where(meta.c.name == name))
    return value


def _set_meta(conn: Connection, name: str, value: str) -> None:
    conn.execute(meta.delete().where(meta.c.name == name))
    conn.execute(meta.insert(), {"name": name, "value": value})


def _state_of(conn: Connection) -> _State | None:
    text = _meta_value(conn, COMING_IN)
    return None if text is None else _State(**json.loads(text))


# --- rows


def _count(conn: Connection, table: Table) -> int:
    return conn.scalar(select(func.count()).select_from(table)) or 0


def _insert(conn: Connection, table: Table, rows: Sequence[Row[Any]]) -> None:
    if rows:
        conn.execute(table.insert(), [dict(row._mapping) for row in rows])


def _pages(conn: Connection, table: Table, after: Key | None, end: int | None = None) -> Iterator[Sequence[Row[Any]]]:
    """All rows by primary key, in pages that fit into memory. `end`: up to this key."""
    key_columns = list(table.primary_key)
    while True:
        query = select(*key_columns, _size(table)).order_by(*key_columns).limit(PAGE)
        query = query if end is None else query.where(key_columns[0] <= end)
        sizes = conn.execute(query if after is None else query.where(_is_above(table, after))).all()
        if not sizes:
            return
        last = _cut(sizes)[-1]
        upto = ~_is_above(table, last) if after is None else and_(_is_above(table, after), ~_is_above(table, last))
        rows = conn.execute(select(table).where(upto).order_by(*key_columns)).all()
        if rows:
            yield rows
        after = last


def _cut(sizes: Sequence[Any]) -> list[Key]:
    """The first keys whose rows fit into a page; at least one."""
    size = 0
    keys: list[Key] = []
    for *key, one in sizes:
        size += one
        if keys and size > PAGE_SIZE:
            break
        keys.append(tuple(key))
    return keys


def _size(table: Table) -> ColumnElement[int]:
    long = [column for column in table.c if isinstance(column.type, Text | LargeBinary)]
    return sum((func.coalesce(func.length(column), 0) for column in long), literal(0)).label("size")


def _key(table: Table, row: Row[Any]) -> Key:
    return tuple(row._mapping[column] for column in table.primary_key)


def _is_above(table: Table, key: Key) -> ColumnElement[bool]:
    key_columns = list(table.primary_key)
    if len(key_columns) == 1:
        above: ColumnElement[bool] = key_columns[0] > key[0]
        return above
    return tuple_(*key_columns) > tuple_(
        *(literal(value, column.type) for value, column in zip(key, key_columns, strict=True))
    )


def _is_one_of(table: Table, keys: Sequence[Key]) -> ColumnElement[bool]:
    key_columns = list(table.primary_key)
    return key_columns[0].in_([key for (key,) in keys]) if len(key_columns) == 1 else tuple_(*key_columns).in_(keys)


def _differing(target: Connection, table: Table, rows: Sequence[Row[Any]]) -> set[Key]:
    """The keys of rows that are missing or different in the target."""
    digests = {_key(table, row): _digest(table, row) for row in rows}
    if not digests:
        return set()
    for row in target.execute(select(table).where(_is_one_of(table, list(digests)))).all():
        key = _key(table, row)
        if digests[key] == _digest(table, row):
            del digests[key]
    return set(digests)


def _digest(table: Table, row: Row[Any]) -> bytes:
    """SHA-256 of all values, each with its length, in one form: databases represent integers and booleans
    differently."""
    hashed = hashlib.sha256()
    for column, value in zip(table.c, row, strict=True):
        if value is None:
            data = b"\xff"
        elif isinstance(value, bytes):
            data = value
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
        elif isinstance(column.type, Double):
            data = repr(float(value)).encode()
        else:
            data = repr(bool(value) if isinstance(column.type, Boolean) else int(value)).encode()
        hashed.update(b"%d:" % len(data) + data)
    return hashed.digest()
