"""A store moves into another database as a whole, while its proxies go on.

1. The source notes each row that is written from now on (`Side.watch`: triggers that fill the table `moving`).
2. Every table is copied, page by page; the target keeps how far that came, with the rows, in one transaction.
3. Every row is compared by its SHA-256. What was written since is copied again, until little is left.
4. The mover holds every agent's lease by now. It locks the source, copies the rest, compares the counts and marks the
   source as moved, in one transaction: the database itself refuses every write from then on.
5. The target is opened for proxies.

Ended anywhere before the end of 4, by whatever, the source goes on serving, and the next try goes on where this one
was. Nothing here is asynchronous: a move runs on a thread of its own, on connections of its own.
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

# What is copied, in an order in which what a row refers to comes before it.
COPIED = tuple(table for table in metadata.sorted_tables if table.name not in {
    "meta", "proxies", "followers", "cancels", "leases",
})  # fmt: skip
# Who holds an agent is copied when it changes no more, with its epoch.
LAST = (leases,)
# What belongs to the source and its proxies: its schema, who is on it, who waits there for an answer, which turns must
# end.
LEFT = (meta, proxies, followers, cancels)

# A page: rows, and characters or bytes of them unless one row alone has more.
PAGE = 500
PAGE_SIZE = 4 * 1024 * 1024

# The row of `meta` in the source that says which move it is, and its table of what was written since.
MOVING = "moving"
_beside = MetaData()
# The rows that were written since: their table and their primary key as JSON. `n` grows with each write.
changes = Table(
    MOVING,
    _beside,
    Column("name", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("n", BigInteger, nullable=False),
)

# So much is done, of so much; it may raise to end the move.
Told = Callable[[int, int], None]


def untold(_done: int, _total: int) -> None:
    """For who does not want to know."""


Key = tuple[Any, ...]


class Side(Protocol):
    """One of the two databases of a move. What a statement of SQLAlchemy does not say alike on all of them.

    `name` is how messages call it; it holds no password. `apart` is a connection that begins no transaction by itself;
    errors leave it as `StoreUnavailable`.
    """

    name: str
    apart: Callable[[], AbstractContextManager[Connection]]

    def __init__(self, name: str, apart: Callable[[], AbstractContextManager[Connection]]) -> None:
        self.name = name
        self.apart = apart

    def prepare(self, conn: Connection) -> None:
        """As the target: the schema, which is not there yet, in the caller's transaction."""

    def begin(self, conn: Connection) -> None:
        """A transaction that writes."""

    def lock(self, conn: Connection, tables: Sequence[Table]) -> None:
        """A transaction beside which nobody writes these tables."""

    def watch(self, conn: Connection, table: Table) -> None:
        """From the end of this transaction on, each row that is written is noted in `changes`."""

    def unwatch(self, conn: Connection, table: Table) -> None: ...

    def refuse(self, conn: Connection, table: Table, place: str) -> None:
        """From the end of this transaction on, every write of this table is a `StoreUnavailable` that names the
        place."""

    def loosen(self, conn: Connection) -> None:
        """As the target: rows may come before those that they refer to."""

    def tighten(self, conn: Connection) -> None:
        """The end of `loosen`."""

    def last_key(self, conn: Connection, column: Column[Any]) -> int:
        """The highest key that the database ever gave out for this column, also to a row that is gone."""

    def set_last_key(self, conn: Connection, column: Column[Any], value: int) -> None: ...


class NotHeld(Exception):
    """Agents whose leases the mover does not hold: they came in since."""

    def __init__(self, agent_keys: Sequence[int]) -> None:
        super().__init__(f"{len(agent_keys)} agents")
        self.agent_keys = agent_keys


@dataclass(slots=True)
class MovedRows:
    """What is in the target: rows of each table."""

    place: str
    rows: dict[str, int]


