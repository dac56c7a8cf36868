"""Markdown in the terminal: an answer, block by block while it streams; and a dump, in a pager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.padding import Padding
from rich.text import Text

from ..settings import Settings
from . import dumping

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])\s")
# A line of so many characters shows what kind of block it begins.
_BEGINNING = 12


class AnswerView:
    """Renders complete blocks for good. The growing block is shown as plain text, as much of its end as fits."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None

    def add(self, piece: str) -> None:
        complete, self._rest = blocks(self._rest + piece)
        for block in complete:
            self._print_block(block)
        if self._rest.strip():
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            # As many of its last rows as the screen shows, all but two.
            most, width = max(1, self._console.height - 2), max(1, self._console.width)
            rows, shown = most, list[str]()
            for line in reversed(self._rest.strip("\n").split("\n")):
                rows -= max(1, -(-len(line) // width))
                if rows < 0 and shown:
                    break
                shown.append(line[-width * most :])
            self._live.update(Text("\n".join(reversed(shown))), refresh=True)

    def end(self) -> None:
        """The answer is complete."""
        self._print_block(self._rest)
        self._rest = ""

    def note(self, text: str) -> None:
        """Print a line that is not part of the answer. The growing block is drawn again when it grows."""
        self._wipe()
        self._console.print(Text(text), end="", soft_wrap=True)

    def _wipe(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_block(self, block: str) -> None:
        self._wipe()
        if block.strip():
            self._console.print(Markdown(block, hyperlinks=False), end="\n")


def blocks(text: str) -> tuple[list[str], str]:
    """The complete blocks and the rest, which may go on, such as a list or code with empty lines in it."""
    lines = text.split("\n")
    complete: list[str] = []
    begins, fence = 0, ""  # the line at which the block began; the fence of the code that it is in
    for at, line in enumerate(lines[:-1]):
        mark = _FENCE.match(line)
        if fence:
            if mark is not None and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark is not None:
            fence = mark[1]
        elif not line.strip():
            follows = lines[at + 1]
            known = at + 2 < len(lines) or len(follows) >= _BEGINNING
            is_item = _ITEM.match(follows) and _ITEM.match(lines[begins])
            if known and follows and not follows[0].isspace() and not is_item:
                complete.append("\n".join(lines[begins:at]))
                begins = at + 1
    return complete, "\n".join(lines[begins:])


# --- a dump


class MessageBlock(CodeBlock):
    """A message, wrapped and indented. Rich's own block loses letters where it wraps (13.9.4)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), overflow="fold"), (0, 0, 0, 4))


class DumpPages(Markdown):
    """Markdown whose code blocks are `MessageBlock`s."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "code_block": MessageBlock,
        "fence": MessageBlock,
    }


def dump_by_the_page(settings: Settings, owner: str, agent_id: str, shown: dumping.Shown) -> None:
    """Show the dump in the terminal's pager. A long chain is rendered only as far as somebody reads.

    Raises `NotFound`, `ConfigError`.
    """
    console = Console()
    pieces = dumping.pieces(settings, owner, agent_id, shown)

    async def next_piece() -> str | None:
        return await anext(pieces, None)

    async def close() -> None:
        await pieces.aclose()

    def pages(runner: asyncio.Runner) -> Iterator[str]:
        while (text := runner.run(next_piece())) is not None:
            with console.capture() as page:
                console.print(DumpPages(text, hyperlinks=False))
            yield page.get()

    with asyncio.Runner() as runner:
        rendered = pages(runner)
        try:
            first = next(rendered)  # an error must not open a pager
            click.echo_via_pager(chain((first,), rendered), color=True)
        finally:
            runner.run(close())
