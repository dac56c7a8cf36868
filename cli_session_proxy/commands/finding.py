"""`find`: search all messages, beside a running server or without one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..domain import times
from ..domain.searching import Found, Indexed, Search
from ..errors import printable
from ..export import lists, shown, words
from ..settings import Settings
from .listing import ChainFilter, moment_of
from .stored import opened
from .terminal import fitted, progress_bar

# Seconds of indexing between two moves of the bar.
STEP = 0.25
# Characters of a question.
WORDS = 200


def parse(
    words: Sequence[str],
    owner: str | None,
    since: str | None,
    until: str | None,
    status: str | None,
    **more: Any,
) -> Search:
    """Parse the options. A word with blanks is a phrase. Raises `ConfigError`."""
    text = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    after = None if since is None else moment_of("--since", since)
    before = None if until is None else moment_of("--until", until)
    return Search(text, owner, after, before, status=ChainFilter.parse(None, None, status).status, **more)


@dataclass(frozen=True, slots=True)
class TurnExtras:
    """Extra lines for a found turn: its question, and its repairs in a few words each."""

    asked: str
    repairs: tuple[str, ...]


async def find(settings: Settings, query: Search) -> tuple[Found, Indexed, Mapping[str, TurnExtras]]:
    """Update the index (with a bar on stderr), and search. The last result has, by turn, extra lines for searches
    without words or for repairs."""
    async with opened(settings) as store:
        if store is None:
            return Found((), 0, 0), Indexed(0, 0), {}
        indexed = await store.index(STEP)
        if not indexed.is_whole:
            with progress_bar("reading what was said") as move:
                while not indexed.is_whole:
                    move(indexed.done, indexed.total)
                    indexed = await store.index(STEP)
        found = await store.search(query)
        extras = {}
        for hit in found.hits:
            if hit.kind == "agent" or (hit.snippet and not query.repaired):
                continue
            if (turn := await store.turn(hit.turn_id or "")) is not None:
                asked = [block for message in shown.contents(turn)["input"] for block in message["content"]]
                links = (await store.page(turn.agent_key, before_seq=turn.seq + 1, limit=1)).links
                repairs = tuple(one.says for one in words.in_brief(turn, links) if one.kind == "repair")
                extras[turn.id] = TurnExtras(shown.line(asked, WORDS), repairs)
        return found, indexed, extras


def print_found(query: Search, found: Found, extras: Mapping[str, TurnExtras]) -> None:
    """Print each hit: where it is, a snippet or else the question, and each repair."""
    lines = [*_lines(found, extras), (0, [(lists.found_summary(query, found), "dim")])]
    if not sys.stdout.isatty():
        for indent, parts in lines:
            print(" " * indent + "".join(text for text, _ in parts))
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe needs none of it
    from rich.padding import Padding  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    for indent, parts in lines:
        console.print(Padding(Text.assemble(*parts), (0, 0, 0, indent), expand=False))


def _lines(found: Found, extras: Mapping[str, TurnExtras]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Lines with their indent, each in parts of (text, style)."""
    for hit in found.hits:
        place = printable(lists.place_of(hit))
        status = "" if hit.status in (None, "completed") else f"  {hit.status.replace('_', ' ')}"
        line = fitted(f"{place}{status}  {times.written(hit.at, 'minutes')}", 4)
        yield 0, [(line[: len(place)], "bold"), (line[len(place) :], "dim")]
        of_turn = extras.get(hit.turn_id or "", TurnExtras("", ()))
        words = [
            (printable(re.sub(r"\s+", " ", text)), "bold yellow" if n % 2 else "") for n, text in enumerate(hit.snippet)
        ]
        repairs = ([(printable(says), "dim")] for says in of_turn.repairs)
        for parts in (words or [(printable(of_turn.asked), "")], *repairs):
            if any(text.strip() for text, _ in parts):
                yield 2, parts
