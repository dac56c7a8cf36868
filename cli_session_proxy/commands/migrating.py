"""Progress of a store's migration on stderr: a bar in a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ..stores.base import ReportStep
from .bars import drawn

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds until there is a bar, and between two lines.
SOON = 1.0
EVERY = 5.0


@contextmanager
def migrating() -> Iterator[ReportStep]:
    """A short migration prints nothing."""
    shown: Progress | None = None
    last = began = time.monotonic()
    in_terminal = sys.stderr.isatty()  # asked before Rich replaces sys.stderr
    with ExitStack() as until:

        def report(step: str, done: int, total: int) -> None:
            nonlocal shown, last
            now = time.monotonic()
            words = f"bringing the store up to date: {step}"
            if not in_terminal:
                if now - last > EVERY:
                    last = now
                    print(f"{words}, {100 * done // max(1, total)} %", file=sys.stderr, flush=True)
                return
            if shown is None and now - began > SOON:
                shown = until.enter_context(drawn())
                shown.add_task(words)
            if shown is not None:
                shown.update(shown.task_ids[0], description=words, completed=done, total=total)

        yield report
