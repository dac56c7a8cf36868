"""Structured output: an answer that is one JSON value, validated on the way out.

The wish travels as one more text block of the user's message. Run on 2.1.329, `--json-schema` would cost more:
its tools stand at the front of the prompt, so that nothing of the prompt cache is left (0.00 of the prefix, and
again when the next turn has none); the answer becomes a tool call; the next resumed turn holds an invented "No
response requested."; and a model that does not call the tool gets a result without `structured_output`. With the
block, the prefix holds to the byte and the chain is what was said.

A format is `{"schema": JSON Schema}`, or `{"schema": None}` for any JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest, UpstreamError
from .models import JSON, Block

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.S | re.I)
# What of a fault is shown to the model and in the error: a validator quotes the whole value.
FAULT_LIMIT = 300


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
    """The schema, when it is one. Raises `InvalidRequest`."""
    import jsonschema  # noqa: PLC0415 - 80 ms that only structured output needs

    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} is missing: it must be a JSON Schema", param=where)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as exc:
        raise InvalidRequest(f"{where} is not a JSON Schema: {_short(exc.message)}", param=where) from exc
    except RecursionError as exc:
        raise InvalidRequest(f"{where} is nested too deep", param=where) from exc
    return schema


def instruction(format: JSON, fault: str | None = None) -> Block:
    """The block that asks for it; with `fault`, after an answer that was refused for it."""
    schema = format["schema"]
    what = "one JSON object" if schema is None else "one JSON value that validates against this JSON Schema"
    text = f"Answer this message with {what}, and nothing else: no words around it, no code fence."
    if schema is not None:
        text += f"\n\n{json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}"
    if fault is not None:
        text += f"\n\nAn earlier answer was refused: {fault}."
    return {"type": "text", "text": text}


def checked(format: JSON, output: Sequence[Block]) -> list[Block]:
    """The answer with one text block that is the JSON, a code fence taken off. Raises `InvalidOutput`.

    CPU-bound; a schema's patterns are the client's own.
    """
    text = "".join(block["text"] for block in output if block.get("type") == "text")
    fenced = _FENCE.fullmatch(text)
    text = (fenced[1] if fenced else text).strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidOutput("it is not JSON") from None
    if format["schema"] is None:
        if not isinstance(value, dict):
            raise InvalidOutput("it is not a JSON object")
    else:
        validate(value, format["schema"])
    return [*(block for block in output if block.get("type") != "text"), {"type": "text", "text": text}]


def validate(value: object, schema: JSON) -> None:
    """Raises `InvalidOutput`, and `InvalidRequest` for a schema that cannot be used."""
    import jsonschema  # noqa: PLC0415 - as above
    import referencing  # noqa: PLC0415 - as above
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 - as above

    # An empty registry: a `$ref` to another machine is never fetched.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        fault = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except Unresolvable as exc:
        raise InvalidRequest(f"the JSON Schema refers to {exc.ref!r}, which it does not hold", param="schema") from exc
    except RecursionError as exc:
        raise InvalidOutput("it is nested too deep") from exc
    if fault is not None:
        raise InvalidOutput(f"at {_short(fault.json_path)}: {_short(fault.message)}")


def _short(text: str) -> str:
    return text if len(text) <= FAULT_LIMIT else f"{text[:FAULT_LIMIT]}…"