@dataclass(slots=True)
class _State:
    """In `meta` of the target: which move comes in, and how far it is. `after`: the last key of each table that is
    copied. `whole`: the source may be marked by now."""

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
    """All of it or nothing. `tables`: nobody else writes them meanwhile."""
    if tables:
        side.lock(conn, tables)
    else:
        side.begin(conn)
    try:
        yield
        conn.exec_driver_sql("COMMIT")
    except BaseException:
        conn.exec_driver_sql("ROLLBACK")
        raise


class Move:
    """One move. Its methods are called in their order, on one thread at a time."""

    def __init__(self, source: Side, target: Side, told: Told) -> None:
        self.source = source
        self.target = target
        self._told = told
        self._state = _State("", source.name)
        self._done = self._total = 0

    def was_marked(self) -> bool:
        """An earlier try came past the mark: only the target is left to be opened. Raises `StoreUnavailable` where the
        source was moved elsewhere."""
        with self.source.apart() as conn:
            if version_of(conn, self.source.name) is None:
                return False
            place, move = _noted(conn, MOVED_TO), _noted(conn, MOVING)
        if place is None:
            return False
        with self.target.apart() as conn:
            state = None if version_of(conn, self.target.name) is None else _state_of(conn)
        if state is None or state.id != move or not state.whole:
            raise StoreUnavailable(f"the store {self.source.name} was moved to {place} already: see there")
        self._state = state
        return True

    def begin(self) -> None:
        """Have the source note what is written, and make the target. Raises `InvalidRequest` where it is in use."""
        with self.target.apart() as there:
            version = version_of(there, self.target.name)
            found = None if version is None else _state_of(there)
            with self.source.apart() as here:
                if version is not None and (found is None or version != version_of(here, self.source.name)):
                    raise InvalidRequest(
                        f"{self.target.name} holds a store already: name a new place, or move that one away first"
                    )
                if found is not None and _noted(here, MOVING) == found.id:
                    self._state = found
                else:
                    found = None
                    self._state = _State(uuid.uuid4().hex, self.source.name)
                    self._forget_changes(here)
                    with committed(self.source, here):
                        changes.create(here)
                        _note(here, MOVING, self._state.id)
                    for table in COPIED:  # one by one: who locks many waits for those who lock them the other way round
                        with committed(self.source, here, [table]):
                            self.source.watch(here, table)
            with committed(self.target, there):
                if version is None:
                    self.target.prepare(there)
                elif found is None:  # of another move, which nobody goes on with
                    for table in reversed([*COPIED, *LAST]):
                        there.execute(table.delete())
                _note(there, COMING_IN, self._state.as_text())

    def give_up(self) -> None:
        """The source notes nothing any more; what is in the target is of no use."""
        with self.source.apart() as here:
            with committed(self.source, here):
                here.execute(meta.delete().where(meta.c.name == MOVING))
            self._forget_changes(here)

    def copy(self) -> None:
        """Every table, from where an earlier try was."""
        with self.source.apart() as here, self.target.apart() as there:
            self.target.loosen(there)
            self._total = 2 * sum(_count(here, table) for table in COPIED)
            self._step(self._state.rows)
            for table in COPIED:
                if table.name in self._state.copied:
                    continue
                after = self._state.after.get(table.name)
                for rows in _pages(here, table, None if after is None else tuple(after), self._end(here, table)):
                    with committed(self.target, there):
                        _insert(there, table, rows)
                        self._state.after[table.name] = list(_key(table, rows[-1]))
                        self._state.rows += len(rows)
                        _note(there, COMING_IN, self._state.as_text())
                    self._step(len(rows))
                self._state.copied.append(table.name)

    def verify(self) -> None:
        """Compare every row by its hash. One that differs was written since, or the move ends here."""
        with self.source.apart() as here, self.target.apart() as there:
            for table in COPIED:
                for rows in _pages(here, table, None, self._end(here, table)):
                    differ = _differing(there, table, rows)
                    noted = _noted_changes(here, table, differ)
                    for key in differ:
                        if key not in noted:
                            raise self._unlike(table, f"the row {key} is not the same")
                    self._step(len(rows))

    def catch_up(self) -> None:
        """Copy what was written since, until less than a page is left, or until as much is written meanwhile: that ends
        when the mover holds the agents."""
        with self.source.apart() as here, self.target.apart() as there:
            self.target.loosen(there)
            before, left = 0, _count(here, changes)
            while left >= PAGE and (before == 0 or left < before / 2):
                before = left
                while left > 0:
                    left -= self._drain(here, there) or left
                    self._told(self._done, self._total)
                left = _count(here, changes)

    def finish(self, holder: str) -> MovedRows:
        """Lock the source, copy the rest, mark the source as moved. Raises `NotHeld`, with everything as it was."""
        with self.source.apart() as here, self.target.apart() as there:
            self.target.loosen(there)
            with committed(self.source, here, [*metadata.sorted_tables, changes]):
                held = select(leases.c.agent_key).where(leases.c.holder == holder)
                free = list(here.scalars(select(agents.c.key).where(agents.c.key.not_in(held))))
                if free:
                    raise NotHeld(free)
                while self._drain(here, there):
                    pass
                with committed(self.target, there):
                    for table in LAST:
                        there.execute(table.delete())
                for table in LAST:
                    for rows in _pages(here, table, None):
                        with committed(self.target, there):
                            _insert(there, table, rows)
                        if _differing(there, table, rows):
                            raise self._unlike(table, "a row is not the same")
                counts = {table.name: _count(here, table) for table in (*COPIED, *LAST)}
                for table in (*COPIED, *LAST):
                    number = _count(there, table)
                    if number != counts[table.name]:
                        raise self._unlike(table, f"{counts[table.name]} rows and {number}")
                self._state.whole = True
                with committed(self.target, there):
                    for table in COPIED:
                        column = table.autoincrement_column
                        if column is not None:
                            self.target.set_last_key(there, column, self.source.last_key(here, column))
                    _note(there, COMING_IN, self._state.as_text())
                _note(here, MOVED_TO, self.target.name)
                for table in metadata.sorted_tables:
                    self.source.refuse(here, table, self.target.name)
        return self.open_target()

    def open_target(self) -> MovedRows:
        """The last step: proxies may use the target from now on."""
        with self.target.apart() as there, committed(self.target, there):
            self.target.tighten(there)
            there.execute(meta.delete().where(meta.c.name == COMING_IN))
            return MovedRows(self.target.name, {table.name: _count(there, table) for table in (*COPIED, *LAST)})

    def _drain(self, here: Connection, there: Connection) -> int:
        """Copy at most a page of what was written since. Returns how many rows that were.

        One that is written again meanwhile has another number by then, and stays noted.
        """
        noted = here.execute(select(changes).order_by(changes.c.name, changes.c.key).limit(PAGE)).all()
        keys: dict[str, list[Key]] = {}
        for row in noted:
            keys.setdefault(row.name, []).append(tuple(json.loads(row.key)))
        for table in COPIED:
            for some in _portions(here, table, keys.get(table.name, [])):
                rows = here.execute(select(table).where(_is_one_of(table, some))).all()
                with committed(self.target, there):
                    there.execute(table.delete().where(_is_one_of(table, some)))
                    _insert(there, table, rows)
                if _differing(there, table, rows):
                    raise self._unlike(table, "a row is not the same")
        for row in noted:
            same = and_(changes.c.name == row.name, changes.c.key == row.key, changes.c.n == row.n)
            here.execute(changes.delete().where(same))
        return len(noted)

    def _end(self, here: Connection, table: Table) -> int | None:
        """The last key by now: rows that come behind it are noted, and may come as fast as they are copied."""
        column = table.autoincrement_column
        return None if column is None else self.source.last_key(here, column)

    def _forget_changes(self, here: Connection) -> None:
        for table in COPIED:
            with committed(self.source, here, [table]):
                self.source.unwatch(here, table)
        with committed(self.source, here):
            changes.drop(here, checkfirst=True)

    def _step(self, rows: int) -> None:
        self._done += rows
        self._told(self._done, self._total)

    def _unlike(self, table: Table, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.target.name} is not as {self.source.name}: {why} in {table.name}; nothing was moved, and the store "
            "goes on serving: empty the new place, then try again"
        )


