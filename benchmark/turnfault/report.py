"""What one run measured, as a table, JSON, traces, a badge and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any
from xml.sax.saxutils import escape

from .running import RowResult
from .score import FAULTS

SCHEMA = "turnfault/results/1"
WHOLE, FLAT, BROKEN, LEFT_OUT = "#2da44e", "#d4a72c", "#cf222e", "#8c959f"
# Pixels of the picture: a row, where the squares begin, and one square.
LINE, LEFT, SQUARE = 20, 300, 14


def kept(results: Sequence[RowResult]) -> tuple[int, int]:
    """How many rows kept every acknowledged turn once and in order, of how many that ran."""
    ran = [result.score for result in results if result.score is not None]
    return sum(score.whole for score in ran), len(ran)


@dataclass(frozen=True, slots=True)
class About:
    """Which run: of this target, in this version where it is known, by this seed. `note`: what to know of it."""

    target: str
    seed: int
    version: str | None = None
    note: str | None = None


def as_json(about: About, results: Sequence[RowResult]) -> dict[str, Any]:
    """As `schema.json` says."""
    whole, ran = kept(results)
    rows: list[dict[str, Any]] = []
    for result in results:
        row: dict[str, Any] = {"id": result.row.id, "group": result.row.group, "name": result.row.name}
        if result.score is None:
            rows.append({**row, "left_out": result.why})
            continue
        score = result.score
        counts = {name: getattr(score, name) for name in ("acknowledged", "remembered", *FAULTS, "flattened")}
        measured = {"prefix": score.prefix, "cached": score.cached, "refused": score.refused, "calls": result.calls}
        rows.append({**row, "whole": score.whole, **counts, **measured, "seconds": round(result.seconds, 2)})
    made_by = {"name": "turnfault", "version": metadata.version("turnfault")}
    machine = {"system": platform.platform(), "python": platform.python_version(), "processors": os.cpu_count()}
    return {
        "schema": SCHEMA, "made_by": made_by, "machine": machine, **asdict(about), "whole": whole, "rows_run": ran,
        "rows": rows,
    }  # fmt: skip


def as_text(about: About, results: Sequence[RowResult]) -> str:
    """JSON, a line for each row."""
    data = as_json(about, results)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in data.pop("rows"))
    head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "rows": [\n{rows}\n]}}\n'


def traces(results: Sequence[RowResult]) -> str:
    """JSON lines, a row each."""
    lines = (json.dumps({"id": one.row.id, "events": one.trace}, ensure_ascii=False) for one in results if one.score)
    return "".join(f"{line}\n" for line in lines)


def table(target: str, results: Sequence[RowResult]) -> str:
    """Markdown."""
    whole, ran = kept(results)
    lines = [
        f"{target}: {whole} of {ran} rows kept every acknowledged turn once and in order.",
        "",
        "| | broken | kept | prefix | cache | calls | s |",
        "|---|---|---|---|---|---|---|",
    ]
    last = ""
    for result in results:
        group = result.row.group if result.row.group != last else ""
        last = result.row.group
        if result.score is None:
            lines.append(f"| {group} | {result.row.name} | – ({result.why}) | | | | |")
            continue
        shares = [share(result.score.prefix), share(result.score.cached)]
        cells = [group, result.row.name, str(result.score), *shares, str(result.calls), f"{result.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def share(measured: float | None) -> str:
    return "–" if measured is None else f"{measured:.2f}"


def badge(results: Sequence[RowResult]) -> str:
    """SVG, as badges are: two words side by side."""
    whole, ran = kept(results)
    colour = WHOLE if whole == ran else FLAT if whole * 2 >= ran else BROKEN
    text = f"{whole}/{ran}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="130" height="20" role="img" '
        f'aria-label="continuity: {text}"><rect width="76" height="20" fill="#555"/>'
        f'<rect x="76" width="54" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="38" y="14">continuity</text><text x="103" y="14">{text}</text></g></svg>\n'
    )


def picture(target: str, results: Sequence[RowResult]) -> str:
    """SVG: a line for each row, a square for each acknowledged turn, in the colour of what became of it."""
    height = LINE * (len(results) + 2)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="640" height="{height}" fill="#fff"/>',
        f'<text x="8" y="{LINE - 5}" font-weight="bold">{escape(target)}</text>',
    ]
    for at, result in enumerate(results, 1):
        y = LINE * at
        drawn.append(f'<text x="8" y="{y + LINE - 5}">{escape(str(result.row))}</text>')
        if result.score is None:
            drawn.append(f'<text x="{LEFT}" y="{y + LINE - 5}" fill="{LEFT_OUT}">{escape(result.why)}</text>')
            continue
        score = result.score
        colours = [WHOLE] * score.remembered + [FLAT] * score.flattened
        colours += [BROKEN] * max(0, score.acknowledged - len(colours)) + [BROKEN] * score.foreign
        for number, colour in enumerate(colours):
            x = LEFT + number * (SQUARE + 3)
            drawn.append(f'<rect x="{x}" y="{y + 3}" width="{SQUARE}" height="{SQUARE}" fill="{colour}"/>')
        after = LEFT + (len(colours) + 1) * (SQUARE + 3)
        drawn.append(f'<text x="{after}" y="{y + LINE - 5}">{escape(str(score))}</text>')
    return "\n".join([*drawn, "</svg>", ""])
