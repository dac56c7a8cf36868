"""`dump`: a chain, whole or in part, into a file or by the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.padding import Padding
from rich.text import Text

from ..domain.models import Agent
from ..errors import ConfigError, NotFound, did_you_mean
from ..export.chain_json import chain_json
from ..export.formats import FORMATS
from ..export.markdown import markdown
from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Store, TurnPage
from .stored import agent_in, opened

Write = Callable[[str], None]

# The forms of which a part can be written.
PARTS = {"json": chain_json, "markdown": markdown}


@dataclass(frozen=True, slots=True)
class Shown:
    """How a chain is printed. `verbatim`: secrets in what was said are left as they are. `last`: so many of the newest
    turns; `turn`: this one alone."""

    format: str = "json"
    verbatim: bool = False
    last: int | None = None
    turn: str | None = None


async def dump(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write the agent's chain piece by piece. Raises `NotFound`, `ConfigError`."""
    async with aclosing(_dumped(settings, owner, agent_id, shown)) as pieces:  # also where the reader leaves
        async for text in pieces:
            write(text)


class SaidBlock(CodeBlock):
    """What was said, wrapped and indented. Rich's own block cuts letters off where it wraps (13.9.4)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), overflow="fold"), (0, 0, 0, 4))


class Pages(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "code_block": SaidBlock,
        "fence": SaidBlock,
    }


def dump_by_the_page(settings: Settings, owner: str, agent_id: str, shown: Shown) -> None:
    """Show it in the terminal's pager, Markdown with colours. A long chain is drawn as far as somebody reads.

    Raises `NotFound`, `ConfigError`.
    """
    console = Console()
    pieces = _dumped(settings, owner, agent_id, shown)

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
            first = next(pages)  # what is refused opens no pager
            click.echo_via_pager(chain((first,), pages), color=True)
        finally:
            runner.run(done())


async def _dumped(settings: Settings, owner: str, agent_id: str, shown: Shown) -> AsyncGenerator[str, None]:
    if shown.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}{did_you_mean(shown.format, FORMATS)}")
    async with opened(settings) as there:
        store, agent = await agent_in(settings, there, owner, agent_id)
        sandbox = str(Sandboxes(settings).path(agent.dir))
        if shown.last is None and shown.turn is None:
            written = FORMATS[shown.format].write(store, agent, sandbox=sandbox, verbatim=shown.verbatim)
        elif shown.format in PARTS:
            part = await _part(store, agent, shown)
            written = PARTS[shown.format](store, agent, sandbox=sandbox, verbatim=shown.verbatim, part=part)
        else:
            raise ConfigError(f"--last and --turn take --format {' or '.join(PARTS)}")
        async for text in written:
            yield text


async def _part(store: Store, agent: Agent, shown: Shown) -> TurnPage:
    """Raises `NotFound` for a turn that the agent does not have."""
    if shown.turn is None:
        return await store.page(agent.key, before_seq=None, limit=shown.last or 1)
    turn = await store.turn(shown.turn)
    if turn is None or turn.agent_key != agent.key:
        raise NotFound(f"agent {agent.agent_id!r} has no turn {shown.turn!r}: see `find`")
    return await store.page(agent.key, before_seq=turn.seq + 1, limit=1)
