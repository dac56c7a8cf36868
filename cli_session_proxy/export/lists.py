"""Lists over many chains: their rows, sums of turns by day, model and owner of the key, and results of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import quote

from .. import redact
from ..domain import times
from ..domain.models import JSON, ChainSummary
from ..domain.searching import Found, Hit, Indexed, Search
from ..settings import MODELS
from ..stores.base import Forgotten, TurnFacts
from .words import count

# Rows of a list by default: 5,000 are 1.6 MB.
LISTED = 1000
# Seconds for which a one-shot has its own row: its client may still continue it.
ONE_SHOT_SHOWN = 600.0
DAY = 86_400.0

DAYS = 14
# Only so many of the newest turns are summed up: a longer read would slow running turns.
TURNS = 20_000


def summary_json(row: ChainSummary) -> JSON:
    """One row of the list of chains. `bytes`: its size in the store; `last_at`: UTC seconds; `state`: the status of its
    last turn.

    `side`: it has only suspected side calls. `host`, `address`: of the proxy that holds the agent now.
    """
    return {
        "agent_id": row.agent.agent_id,
        "owner": row.agent.owner,
        "head": row.agent.head,
        "turns": row.turns,
        "sessions": row.sessions,
        "repairs": row.repairs,
        "failures": row.failures,
        "state": row.state,
        "cost_usd": row.cost_usd,
        "bytes": row.bytes,
        "created_at": row.agent.created_at,
        "last_at": row.last_at,
        "side": row.side,
        "host": row.host,
        "address": row.address,
    }


def summed(
    facts: Sequence[TurnFacts], now: float, forgotten: Sequence[Forgotten] = ()
) -> tuple[list[JSON], list[JSON], list[JSON]]:
    """A row for each of the last days, oldest first; for each model and each owner, the most expensive first. Pure.

    Of deleted one-shots only count and cost are known.
    """
    days = {day.isoformat(): _empty_row() for day in times.days(now, DAYS)}
    models: dict[str, JSON] = defaultdict(_empty_row)
    keys: dict[str, JSON] = defaultdict(_empty_row)
    used = {one.model for one in facts}
    # Short names such as `sonnet`, if only one full model name that answered matches: `claude-sonnet-5-5`.
    matches = {short: [model for model in used if f"-{short}-" in model] for short in MODELS if short in used}
    names = {short: full[0] for short, full in matches.items() if len(full) == 1}

    def rows(at: float, model: str, owner: str) -> list[JSON]:
        """The rows to which a turn belongs."""
        of_turn = days.get(times.day(at)), models[names.get(model, model)], keys[owner]
        return [row for row in of_turn if row is not None]  # no row for the part of a day before the first one

    for deleted in forgotten:
        for row in rows(deleted.at, deleted.model, deleted.owner):
            row["turns"] += deleted.turns
            row["cost_usd"] += deleted.cost_usd
    for turn in facts:
        for row in rows(turn.created_at, turn.model, turn.owner):
            row["turns"] += 1
            row["failed"] += turn.status == "failed"
            row["refused"] += turn.status == "refused"
            row["repairs"] += turn.repairs
            row["cost_usd"] += turn.cost_usd or 0.0
            for name in _TOKENS:
                row[name] += getattr(turn.usage, name)
    by_day = [{"day": day, **row} for day, row in days.items()]
    return by_day, _most_expensive_first("model", models), _most_expensive_first("key", keys)


def _most_expensive_first(column: str, rows: dict[str, JSON]) -> list[JSON]:
    ordered = sorted(rows.items(), key=lambda item: (-item[1]["cost_usd"], -item[1]["turns"], item[0]))
    return [{column: name, **row} for name, row in ordered]


_TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")


def _empty_row() -> JSON:
    return {"turns": 0, "failed": 0, "refused": 0, "repairs": 0, "cost_usd": 0.0, **dict.fromkeys(_TOKENS, 0)}


# --- results of a search, for the page, for programs and for a terminal


def found_json(search: Search, result: Found, indexed: Indexed) -> JSON:
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


def place_of(hit: Hit) -> str:
    """The agent, and the number of the turn or session."""
    words = [hit.agent.agent_id]
    if hit.kind == "session":
        words.append(f"session {hit.session_id}")
    if hit.turn_id is not None and hit.kind != "agent":
        words.append(f"#{hit.number} {hit.turn_id}")
    return "  ".join(words)


def found_summary(search: Search, result: Found) -> str:
    """How many hits there are, and how much was searched, in one line."""
    one_shots = f", {count(result.one_shots, 'one-shot')} among them" if result.one_shots else ""
    searched = f"{count(result.agents, 'agent')} ({count(result.turns, 'turn')}{one_shots})"
    if not result.hits:
        return f"nothing found: none of {searched} has it"
    the_best = "the best " if len(result.hits) >= search.limit else ""
    return f"{the_best}{count(len(result.hits), 'hit')} in {searched}"
