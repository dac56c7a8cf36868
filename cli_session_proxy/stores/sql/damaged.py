"""Rows with values that this program never writes. SQLite keeps any value in any column, and people edit the file.

A function that reads a row names its columns (`reads`). Lists are read by `undamaged`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import ColumnElement

from ... import logs
from ...domain.times import LAST_TIME
from ...errors import DamagedRow

log = logs.get(__name__)

T = TypeVar("T")
P = ParamSpec("P")
Read = Callable[Concatenate[Any, P], T]

# What reading JSON of an unexpected form raises.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Damaged rows that the log has named, and how many it names.
_logged: set[str] = set()
MOST_LOGGED = 1000


def reads(*columns: ColumnElement[Any]) -> Callable[[Read[P, T]], Read[P, T]]:
    """Decorates a function that reads a row which begins with these columns. If a value cannot be read, it raises
    `DamagedRow`, which names the row and the column. The log names each row once."""
    floats = tuple(n for n, column in enumerate(columns) if column.type.python_type is float)
    known_types: set[tuple[type, ...]] = set()  # of rows that passed the check by column

    def checked(read: Read[P, T]) -> Read[P, T]:
        @wraps(read)
        def read_checked(row: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            values = row[: len(columns)]
            kinds = tuple(map(type, values))
            if kinds not in known_types:
                for column, kind in zip(columns, kinds, strict=True):
                    expected = column.type.python_type
                    if kind not in (expected, type(None)) and not (expected is bool and kind is int):
                        raise _damaged(columns, values, column, kind.__name__)
                known_types.add(kinds)
            for n in floats:
                if values[n] is not None and not -LAST_TIME < values[n] < LAST_TIME:
                    raise _damaged(columns, values, columns[n], str(values[n]))
            try:
                return read(row, *args, **kwargs)
            except _UNREADABLE as exc:
                broken = (column for column, value in zip(columns, values, strict=True) if _is_broken_json(value))
                raise _damaged(columns, values, next(broken, None), type(exc).__name__) from exc

        return read_checked

    return checked


def undamaged(
    read: Callable[[Any], T], rows: Iterable[Any], instead: Callable[[Any, DamagedRow], T] | None = None
) -> list[T]:
    """`read` of each row. A damaged row is left out or, with `instead`, replaced by `instead(row, error)`."""
    values = []
    for row in rows:
        try:
            values.append(read(row))
        except DamagedRow as exc:
            if instead is not None:
                values.append(instead(row, exc))
    return values


def _is_broken_json(value: object) -> bool:
    if not isinstance(value, str) or not value.startswith(("[", "{", '"')):  # not JSON: an id, a name
        return False
    try:
        json.loads(value)
    except _UNREADABLE:
        return True
    return False


def _damaged(
    columns: Sequence[ColumnElement[Any]], values: Sequence[Any], wrong: ColumnElement[Any] | None, why: str
) -> DamagedRow:
    """Make the error for a damaged row, and log it once. `wrong`: the column that cannot be read, if it is known."""
    table: Any = getattr(wrong, "table", None)
    table = columns[0].table if table is None else table  # a label has no table; the first column is never a label
    of_table = [(column, value) for column, value in zip(columns, values, strict=True) if column in set(table.c)]
    keys = [pair for pair in of_table if pair[0].primary_key] or of_table[:1]  # without its key, by its first column
    where = ", ".join(f"{column.name} {str(value)[:80]!r}" for column, value in keys)
    named = f"{table.name} with {where}: {'its JSON' if wrong is None else wrong.name}"
    if named not in _logged and len(_logged) < MOST_LOGGED:
        _logged.add(named)
        log.error("damaged_row", row=named, why=why)
    return DamagedRow(f"a row of the store is damaged: {named} ({why}); correct it, or restore the row from a backup")
