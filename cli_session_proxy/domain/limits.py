"""What may come from elsewhere: how much, how deep, and the forms of ids. Pure.

docs/contract/errors.md states these numbers.

They are checked before work begins. What they allow is worked on in bounded time: every step of ours takes time in
proportion to the size of the body, and what does not (a client's JSON Schema) is checked where it can be ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Sized
from typing import Any, TypeGuard

from ..errors import InvalidRequest

# Levels of objects and lists, of a body and of the arguments of a call. serde_json refuses more than 128 as well; JSON
# Schemas of tools have 10 to 30. Code that recurses over a JSON value stays far from the end of Python's stack (1,000).
DEPTH = 128
# Levels in what the CLI prints and writes: it wraps a call's arguments five times, and its own tools are its business.
CLI_DEPTH = 400
# Objects, lists, texts, numbers in one body, with those in the arguments of calls, which some wires send as text.
# 20,000 messages of one block each and their tools have 150,000; to take so many from another process takes 30 ms.
VALUES = 200_000
# Messages in one body (items, contents, steps). 10,000 turns of a history; the context holds fewer.
MESSAGES = 20_000
# Tools in one request; OpenAI takes 128. A tool of MCP costs the model about 200 tokens.
TOOLS = 1_000
# Objects, lists, texts, numbers in one JSON Schema: OpenAI's own limit of 5,000 properties, each with its description.
SCHEMA_VALUES = 20_000
# Stop texts, and characters of each. OpenAI takes 4, Google 5. Each is looked for in every piece of the answer.
STOPS = 64
STOP_LENGTH = 256
# US dollars that a session may have cost. JSON has numbers that no float holds.
MOST_USD = 1e9
# Tokens, and what else a CLI counts in one answer.
MOST_COUNTED = 10**12


class TooDeep(ValueError):
    """JSON that nests deeper than it may."""

    def __init__(self, depth: int) -> None:
        super().__init__(f"it is nested deeper than {depth} levels")


def no_constant(name: str) -> float:
    """Python takes NaN and Infinity; other readers of JSON do not."""
    raise ValueError(f"{name} is not JSON")


def loads(text: str | bytes, depth: int = DEPTH, *, strict: bool = False) -> Any:
    """`json.loads` of what nests at most `depth` levels. Raises `TooDeep`, `ValueError`; where it is `strict`, also for
    NaN and Infinity."""
    # Nearly no text has one of these words: it is read by the decoder that is there, not by one made for it.
    looked_for = strict and (isinstance(text, bytes) or "NaN" in text or "Infinity" in text)
    try:
        value = json.loads(text, parse_constant=no_constant if looked_for else None)
    except RecursionError as exc:  # how deep that is depends on Python's version
        raise TooDeep(depth) from exc
    # Nearly every text has fewer brackets than there may be levels; to count them takes no time.
    few = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if few > depth and is_deeper(value, depth):
        raise TooDeep(depth)
    return value


def count(value: object) -> int:
    """What a CLI has counted; 0 where it is no count. A store could not add up any number."""
    return value if type(value) is int and 0 <= value <= MOST_COUNTED else 0


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Whether a JSON value nests more than `depth` levels."""
    if type(value) is dict and _NESTING.isdisjoint(map(type, value.values())):  # nearly every one that is shown
        return depth < 1
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(depth):
        level = _within(level)
        if not level:
            return False
    return bool(level)


def holds_more(value: Any, most: int) -> bool:
    """Whether a JSON value consists of more than `most` objects, lists, texts and numbers."""
    seen, level = 1, [value] if isinstance(value, _CONTAINERS) else []
    while level and seen <= most:
        seen += sum(map(len, level))
        level = _within(level)
    return seen > most


def characters(value: Any) -> int:
    """Of all texts of a JSON value together, but for names."""
    total, level = 0, [value]
    while level:
        total += sum(len(text) for outer in level for text in _inner(outer) if isinstance(text, str))
        level = _within(level)
    return total


_CONTAINERS = (dict, list, tuple)
_NESTING = frozenset(_CONTAINERS)


def _within(level: list[Any]) -> list[Any]:
    """The objects and lists that stand in these: the next level, without a stack that could be too deep."""
    return [inner for outer in level for inner in _inner(outer) if isinstance(inner, _CONTAINERS)]


def _inner(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def at_most(given: Sized, most: int, where: str) -> None:
    """Raises `InvalidRequest`."""
    if len(given) > most:
        raise InvalidRequest(f"{where} has {len(given):,} entries, and {most:,} is the most: send fewer", param=where)


async def split(pieces: AsyncIterator[bytes], end: bytes, most: int) -> AsyncIterator[bytes]:
    """Each part of a stream that `end`, one byte, closes: at most its first `most` bytes. An open part is left out."""
    kept = bytearray()
    async for piece in pieces:
        *ended, rest = piece.split(end)
        for part in ended:
            yield bytes(kept + part[: most - len(kept)])
            kept.clear()
        kept += rest[: most - len(kept)]


# --- the forms of ids and names from files, another program, or a client

# They become file names, arguments of a command line, parts of a page. They are checked where they enter, and session
# ids again where a path is made of one.

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
