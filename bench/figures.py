"""Many measurements as a median with its spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The median, what a tenth was below and above of, and how many runs there were."""

    median: float
    p10: float
    p90: float
    runs: int

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.p10)} to {short(self.p90)}, {self.runs})"

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def figure(values: Sequence[float], scale: float = 1.0) -> Figure:
    ordered = sorted(value * scale for value in values)
    assert ordered, "nothing was measured"
    last = len(ordered) - 1
    return Figure(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered))


def short(value: float) -> str:
    """Three digits that say something."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"
