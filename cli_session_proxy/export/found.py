"""Results of a search, for the page, for programs and for a terminal. Pure."""

from __future__ import annotations

from urllib.parse import quote

from .. import redact
from ..domain.models import JSON
from ..domain.searching import Found, Hit, Indexed, Search
from .words import count


def as_json(wanted: Search, found: Found, indexed: Indexed) -> JSON:
    """`indexed`: how many turns are indexed so far. The newest are indexed first."""
    return {
        "object": "list",
        "query": wanted.text,
        "agents": found.agents,
        "turns": found.turns,
        "one_shots": found.one_shots,
        "indexed": {"done": indexed.done, "total": indexed.total},
        "data": [hit_json(hit) for hit in found.hits],
    }


def hit_json(hit: Hit) -> JSON:
    """`page`: the page's address of it. `snippet`: pieces, each marked if it matches."""
    return {
        "kind": hit.kind,
        "agent_id": hit.agent.agent_id,
        "owner": hit.agent.owner,
        "turn_id": hit.turn_id,
        "number": hit.number,
        "session_id": hit.session_id,
        "status": hit.status,
        "model": hit.model,
        "continuity": hit.continuity,
        "cost_usd": hit.cost_usd,
        "at": hit.at,
        "part": hit.part,
        "snippet": [{"text": redact.text(text), "found": n % 2 == 1} for n, text in enumerate(hit.snippet) if text],
        "page": page_of(hit),
    }


def page_of(hit: Hit) -> str:
    agent = f"/ui#/{quote(hit.agent.agent_id, safe='')}"
    return agent if hit.kind == "agent" or hit.turn_id is None else f"{agent}/{quote(hit.turn_id, safe='')}"


def place(hit: Hit) -> str:
    """The agent, and the number of the turn or session."""
    words = [hit.agent.agent_id]
    if hit.kind == "session":
        words.append(f"session {hit.session_id}")
    if hit.turn_id is not None and hit.kind != "agent":
        words.append(f"#{hit.number} {hit.turn_id}")
    return "  ".join(words)


def summed_up(wanted: Search, found: Found) -> str:
    """How many hits there are, and how much was searched."""
    folded = f", {count(found.one_shots, 'one-shot')} among them" if found.one_shots else ""
    among = f"{count(found.agents, 'agent')} ({count(found.turns, 'turn')}{folded})"
    if found.hits:
        more = "the best " if len(found.hits) >= wanted.limit else ""
        return f"{more}{count(len(found.hits), 'hit')} in {among}"
    return f"nothing found: none of {among} has it"
