"""Several programs on one file, and one that is killed."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import an_agent, complete, gathered, opened

from ..conftest import CONFORMANCE, ROOT

# Completes turns one after another and prints the id of each when it is acknowledged.
PROGRAM = """
import asyncio, sys
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import an_agent, complete, opened

async def main(path, name, count):
    async with opened(lambda: SqliteStore(path)) as store:
        agent = await an_agent(store)
        for n in range(count):
            print((await complete(store, agent, f"{name}{n}", session=name)).id, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def program(path: Path, name: str, count: int) -> Process:
    env = {"PYTHONPATH": str(CONFORMANCE)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(path), name, str(count), stdout=PIPE, cwd=ROOT, env=env
    )


async def test_two_programs_write_beside_each_other(tmp_path: Path) -> None:
    path, count = tmp_path / "chains.sqlite3", 40
    programs = [await program(path, name, count) for name in ("x", "y")]
    outputs = [(await child.communicate())[0].decode().split() for child in programs]
    assert [child.returncode for child in programs] == [0, 0]
    assert outputs == [[f"{name}{n}" for n in range(count)] for name in ("x", "y")]
    async with opened(lambda: SqliteStore(path)) as store:
        turns = await gathered(store.turns((await an_agent(store)).key))
    assert len({turn.seq for turn in turns}) == 2 * count
    for name, output in zip(("x", "y"), outputs, strict=True):
        assert [turn.id for turn in turns if turn.id.startswith(name)] == output


async def test_a_killed_program_loses_no_acknowledged_turn(tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    child = await program(path, "x", 100_000)
    assert child.stdout is not None
    acknowledged = [(await child.stdout.readline()).decode().strip() for _ in range(25)]
    child.kill()
    rest, _ = await child.communicate()
    acknowledged += [line.decode() for line in rest.split(b"\n")[:-1]]
    async with opened(lambda: SqliteStore(path)) as store:
        agent = await an_agent(store)
        turns = {turn.id: turn for turn in await gathered(store.turns(agent.key))}
        assert {turns[name].status for name in acknowledged} == {"completed"}
        for name in acknowledged[-3:]:
            assert len(await store.records(name)) == 1
        assert agent.head is not None
        assert turns[agent.head].status == "completed"
        await complete(store, agent, "after", agent.head, session="s2")
