"""The formats of a dump by name, and the one for programs: the JSON of the contract (`shown.ChainDump`).

Each is streamed: memory is bounded by one turn and the outline, not by the chain.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..domain.models import Agent
from ..domain.ordering import by_turn
from ..stores.base import Store, TurnPage
from . import shown
from .html import html
from .markdown import markdown
from .outline import chain_of, mermaid, turns_of
from .shown import SCHEMA, Renderer, render_in_process


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
    chain = await chain_of(store, agent)
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


# ASCII, so that half a surrogate pair from a model is still valid JSON. Data read from JSON has no cycles.
_line = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Write(Protocol):
    def __call__(
        self, store: Store, agent: Agent, *, sandbox: str, verbatim: bool = False, render: Renderer = render_in_process
    ) -> AsyncIterator[str]: ...


@dataclass(frozen=True, slots=True)
class Format:
    write: Write
    media_type: str


FORMATS: Mapping[str, Format] = {
    "json": Format(chain_json, "application/json"),
    "markdown": Format(markdown, "text/markdown; charset=utf-8"),
    "mermaid": Format(mermaid, "text/vnd.mermaid; charset=utf-8"),
    "html": Format(html, "text/html; charset=utf-8"),
}
