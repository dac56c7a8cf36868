"""Structured output: an answer that is one JSON value, validated on the way out.

The wish travels as one more text block of the user's message. Run on 2.1.329, `--json-schema` would cost more:
its tools stand at the front of the prompt, so that nothing of the prompt cache is left (0.00 of the prefix, and
again when the next turn has none); the answer becomes a tool call; the next resumed turn holds an invented "No
response requested."; and a model that does not call the tool gets a result without `structured_output`. With the
block, the prefix holds to the byte and the chain is what was said.

A format is `{"schema": JSON Schema}`, or `{"schema": None}` for any JSON object.

Schemas are strangers' programs. jsonschema-rs runs them, because its patterns take linear time, or a bounded number of
steps where they look around, and because it reads a schema 200 times as fast as the one in Python (0.1 ms for 200
properties). References can still make it take 2^n steps: `checked` and `fault_of` belong into a process that is killed
after a second (see `aside`). It recurses without a bound of its own: nothing deeper than `limits.DEPTH` reaches it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest, UpstreamError
from . import limits
from .models import JSON, Block

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError, Validator

# What of a fault is shown to the model and in the error: a validator quotes the whole value.
FAULT_LIMIT = 300
# Steps that one pattern with look-around or back-references may take at one text (about 4 ms); others take linear time.
PATTERN_STEPS = 100_000

FENCE = "```"


class InvalidOutput(Exception):
    """The model's answer is not what the format asks for. `fault` says why."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault

    def as_error(self) -> UpstreamError:
        return UpstreamError(f"invalid structured output: {self.fault}; send it again, or loosen the schema")


def read_format(wanted: Mapping[str, Any], where: str) -> JSON | None:
    """The format of OpenAI's `response_format` or `text.format`; None for text. Raises `InvalidRequest`.

    The schema stands in `json_schema` there (Chat Completions) or in the object itself (Responses).
    """
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"schema": None}
    if kind != "json_schema":
        raise InvalidRequest(f"{where}.type must be text, json_object or json_schema", param=f"{where}.type")
    inner = wanted.get("json_schema", wanted) if "schema" not in wanted else wanted
    place = where if inner is wanted else f"{where}.json_schema"
    if not isinstance(inner, dict):
        raise InvalidRequest(f"{place} must be an object", param=place)
    return {"schema": checked_schema(inner.get("schema"), f"{place}.schema")}


def checked_schema(schema: object, where: str) -> JSON:
    """The schema, when it is one within the limits. Its patterns and references are not looked at.

    Raises `InvalidRequest`.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} is missing: it must be a JSON Schema", param=where)
    if limits.holds_more(schema, limits.SCHEMA_VALUES):
        raise InvalidRequest(
            f"{where} has more than {limits.SCHEMA_VALUES:,} JSON values: describe less of the value", param=where
        )
    if limits.is_deeper(schema):
        raise InvalidRequest(f"{where} is nested deeper than {limits.DEPTH} levels", param=where)
    if (fault := _first_fault(_metaschema(), schema)) is not None:
        raise InvalidRequest(f"{where} is not a JSON Schema: {fault}", param=where)
    return schema


@cache
def _metaschema() -> Validator:
    """2020-12's own: whatever `$schema` says, answers are checked by the same."""
    import jsonschema_rs  # noqa: PLC0415 - 25 ms and 4 MB that only schemas need

    return jsonschema_rs.Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"}, offline=True)


def instruction(format: JSON, fault: str | None = None) -> Block:
    """The block of the prompt that asks for the format; with `fault`, again after an invalid answer."""
    schema = format["schema"]
    what = "one JSON object" if schema is None else "one JSON value that validates against this JSON Schema"
    text = f"Answer this message with {what}, and nothing else: no words around it, no code fence."
    if schema is not None:
        text += f"\n\n{json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}"
    if fault is not None:
        text += f"\n\nAn earlier answer was refused: {fault}."
    return {"type": "text", "text": text}


def checked(format: JSON, text: str) -> str:
    """The JSON of an answer, a code fence around it taken off. Raises `InvalidOutput`, `InvalidRequest`."""
    text = text.strip()
    first, _, rest = text.partition("\n")
    if first.rstrip().lower() in (FENCE, f"{FENCE}json") and rest.endswith(FENCE):
        text = rest.removesuffix(FENCE).strip()
    try:
        value = limits.loads(text, strict=True)
    except limits.TooDeep as exc:
        raise InvalidOutput(str(exc)) from None
    except ValueError:
        raise InvalidOutput("it is not JSON") from None
    if format["schema"] is None:
        if not isinstance(value, dict):
            raise InvalidOutput("it is not a JSON object")
    elif (fault := fault_of(value, format["schema"])) is not None:
        raise InvalidOutput(fault)
    return text


def fault_of(value: object, schema: JSON) -> str | None:
    """Why a value does not validate; None where it does. Raises `InvalidRequest` for a schema that cannot be used."""
    import jsonschema_rs  # noqa: PLC0415 - as above

    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=PATTERN_STEPS)
    try:
        # Offline: a `$ref` to another machine, or to a file, is never fetched.
        validator = jsonschema_rs.Draft202012Validator(schema, offline=True, pattern_options=patterns)
    except jsonschema_rs.ValidationError as exc:
        raise InvalidRequest(f"the JSON Schema cannot be used: {_short(exc.message)}", param="schema") from exc
    return _first_fault(validator, value)


def _first_fault(validator: Validator, value: object) -> str | None:
    import jsonschema_rs  # noqa: PLC0415 - as above

    try:
        error = next(iter(validator.iter_errors(value)), None)
    except UnicodeEncodeError:
        return "it holds half a surrogate pair, which is no text"
    if error is None:
        return None
    error = _telling(error)
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded):
        raise InvalidRequest("a pattern of the JSON Schema takes too many steps: write it simpler", param="schema")
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"at {_short(f'${path}')}: {_short(error.message)}"


def _telling(error: ValidationError) -> ValidationError:
    """The error that says most: of alternatives, what is wrong with the one that fits best.

    That is the one whose fault lies deepest in the value, as the rest of it was right.
    """
    for _ in range(limits.DEPTH):
        inner = [branch[0] for branch in getattr(error.kind, "context", ()) if branch]
        deepest = max(inner, key=lambda one: len(one.instance_path), default=error)
        if len(deepest.instance_path) <= len(error.instance_path):
            return error
        error = deepest
    return error


def _short(text: str) -> str:
    return text if len(text) <= FAULT_LIMIT else f"{text[:FAULT_LIMIT]}…"
