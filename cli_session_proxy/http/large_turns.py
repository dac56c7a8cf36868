"""Turns as a dump shows them, made where they may take their time: a large one in a process that can be ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..aside.pool import Helpers, OutOfBoundsError
from ..domain.models import PLAIN, Block, Link, Message, Turn
from ..export.shown import Show, T

# Characters of texts and images that are gone through on the event loop: 20 ms where every word is a secret's name.
LARGE = 128 * 1024
TOO_LARGE = "[too large to be shown here; `cli-session-proxy dump` shows it, and `export` has it whole]"


class Teller:
    """See `shown.Tell`."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers

    async def __call__(self, show: Show[T], row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> T:
        if not is_large(row):
            return show(row, links, verbatim=verbatim)
        try:
            return await self._helpers.call(partial(show, verbatim=verbatim), row, tuple(links))
        except OutOfBoundsError:
            note: Block = {"type": "text", "text": TOO_LARGE}
            said = tuple(Message(message.role, (note,)) for message in row.input[:1])
            return show(replace(row, input=said, output=(note,), tools=(), system=None), links, verbatim=verbatim)


def is_large(row: Turn) -> bool:
    left = LARGE - len(row.system or "")
    blocks = [row.evidence.as_json(), *row.output, *row.tools]
    if row.options is not PLAIN:
        blocks.append(row.options.as_json())
    for message in row.input:
        blocks += message.content
    while blocks and left >= 0:
        block = blocks.pop()
        for value in block.values():
            if isinstance(value, str):
                left -= len(value)
            elif isinstance(value, dict):
                blocks.append(value)
            elif isinstance(value, list):
                blocks += [item if isinstance(item, dict) else {"": item} for item in value]
    return left < 0
