"""`find`: look through everything that was said, beside a running server or without one."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.text import Text

from ..domain.searching import Found, Indexed, Search
from ..errors import printable
from ..export import found as shown
from ..settings import Settings
from ..stores.base import Store
from .bars import bar
from .listing import ChainFilter, moment_of
from .stored import opened

# Seconds for which the index is filled between two moves of the bar.
STEP = 0.25


def parse(
    words: Sequence[str],
    owner: str | None,
    since: str | None,
    until: str | None,
    status: str | None,
    **more: Any,
) -> Search:
    """A word with blanks in it is a phrase. Raises `ConfigError`."""
    text = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    after = None if since is None else moment_of("--since", since)
    before = None if until is None else moment_of("--until", until)
    return Search(text, owner, after, before, status=ChainFilter.parse(None, None, status).status, **more)


async def find(settings: Settings, wanted: Search) -> tuple[Found, Indexed]:
    """What is found once the index knows all turns; a bar on stderr while it learns them."""
    async with opened(settings) as store:
        if store is None:
            return Found((), 0, 0), Indexed(0, 0)
        indexed = await _indexed(store)
        return await store.search(wanted), indexed


async def _indexed(store: Store) -> Indexed:
    with bar("reading what was said", TaskProgressColumn()) as move:
        while not (indexed := await store.index(STEP)).is_whole:
            move(indexed.done, indexed.total)
    return indexed


def print_found(wanted: Search, found: Found) -> None:
    """Two lines a hit: where it is, and the words around what was looked for."""
    console = Console(highlight=False, soft_wrap=True)
    for hit in found.hits:
        line = Text(printable(shown.place(hit)), style="bold")
        about = [hit.status or "", hit.continuity or "", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(hit.at))]
        line.append("  " + "  ".join(part for part in about if part), style="not bold dim")
        console.print(line)
        words = Text("  ")
        for n, text in enumerate(hit.snippet):
            words.append(printable(re.sub(r"\s+", " ", text)), "bold yellow" if n % 2 else "")
        if hit.snippet:
            console.print(words)
    console.print(Text(shown.summed_up(wanted, found), style="dim"))
