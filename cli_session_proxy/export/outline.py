"""A chain's shape without its messages, for the graph and the page's tree. Small per turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import redact
from ..domain.models import Agent, Chain, Link, Status
from ..domain.ordering import by_turn, numbered
from ..errors import NotFound
from ..stores.base import Store
from . import explain

# Characters of the prompt that label a turn.
FIRST_WORDS = 60
# Characters that are redacted first: a secret that is cut at the edge would not be recognised.
LOOKED_AT = 8 * FIRST_WORDS


@dataclass(slots=True)
class Node:
    """One turn of the tree. `words`: the first ones of its prompt. `mended`: it has a repair beside those of its links.
    `lane` 0 is the path to the head; every branch that leaves another gets a lane of its own."""

    id: str
    number: int
    parent: str | None
    status: Status
    session: str | None
    words: str
    mended: bool = False
    lane: int = 0
    children: int = 0


@dataclass(slots=True)
class Outline:
    """The shape of a chain. `nodes` by id, parents first; `links` by the id of their turn (None: without a turn)."""

    chain: Chain
    nodes: dict[str, Node] = field(default_factory=dict)
    links: Mapping[str | None, Sequence[Link]] = field(default_factory=dict)


async def outline(store: Store, agent: Agent) -> Outline:
    """The shape of an agent's chain. Raises `NotFound` if the agent was deleted."""
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}", param="agent_id")
    shape = Outline(chain, links=by_turn(chain.links))
    async for number, turn in numbered(store.outlines(agent.key)):
        blocks = (block for message in turn.input for block in message.content)
        first = next((str(block.get("text", "")) for block in blocks if block.get("type") == "text"), "")
        words = redact.text(first[:LOOKED_AT])[: 2 * FIRST_WORDS]
        briefs = explain.turn(turn.evidence, turn.attempts, shape.links.get(turn.id, ()))
        shape.nodes[turn.id] = Node(
            turn.id, number, turn.parent_id, turn.status, turn.session_id, " ".join(words.split())[:FIRST_WORDS],
            mended=any(brief.kind == "repair" for brief in briefs),
        )  # fmt: skip
    # Lanes: the head's path is lane 0; elsewhere the first child stays in its parent's lane.
    on_head: set[str] = set()
    at = chain.agent.head
    while at in shape.nodes and at not in on_head:
        on_head.add(at)
        at = shape.nodes[at].parent
    lanes = 0
    continued: set[str] = set()  # nodes whose first child stays in their lane
    for node in shape.nodes.values():
        above = shape.nodes.get(node.parent or "")
        if above is not None:
            above.children += 1
        if node.id in on_head:
            continue
        if above is not None and above.id not in continued and above.id not in on_head:
            node.lane = above.lane
            continued.add(above.id)
        else:
            lanes += 1
            node.lane = lanes
    return shape
