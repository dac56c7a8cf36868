"""The table of the drift: what was changed, and how the turns of that life ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from .life import Step
from .tomorrow import CHANGES, VERSION

DRIFT = "drift"

_HEAD = """# A CLI of tomorrow: measured

The CLI is updated often, while people use it. Here a wrapper replaces the real one: it changes one thing in the
CLI's input or output, and calls itself {version}. Each row is a series of turns. The first runs on the real CLI. On
the changed one run a plain turn, a stream, an image, parameters, another system prompt, a call of the client's tool
with its result, and a new agent whose first turn is cancelled in the middle; then all transcripts are deleted, and
the proxy restarts. At last the real CLI is back. "Right" turns had the right answer, and their request held every
acknowledged turn once, in order. A "refused" turn ended in an error that names the CLI's version and binary; nothing
of it reached a later request. "Slowest" is the longest wait of a client for either. "Faults" are wrong answers,
vague errors, and acknowledged turns that a request did not hold. Settings are the defaults of `serve`.
Made by `make drift`, which fails if a turn is neither right nor refused with such an error, takes too long, or is lost.

| changed | right | refused | slowest | faults | the first refusal |
|---|---|---|---|---|---|
"""


class Row(TypedDict):
    change: str
    right: int
    refused: int
    slowest: float
    faults: list[str]
    error: str


def row(change: str, steps: Sequence[Step], folder: Path) -> Row:
    errors = [step.error for step in steps if step.error is not None]
    return {
        "change": change,
        "right": sum(step.error is None and step.fault is None for step in steps),
        "refused": len(errors),
        "slowest": max(step.seconds for step in steps),
        "faults": [f"{step.name}: {step.fault}" for step in steps if step.fault is not None],
        "error": errors[0].replace(str(folder), "…").replace(str(folder.parent), "…") if errors else "",
    }


def write(path: Path, rows: Mapping[str, Row]) -> None:
    order = [name for name in CHANGES if name in rows] + [name for name in rows if name not in CHANGES]
    lines = []
    for name in order:
        one = rows[name]
        lost = "–" if not one["faults"] else "; ".join(one["faults"])
        cells = [name, str(one["right"]), str(one["refused"]), f"{one['slowest']:.1f} s", lost, one["error"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n")
    whole = sum(not one["faults"] for one in rows.values())
    machine = f"{os.cpu_count()} cores, whose load was {os.getloadavg()[2]:.0f} at the end"
    end = f"\nRows without a fault: {whole} of {len(rows)}. Run on {machine}.\n"
    path.write_text(_HEAD.format(version=VERSION) + "".join(lines) + end, encoding="utf-8")