# --- meta


def _noted(conn: Connection, name: str) -> str | None:
    value: str | None = conn.scalar(select(meta.c.value).where(meta.c.name == name))
    return value


def _note(conn: Connection, name: str, value: str) -> None:
    conn.execute(meta.delete().where(meta.c.name == name))
    conn.execute(meta.insert(), {"name": name, "value": value})


def _state_of(conn: Connection) -> _State | None:
    text = _noted(conn, COMING_IN)
    return None if text is None else _State(**json.loads(text))


# --- rows


def _count(conn: Connection, table: Table) -> int:
    return conn.scalar(select(func.count()).select_from(table)) or 0


def _insert(conn: Connection, table: Table, rows: Sequence[Row[Any]]) -> None:
    if rows:
        conn.execute(table.insert(), [dict(row._mapping) for row in rows])


def _pages(conn: Connection, table: Table, after: Key | None, end: int | None = None) -> Iterator[Sequence[Row[Any]]]:
    """All rows by their primary key, so many at once that they fit into memory. `end`: up to this key."""
    own = list(table.primary_key)
    while True:
        query = select(*own, _size(table)).order_by(*own).limit(PAGE)
        query = query if end is None else query.where(own[0] <= end)
        sizes = conn.execute(query if after is None else query.where(_is_above(table, after))).all()
        if not sizes:
            return
        last = _cut(sizes)[-1]
        upto = ~_is_above(table, last) if after is None else and_(_is_above(table, after), ~_is_above(table, last))
        rows = conn.execute(select(table).where(upto).order_by(*own)).all()
        if rows:
            yield rows
        after = last


