"""Bars for what takes more than a second: on stderr, in a terminal only, and gone when done.

Stdout is for what was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

# What is done sooner shows no bar: it would only flicker. Seconds.
SOON = 1.0


@contextmanager
def bar(name: str, column: ProgressColumn) -> Iterator[Callable[[int, int | None], None]]:
    """What moves a bar of this name: so much is done, of so much (None: nobody knows)."""
    if not Console(stderr=True).is_terminal:  # a bar that is disabled still writes an empty line
        yield lambda _done, _whole: None
        return
    with drawn(column) as shown:
        task = shown.add_task(name, total=None, visible=False)
        shows = asyncio.get_running_loop().call_later(SOON, lambda: shown.update(task, visible=True))
        try:
            yield lambda done, whole: shown.update(task, completed=done, total=whole)
        finally:
            shows.cancel()


def drawn(column: ProgressColumn) -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), column, console=Console(stderr=True), transient=True)
