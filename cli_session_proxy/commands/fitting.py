"""Lines for a terminal: no word is broken in its middle. Without Rich, which takes 30 ms to import."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap


def fitted(line: str, indent: int = 0) -> str:
    """Broken between words where the terminal ends, with what follows indented; in a pipe it stays one line."""
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
