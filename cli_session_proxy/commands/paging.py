"""`dump` in a terminal: as coloured Markdown in a pager."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.padding import Padding
from rich.text import Text

from ..settings import Settings
from . import dumping


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
