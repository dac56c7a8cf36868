"""A chain as the dumps read it: its turns in order, its shape without the messages, and the graph of that shape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from .. import redact
from ..domain.models import MARKED_REASONS, ON_PATH, Agent, Chain, Link, LinkReason, Status, Turn
from ..domain.ordering import by_turn, numbered
from ..errors import NotFound
from ..stores.base import Store, TurnPage
from . import explain
from .shown import Renderer, render_in_process

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


async def chain_of(store: Store, agent: Agent) -> Chain:
    """Raises `NotFound` if the agent was deleted."""
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}", param="agent_id")
    return chain


async def turns_of(store: Store, agent: Agent, part: TurnPage | None = None) -> AsyncIterator[tuple[int, Turn]]:
    """All turns, parents first, or those of the page `part` in the order of acceptance. Each has its number."""
    if part is None:
        async for number, turn in numbered(store.turns(agent.key)):
            yield number, turn
    else:
        for number, turn in enumerate(reversed(part.turns), part.newest - len(part.turns) + 1):
            yield number, turn


async def outline(store: Store, agent: Agent) -> Outline:
    """The shape of an agent's chain, small per turn. Raises `NotFound` if the agent was deleted."""
    chain = await chain_of(store, agent)
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


# --- the graph: runs of turns in one session as boxes, the links between them as arrows

# It has no text of the conversation, and the agent's name is written as character codes, so that nothing in a chain can
# be taken for syntax. Viewers fail above 500 edges, so the oldest boxes of a long chain are left out.

# mermaid's default `maxEdges` is 500 and its `maxTextSize` 50,000 characters (its documentation, "Config").
MOST_BOXES = 250

_REASONS, _STATUSES = frozenset(get_args(LinkReason)), frozenset(get_args(Status))
_UNKNOWN = "unknown"

# CLI 1.x gives every turn a new session id: that alone makes no new box.
_QUIET: frozenset[LinkReason] = frozenset({"forked_by_cli"})

_STYLES = (
    "classDef head stroke-width:4px",
    "classDef repaired stroke:#b45309,stroke-width:3px",
    "classDef failed stroke:#b91c1c,stroke-dasharray:4 3",
)


@dataclass(slots=True)
class _Box:
    """Consecutive turns without a repair or branch between them, drawn as one box."""

    number: int
    nodes: list[Node]
    above: _Box | None
    why: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


async def mermaid(
    store: Store,
    agent: Agent,
    *,
    sandbox: str,  # noqa: ARG001 - the shape of every format; no words are shown here
    verbatim: bool = False,  # noqa: ARG001 - as above
    render: Renderer = render_in_process,  # noqa: ARG001 - as above
) -> AsyncIterator[str]:
    """A flowchart. Raises `NotFound` before the first piece."""
    shape = await outline(store, agent)
    boxes = _boxes(shape)
    left_out = max(0, len(boxes) - MOST_BOXES)
    yield f'flowchart TD\n  agent(["agent {_coded(shape.chain.agent.agent_id)}"])\n'
    if left_out:
        yield f'  earlier["{left_out} earlier boxes left out"]\n  agent --> earlier\n'
    drawn = {box.number for box in boxes[left_out:]}
    for box in boxes[left_out:]:
        for line in _box_lines(box, drawn, shape.chain.agent.head):
            yield f"  {line}\n"
    yield "".join(f"  {style}\n" for style in _STYLES)


def _boxes(shape: Outline) -> list[_Box]:
    boxes: list[_Box] = []
    box_of: dict[str, _Box] = {}
    for node in shape.nodes.values():
        # An earlier version imported chains without validation: an unknown word must not become syntax.
        reasons = [link.reason for link in shape.links.get(node.id, ()) if link.reason not in _QUIET]
        why = [reason if reason in _REASONS else _UNKNOWN for reason in reasons]
        above = box_of.get(node.parent or "")
        fits = above is not None and not why and above.nodes[-1].id == node.parent
        if above is None or not fits or shape.nodes[above.nodes[-1].id].children > 1 or node.status not in ON_PATH:
            above = _Box(len(boxes) + 1, [], above, why)
            boxes.append(above)
        above.nodes.append(node)
        box_of[node.id] = above
        if node.session and node.session not in above.sessions:
            above.sessions.append(node.session)
    return boxes


def _box_lines(box: _Box, drawn: set[int], head: str | None) -> Iterator[str]:
    first, last = box.nodes[0], box.nodes[-1]
    span = f"turn {first.number}" if first is last else f"turns {first.number} to {last.number}"
    session = ""
    if box.sessions:
        more = f" and {len(box.sessions) - 1} more" if len(box.sessions) > 1 else ""
        session = f"session {_coded(box.sessions[0][:8])}{more}"
    parts = [span, session]
    if last.status != "completed":
        parts.append(last.status if last.status in _STATUSES else _UNKNOWN)
    if last.id == head:
        parts.append("head")
    yield f'b{box.number}["{"<br/>".join(part for part in parts if part)}"]'
    source = "agent" if box.above is None else f"b{box.above.number}" if box.above.number in drawn else "earlier"
    label = f"|{', '.join(dict.fromkeys(box.why))}|" if box.why else ""
    yield f"{source} -->{label} b{box.number}"
    for name, applies in (
        ("failed", last.status in ("refused", "failed", "cancelled")),
        ("repaired", not MARKED_REASONS.isdisjoint(box.why)),
        ("head", last.id == head),
    ):
        if applies:
            yield f"class b{box.number} {name}"


def _coded(text: str) -> str:
    """mermaid's own entity codes for everything but plain letters, digits and spaces."""
    return "".join(char if char.isascii() and (char.isalnum() or char in " -") else f"#{ord(char)};" for char in text)
