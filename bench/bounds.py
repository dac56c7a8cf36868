"""What was promised, as ratios of one run: each with what was measured and whether it holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .again import MANY, MEMORY, PARALLEL, RATE, REST, TOGETHER, WARM, WAYS
from .agents import Crowd
from .contenders import BARE, SPAWNED
from .figures import Figure, short
from .freeze import END, HEALTH, QUIET, TURN
from .hosts import CPU, ONE, POSTGRESQL, TWO
from .page import AGENTS, FIRST, HEAP, LINK, OPEN, WIDE
from .plan import Row
from .servers import CCPROXY
from .turns import CHUNKS


@dataclass(frozen=True)
class Bound:
    """`met` is None where it was not measured in this run."""

    measure: str
    wanted: str
    found: str
    met: bool | None


class Results:
    """The rows of a run, by measure, contender and what they were measured at."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._figures = {(row.measure, row.contender, row.at): row.value for row in rows}

    def get(self, measure: str, contender: str, at: int | None = None) -> Figure | None:
        return self._figures.get((measure, contender, at))

    def median(self, measure: str, contender: str, at: int | None = None) -> float | None:
        found = self.get(measure, contender, at)
        return None if found is None else found.median

    def ratio(self, measure: str, one: str, other: str, at: int | None = None) -> float | None:
        return _over(self.median(measure, one, at), self.median(measure, other, at))

    def places(self, measure: str) -> list[int]:
        return sorted({row.at for row in self.rows if row.measure == measure and row.at is not None})


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def bounds(results: Results, crowd: Crowd | None) -> list[Bound]:
    return [
        *_turns(results), *_again(results), *_servers(results), *_chains(results), *_page(results), *_crowd(crowd),
    ]  # fmt: skip


def _turns(results: Results) -> Iterator[Bound]:
    yield _at_most("warm turn, proxy ÷ bare warm CLI", results.ratio("turn", "proxy", BARE), 1.2)
    yield _at_most("warm turn, proxy on PostgreSQL ÷ bare warm CLI", results.ratio("turn", POSTGRESQL, BARE), 1.35)
    added = results.median("first token added by the proxy", "proxy")
    yield _at_most("time to first token added by the proxy", added, 5, " ms")
    without, control = results.median("turn without parameters", "proxy"), results.median("control round trip", BARE)
    other = results.median("turn with other parameters", "proxy")
    together = None if without is None or control is None else without + control
    yield _at_most("turn with other parameters ÷ one without and a control round trip", _over(other, together), 1.1)
    told, bare = results.median("turn with other parameters", BARE), results.median("turn without parameters", BARE)
    alone = None if without is None or told is None or bare is None else without + told - bare
    yield _at_most("turn with other parameters ÷ one without and what they cost the bare CLI", _over(other, alone), 1.1)
    yield _at_least("warm turn, a spawn a turn ÷ proxy", results.ratio("turn", SPAWNED, "proxy"), 8)
    cpu = results.median(f"own CPU, answer of {CHUNKS:,} chunks", "proxy")
    yield _at_most(f"the proxy's CPU, answer of {CHUNKS:,} chunks", cpu, 60, " ms")
    first = _over(
        results.median("first turn of a new agent", "proxy"), results.median("first turn of a new agent", BARE)
    )
    yield _at_most("first turn of a new agent, proxy ÷ bare cold spawn", first, 0.6)


def _again(results: Results) -> Iterator[Bound]:
    warm, edited, after = (results.median(way, "proxy") for way in WAYS)
    yield _at_most("edited message ÷ warm turn", _over(edited, warm), 1.5)
    yield _at_most("turn after a failed one ÷ warm turn", _over(after, warm), 1.5)
    yield _at_least("one-shots/s ÷ warm turns/s, four at once", results.ratio(RATE, "proxy", WARM, 4), 0.5)
    yield _at_least("one-shots/s ÷ a CLI for each", results.ratio(RATE, "proxy", SPAWNED, 4), 5)
    yield _at_most(f"{PARALLEL} one-shots at once, median", results.median(TOGETHER, "proxy"), 1.5, " s")
    memory = results.ratio(MEMORY, "proxy", REST, MANY)
    yield _at_most(f"memory after {MANY} one-shots ÷ max_processes at rest", memory, 1.0)


