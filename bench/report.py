"""A run as tables, as JSON, and as a page of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .agents import Crowd
from .bounds import Bound, Results, bounds
from .plan import Row

PAGE = "bench.md"
PICTURE = "bench.svg"
_SAYS = {True: "met", False: "**not met**", None: "not measured"}


@dataclass(frozen=True)
class Run:
    """`about` is the machine and the versions, `seconds` how long each scenario took."""

    about: Mapping[str, str | int]
    rows: Sequence[Row]
    crowd: Crowd | None
    seconds: Mapping[str, float]

    def bounds(self) -> list[Bound]:
        return bounds(Results(self.rows), self.crowd)


def as_json(run: Run) -> dict[str, Any]:
    return {
        "about": dict(run.about),
        "bounds": [asdict(bound) for bound in run.bounds()],
        "rows": [{**asdict(row), "value": row.value.as_json()} for row in run.rows],
        "crowd": None if run.crowd is None else asdict(run.crowd),
        "seconds": {name: round(value, 1) for name, value in run.seconds.items()},
    }


def tables(run: Run) -> Iterator[str]:
    """The bounds, then everything, as Markdown."""
    yield from _table(
        ("measure", "bound", "found", ""),
        [(bound.measure, bound.wanted, bound.found, _SAYS[bound.met]) for bound in run.bounds()],
    )
    yield ""
    rows = [
        (row.measure, "" if row.at is None else f"{row.at:,}", row.contender, f"{row.value} {row.unit}")
        for row in run.rows
    ]
    yield from _table(("measure", "at", "contender", "median (p10 to p90, runs)"), rows)
    if run.crowd is not None:
        yield ""
        yield from _table(("crowd", ""), [(name.replace("_", " "), str(v)) for name, v in asdict(run.crowd).items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def write(run: Run, json_file: Path | None, docs: Path | None) -> None:
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_json(run), indent=1) + "\n")
    if docs is not None:
        _write_page(run, docs / PAGE)


def _write_page(run: Run, page: Path) -> None:
    """Everything after the mark is written anew; the words before it are kept."""
    words, mark, _ = page.read_text().partition("<!-- written by `make bench` -->\n")
    assert mark, f"{page} has no place for the tables"
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run.about.items())
    page.write_text(f"{words}{mark}\n{facts}\n\n" + "\n".join(tables(run)) + "\n")
