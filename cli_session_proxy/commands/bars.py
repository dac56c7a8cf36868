"""Progress bars for work of more than a second: on stderr, only in a terminal, removed when done.

Stdout is for results. Rich is imported when a bar is drawn: most commands end before.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds before a bar is shown: a shorter one would only flicker.
SOON = 1.0


@contextmanager
def bar(name: str, unit: str | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """A function that moves the bar: done, total (None: unknown, `unit`s are counted)."""
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # a bar that is disabled still writes an empty line
        yield lambda _done, _whole: None
        return
    with drawn(unit) as shown:
        task = shown.add_task(name, total=None, visible=False)
        shows = asyncio.get_running_loop().call_later(SOON, lambda: shown.update(task, visible=True))
        try:
            yield lambda done, whole: shown.update(task, completed=done, total=whole)
        finally:
            shows.cancel()


def drawn(unit: str | None = None) -> Progress:
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415

    last = TaskProgressColumn() if unit is None else TextColumn("{task.completed} " + unit)
    return Progress(TextColumn("{task.description}"), BarColumn(), last, console=Console(stderr=True), transient=True)
