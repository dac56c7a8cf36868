"""The table of a full run: what was broken, what the bare CLI makes of it, what the proxy makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from turnfault import report as benchmark
from turnfault.running import RowResult

from .row import Row
from .score import Score, Thinking

_HEAD = """# What survives a breakage: measured

Each row ran on the real CLI over a scripted upstream: three turns are acknowledged, one thing is broken, one more turn
is sent, and the `messages` array that reaches the model is read. "3/3" = all acknowledged turns are there exactly
once, with their answers, in order. The bare CLI is driven as a script would (`claude -p`, `--resume` of the last id;
a turn that failed is sent again). Prefix = bytes of the request before the breakage that still start the next one ÷
its bytes. For it breakpoints are left out, and a text counts as the list of one text. Cache = of what that request
wrote into the prompt cache, the share that the next one reads: a cache that writes an entry at each breakpoint, and
looks back over 20 blocks from each. Over a change of CLI, system prompt or tools neither can be 1.00.
Made by `make continuity`.

| | broken | bare CLI 2.1 | proxy, CLI 2.1 | prefix | cache | proxy, CLI 1.0 |
|---|---|---|---|---|---|---|
"""
_SERVED = """
## The same from outside

What `cli-session-proxy bench-continuity` does to any server, here to `cli-session-proxy serve`, CLI 2.1.

"""


@dataclass(slots=True)
class Report:
    """Scores by row; a row that did not run is a dash."""

    scores: dict[str, dict[str, Score]] = field(default_factory=dict)
    groups: dict[str, tuple[str, str]] = field(default_factory=dict)
    served: list[RowResult] = field(default_factory=list)  # the rows of `bench-continuity`, on a proxy that is served
    measures: dict[str, dict[str, list[Thinking]]] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)

    def add(self, row: Row, cli: str, bare: bool, score: Score) -> None:
        self.groups[str(row)] = (row.group, row.name)
        self.scores.setdefault(str(row), {})["bare" if bare else cli] = score

    def measure(self, cli: str, found: Thinking) -> None:
        self.measures.setdefault(found.what, {}).setdefault(cli, []).append(found)

    def same_form(self, what: str) -> None:
        """After this, a request was written as that of a CLI to which nothing had happened."""
        self.forms.append(what)

    def write(self, path: Path) -> None:
        served = _SERVED + benchmark.table("cli-session-proxy", self.served) if self.served else ""
        lines = "".join(f"{line}\n" for line in self._lines())
        path.write_text(_HEAD + lines + self._sum() + served, encoding="utf-8")

    def _lines(self) -> list[str]:
        lines = []
        last = ""
        for key, (group, name) in self.groups.items():
            scores = self.scores[key]
            new = scores.get("2.1")
            shares = (None, None) if new is None else (new.prefix, new.cached)
            cells = [_cell(scores.get("bare")), _cell(new), *map(benchmark.share, shares), _cell(scores.get("1.0"))]
            lines.append(f"| {group if group != last else ''} | {name} | {' | '.join(cells)} |")
            last = group
        return lines

    def _sum(self) -> str:
        parts = []
        for name, of in (("bare CLI 2.1", "bare"), ("proxy, CLI 2.1", "2.1"), ("proxy, CLI 1.0", "1.0")):
            scores = [row[of] for row in self.scores.values() if of in row]
            if scores:
                parts.append(f"{name} {sum(score.whole for score in scores)} of {len(scores)}")
        return (
            f"\nRows with every acknowledged turn remembered once, in order: {'; '.join(parts)}.\n" + self._thinking()
        )

    def _thinking(self) -> str:
        lines = []
        for what, by_cli in self.measures.items():
            told = []
            for cli, found in sorted(by_cli.items(), reverse=True):
                kept, of = sum(one.kept for one in found), sum(one.of for one in found)
                prefixes = [one.prefix for one in found if one.prefix is not None]
                prefix = f", prefix {min(prefixes):.2f}" if prefixes else ""
                told.append(f"CLI {cli} {kept / of:.2f} ({kept} of {of}){prefix}")
            lines.append(f"Sealed thinking that is still accepted after {what}: {'; '.join(told)}.\n")
        if self.forms:
            lines.append(
                "Strictly: beside a CLI to which nothing happened, the next request had the same form after "
                f"{', '.join(sorted(self.forms))}: strings and lists of blocks, their types, and the breakpoints.\n"
            )
        return "".join(f"\n{line}" for line in lines)


def _cell(score: Score | None) -> str:
    return "–" if score is None else str(score)
