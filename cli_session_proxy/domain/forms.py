"""Converts dataclasses to JSON and back, in one form for the store, exports and dumps. Pure.

Fields that are such dataclasses, or tuples of them, are converted, too. A tuple becomes a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter, index
from types import UnionType
from typing import Any, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

Way = Callable[[Any], Any]


class Recorded:
    """A dataclass with a JSON form, which has every field."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        form = _form(kind)
        written = zip(form.fields, form.values(self), strict=True)
        return {one.name: value if one.write is None else one.write(value) for one, value in written}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON; unknown fields are ignored."""
        kind: Any = cls
        given = {}
        for one in _form(kind).fields:
            if one.name in data and (data[one.name] is not None or one.default is None or one.default is MISSING):
                given[one.name] = data[one.name] if one.read is None else one.read(data[one.name])
        return cls(**given)


class Sparse(Recorded):
    """A `Recorded` whose JSON leaves out fields with their default. {} always gives the same object."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        form = _form(kind)
        values = form.values(self)
        if values == form.defaults:  # nearly every turn's options and evidence: fast, for a dump of 20,000
            return {}
        return {
            one.name: value if one.write is None else one.write(value)
            for one, value in zip(form.fields, values, strict=True)
            if value != one.default
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        kind: Any = cls
        found: Self = super().from_json(data) if data else _nothing(kind)
        return found


class _Field(NamedTuple):
    name: str
    default: Any  # MISSING: no default
    write: Way | None  # None: the value is already JSON
    read: Way | None


class _Form(NamedTuple):
    fields: tuple[_Field, ...]
    values: Callable[[Any], tuple[Any, ...]]
    defaults: tuple[Any, ...]


@cache
def _nothing(kind: Any) -> Any:
    return kind()


@cache
def _form(kind: Any) -> _Form:
    types = get_type_hints(kind)
    found = []
    for one in fields(kind):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        found.append(_Field(one.name, default, *_ways(types[one.name])))
    # Each record has two fields at least.
    return _Form(tuple(found), attrgetter(*(one.name for one in found)), tuple(one.default for one in found))


def _ways(kind: Any) -> tuple[Way | None, Way | None]:
    """The functions that write and read a value of this type; None if it is JSON."""
    of = get_args(kind)
    if get_origin(kind) in (Union, UnionType):  # with None
        write, read = _ways(of[0])
        return write and _or_none(write), read and _or_none(read)
    if get_origin(kind) is tuple:
        write, read = _ways(of[0])
        return _each(list, write) if write else list, _each(tuple, read) if read else tuple
    if hasattr(kind, "from_json"):
        return kind.as_json, kind.from_json
    # A store or a file may hold anything: what is no number, or no object, raises.
    return None, index if kind is int else dict if get_origin(kind) is dict else None


def _or_none(way: Way) -> Way:
    return lambda value: None if value is None else way(value)


def _each(into: Way, way: Way) -> Way:
    return lambda values: into(map(way, values))
