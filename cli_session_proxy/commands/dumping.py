"""`dump`: a chain, whole or in part."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from ..errors import ConfigError, NotFound, did_you_mean
from ..export.formats import FORMATS, chain_json
from ..export.markdown import markdown
from ..sandbox import Sandboxes
from ..settings import Settings
from .stored import agent_in, opened

Write = Callable[[str], None]

# The formats that can write a part of a chain.
PARTS = {"json": chain_json, "markdown": markdown}


@dataclass(frozen=True, slots=True)
class Shown:
    """How a chain is printed. `verbatim`: secrets in messages are not redacted. `last`: only so many of the newest
    turns; `turn`: only this one."""

    format: str = "json"
    verbatim: bool = False
    last: int | None = None
    turn: str | None = None


async def dump(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write the agent's chain piece by piece. Raises `NotFound`, `ConfigError`."""
    async with aclosing(pieces(settings, owner, agent_id, shown)) as dumped:  # closed also if the reader leaves
        async for text in dumped:
            write(text)


async def pieces(settings: Settings, owner: str, agent_id: str, shown: Shown) -> AsyncGenerator[str, None]:
    """The dump's text, piece by piece. Raises `NotFound` also for a turn of another agent, `ConfigError`."""
    if shown.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}{did_you_mean(shown.format, FORMATS)}")
    async with opened(settings) as existing:
        store, agent = await agent_in(settings, existing, owner, agent_id)
        sandbox = str(Sandboxes(settings).path(agent.dir))
        if shown.last is None and shown.turn is None:
            written = FORMATS[shown.format].write(store, agent, sandbox=sandbox, verbatim=shown.verbatim)
        elif shown.format in PARTS:
            if shown.turn is None:
                part = await store.page(agent.key, before_seq=None, limit=shown.last or 1)
            else:
                turn = await store.turn(shown.turn)
                if turn is None or turn.agent_key != agent.key:
                    raise NotFound(f"agent {agent.agent_id!r} has no turn {shown.turn!r}: see `find`")
                part = await store.page(agent.key, before_seq=turn.seq + 1, limit=1)
            written = PARTS[shown.format](store, agent, sandbox=sandbox, verbatim=shown.verbatim, part=part)
        else:
            raise ConfigError(f"--last and --turn take --format {' or '.join(PARTS)}")
        async for text in written:
            yield text
