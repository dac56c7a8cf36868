"""How long it takes to find what a history continues, over 10, 1,000 and 100,000 stored turns.

    python -m bench.matching [--json FILE] [--rounds N]

The time is the proxy's own (`Placement.match` on a SQLite store on disk: hashing and look-up), by the clock and of
the processor, for histories of 2,000 messages and less, found and not found. In the case `opening` every stored
conversation begins with the same words and the same answer, and the history is that opening.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from cli_session_proxy.aside.pool import Aside
from cli_session_proxy.backends.base import Backend
from cli_session_proxy.domain import lineage
from cli_session_proxy.domain.models import Message, Turn, TurnRequest
from cli_session_proxy.engine.placement import Placement
from cli_session_proxy.stores.base import Store, WholeTurn
from cli_session_proxy.stores.sqlite.store import SqliteStore

STORED = (10, 1_000, 100_000)
LONG = 2_000  # messages of the long history
BOUND_MS = 5.0
PER_CHAIN = 5  # turns of each stored conversation
BATCH = 5_000
OPENING = (Message.user("hello"), Message.assistant("Hello! How can I help?"))


def history(name: str, messages: int) -> list[Message]:
    """Alternating messages of about 300 characters, and the new one."""
    words = "the quick brown fox jumps over the lazy dog, and " * 6
    said = [(Message.assistant if n % 2 else Message.user)(f"{name} {n}: {words}") for n in range(messages)]
    return [*said, Message.user("and now?")]


def imported(agent_key: int, name: str, messages: Sequence[Message], opened: str | None = None) -> list[WholeTurn]:
    turns: list[WholeTurn] = []
    path_hash = opened
    for n, exchange in enumerate(lineage.past(messages)):
        path_hash = lineage.path_hash(path_hash, exchange.input, exchange.output)
        parent = turns[-1].turn.id if turns else None
        turn = Turn(
            f"turn_{name}_{n}", 0, agent_key, parent, "completed", "m", exchange.input, 0.0, output=exchange.output,
            delivery="delivered", origin="imported", path_hash=path_hash, depth=n + 1, finished_at=0.0,
        )  # fmt: skip
        turns.append(WholeTurn(turn, ()))
    return turns


async def fill(store: Store, turns: int) -> None:
    """Other conversations with one opening, up to this many turns in all."""
    batch: list[WholeTurn] = []
    for number in range(turns // PER_CHAIN):
        agent = await store.ensure_agent("local", f"auto_{number}", f"d{number}", named=False, now=0.0)
        more = [Message.user(f"I am {number}"), Message.assistant("Noted.")] * (PER_CHAIN - 1)
        batch += imported(agent.key, str(number), [*OPENING, *more])
        if len(batch) >= BATCH:
            await store.import_turns(batch)
            batch = []
    await store.import_turns(batch)


@asynccontextmanager
async def filled(turns: int) -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "chains.sqlite3")
        await store.open()
        try:
            await fill(store, turns)
            agent = await store.ensure_agent("local", "auto_long", "long", named=False, now=0.0)
            await store.import_turns(imported(agent.key, "long", history("long", LONG)[:-1]))
            yield store
        finally:
            await store.close()


def cases() -> Iterator[tuple[str, list[Message]]]:
    long = history("long", LONG)
    yield f"{LONG} messages, all known", long
    yield f"{LONG} messages, the last 10 edited", [*long[: LONG - 10], *history("edited", 10)]
    yield f"{LONG} messages, none known", history("unknown", LONG)
    yield "20 messages, all known", [*long[:20], Message.user("and now?")]
    yield "opening shared by all", [*OPENING, Message.user("and now?")]


async def measure(placement: Placement, messages: Sequence[Message], rounds: int) -> dict[str, float]:
    """Milliseconds: best and median by the clock, median of the processor's (all threads)."""
    request = TurnRequest(model="m", messages=tuple(messages), fingerprint="f")
    await placement.match(request.owner, request.messages, None)  # compiles the statements
    clock, cpu = [], []
    for _ in range(rounds):
        before = time.perf_counter(), time.process_time()
        await placement.match(request.owner, request.messages, None)
        clock.append((time.perf_counter() - before[0]) * 1000)
        cpu.append((time.process_time() - before[1]) * 1000)
    figures = {"best_ms": min(clock), "median_ms": statistics.median(clock), "cpu_ms": statistics.median(cpu)}
    return {name: round(value, 2) for name, value in figures.items()}


async def _never(_of: object) -> bool:
    """What `Placement` asks of a turn's clients, and of the proxy that has it; here there are no others."""
    return False


async def run(rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for stored in STORED:
        async with filled(stored) as store:
            aside = Aside()
            placement = Placement(
                store,
                cast(Backend, None),
                aside,
                instance="p",
                idempotency_hours=24.0,
                is_gone=_never,
                was_left=_never,
                clock=time.time,
            )  # placing a turn needs no backend
            for name, messages in cases():
                rows.append({"stored_turns": stored, "case": name, **await measure(placement, messages, rounds)})
            await aside.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows = asyncio.run(run(options.rounds))
    print(f"| stored turns | history | best ms | median ms | CPU ms |\n|{'---|' * 5}")
    for row in rows:
        figures = " | ".join(f"{row[name]:.2f}" for name in ("best_ms", "median_ms", "cpu_ms"))
        print(f"| {row['stored_turns']:,} | {row['case']} | {figures} |")
    slow = [row for row in rows if row["best_ms"] > BOUND_MS]  # the median is the neighbours' work as well
    if options.json:
        options.json.write_text(json.dumps({"bound_ms": BOUND_MS, "rows": rows}, indent=1) + "\n")
    if slow:
        raise SystemExit(f"\n{len(slow)} case(s) over {BOUND_MS} ms")


if __name__ == "__main__":
    main()
