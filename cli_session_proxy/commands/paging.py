"""`dump` in a terminal: in a pager, as Markdown with colours."""

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


class SaidBlock(CodeBlock):
    """A message, wrapped and indented. Rich's own block loses letters where it wraps (13.9.4)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), overflow="fold"), (0, 0, 0, 4))


class Pages(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "code_block": SaidBlock,
        "fence": SaidBlock,
    }


def dump_by_the_page(settings: Settings, owner: str, agent_id: str, shown: dumping.Shown) -> None:
    """Show the dump in the terminal's pager. A long chain is rendered only as far as somebody reads.

    Raises `NotFound`, `ConfigError`.
    """
    console = Console()
    pieces = dumping.pieces(settings, owner, agent_id, shown)

    async def following() -> str | None:
        return await anext(pieces, None)

    async def done() -> None:
        await pieces.aclose()

    def drawn(runner: asyncio.Runner) -> Iterator[str]:
        while (text := runner.run(following())) is not None:
            with console.capture() as page:
                console.print(Pages(text, hyperlinks=False))
            yield page.get()

    with asyncio.Runner() as runner:
        pages = drawn(runner)
        try:
            first = next(pages)  # an error must not open a pager
            click.echo_via_pager(chain((first,), pages), color=True)
        finally:
            runner.run(done())