def _servers(results: Results) -> Iterator[Bound]:
    """With many agents, at rest, and the worst of all attacks."""
    yield _at_least("turns/s, 8 agents, proxy ÷ bare warm CLIs", results.ratio("turns/s", "proxy", BARE, 8), 0.85)
    yield _at_least("turns/s, 8 agents, proxy ÷ ccproxy", results.ratio("turns/s", "proxy", CCPROXY, 8), 1.2)
    memory = results.ratio("peak memory, with children", "proxy", CCPROXY, 8)
    yield _at_most("peak memory with children, 8 agents, proxy ÷ ccproxy", memory, 1.0)
    (agents,) = results.places(CPU) or [16]
    two = results.ratio(CPU, TWO, ONE, agents)
    yield _at_most(f"CPU of a turn on PostgreSQL, {agents} agents a host, two hosts ÷ one", two, 1.1)
    yield _at_most("serve ready", results.median("ready", "proxy"), 1.0, " s")
    yield _at_most("RSS without children", results.median("RSS without children", "proxy"), 90, " MB")
    for measure, limit, unit in ((HEALTH, 1000, " ms"), (TURN, 5000, " ms"), (END, 5, " s")):
        worst = [row.value.p90 for row in results.rows if row.measure == measure and row.contender != QUIET]
        yield _at_most(f"{measure}, under any attack", max(worst) if worst else None, limit, unit)


def _chains(results: Results) -> Iterator[Bound]:
    lengths = results.places("the proxy's share of it") or [0]
    for measure, said in (("the proxy's share of it", "share of a turn"), ("the proxy's CPU for it", "CPU for a turn")):
        values = [results.median(measure, "proxy", length) for length in (lengths[-1], lengths[0])]
        name = f"the proxy's {said}, {lengths[-1]:,} turns ÷ {lengths[0]:,}"
        yield _at_most(name, _over(*values) if len(lengths) > 1 else None, 1.2)
    for name in ("json", "markdown", "mermaid", "html"):
        yield _at_most(f"dump of 20,000 turns as {name}", results.median("dump", name), 2, " s")
        memory = results.get("dump, memory above idle", name)
        yield _at_most(f"its memory above idle, {name}", None if memory is None else memory.p90, 60, " MB")


def _page(results: Results) -> Iterator[Bound]:
    found = {row.measure: row for row in results.rows}
    for name, limit, unit in ((OPEN, 300, " ms"), (FIRST, 300, " ms"), (LINK, 300, " ms"), (AGENTS, 500, " ms"),
                              (HEAP, 100, " MB"), (WIDE, 2000, " ms")):  # fmt: skip
        row = found.get(name)
        many = "" if row is None else f", {row.at:,}"
        yield _at_most(f"{name}{many}", None if row is None else row.value.median, limit, unit)


def _crowd(crowd: Crowd | None) -> Iterator[Bound]:
    name = "agents on few processes" if crowd is None else f"{crowd.agents} agents, {crowd.turns} turns each"
    if crowd is None:
        yield Bound(name, "all answered, all remembered", "", None)
        return
    asked = crowd.agents * crowd.turns
    found = f"{crowd.answered} of {asked} answered, {crowd.forgotten} forgotten"
    met = crowd.answered == asked and not crowd.forgotten
    yield Bound(name, "all answered, all remembered", found, met)
    for what, most, limit in (
        ("its CLIs at most", crowd.most_by_metric, crowd.budget),
        ("its children at most", crowd.most_children, crowd.budget + 1),  # one more may be ending
    ):
        yield Bound(what, f"≤ {limit}", str(most), most <= limit)
    yield Bound("its orphans", "0", str(crowd.orphans), not crowd.orphans)


def _at_most(measure: str, value: float | None, limit: float, unit: str = "") -> Bound:
    return _bound(measure, value, limit, unit, "≤", operator.le)


def _at_least(measure: str, value: float | None, limit: float, unit: str = "") -> Bound:
    return _bound(measure, value, limit, unit, "≥", operator.ge)


def _bound(
    measure: str, value: float | None, limit: float, unit: str, sign: str, holds: Callable[[float, float], bool]
) -> Bound:
    wanted = f"{sign} {limit:g}{unit}"
    if value is None:
        return Bound(measure, wanted, "", None)
    return Bound(measure, wanted, f"{short(value)}{unit}", holds(value, limit))