def _portions(conn: Connection, table: Table, keys: list[Key]) -> Iterator[list[Key]]:
    """These keys in portions whose rows fit into memory; rows that are gone weigh nothing."""
    while keys:
        sizes = conn.execute(select(*table.primary_key, _size(table)).where(_is_one_of(table, keys))).all()
        some = _cut(sizes)
        later = {tuple(row[:-1]) for row in sizes}.difference(some)
        yield [key for key in keys if key not in later]
        keys = list(later)


def _cut(sizes: Sequence[Any]) -> list[Key]:
    """The first of these keys, whose rows are no page together; one at least."""
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
    own = list(table.primary_key)
    if len(own) == 1:
        above: ColumnElement[bool] = own[0] > key[0]
        return above
    return tuple_(*own) > tuple_(*(literal(value, column.type) for value, column in zip(key, own, strict=True)))


def _is_one_of(table: Table, keys: Sequence[Key]) -> ColumnElement[bool]:
    own = list(table.primary_key)
    return own[0].in_([key for (key,) in keys]) if len(own) == 1 else tuple_(*own).in_(keys)


def _differing(there: Connection, table: Table, rows: Sequence[Row[Any]]) -> set[Key]:
    """The keys of these rows that the target does not have as they are."""
    wanted = {_key(table, row): _digest(table, row) for row in rows}
    if not wanted:
        return set()
    found = there.execute(select(table).where(_is_one_of(table, list(wanted))))
    same = {key for key, digest in ((_key(table, row), _digest(table, row)) for row in found) if wanted[key] == digest}
    return wanted.keys() - same


def _digest(table: Table, row: Row[Any]) -> bytes:
    """SHA-256 of all values, each with its length. Databases have their own ways with whole numbers and truth."""
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


def _noted_changes(here: Connection, table: Table, keys: set[Key]) -> set[Key]:
    """Which of these rows were written since."""
    if not keys:
        return set()
    found = here.scalars(select(changes.c.key).where(changes.c.name == table.name))
    return {key for key in (tuple(json.loads(text)) for text in found) if key in keys}
