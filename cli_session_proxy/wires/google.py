"""What Google's wires share: field names, schemas, base64, and which of its tools a client lets the model call. Pure.

Names of fields are accepted as the JSON form of protobuf allows: camelCase and snake_case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, TypeVar

from ..domain.client_tools import checked_choice
from ..domain.models import Tool, ToolChoice
from ..errors import InvalidRequest
from .fields import Part, checked_type, model_name

T = TypeVar("T")

# Google's FunctionCallingConfig modes, and what the Interactions call them.
_MODES: Mapping[str, Any] = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


# Of the names of fields, which are few: a large body asks for each a hundred thousand times.
_snake_case = cache(partial(re.compile("[A-Z]").sub, lambda upper: f"_{upper[0].lower()}"))


def checked_model(name: str) -> str:
    return model_name(name.removeprefix("models/"))


def either(
    part: Part,
    name: str,
    kind: type[T] | tuple[type[T], ...] | None = None,
    where: str = "",
    *,
    expected: str | None = None,
) -> Any:  # typed where a kind is given; the union of both would need a cast at each call
    """The field under its camelCase or snake_case name; with a `kind`, checked as `fields.optional` does."""
    value = part.get(name)
    if value is None:
        value = part.get(_snake_case(name))
    return value if value is None or kind is None else checked_type(value, kind, where, name, expected)


def standard_base64(data: str) -> str:
    """google-genai 3.4 sends the URL-safe alphabet, others the standard one; protobuf's JSON form takes both."""
    data = data.translate(str.maketrans("-_", "+/"))
    return data + "=" * (-len(data) % 4)


def checked_mode(mode: str, allowed: list[Any] | None, tools: tuple[Tool, ...], where: str) -> ToolChoice:
    if mode not in _MODES:
        raise InvalidRequest(f"{where}.mode must be one of {', '.join(_MODES)}", param=f"{where}.mode")
    names = tuple(str(name) for name in allowed) if allowed else None
    return checked_choice(ToolChoice(_MODES[mode], names), tools, where)


# Where a Schema of Google's holds further ones: in a field, in a list, under names.
_INNER, _INNER_LISTS, _INNER_NAMES = ("items", "additionalProperties"), ("anyOf", "prefixItems"), ("properties", "defs")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(schema: Part) -> dict[str, Any]:
    """Google's Schema (a subset of OpenAPI 3.0: types in capitals, `nullable`, snake_case allowed) as JSON Schema."""
    out: dict[str, Any] = {}
    for given, value in schema.items():
        name = re.sub("_([a-z])", lambda letter: letter[1].upper(), given)
        if name in _INNER and isinstance(value, dict):
            out[name] = json_schema(value)
        elif name in _INNER_LISTS and isinstance(value, list):
            out[name] = [json_schema(one) if isinstance(one, dict) else one for one in value]
        elif name in _INNER_NAMES and isinstance(value, dict):
            out[name] = {key: json_schema(one) if isinstance(one, dict) else one for key, one in value.items()}
        elif name == "type" and isinstance(value, str):
            out["type"] = value.lower()
        elif name in _COUNTS and isinstance(value, str) and value.isdecimal():
            out[name] = int(value)  # int64 is a text in the JSON form of protobuf
        elif name not in ("nullable", "propertyOrdering", "example"):
            out[name] = value
    if schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    return out


# The types of Google's Schema, which its clients write in a JSON Schema too.
_CAPITALS = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
# In these a JSON Schema holds values, not schemas.
_VALUES = frozenset({"enum", "const", "default", "examples", "required"})


def lowered(schema: Part) -> dict[str, Any]:
    """A JSON Schema with the names of its types in small letters, as they are defined."""

    def small(value: Any) -> Any:
        return value.lower() if isinstance(value, str) and value in _CAPITALS else value

    def within(value: Any) -> Any:
        if isinstance(value, dict):
            return lowered(value)
        return [within(one) for one in value] if isinstance(value, list) else value

    out: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str | list):
            out[name] = [small(one) for one in value] if isinstance(value, list) else small(value)
        else:
            out[name] = value if name in _VALUES else within(value)
    return out
