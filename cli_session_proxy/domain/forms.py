"""Converts dataclasses to JSON and back, in the same form for the store, exports and dumps; cuts images out. Pure.

A field that is itself a `Recorded`, or a tuple of them, is converted, too. A tuple becomes a list.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter, index
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

Convert = Callable[[Any], Any]

if TYPE_CHECKING:  # mypy checks the fields of this one
    from dataclasses import replace as replace  # noqa: PLC0414 - exported
else:

    def replace(record, /, **changed):
        """`dataclasses.replace`, which reads the fields one by one: a turn has 40, and is replaced at each step."""
        kind = type(record)
        if (known := _readers.get(kind)) is None:
            names = [field.name for field in fields(kind)]
            known = _readers[kind] = names, attrgetter(*names, names[0])  # twice: of a single name it gives no tuple
        return kind(**dict(zip(known[0], known[1](record), strict=False), **changed))

    _readers = {}


class Recorded:
    """A dataclass with a JSON form, which has every field."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        form = _form(kind)
        pairs = zip(form.fields, form.values(self), strict=True)
        return {field.name: value if field.write is None else field.write(value) for field, value in pairs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON; unknown fields are ignored."""
        kind: Any = cls
        given = {}
        for field in _form(kind).fields:
            value = data.get(field.name)
            # A null counts only where None is the default, or there is no default.
            if value is not None or (field.name in data and (field.default is None or field.default is MISSING)):
                given[field.name] = value if field.read is None else field.read(value)
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
            field.name: value if field.write is None else field.write(value)
            for field, value in zip(form.fields, values, strict=True)
            if value != field.default
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        kind: Any = cls
        record: Self = super().from_json(data) if data else _of_defaults(kind)
        return record


class _Field(NamedTuple):
    name: str
    default: Any  # MISSING: no default
    write: Convert | None  # None: the value is already JSON
    read: Convert | None


class _Form(NamedTuple):
    fields: tuple[_Field, ...]
    values: Callable[[Any], tuple[Any, ...]]
    defaults: tuple[Any, ...]


@cache
def _of_defaults(kind: Any) -> Any:
    return kind()


@cache
def _form(kind: Any) -> _Form:
    types = get_type_hints(kind)
    out = []
    for each in fields(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        out.append(_Field(each.name, default, *_converters(types[each.name])))
    # Each record has at least two fields, so `attrgetter` gives a tuple.
    return _Form(tuple(out), attrgetter(*(field.name for field in out)), tuple(field.default for field in out))


def _converters(kind: Any) -> tuple[Convert | None, Convert | None]:
    """The functions that write and read a value of this type; None if the value is JSON already."""
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):  # `X | None`
        write, read = _converters(inner[0])
        return write and _or_none(write), read and _or_none(read)
    if get_origin(kind) is tuple:
        write, read = _converters(inner[0])
        return _each(list, write) if write else list, _each(tuple, read) if read else tuple
    if hasattr(kind, "from_json"):
        return kind.as_json, kind.from_json
    # A store or a file may hold anything: a value that is no integer or no object raises.
    return None, index if kind is int else dict if get_origin(kind) is dict else None


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _each(into: Convert, convert: Convert) -> Convert:
    return lambda values: into(map(convert, values))


# --- images, cut out of JSON texts so that each is stored once, and put back

# It works on the text, not on parsed values, so a line comes back byte-identical whatever its spacing, escapes or key
# order. Places are offsets into the shortened text, so there are no placeholders that a text could imitate.

# `data`: a base64 source of the Messages API; `base64`: a file in results of the CLI's own tools. Texts shorter than a
# hash (64 characters) are not cut.
_BASE64 = re.compile(r'"(?:data|base64)"\s*:\s*"([A-Za-z0-9+/]{64,}={0,2})"')

ImagePlace = tuple[int, str]
"""Where an image was: offset in characters of the shortened text, and the sha256 of what stood there."""


@dataclass(slots=True)
class ImageCutter:
    """Shortens the texts of one transaction and collects what it cut: sha256 → base64 text."""

    images: dict[str, str] = dataclasses.field(default_factory=dict)

    def cut(self, text: str) -> tuple[str, list[ImagePlace]]:
        if '"data"' not in text and '"base64"' not in text:
            return text, []
        pieces: list[str] = []
        places: list[ImagePlace] = []
        end = offset = 0
        for found in _BASE64.finditer(text):
            piece = text[end : found.start(1)]
            pieces.append(piece)
            offset += len(piece)
            data = found.group(1)
            sha256 = hashlib.sha256(data.encode("ascii")).hexdigest()
            self.images[sha256] = data
            places.append((offset, sha256))
            end = found.end(1)
        pieces.append(text[end:])
        return "".join(pieces), places


def restore(text: str, places: Iterable[ImagePlace], images: Mapping[str, str]) -> str:
    """The inverse of `ImageCutter.cut`. `images`: the base64 texts by hash."""
    pieces: list[str] = []
    end = 0
    for offset, sha256 in places:
        pieces += (text[end:offset], images[sha256])
        end = offset
    pieces.append(text[end:])
    return "".join(pieces)
