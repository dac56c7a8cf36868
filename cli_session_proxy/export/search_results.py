"""Results of a search, for the page, for programs and for a terminal. Pure."""

from __future__ import annotations

from urllib.parse import quote

from .. import redact
from ..domain.models import JSON
from ..domain.searching import Found, Hit, Indexed, Search
from .words import count


def as_json(search: Search, result: Found, indexed: Indexed) -> JSON:
    """The answer to a search. `indexed`: how many turns are indexed so far; the newest are indexed first."""
    return {
        "object": "list",
        "query": search.text,
        "agents": result.agents,
        "turns": result.turns,
        "one_shots": result.one_shots,
        "indexed": {"done": indexed.done, "total": indexed.total},
        "data": [hit_json(hit) for hit in result.hits],
    }


def hit_json(hit: Hit) -> JSON:
    """One hit. `page`: its address in the web page. `snippet`: pieces of text, each marked if it matches."""
    page = f"/ui#/{quote(hit.agent.agent_id, safe='')}"
    if hit.kind != "agent" and hit.turn_id is not None:
        page += f"/{quote(hit.turn_id, safe='')}"
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
        "page": page,
    }


def place(hit: Hit) -> str:
    """The agent, and the number of the turn or session."""
    words = [hit.agent.agent_id]
    if hit.kind == "session":
        words.append(f"session {hit.session_id}")
    if hit.turn_id is not None and hit.kind != "agent":
        words.append(f"#{hit.number} {hit.turn_id}")
    return "  ".join(words)


def summary(search: Search, result: Found) -> str:
    """How many hits there are, and how much was searched, in one line."""
    one_shots = f", {count(result.one_shots, 'one-shot')} among them" if result.one_shots else ""
    searched = f"{count(result.agents, 'agent')} ({count(result.turns, 'turn')}{one_shots})"
    if not result.hits:
        return f"nothing found: none of {searched} has it"
    the_best = "the best " if len(result.hits) >= search.limit else ""
    return f"{the_best}{count(len(result.hits), 'hit')} in {searched}"
