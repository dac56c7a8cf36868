"""Structured output: an answer that is one JSON value, validated before it is sent.

The format is requested by one more text block in the user's message. Run on 2.1.329, `--json-schema` is worse: its
tools are at the front of the prompt, so the prompt cache is lost (0.00 of the prefix, and again when the next turn has
none); the answer becomes a tool call; the next resumed turn has an invented "No response requested."; and a model that
does not call the tool gets a result without `structured_output`. With the block, the prefix stays byte-identical, and
the chain has the real messages.

A format is `{"schema": JSON Schema}`, or `{"schema": None}` for any JSON object.

Schemas are not trusted. jsonschema-rs validates them, because its patterns take linear time, or a bounded number of
steps with look-around, and because it compiles a schema 200 times as fast as the Python library (0.1 ms for 200
properties). References can still take 2^n steps: call `checked` and `fault_of` in a process that is killed after a
second (see `aside`). It recurses without a limit, so nothing deeper than `limits.DEPTH` is given to it.
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
    from jsonschema_rs import Validator

# Characters of an error that are shown to the model and the client: a validator quotes the whole value.
FAULT_LIMIT = 300
# Steps of one pattern with look-around or back-references on one text (about 4 ms); others take linear time.
PATTERN_STEPS = 100_000

FENCE = "```"


class InvalidOutput(Exception):
    """The model's answer does not match the format. `fault` says why."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault

    def as_error(self) -> UpstreamError:
        return UpstreamError(f"invalid structured output: {self.fault}; send it again, or loosen the schema")


def read_format(given: Mapping[str, Any], where: str) -> JSON | None:
    """The format of OpenAI's `response_format` or `text.format`; None for text. Raises `InvalidRequest`.

    The schema is in `json_schema` (Chat Completions) or in the object itself (Responses).
    """
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"schema": None}
    if kind != "json_schema":
        raise InvalidRequest(f"{where}.type must be text, json_object or json_schema", param=f"{where}.type")
    inner = given.get("json_schema", given) if "schema" not in given else given
    place = where if inner is given else f"{where}.json_schema"
    if not isinstance(inner, dict):
        raise InvalidRequest(f"{place} must be an object", param=place)
    return {"schema": checked_schema(inner.get("schema"), f"{place}.schema")}


def checked_schema(schema: object, where: str) -> JSON:
    """The schema, if it is valid and within the limits. Its patterns and references are not checked.

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
    """The validator of 2020-12's metaschema, which is used whatever `$schema` says."""
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
    """The JSON of an answer, without a code fence around it. Raises `InvalidOutput`, `InvalidRequest`."""
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
    """Why a value is invalid; None if it is valid. Raises `InvalidRequest` for a schema that cannot be used."""
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
    # Of alternatives take the one that fits best: its error is deepest in the value, because the rest of it was right.
    for _ in range(limits.DEPTH):
        alternatives = [errors[0] for errors in getattr(error.kind, "context", ()) if errors]
        deepest = max(alternatives, key=lambda one: len(one.instance_path), default=error)
        if len(deepest.instance_path) <= len(error.instance_path):
            break
        error = deepest
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded):
        raise InvalidRequest("a pattern of the JSON Schema takes too many steps: write it simpler", param="schema")
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"at {_short(f'${path}')}: {_short(error.message)}"


def _short(text: str) -> str:
    return text if len(text) <= FAULT_LIMIT else f"{text[:FAULT_LIMIT]}…"
