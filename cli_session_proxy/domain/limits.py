"""Limits for input from outside: sizes, depth, and formats of ids, names, hosts and origins. Pure.

docs/contract/errors.md states these numbers.

They are checked before work begins. Then time is bounded: every step is linear in the size of the body, and what is not
(validation by a client's JSON Schema) runs in a process that can be killed.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sized
from functools import lru_cache
from typing import Any, TypeGuard

from ..errors import InvalidRequest

# Nesting of objects and lists in a body and in the arguments of a call. serde_json has the same limit of 128; JSON
# Schemas of tools have 10 to 30. Code that recurses over a JSON value stays far below Python's limit (1,000).
DEPTH = 128
# Nesting in frames and records of the CLI: it wraps a call's arguments five times, and its own tools may nest deeper.
CLI_DEPTH = 400
# Fewer in a frame: a record made of frames nests deeper than they do, and must stay within CLI_DEPTH.
FRAME_DEPTH = CLI_DEPTH - 8
# JSON values in one body, including the arguments of calls, which some wires send as text. 20,000 messages of one block
# and their tools have 150,000; to receive so many from another process takes 30 ms.
VALUES = 200_000
# The same for a line of a transcript or of an export, and for a frame: more than twice as many as a body has.
LINE_VALUES = 500_000
# The same for a turn in an export: its input, what is kept of its body beside that, its answer and its tools' calls.
# 1.3 million of them, in objects of one number, take 157 MB.
TURN_VALUES = 2_000_000
# The input of one turn: of a body, or of a conversation's items together. Values, and bytes without images. A record of
# the CLI has all of it in one line.
INPUT_VALUES, INPUT_BYTES = 2 * VALUES, 128 * 1024 * 1024
# Messages in one body (items, contents, steps). 10,000 turns of a history; the context holds fewer.
MESSAGES = 20_000
# Tools in one request; OpenAI takes 128. An MCP tool costs the model about 200 tokens.
TOOLS = 1_000
# Objects, lists, texts, numbers in one JSON Schema: OpenAI's own limit of 5,000 properties, each with its description.
SCHEMA_VALUES = 20_000
# Stop sequences, and characters of each. OpenAI takes 4, Google 5. Each is searched in every piece of the answer.
STOPS = 64
STOP_LENGTH = 256
# The highest cost of a session in US dollars. JSON may say 1e400, which Python reads as infinity.
MOST_USD = 1e9
# The highest count (of tokens etc.) in one answer.
MOST_COUNTED = 10**12
# The highest time in seconds that is taken from a CLI, in the year 5138.
MOST_SECONDS = 1e11


class TooDeep(ValueError):
    """JSON nests deeper than allowed."""

    def __init__(self, depth: int) -> None:
        super().__init__(f"it is nested deeper than {depth} levels")


def no_constant(name: str) -> float:
    """Refuse NaN and Infinity, which Python accepts and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """Refuse too large numbers: Python reads them as infinity, which JSON does not have."""
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON")
    return number


def loads(text: str | bytes, depth: int = DEPTH, *, strict: bool = False) -> Any:
    """`json.loads` with at most `depth` levels. Raises `TooDeep`, `ValueError`. `strict`: also refuse NaN and Infinity,
    which are not JSON, and numbers too large for a float."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        if text[:1] in _BEFORE:
            value = json.loads(text, **(STRICT if strict else {}))
        else:
            value, end = (_strict_decoder if strict else _decoder).raw_decode(text)
            if end != len(text) and (rest := text[end:].lstrip(_BLANKS)):
                raise json.JSONDecodeError("Extra data", text, len(text) - len(rest))
    except RecursionError as exc:  # its depth depends on Python's version
        raise TooDeep(depth) from exc
    # Most texts have fewer brackets than allowed levels, and counting them is fast.
    if text.count("[") + text.count("{") > depth and is_deeper(value, depth):
        raise TooDeep(depth)
    return value


# `json.loads` also looks for blanks around the text, which takes as long as the rest of a short one.
_decoder = json.JSONDecoder()
STRICT: Mapping[str, Any] = {"parse_constant": no_constant, "parse_float": finite}
_strict_decoder = json.JSONDecoder(**STRICT)
_BLANKS = " \t\n\r"
_BEFORE = f"{_BLANKS}\ufeff"


def count(value: object) -> int:
    """A count from the CLI; 0 if it is invalid or too large for sums in a store."""
    return value if type(value) is int and 0 <= value <= MOST_COUNTED else 0


def number(value: object) -> float | None:
    """A number from the CLI, such as a time in seconds; None if it is invalid, negative or above `MOST_SECONDS`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_SECONDS
    return float(value) if fits else None  # type: ignore[arg-type]  # it fits


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Whether a JSON value nests more than `depth` levels."""
    if type(value) is dict and _NESTING.isdisjoint(map(type, value.values())):  # the usual case
        return depth < 1
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(depth):
        level = _within(level)
        if not level:
            return False
    return bool(level)


def holds_more(value: Any, most: int) -> bool:
    """Whether a JSON value has more than `most` values, itself included. Stops counting there."""
    counted, level = 1, [value] if isinstance(value, _CONTAINERS) else []
    while level and counted <= most:
        counted += sum(map(len, level))
        level = _within(level)
    return counted > most


_BEFORE_VALUES = (b",", b"[", b"{")


def most_values(raw: bytes) -> int:
    """A quick upper bound for the JSON values in a text, without parsing: it also counts inside texts."""
    return 1 + sum(map(raw.count, _BEFORE_VALUES))


def values_in(raw: bytes, most: int = LINE_VALUES) -> int:
    """A closer upper bound: it counts outside of texts only. A lower one if that is above `most`."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts > 2 * most:  # each is a value, or the key of one
        return texts // 2
    return most_values(b"".join(bare.split(b'"')[::2]))


