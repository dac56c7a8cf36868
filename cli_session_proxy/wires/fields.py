"""Reads a JSON body and the fields of its objects. Shared by all wires; pure.

Errors name the field by its place in the body, such as `messages[2].content`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from ..domain import limits
from ..domain.client_tools import UNPARSED
from ..domain.limits import is_model
from ..domain.models import JSON, Message
from ..domain.options import ParameterName, Parameters
from ..errors import InvalidRequest

T = TypeVar("T")

# An object of a body.
Part = Mapping[str, Any]

# By our name of a parameter, the field of a wire's body that has it: for reading, and for X-Ignored-Params.
Names = Mapping[ParameterName, str]

# Prefixes of a model's name from LiteLLM's routing to an OpenAI-compatible endpoint or to us.
MODEL_PREFIXES = ("claude-cli/", "openai/")

# Vendors often add fields, so unknown ones are accepted, and reported as ignored: at most this many.
MAX_UNREAD = 16
# Names of fields, and types of tools, that may be put into a header.
FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")

# Each parameter's minimum and maximum (None: unbounded), and whether it is an integer. Temperature has OpenAI's and
# Google's scale (Anthropic's goes to 1); a seed is any 64-bit integer.
NUMBERS: Mapping[ParameterName, tuple[float, float | None, bool]] = {
    "max_tokens": (1, None, True), "temperature": (0, 2.0, False), "top_p": (0, 1, False), "top_k": (0, None, True),
    "seed": (-(2**63), 2**63 - 1, True),
}  # fmt: skip


def parse_body(raw: bytes) -> JSON:
    """The request's JSON object. Raises `InvalidRequest` if it is invalid or exceeds the limits."""
    try:
        body = limits.loads(raw.decode("utf-8"), strict=True)
    except UnicodeDecodeError as exc:
        raise InvalidRequest("the body must be JSON in UTF-8, not compressed") from exc
    except limits.TooDeep as exc:
        raise InvalidRequest(f"the body's JSON cannot be used: {exc}; send it flatter") from exc
    except ValueError as exc:
        # A JSONDecodeError's message has a position, never the text.
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    # Each value takes at least two bytes, so a small body need not be counted.
    if len(raw) > 2 * limits.VALUES and limits.holds_more(body, limits.VALUES):
        raise InvalidRequest(f"the body has more than {limits.VALUES:,} JSON values: send less")
    return body


def model_name(value: object) -> str:
    """The CLI's name of the model, without a LiteLLM prefix; `default` if the client names none."""
    if value is None:
        return "default"
    if not isinstance(value, str):
        raise wrong_type("model", "a string")
    for prefix in MODEL_PREFIXES:
        value = value.removeprefix(prefix)
    if not is_model(value):
        raise InvalidRequest("model must be sonnet, opus, haiku, default or a name that the CLI takes", param="model")
    return value


def hosted_tool(kind: str, where: str, names: re.Pattern[str] = _KIND) -> str:
    """How X-Ignored-Params names a tool that the vendor would run: by its type or, if no header can hold that, by its
    place in the body. `names`: the vendor's form of types."""
    return f"tools.{kind}" if names.fullmatch(kind) else where


class Fields(dict[str, Any]):
    """An object of a body that records which fields were read: the others have no effect."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self[name] if name in self else default  # noqa: SIM401 - that would be this method

    def given(self, names: Collection[str]) -> tuple[str, ...]:
        """The names in this list whose fields are present and not null. All of them count as read."""
        self._read.update(names)
        if self.keys().isdisjoint(names):  # the usual case
            return ()
        return tuple(name for name in names if self.get(name) is not None)

    def unread(self, where: str = "") -> tuple[str, ...]:
        """The names of fields with a value that were not read, and so have no effect; without names that no header can
        hold. Call it after reading everything. `where`: the object's place in the body."""
        if self.keys() <= self._read:  # the usual case
            return ()
        unread = (name for name in self if name not in self._read and self[name] is not None and FIELD.fullmatch(name))
        return tuple(f"{where}.{name}" if where else name for name in islice(unread, MAX_UNREAD))


