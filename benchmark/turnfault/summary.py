"""Several runs of several targets, as tables: medians, their spread, and what differed between runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .score import FAULTS

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A target's runs, each as `schema.json` says. `version`: each that was run."""

    name: str
    version: str | None
    note: str | None
    runs: tuple[Run, ...]

    @property
    def share(self) -> float:
        """The median share of its rows that were kept whole."""
        return median(run["whole"] / run["rows_run"] if run["rows_run"] else 0.0 for run in self.runs)


def contenders(runs: Iterable[Run]) -> list[Contender]:
    """By name, the best first: whose median share of whole rows is highest, then who ran more rows."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run["target"], []).append(run)
    found = []
    for name, of in by_name.items():
        of.sort(key=lambda run: run["seed"])
        versions = dict.fromkeys(run["version"] for run in of if run["version"])
        found.append(Contender(name, "; ".join(versions) or None, of[-1]["note"], tuple(of)))
    return sorted(found, key=lambda one: (-one.share, -max(run["rows_run"] for run in one.runs), one.name))


def spread(values: Sequence[float], shown: str = "{:g}") -> str:
    """The median, and the least and the greatest where they differ."""
    if not values:
        return "–"
    middle, least, most = median(values), min(values), max(values)
    text = shown.format(middle)
    ends = (shown.format(least), shown.format(most))
    return text if ends[0] == ends[1] else f"{text} ({ends[0]} to {ends[1]})"


def verdict(row: Run) -> str | None:
    """What became of one row in one run, whatever the number of its turns. None: it was left out."""
    if "left_out" in row:
        return None
    if row["whole"]:
        return "kept"
    if row["refused"] is not None:
        return f"no answer ({row['refused']})"
    found = [
        f"all {name}" if name == "lost" and row[name] >= row["acknowledged"] else f"{row[name]} {name}"
        for name in FAULTS
        if row[name]
    ]
    if row["flattened"]:
        found.append("flattened")
    return ", ".join(found) or "changed"


def cell(rows: Sequence[Run]) -> str:
    """One row of one contender, over its runs: what came of it, most often first, and how often."""
    told = [said for said in map(verdict, rows) if said is not None]
    if not told:
        return "–"
    counted = Counter(told).most_common()
    if len(counted) == 1:
        return counted[0][0]
    return "; ".join(f"{said} {count}×" for said, count in counted)


def table(runs: Iterable[Run]) -> str:
    """Markdown: what each contender kept, then row by row."""
    of = contenders(runs)
    lines = ["| | version | runs | rows kept | of | turns lost | doubled | foreign | kept but flattened | cache |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for one in of:
        ran = [[row for row in run["rows"] if "left_out" not in row] for run in one.runs]
        sums = [spread([sum(row[name] for row in rows) for rows in ran]) for name in ("lost", "doubled", "foreign")]
        flat = [sum(verdict(row) == "flattened" for row in rows) for rows in ran]
        cached = [row["cached"] for rows in ran for row in rows if row["cached"] is not None]
        cells = [
            one.name, one.version or "", str(len(one.runs)), spread([run["whole"] for run in one.runs]),
            spread([run["rows_run"] for run in one.runs]), *sums, spread(flat), spread(cached, "{:.2f}"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| | broken | {' | '.join(one.name for one in of)} |", f"|---|---|{'---|' * len(of)}"]
    last = ""
    for row in _rows(of):
        cells = [cell([found for run in one.runs for found in run["rows"] if found["id"] == row["id"]]) for one in of]
        lines.append(f"| {row['group'] if row['group'] != last else ''} | {row['name']} | {' | '.join(cells)} |")
        last = row["group"]
    return "\n".join([*lines, ""])


def differing(runs: Iterable[Run]) -> list[str]:
    """A line for each row that did not come out the same in all runs of a contender."""
    lines = []
    for one in contenders(runs):
        for row in _rows([one]):
            said = [
                (run["seed"], verdict(found)) for run in one.runs for found in run["rows"] if found["id"] == row["id"]
            ]
            if len({what for _, what in said}) > 1:
                told = "; ".join(f"seed {seed}: {what or 'left out'}" for seed, what in said)
                lines.append(f"{one.name}, {row['group']}: {row['name']}: {told}")
    return lines


def left_out(runs: Iterable[Run]) -> list[str]:
    """Why a contender has dashes, a line for each that has some."""
    lines = []
    for one in contenders(runs):
        why: dict[str, list[str]] = {}
        for row in one.runs[-1]["rows"]:
            if "left_out" in row:
                why.setdefault(row["left_out"], []).append(f"{row['group']}: {row['name']}")
        if why:
            told = ", ".join(f"{reason} ({len(rows)})" for reason, rows in why.items())
            lines.append(f"{one.name}, rows left out: {told}")
    return lines


def _rows(of: Sequence[Contender]) -> list[Run]:
    """Every row that somebody ran, in the order of the runs."""
    seen: dict[str, Run] = {}
    for one in of:
        for run in one.runs:
            for row in run["rows"]:
                seen.setdefault(row["id"], row)
    return list(seen.values())
