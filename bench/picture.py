"""The costs of a run as a picture: against the length of the chain, and against the number of agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from .bounds import Results
from .contenders import BARE, SPAWNED
from .plan import Row

COLOURS = {"proxy": "#2563eb", BARE: "#6b7280", SPAWNED: "#b91c1c"}
OTHER = "#d97706"


def draw(rows: Sequence[Row], path: Path) -> None:
    """An SVG that is the same for the same numbers."""
    results = Results(rows)
    mpl.rcParams["svg.hashsalt"] = "bench"
    picture = Picture(figsize=(11, 4), layout="constrained")
    length, rate, cpu = picture.subplots(1, 3)
    _lines(length, results, "turn at the end of a chain", "turns of the chain before it", "ms a turn")
    length.set(xscale="log", yscale="log")
    _lines(rate, results, "turns/s", "agents at once", "turns/s, together")
    _lines(cpu, results, "CPU a turn, with children", "agents at once", "ms of CPU a turn, all processes")
    for axes in (rate, cpu):
        axes.set_ylim(bottom=0)
    picture.savefig(path, metadata={"Date": None})


def _lines(axes: Axes, results: Results, measure: str, x: str, y: str) -> None:
    for name in dict.fromkeys(row.contender for row in results.rows if row.measure == measure):
        rows = sorted(
            (row.at or 0, row.value) for row in results.rows if (row.measure, row.contender) == (measure, name)
        )
        places = [at for at, _ in rows]
        colour = COLOURS.get(name, OTHER)
        axes.fill_between(places, [v.p10 for _, v in rows], [v.p90 for _, v in rows], color=colour, alpha=0.15, lw=0)
        axes.plot(places, [v.median for _, v in rows], "o-", color=colour, label=name, markersize=4)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
