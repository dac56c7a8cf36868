"""What a turn takes of PostgreSQL and of the processor, as docs/capacity.md tells it: counts, bytes, processor time.

    python -m bench.capacity [--turns 200] [--rest 20] [--starts 20] [--json FILE]

One proxy on a PostgreSQL of its own with 8 warm agents, then one whose agents never find a process of their own. None
of it is a time by the clock, so that most of it holds on a machine that has more to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
from psycopg import sql

from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from tests.postgres import Postgres, server

from . import machine
from .contenders import Place, bundled
from .figures import short
from .servers import HTTPServer, start_proxy
from .upstream import upstream_process

AGENTS = 8
# Bytes of a question, of drawn words: some often and most seldom, as in prose.
SHORT, LONG = 100, 4100
WORDS = 5000


class Look:
    """What the server has done so far. Its log holds a line for each statement."""

    def __init__(self, postgres: Postgres, url: str) -> None:
        lines = (postgres.folder / "log").read_text().splitlines()
        self.statements = sum("LOG:  statement: " in line or "LOG:  execute " in line for line in lines)
        self.transactions = sum(": BEGIN" in line for line in lines)
        self.flushes = sum("'synchronous_commit', 'on'" in line for line in lines)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("VACUUM")
            tables = [name for (name,) in conn.execute("SELECT relname FROM pg_stat_user_tables ORDER BY relname")]
            one = sql.SQL("SELECT count(*), pg_total_relation_size({}) FROM {}")
            found = {
                name: conn.execute(one.format(sql.Literal(name), sql.Identifier(name))).fetchone() for name in tables
            }
            log = conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
            busy = conn.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        assert log is not None
        assert busy is not None
        self.log_bytes = int(log[0])
        self.connections = int(busy[0])
        self.rows = {name: int(value[0]) for name, value in found.items() if value is not None}
        self.bytes = {name: int(value[1]) for name, value in found.items() if value is not None}


async def measure(turns: int, rest: float, starts: int) -> dict[str, float]:
    """The figures by name, each with its unit in it. `rest`: seconds in which nobody asks; `starts`: turns that start
    their process."""
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        server(
            "-c", "shared_buffers=128MB", "-c", "log_statement=all", "-c", "autovacuum=off", memory=False
        ) as postgres,
    ):
        async with upstream_process() as upstream:
            place = Place(bundled(), upstream, Path(folder), machine.cores())
            url = postgres.new_url()
            proxy = await start_proxy(place.beside("warm"), store=url)
            try:
                await _rounds(proxy, 2 * AGENTS, SHORT)
                found |= await _resting(proxy, postgres, url, rest)
                for length in (SHORT, LONG):
                    before = await asyncio.to_thread(Look, postgres, url)
                    await _rounds(proxy, turns, length)
                    after = await asyncio.to_thread(Look, postgres, url)
                    found |= _per_turn(before, after, turns, f"question of {length} bytes")
                found["connections of a proxy"] = after.connections
                found["PostgreSQL's memory with one proxy, MB"] = machine.shared_memory_mb([postgres.pid])
                found |= await _indexed(postgres, url, turns)
            finally:
                await proxy.close()
            found |= await _cold(place, postgres.new_url(), starts)
    return found


async def _rounds(proxy: HTTPServer, turns: int, length: int) -> None:
    """So many turns, of all agents in turn, with questions of that length."""
    drawn = random.Random(length)
    words = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 1) for rank in range(WORDS)]
    for n in range(turns):
        text = " ".join(drawn.choices(words, weights, k=length))[:length]
        await proxy.turn(f"agent-{n % AGENTS}", text, stream=False)


async def _resting(proxy: HTTPServer, postgres: Postgres, url: str, rest: float) -> dict[str, float]:
    """What goes on without a request: of the proxy in the store, and of it and its warm processes on the processor."""
    before = await asyncio.to_thread(Look, postgres, url)
    own = sum(map(machine.own_cpu_seconds, proxy.pids()))
    started = [pid for pid in machine.tree(proxy.pids()) if pid not in proxy.pids()]
    theirs = sum(map(machine.own_cpu_seconds, started))
    await asyncio.sleep(rest)
    own = sum(map(machine.own_cpu_seconds, proxy.pids())) - own
    theirs = sum(map(machine.own_cpu_seconds, started)) - theirs
    after = await asyncio.to_thread(Look, postgres, url)
    # What a look asks itself: VACUUM, the tables, each of them, two more.
    asked = len(before.rows) + 4
    return {
        "statements a second of a proxy at rest": (after.statements - before.statements - asked) / rest,
        "log bytes a second of a proxy at rest": (after.log_bytes - before.log_bytes) / rest,
        "CPU of a proxy at rest, ms a second": own / rest * 1000,
        f"CPU of what it started, with {AGENTS} warm processes and a spare at rest, ms a second": theirs / rest * 1000,
    }


def _per_turn(before: Look, after: Look, turns: int, what: str) -> dict[str, float]:
    def each(of: Callable[[Look], float]) -> float:
        return (of(after) - of(before)) / turns

    found = {
        f"statements a turn, {what}": each(lambda look: look.statements),
        f"transactions a turn, {what}": each(lambda look: look.transactions),
        f"of them acknowledged by the disk, {what}": each(lambda look: look.flushes),
        f"log bytes a turn, {what}": each(lambda look: look.log_bytes),
        f"rows a turn, {what}": each(lambda look: sum(look.rows.values())),
        f"bytes a turn with indexes, {what}": each(lambda look: sum(look.bytes.values())),
    }
    for name in after.rows:
        if after.rows[name] > before.rows[name]:
            found[f"rows of {name} a turn, {what}"] = (after.rows[name] - before.rows[name]) / turns
    return found


async def _indexed(postgres: Postgres, url: str, turns: int) -> dict[str, float]:
    """What search adds, which who searches first has made."""
    before = await asyncio.to_thread(Look, postgres, url)
    store = PostgresqlStore(url)
    await store.open()
    try:
        await store.index(3600.0)
    finally:
        await store.close()
    after = await asyncio.to_thread(Look, postgres, url)
    grown = sum(after.bytes.values()) - sum(before.bytes.values())
    return {f"bytes of search a turn, questions of {SHORT} and {LONG} bytes by halves": grown / (2 * turns)}


async def _cold(place: Place, url: str, turns: int) -> dict[str, float]:
    """The processor time of a turn that has to start its process, and of one that has it."""
    proxy = await start_proxy(place.beside("cold"), store=url, max_processes=1, spares=0)
    try:
        for name in ("one", "two"):
            await proxy.turn(name, "hello", stream=False)
        began = proxy.cpu_seconds()
        for n in range(turns):
            await proxy.turn("two" if n % 2 else "one", "and again", stream=False)
        cold = (proxy.cpu_seconds() - began) / turns
        began = proxy.cpu_seconds()
        for _ in range(turns):
            await proxy.turn("two", "and again", stream=False)
        warm = (proxy.cpu_seconds() - began) / turns
    finally:
        await proxy.close()
    return {
        "CPU of a turn that starts its process, ms": cold * 1000,
        "CPU of a warm turn, one at a time, ms": warm * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds in which nobody asks")
    parser.add_argument("--starts", type=int, default=20, help="turns that start their process")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measure(given.turns, given.rest, given.starts))
    print("| | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {short(value)} |")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
