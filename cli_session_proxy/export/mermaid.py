"""The dump as a graph: runs of turns in one session as boxes, the links between them as arrows.

It has no text of the conversation, and the agent's name is written as character codes, so that nothing in a chain can
be taken for syntax. Viewers fail above 500 edges, so the oldest boxes of a long chain are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import get_args

from ..domain.models import ON_PATH, Agent, LinkReason, Status
from ..stores.base import Store
from .explain import MARKED_REASONS
from .outline import Node, Outline, outline
from .shown import Renderer, render_in_process

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
        for line in _lines(box, drawn, shape.chain.agent.head):
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


def _lines(box: _Box, drawn: set[int], head: str | None) -> Iterator[str]:
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
