"""Bars for what takes more than a second: on stderr, in a terminal only, and gone when done.

Stdout is for what was asked. Rich is imported where there is something to draw: most commands are done before.
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

# What is done sooner shows no bar: it would only flicker. Seconds.
SOON = 1.0


@contextmanager
def bar(name: str, unit: str | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """What moves a bar of this name: so much is done, of so much (None: nobody knows, and `unit` is counted)."""
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