def is_dense(raw: bytes, most: int = LINE_VALUES) -> bool:
    """Whether this text has more than `most` JSON values. In memory each takes 60 to 230 bytes: 60 MB of `{},` took
    1.7 GB. So others' lines are checked before they are parsed."""
    return len(raw) > most and most_values(raw) > most and values_in(raw, most) > most


def is_record(line: str) -> bool:
    """Whether this text is a JSON object within the bounds of a record of the CLI."""
    try:
        is_short = not is_dense(line.encode("utf-8", "surrogatepass"))
        return is_short and isinstance(loads(line, CLI_DEPTH, strict=True), dict)
    except ValueError:
        return False


def characters(value: Any) -> int:
    """The characters of all texts in an object or a list, without the names in objects."""
    total, level = 0, [value]
    while level:
        total += sum(len(text) for outer in level for text in _inner(outer) if isinstance(text, str))
        level = _within(level)
    return total


def size_of(parts: Iterable[Any], most: int, a_value: int = 1) -> int | None:
    """The size of these JSON values: the characters of their texts and of the names in their objects, and `a_value` for
    each value and name. None if it is more than `most`."""
    left, values = most, [*parts]
    while values and left >= 0:
        value = values.pop()
        left -= a_value
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, dict):
            values += value  # the names
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return None if left < 0 else most - left


_CONTAINERS = (dict, list, tuple)
_NESTING = frozenset(_CONTAINERS)


def _within(level: list[Any]) -> list[Any]:
    """The objects and lists directly in these: the next level. Iterative, so that no stack overflows."""
    return [inner for outer in level for inner in _inner(outer) if isinstance(inner, _CONTAINERS)]


def _inner(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def at_most(given: Sized, most: int, where: str) -> None:
    """Raises `InvalidRequest`."""
    if len(given) > most:
        raise InvalidRequest(f"{where} has {len(given):,} entries, and {most:,} is the most: send fewer", param=where)


async def split(pieces: AsyncIterator[bytes], end: bytes, most: int) -> AsyncIterator[bytes]:
    """Split a stream at the byte `end`; of each part at most `most` bytes. An unfinished last part is dropped."""
    buffer = bytearray()
    async for piece in pieces:
        *ended, rest = piece.split(end)
        for part in ended:
            yield bytes(buffer + part[: most - len(buffer)])
            buffer.clear()
        buffer += rest[: most - len(buffer)]


# --- formats of ids and names from files, another program, or a client

# They become file names, command line arguments, parts of a page. They are checked at the entry, and session ids again
# before a path is made of one.

# A session's id is the UUID that the CLI handed out.
UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
TURN_ID = r"turn_[0-9A-Za-z]{1,64}"
# A model's name becomes an argument of the CLI: it must not look like a flag.
MODEL = r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,255}"
VERSION = r"[0-9A-Za-z.+-]{0,64}"

_SESSION_ID, _MODEL, _VERSION = map(re.compile, (UUID, MODEL, VERSION))


def is_session_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _SESSION_ID.fullmatch(value) is not None


def is_model(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _MODEL.fullmatch(value) is not None


def is_version(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


# --- hosts and origins

_NAME = r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://{_NAME}")
# How many host names are cached: clients use the same few again and again.
CACHED_NAMES = 16
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@lru_cache(CACHED_NAMES)
def host_and_port(netloc: str) -> tuple[str, int | None] | None:
    """Host and port of a Host header, in lower case and without brackets; None if it is malformed."""
    match = _HOST.fullmatch(netloc)
    return None if match is None else _parts(match)


def origin(text: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port of an Origin header, with the scheme's default port. None: missing or malformed."""
    match = _ORIGIN.fullmatch(text)
    parts = None if match is None else _parts(match)
    if match is None or parts is None:
        return None
    scheme, (host, port) = match["scheme"].lower(), parts
    return scheme, host, _PORTS.get(scheme) if port is None else port


def _parts(match: re.Match[str]) -> tuple[str, int | None] | None:
    """(host, port); None if the port or the IPv6 address is invalid."""
    name, port = match["name"].lower(), None if match["port"] is None else int(match["port"])
    if port is not None and port > 65535:
        return None
    if not name.startswith("["):
        return name, port
    try:
        return str(ipaddress.IPv6Address(name[1:-1])), port
    except ValueError:
        return None


# --- conversations, whose ids name agents

_MADE_HERE = re.compile(r"conv_[0-9a-f]{32}")
# "x" is no hexadecimal digit, so an encoded name never looks like a generated id.
_OF_NAME = re.compile(r"conv_x((?:[0-9a-f]{2})+)")


def conversation_id(agent_id: str) -> str:
    """The conversation id of this agent. An agent that was created as a conversation has it as its name."""
    if _MADE_HERE.fullmatch(agent_id):
        return agent_id
    return f"conv_x{agent_id.encode('utf-8', 'surrogatepass').hex()}"


def agent_id_of(conversation: str) -> str | None:
    """The agent id of a conversation id; None if it is not one of ours."""
    if _MADE_HERE.fullmatch(conversation):
        return conversation
    match = _OF_NAME.fullmatch(conversation)
    if match is None:
        return None
    try:
        return bytes.fromhex(match[1]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
