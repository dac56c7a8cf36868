"""Parts of the JSON Schemas in `/openapi.json`: bodies and errors of the wires.

A body's schema names the fields that are read. Other fields are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..domain.models import JSON

TEXT: JSON = {"type": "string"}
# In a query string.
COUNT: JSON = {"type": "integer", "minimum": 1}
YES_OR_NO: JSON = {"enum": ["true", "false"]}
SWITCH: JSON = {"enum": ["1", "0"]}
# Every optional field may be null: some clients send null for what was not set.
TEXT_OR_NULL: JSON = {"type": ["string", "null"]}
FLAG: JSON = {"type": ["boolean", "null"]}
NUMBER: JSON = {"type": ["number", "null"]}
OBJECT: JSON = {"type": ["object", "null"]}
OBJECTS: JSON = {"type": ["array", "null"], "items": {"type": "object"}}
TEXTS: JSON = {"type": ["array", "null"], "items": {"type": "string"}}
TEXT_OR_TEXTS: JSON = {"type": ["string", "array", "null"], "items": {"type": "string"}}
TEXT_OR_OBJECTS: JSON = {"type": ["string", "array", "null"], "items": {"type": "object"}}
TEXT_OR_OBJECT: JSON = {"type": ["string", "object", "null"]}


def body(required: Mapping[str, JSON], **optional: JSON) -> JSON:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def message(part: str, *roles: str) -> JSON:
    """`part`: the `type` of a text part. Of parts of other types only the `type` is described."""
    text = body({"type": {"const": part}, "text": {"type": "string"}})
    parts = {"type": "array", "items": {"anyOf": [text, {"type": "object", "required": ["type"]}]}}
    return body({"role": {"enum": list(roles)}, "content": {"anyOf": [{"type": "string"}, parts]}})


def messages(*roles: str) -> JSON:
    return {"type": "array", "minItems": 1, "items": message("text", *roles)}


# As the CLI takes it: no flag, no space.
MODEL: JSON = {"type": ["string", "null"], "pattern": r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}$"}
EFFORT: JSON = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]}
CHOICE: JSON = {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object", "required": ["type"]}]}
THINKING: JSON = {"type": ["object", "null"], "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}}
NAME: JSON = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_FUNCTION = body({"type": {"const": "function"}, "function": body({"name": NAME}, parameters=OBJECT)})
_CUSTOM = body({"type": {"const": "custom"}, "custom": body({"name": NAME})})
FUNCTIONS: JSON = {"type": ["array", "null"], "items": {"anyOf": [_FUNCTION, _CUSTOM]}}
FORMAT: JSON = {"type": ["object", "null"], "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}}


def error_schema(inner: JSON, **outer: JSON) -> JSON:
    """`{"error": {…}}`. `outer`: the wire's fields beside `error`."""
    error: JSON = {"type": "object", "properties": inner, "required": list(inner)}
    return body({"error": error, **outer})
