"""What commands print in a terminal besides their results: fitted lines, and progress on stderr.

Rich takes 30 ms to import, so only a progress bar that is drawn imports it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..stores.base import ReportStep

# Seconds before a progress bar is shown: shorter work would only make it flicker.
SOON = 1.0
# Seconds between two lines about a migration where there is no terminal for a bar.
EVERY = 5.0


def fitted(line: str, indent: int = 0) -> str:
    """The line, wrapped between words to the terminal's width. `indent`: columns before its further lines. Outside a
    terminal it is unchanged."""
    if not sys.stdout.isatty():
        return line
    width = max(shutil.get_terminal_size().columns, indent + 20)
    lines = textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip
    return "\n".join(lines) or line


def bold(text: str) -> str:
    return _styled(text, 1)


def dim(text: str) -> str:
    return _styled(text, 2)


def _styled(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else text


@contextmanager
def progress_bar(name: str, unit: str | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Gives a function that moves a bar: its arguments are the steps done, and all steps (None: unknown; then the
    steps are counted, in this `unit`). The bar is removed at the end."""
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # a bar that is disabled still writes an empty line
        yield lambda _done, _total: None
        return
    with _drawn_bar(unit) as drawn:
        task = drawn.add_task(name, total=None, visible=False)
        timer = asyncio.get_running_loop().call_later(SOON, lambda: drawn.update(task, visible=True))
        try:
            yield lambda done, total: drawn.update(task, completed=done, total=total)
        finally:
            timer.cancel()


@contextmanager
def migration_progress() -> Iterator[ReportStep]:
    """Gives a function that shows the progress of a store's migration: as a bar in a terminal, else as a line every
    few seconds. A short migration prints nothing."""
    drawn: Progress | None = None
    last = began = time.monotonic()
    in_terminal = sys.stderr.isatty()  # Rich replaces sys.stderr
    with ExitStack() as stack:

        def report(step: str, done: int, total: int) -> None:
            nonlocal drawn, last
            now = time.monotonic()
            text = f"bringing the store up to date: {step}"
            if not in_terminal:
                if now - last > EVERY:
                    last = now
                    print(f"{text}, {100 * done // max(1, total)} %", file=sys.stderr, flush=True)
                return
            if drawn is None and now - began > SOON:
                drawn = stack.enter_context(_drawn_bar())
                drawn.add_task(text)
            if drawn is not None:
                drawn.update(drawn.task_ids[0], description=text, completed=done, total=total)

        yield report


def _drawn_bar(unit: str | None = None) -> Progress:
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415

    last = TaskProgressColumn() if unit is None else TextColumn("{task.completed} " + unit)
    return Progress(TextColumn("{task.description}"), BarColumn(), last, console=Console(stderr=True), transient=True)
