"""The list of chains for programs, and sums of turns' usage and cost by day, by model and by the owner of their key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..domain import times
from ..domain.models import JSON, ChainSummary
from ..settings import MODELS
from ..stores.base import Forgotten, TurnFacts

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
