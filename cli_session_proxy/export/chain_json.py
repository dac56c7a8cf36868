"""The dump for programs: the JSON of the contract (`schema.ChainDump`), written turn by turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from ..domain.models import Agent, Turn
from ..domain.ordering import by_turn, numbered
from ..errors import NotFound
from ..stores.base import Store, TurnPage
from . import shown
from .schema import SCHEMA
from .shown import Renderer, render_in_process


async def chain_json(
    store: Store,
    agent: Agent,
    *,
    sandbox: str,
    verbatim: bool = False,
    render: Renderer = render_in_process,
    part: TurnPage | None = None,
) -> AsyncIterator[str]:
    """One valid JSON document in pieces, a newline at its end. Raises `NotFound` before the first piece.

    Sessions and links are read first, so a turn that is committed meanwhile may lack its links, but no link lacks its
    turn. `part` limits only the turns.
    """
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}", param="agent_id")
    head = {
        "schema": SCHEMA,
        "agent_id": chain.agent.agent_id,
        "sandbox": sandbox,
        "head": chain.agent.head,
        "created_at": chain.agent.created_at,
    }
    yield _line(head)[:-1] + ',\n"turns":['
    separator = "\n"
    links = by_turn(chain.links)
    async for number, turn in turns_of(store, agent, part):
        rendered = await render(shown.turn, turn, links.get(turn.id, ()), verbatim=verbatim)
        yield separator + _line(rendered | {"number": number})
        separator = ",\n"
    yield '],\n"sessions":[' + ",\n".join(_line(shown.session(session)) for session in chain.sessions)
    yield '],\n"links":[' + ",\n".join(_line(shown.link(link)) for link in chain.links) + "]}\n"


async def turns_of(store: Store, agent: Agent, part: TurnPage | None) -> AsyncIterator[tuple[int, Turn]]:
    """All turns, parents first, or those of the page `part` in the order of acceptance. Each has its number."""
    if part is None:
        async for number, turn in numbered(store.turns(agent.key)):
            yield number, turn
    else:
        for number, turn in enumerate(reversed(part.turns), part.newest - len(part.turns) + 1):
            yield number, turn


# ASCII, so that half a surrogate pair from a model is still valid JSON. Data read from JSON has no cycles.
_line = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
