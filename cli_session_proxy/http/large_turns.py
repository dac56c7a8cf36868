"""Renders turns for dumps. Those with much text are rendered in a helper process, which can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from .. import redact
from ..aside.pool import Helpers, OutOfBoundsError
from ..domain.limits import size_of
from ..domain.models import PLAIN, Block, Link, Message, Turn
from ..export.shown import Show, T, without_files

S = TypeVar("S")

# Characters that are redacted on the event loop: 20 ms at worst, if every word is the name of a secret.
LARGE = 128 * 1024
TOO_LARGE = "[too large to be shown here; `cli-session-proxy dump` shows it, and `export` has it whole]"


class TurnRenderer:
    """See `shown.Renderer`."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers

    async def __call__(self, show: Show[T], row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> T:
        if is_large(row):
            row = await asyncio.to_thread(without_files, row)
        if not is_large(row):
            return show(row, links, verbatim=verbatim)
        try:
            return await self.aside(partial(show, verbatim=verbatim), row, tuple(links))
        except OutOfBoundsError:
            note: Block = {"type": "text", "text": TOO_LARGE}
            asked = tuple(Message(message.role, (note,)) for message in row.input[:1])
            return show(replace(row, input=asked, output=(note,), tools=(), system=None), links, verbatim=verbatim)

    async def aside(self, show: Callable[..., S], *given: Any) -> S:
        """Call `show` in a helper process, which redacts the same secrets. Raises `OutOfBoundsError`."""
        return await self._helpers.call(redact.knowing, redact.known(), show, *given)


def is_large(row: Turn) -> bool:
    blocks = [row.evidence.as_json(), *row.output, *row.tools]
    if row.options is not PLAIN:
        blocks.append(row.options.as_json())
    for message in row.input:
        blocks += message.content
    return size_of(blocks, LARGE - len(row.system or "")) is None
