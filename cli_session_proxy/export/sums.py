"""Sums of turns' usage and cost, by day, by model and by the owner of their key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..domain import times
from ..domain.models import JSON
from ..settings import MODELS
from ..stores.base import Forgotten, TurnFacts

DAYS = 14
# Only so many of the newest turns are summed up: a longer read would slow running turns.
TURNS = 20_000


def summed(
    facts: Sequence[TurnFacts], now: float, forgotten: Sequence[Forgotten] = ()
) -> tuple[list[JSON], list[JSON], list[JSON]]:
    """A row for each of the last days, oldest first; for each model and each owner, the most expensive first. Pure.

    Of deleted one-shots only count and cost are known.
    """
    days = {day.isoformat(): _row() for day in times.days(now, DAYS)}
    models: dict[str, JSON] = defaultdict(_row)
    keys: dict[str, JSON] = defaultdict(_row)
    asked = {one.model for one in facts}
    # Short names such as `sonnet`, if only one full model name that answered matches: `claude-sonnet-5-5`.
    means = {short: [model for model in asked if f"-{short}-" in model] for short in MODELS if short in asked}
    names = {short: fits[0] for short, fits in means.items() if len(fits) == 1}

    def rows(at: float, model: str, owner: str) -> list[JSON]:
        found = days.get(times.day(at)), models[names.get(model, model)], keys[owner]
        return [row for row in found if row is not None]  # no row for the part of a day before the first one

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