def wrong_type(param: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {expected}", param=param)


# JSON's numbers.
NUMBER: tuple[type[int], type[float]] = (int, float)
# The types of fields, as error messages name them.
TYPE_NAMES: Mapping[object, str] = {
    str: "a string", bool: "true or false", int: "a whole number", NUMBER: "a number", dict: "an object",
    list: "a list",
}  # fmt: skip


def optional(
    part: Part, name: str, kind: type[T] | tuple[type[T], ...], where: str = "", *, expected: str | None = None
) -> T | None:
    """The value of a field of the object at `where` in the body ("": the body itself); None if it is absent or null.

    Raises `InvalidRequest` for another type, which names the `expected` one. A boolean is no number, although it is an
    `int` in Python.
    """
    value = part.get(name)
    return None if value is None else checked_type(value, kind, where, name, expected)


def checked_type(
    value: Any, kind: type[T] | tuple[type[T], ...], where: str, name: str, expected: str | None = None
) -> T:
    """The value of the field `name`, which is not null. Raises `InvalidRequest` as `optional` does."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong_type(f"{where}.{name}" if where else name, expected or TYPE_NAMES[kind])
    return value


def required(part: Part, name: str, kind: type[T], where: str = "", *, expected: str | None = None) -> T:
    """Like `optional`, but raises `InvalidRequest` if the field is absent or null."""
    value = optional(part, name, kind, where, expected=expected)
    if value is None:
        param = f"{where}.{name}" if where else name
        raise InvalidRequest(f"{param} is missing: it must be {expected or TYPE_NAMES[kind]}", param=param)
    return value


def check_types(part: Part, types: Mapping[Any, Iterable[str]], where: str = "") -> None:
    """Raise `InvalidRequest` if one of the fields listed for a type has another type."""
    for kind, names in types.items():
        for name in names:
            optional(part, name, kind, where)


def one_of(part: Part, name: str, allowed: Collection[str], where: str = "") -> str | None:
    """The text of a field with these possible values; None if it is absent or null. Raises `InvalidRequest`."""
    value = optional(part, name, str, where)
    if value is not None and value not in allowed:
        param = f"{where}.{name}" if where else name
        raise InvalidRequest(f"{param} must be one of {', '.join(allowed)}", param=param)
    return value


def refuse(part: Part, reasons: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` with the reason for a field that is present and not null."""
    for name, reason in reasons.items():
        if part.get(name) is not None:
            raise InvalidRequest(f"{name}{reason}", param=name)


def objects(values: Iterable[object], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in the body, object) of each value of the list at `where`. Raises `InvalidRequest` for other values."""
    for index, value in enumerate(values):
        here = f"{where}[{index}]"
        if not isinstance(value, dict):
            raise wrong_type(here, "an object")
        yield here, value


def read_parameters(
    fields: Mapping[str, Any],
    names: Names,
    *,
    thinking: bool | None = None,
    get: Callable[[Mapping[str, Any], str], Any] | None = None,
) -> Parameters:
    """The parameters in these fields. `get`: reads a field that has several spellings. Raises `InvalidRequest`, which
    names the field."""
    given: dict[str, Any] = {}
    for name, (least, most, whole) in NUMBERS.items():
        if name not in names:
            continue
        where = names[name]
        field = where.rpartition(".")[2]
        value = fields.get(field) if get is None else get(fields, field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(where, "a number")
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise InvalidRequest(f"{where} must be {bounds}", param=where)
        if whole and isinstance(value, float):
            if not value.is_integer():
                raise wrong_type(where, "a whole number")
            value = int(value)
        given[name] = value
    return Parameters(thinking=thinking, **given)


def stop_texts(given: object, where: str) -> tuple[str, ...]:
    """The stop sequences, without empty ones. Raises `InvalidRequest`."""
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise wrong_type(where, "a list of strings")
    limits.at_most(given, limits.STOPS, where)
    if any(len(stop) > limits.STOP_LENGTH for stop in given):
        raise InvalidRequest(f"{where}: a stop text has at most {limits.STOP_LENGTH} characters", param=where)
    return tuple(stop for stop in given if stop)


def arguments(text: str | None, where: str) -> JSON:
    """The arguments of a call in a client's history. If they are no JSON object (cut, or with NaN), they are stored
    as text: refusing them would make every later request of that client fail. Raises `InvalidRequest`."""
    try:
        given = limits.loads(text or "{}", strict=True)
    except limits.TooDeep as exc:
        raise InvalidRequest(f"{where} cannot be used: {exc}; send it flatter", param=where) from exc
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {UNPARSED: text}


def checked_arguments(conversation: Iterable[Message], where: str) -> None:
    """Check that arguments that came as text are together within a body's limits. Raises `InvalidRequest`."""
    arguments = [block["input"] for message in conversation for block in message.content if block["type"] == "tool_use"]
    if limits.holds_more(arguments, limits.VALUES):
        raise InvalidRequest(
            f"{where}: the arguments of the calls have more than {limits.VALUES:,} JSON values: send less", param=where
        )
