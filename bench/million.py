"""What a turn costs the store in PostgreSQL over 10,000 stored turns and over a million: nothing may grow.

    PYTHONPATH=store_conformance python -m bench.million [--turns 10000,1000000] [--active 50] [--rounds N]
                                                        [--only warm_turn,…] [--json FILE]

On a server of its own, started for this run. The rows are made by SQL, 100 turns an agent, each a copy of one that the
store has written itself. Medians in ms of 50 active agents, each beside that of the fewest turns:

    warm turn       all that the store does in one: arrival, accept with the state of the agent, begin, commit, delivery
    match           what a history of 20 exchanges continues
    opening         the same of one exchange, with which every agent began
    list of agents  the page's first look at the agents
    chain           one page of an agent's turns
    sums            500 turns of the overview
    search          is told, and not bounded
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from sqlalchemy import Connection, Table, select

from cli_session_proxy.domain.models import Agent, Link, Placed, Record
from cli_session_proxy.domain.searching import Search
from cli_session_proxy.stores.base import Lease, Proxy
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.stores.sql.tables import agents, frames, leases, links, records, sessions, turns
from cli_session_proxy_store_conformance.samples import a_begin, a_commit, a_turn, an_agent, complete
from tests.postgres import server

PER_AGENT = 100
# The keys of copied rows begin behind this one.
BEHIND = 1000
# Where the keys begin that the store gives itself.
AHEAD = 10**9
BOUND = 1.2
# What every agent begins with.
SHARED = "opening"
CASES = ("warm_turn", "match", "opening", "list_of_agents", "chain", "sums", "search")
# Agents that are talked to while all others rest: what is asked of them is in the server's memory after a while.
ACTIVE = 50
HOLDER = Proxy("bench", "here", 3600.0)
# Turns that are made in one statement.
BATCH = 100_000
# What of a copied row is its own. `g` is the number of the turn, from 1, `a` that of its agent, `n` how many turns of
# the agent are before it, `m` how many agents there are: their turns come in by turns, as they do from many clients.
_TURN = {
    "seq": f"g + {BEHIND}", "id": "'turn_' || md5(g::text)", "agent_key": f"a + {BEHIND}",
    "parent_id": "CASE WHEN n = 0 THEN NULL ELSE 'turn_' || md5((g - m)::text) END",
    "session_id": "md5(a::text)::uuid::text", "fingerprint": "md5('f' || g)", "frame_uuid": "md5('u' || g)::uuid::text",
    "path_hash": f"CASE WHEN n = 0 THEN '{SHARED}' ELSE md5('p' || g) END", "depth": "n + 1",
    "created_at": "1.7e9 + g", "finished_at": "1.7e9 + g", "started_at": "1.7e9 + g", "delivery": "'delivered'",
    "input": """'[{"role":"user","content":[{"type":"text","text":"question ' || g || ' of agent ' || a || '"}]}]'""",
}  # fmt: skip
_OF_TURN = {"turn_id": "'turn_' || md5(g::text)", "agent_key": f"a + {BEHIND}"}
_AGENT = {
    "key": f"a + {BEHIND}", "agent_id": "'agent ' || a", "dir": "'agent-' || a", "named": "mod(a, 2) = 0",
    "head": f"'turn_' || md5((a + {PER_AGENT - 1} * m)::text)", "last_at": f"1.7e9 + a + {PER_AGENT - 1} * m",
}  # fmt: skip
_SESSION = {
    "n": f"a + {BEHIND}", "id": "md5(a::text)::uuid::text", "agent_key": f"a + {BEHIND}", "tip_turn_id": _AGENT["head"],
}  # fmt: skip
_LINK = {
    "n": f"a + {BEHIND}", "agent_key": f"a + {BEHIND}", "to_session": _SESSION["id"],
    "turn_id": "'turn_' || md5(a::text)",
}  # fmt: skip


async def seed(store: PostgresqlStore) -> None:
    """One agent with one turn, as the store writes it: what is copied."""
    agent = await an_agent(store, "seed")
    said = ({"type": "text", "text": "an answer of some length, as models give them. " * 8},)
    started = Link(None, "s1", "seed", "started", {}, 9.0)
    line = json.dumps({"type": "assistant", "message": {"role": "assistant", "content": said}})
    await complete(store, agent, "seed", output=said, records=(Record(line, "u"),), links=(started,))


def copies(table: Table, own: dict[str, str], rows: str) -> str:
    """A statement that copies the only row of a table; `own`: columns with a value of their own."""
    columns = [column.name for column in table.c]
    values = [own.get(name, f'seed."{name}"') for name in columns]
    names = ", ".join(f'"{name}"' for name in columns)
    one = f"(SELECT * FROM {table.name} LIMIT 1) seed"
    return f"INSERT INTO {table.name} ({names}) SELECT {', '.join(values)} FROM {one}, {rows}"


def grow(conn: Connection, number: int) -> None:
    """So many copied turns."""
    agent_count = number // PER_AGENT
    of_agents = f"(SELECT a, {agent_count} m FROM generate_series(1, {agent_count}) a) numbers"
    conn.exec_driver_sql(copies(agents, _AGENT, of_agents))
    for low in range(0, number, BATCH):
        one = f"g, mod(g - 1, {agent_count}) + 1 a, (g - 1) / {agent_count} n, {agent_count} m"
        of_turns = f"(SELECT {one} FROM generate_series({low + 1}, {min(number, low + BATCH)}) g ORDER BY g) numbers"
        conn.exec_driver_sql(copies(turns, _TURN, of_turns))
        conn.exec_driver_sql(copies(records, {**_OF_TURN, "n": "0"}, of_turns))
        conn.exec_driver_sql(copies(frames, {"agent_key": _TURN["agent_key"], "uuid": _TURN["frame_uuid"]}, of_turns))
    conn.exec_driver_sql(copies(sessions, _SESSION, of_agents))
    conn.exec_driver_sql(copies(links, _LINK, of_agents))
    conn.exec_driver_sql(copies(leases, {"agent_key": f"a + {BEHIND}", "holder": f"'{HOLDER.id}'"}, of_agents))
    for table, column in ((agents, "key"), (turns, "seq"), (sessions, "n"), (links, "n")):
        conn.exec_driver_sql(f"SELECT setval(pg_get_serial_sequence('{table.name}', '{column}'), {AHEAD})")


class Cases:
    """What is measured, each on one of the agents that are active, which is drawn anew."""

    def __init__(self, store: PostgresqlStore, stored: int, active: int) -> None:
        self._store = store
        self._stored = stored
        self._drawn = random.Random(stored)
        self._number = 0
        self._epoch = 0
        self._keys = self._drawn.sample(range(BEHIND + 1, BEHIND + 1 + stored // PER_AGENT), active)

    async def prepare(self) -> None:
        await self._store.renew(HOLDER)
        query = select(leases.c.epoch).limit(1)
        self._epoch = await self._store.database.read(lambda conn: conn.scalar(query) or 0)

    async def warm_up(self, name: str) -> None:
        for key in self._keys:
            await self.took(name, key)

    async def warm_turn(self, agent: Agent) -> None:
        self._number += 1
        name = f"turn_{self._stored}_{self._number}"
        _, found = await self._store.arrival("local", name, agent.agent_id)
        assert found is not None
        new = a_turn(agent, name, None, time.time(), fingerprint=name, placed=Placed("head"), instance=HOLDER.id)
        turn, state = await self._store.accept(**new)
        assert state is not None
        assert state.parent is not None
        assert state.session is not None
        lease = Lease(agent.key, HOLDER.id, self._epoch)
        await self._store.begin(**a_begin(turn, state.session.id, lease=lease, parent_id=state.parent.id))
        await self._store.commit(**a_commit(turn, agent, state.session.id, lease=lease, finished_at=time.time()))
        await self._store.set_delivery(turn.id, "delivered", soon=True)

    async def match(self, agent: Agent) -> None:
        """Its first 19 exchanges and a new one."""
        number, every = agent.key - BEHIND, self._stored // PER_AGENT
        hashes = [SHARED, *(hashlib.md5(f"p{number + n * every}".encode()).hexdigest() for n in range(1, 19))]
        found = await self._store.deepest("local", [*hashes, "new"], agent.key if agent.named else None)
        assert found is not None
        assert found.depth == len(hashes)

    async def list_of_agents(self, _agent: Agent) -> None:
        shown = 0
        async for _ in self._store.summaries("local"):
            shown += 1
            if shown == 100:
                break

    async def chain(self, agent: Agent) -> None:
        assert (await self._store.page(agent.key, before_seq=None, limit=100)).turns

    async def sums(self, _agent: Agent) -> None:
        assert await self._store.facts("local", since=0.0, limit=500)

    async def search(self, agent: Agent) -> None:
        assert (await self._store.search(Search(f'"{agent.agent_id} "', "local"))).hits

    async def opening(self, _agent: Agent) -> None:
        """What every other agent without a name began with, too."""
        found = await self._store.deepest("local", [SHARED])
        assert found is not None
        assert found.depth == 1

    async def index(self) -> None:
        began = time.perf_counter()
        await self._store.index(24 * 3600.0)
        print(f"{self._stored:,} turns indexed in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    async def took(self, name: str, key: int | None = None) -> float:
        """Milliseconds, with this agent or any."""
        case: Callable[[Agent], Awaitable[None]] = getattr(self, name)
        agent = await self._store.agent_by_key(self._drawn.choice(self._keys) if key is None else key)
        assert agent is not None
        began = time.perf_counter()
        await case(agent)
        return (time.perf_counter() - began) * 1000


async def run(
    urls: dict[int, str], rounds: int, cases: Sequence[str] = CASES, active: int = ACTIVE
) -> dict[str, dict[int, float]]:
    """Medians in ms by case and number of turns. The databases take turns: what else the machine does meets all."""
    figures: dict[str, dict[int, float]] = {}
    async with AsyncExitStack() as stack:
        every: dict[int, Cases] = {}
        for size, url in urls.items():
            store = PostgresqlStore(url)
            await store.open()
            stack.push_async_callback(store.close)
            await seed(store)
            began = time.perf_counter()
            await asyncio.to_thread(fill, store, size)
            print(f"{size:,} turns made in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            every[size] = Cases(store, size, min(active, size // PER_AGENT))
            await every[size].prepare()
        for name in cases:
            times = rounds if name != "search" else max(3, rounds // 10)
            if name == "search":
                for one in every.values():
                    await one.index()
            each: dict[int, list[float]] = {size: [] for size in every}
            for one in every.values():
                await one.warm_up(name)
            for _ in range(times):
                for size, one in every.items():
                    each[size].append(await one.took(name))
            figures[name] = {size: statistics.median(took) for size, took in each.items()}
            told = ", ".join(f"{median:.2f} ms over {size:,}" for size, median in figures[name].items())
            print(f"{name.replace('_', ' ')}: {told}", file=sys.stderr, flush=True)
    return figures


def fill(store: PostgresqlStore, number: int) -> None:
    with store.database.connection() as conn:
        # On the disk, with all that was written just before: VACUUM takes nothing else for seen by all, and then no
        # index is read without its table, as those of a store of some age are.
        conn.exec_driver_sql("BEGIN; SET LOCAL synchronous_commit = on")
        grow(conn, number)
        conn.exec_driver_sql("COMMIT")
        conn.exec_driver_sql("CHECKPOINT")
        conn.exec_driver_sql("VACUUM ANALYZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="10000,1000000")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--active", type=int, default=ACTIVE)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = [int(size) for size in given.turns.split(",")]
    with server("-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB") as postgres:
        figures = asyncio.run(
            run({size: postgres.new_url() for size in sizes}, given.rounds, given.only.split(","), given.active)
        )
    print(f"| | {' | '.join(f'{size:,} turns' for size in sizes)} | ratio |\n|{'---|' * (len(sizes) + 2)}")
    grown = []
    for name, found in figures.items():
        ratio = found[sizes[-1]] / found[sizes[0]]
        print(f"| {name.replace('_', ' ')} | {' | '.join(f'{found[size]:.2f} ms' for size in sizes)} | {ratio:.2f} |")
        if ratio > BOUND and name != "search":
            grown.append(f"{name} {ratio:.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"bound": BOUND, "medians_ms": figures}, indent=1) + "\n")
    if grown:
        raise SystemExit(f"over {BOUND} times what it takes with {sizes[0]:,} turns: {', '.join(grown)}")


if __name__ == "__main__":
    main()
