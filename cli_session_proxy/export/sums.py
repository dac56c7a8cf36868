"""What turns cost and came to, by day, by model and by the owner of their key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..domain import times
from ..domain.models import JSON
from ..settings import MODELS
from ..stores.base import Forgotten, TurnFacts

DAYS = 14
# The newest turns that are summed up: a long look at a very large store would slow the turns that run.
TURNS = 20_000


def summed(
    facts: Sequence[TurnFacts], now: float, forgotten: Sequence[Forgotten] = ()
) -> tuple[list[JSON], list[JSON], list[JSON]]:
    """A row for each of the last days, oldest first; for each model and each owner, the dearest first. Pure.

    Of what is forgotten it is only known how many requests there were, and what they cost.
    """
    days = {day.isoformat(): _row() for day in times.days(now, DAYS)}
    models: dict[str, JSON] = defaultdict(_row)
    keys: dict[str, JSON] = defaultdict(_row)
    asked = {one.model for one in facts}
    # Of names such as `sonnet` those that one model alone can mean which answered: `claude-sonnet-5-5`.
    means = {short: [model for model in asked if f"-{short}-" in model] for short in MODELS if short in asked}
    names = {short: fits[0] for short, fits in means.items() if len(fits) == 1}

    def rows(at: float, model: str, owner: str) -> list[JSON]:
        found = days.get(times.day(at)), models[names.get(model, model)], keys[owner]
        return [row for row in found if row is not None]  # there is none for the rest of the day before the first one

    for gone in forgotten:
        for row in rows(gone.at, gone.model, gone.owner):
            row["turns"] += gone.turns
            row["cost_usd"] += gone.cost_usd
    for one in facts:
        for row in rows(one.created_at, one.model, one.owner):
            row["turns"] += 1
            row["failed"] += one.status == "failed"
            row["refused"] += one.status == "refused"
            row["repairs"] += one.repairs
            row["cost_usd"] += one.cost_usd or 0.0
            for name in _TOKENS:
                row[name] += getattr(one.usage, name)
    return [{"day": day, **row} for day, row in days.items()], _dearest("model", models), _dearest("key", keys)


def _dearest(name: str, found: dict[str, JSON]) -> list[JSON]:
    every = sorted(found.items(), key=lambda item: (-item[1]["cost_usd"], -item[1]["turns"], item[0]))
    return [{name: one, **row} for one, row in every]


_TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")


def _row() -> JSON:
    return {"turns": 0, "failed": 0, "refused": 0, "repairs": 0, "cost_usd": 0.0, **dict.fromkeys(_TOKENS, 0)}
