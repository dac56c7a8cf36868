"""How much is measured: the whole, a quick look, or so little that it only shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .contenders import BareCLI, Place
from .figures import Figure
from .servers import HTTPServer, start_ccproxy, start_proxy


@dataclass(frozen=True)
class Plan:
    """Counts, and seconds where it says so. `round_turns`: timed ones in each of the `rounds`, with new processes.
    `crowd`: agents, turns of each, budget of processes."""

    rounds: int
    round_turns: int
    turns: int
    spawns: int
    agents: tuple[int, ...]
    windows: int
    window: float
    repeats: int
    starts: int
    newcomers: int
    pause: float
    answers: int
    lengths: tuple[int, ...]
    chain_turns: int
    dump_turns: int
    dumps: int
    crowd: tuple[int, int, int]
    host_agents: int
    attacks: int
    page_agents: int
    warm_up: int = 10


FULL = Plan(
    rounds=6, round_turns=24, turns=80, spawns=12, agents=(1, 8, 32), windows=3, window=2.5, repeats=2, starts=7,
    newcomers=12, pause=3.6, answers=15, lengths=(10, 500, 5000), chain_turns=40, dump_turns=20_000, dumps=3,
    crowd=(200, 5, 12), attacks=99, page_agents=5000, host_agents=16,
)  # fmt: skip
QUICK = Plan(
    rounds=2, round_turns=10, turns=20, spawns=4, agents=(1, 8), windows=2, window=1.5, repeats=1, starts=2,
    newcomers=4, pause=3.6, answers=4, lengths=(10, 1000), chain_turns=10, dump_turns=20_000, dumps=1,
    crowd=(24, 3, 6), attacks=99, page_agents=5000, host_agents=8,
)  # fmt: skip
TINY = Plan(
    rounds=1, round_turns=2, turns=2, spawns=1, agents=(2,), windows=1, window=0.3, repeats=1, starts=1,
    newcomers=1, pause=0.0, answers=1, lengths=(2,), chain_turns=2, dump_turns=30, dumps=1, crowd=(3, 2, 2), attacks=1,
    page_agents=3, host_agents=1, warm_up=1,
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """What every scenario stands on. `ccproxy` is its program; None leaves it out."""

    plan: Plan
    place: Place
    ccproxy: Path | None

    def warm_cli(self, folder: str) -> BareCLI:
        return BareCLI(self.place.beside(folder), warm=True)

    def spawned_cli(self, folder: str) -> BareCLI:
        return BareCLI(self.place.beside(folder), warm=False)

    async def proxy(self, folder: str, **options: str | int) -> HTTPServer:
        return await start_proxy(self.place.beside(folder), **options)

    async def peer(self, folder: str) -> HTTPServer | None:
        return None if self.ccproxy is None else await start_ccproxy(self.place.beside(folder), self.ccproxy)


@dataclass(frozen=True)
class Row:
    """One measure of one contender. `at` is what it was measured at (agents, turns of the chain), where that varies."""

    measure: str
    contender: str
    unit: str
    value: Figure
    at: int | None = None
