"""The table of the versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .life import TURNS, Found

_HEAD = f"""# Every CLI that people have: measured

One agent's life of {TURNS} turns on each version from npm: plain and streamed turns, an image, four turns at once,
all transcripts deleted, a stream that the provider cuts, a restart of the proxy. "Whole" counts the answered turns
whose request to the model held every turn that was acknowledged before, once, in order. "Prefix" is the smallest share
that any request kept of the one before it, and in which turn; at 1.00 the prompt cache holds. The provider is scripted.
Tried: every 20th version since 1.0.60, and the last ten. Made by `make versions`.

Where the prefix is below 1.00 the CLI itself changes its request (checked on two). 2.1.119 writes a hash of each
request into a billing line of its system prompt (`cch=…`); all messages are the same. 2.1.235 adds a count of tokens
left to the newest message, and leaves it out after a restart. 1.0.120 puts reminders of its own into the
newest message. All acknowledged messages are there in each of them.

| version | answered | whole | prefix | seconds | what its clients were told | faults |
|---|---|---|---|---|---|---|
"""


def write(path: Path, every: Sequence[Found]) -> None:
    lines = []
    for one in every:
        told = "; ".join(one.errors) or "–"
        cells = [
            one.version, f"{one.answered}/{TURNS}", f"{one.whole}/{one.answered}",
            f"{one.prefix:.2f}" + (f" ({one.least_at})" if one.least_at else ""),
            f"{one.seconds:.0f}", told, "; ".join(one.faults) or "–",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n")
    sound = sum(one.sound for one in every)
    path.write_text(
        _HEAD + "".join(lines) + f"\nVersions without a fault: {sound} of {len(every)}.\n", encoding="utf-8"
    )
