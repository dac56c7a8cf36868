"""What 0.1 wrote or read opens: its store, its export, its settings.

`legacy/` was written by its code, and told by the last one before schema version 4.
"""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiofiles
import pytest

from cli_session_proxy.commands import moving
from cli_session_proxy.domain.models import Placed, Tool, ToolChoice, TurnOptions
from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.errors import InvalidRequest, StoreUnavailable
from cli_session_proxy.export import portable, shown
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores.base import Store
from cli_session_proxy.stores.sql.migrations import newest
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import opened, turn_of

HERE = Path(__file__).parent / "legacy"
ID = "turn_" + "0" * 31
TOLD = json.loads((HERE / "told.json").read_text())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of schema version 2."""
    path = tmp_path / FILE
    with closing(sqlite3.connect(path)) as db:
        db.executescript((HERE / "store.sql").read_text())
    return path


@asynccontextmanager
async def store_at(path: Path) -> AsyncIterator[Store]:
    async with opened(lambda: SqliteStore(path)) as store:
        yield store


async def told(store: Store, agent_id: str = "ada") -> dict[str, Any]:
    """What a dump says of it, in the form of `told.json`."""
    agent = await store.agent("local", agent_id)
    assert agent is not None
    chain = await store.chain(agent.key)
    assert chain is not None
    names = ("id", "continuity_reason", "reason", "attempts", "says")
    dumps = [shown.turn(turn, chain.links) async for turn in store.turns(agent.key)]
    turns = [{name: dump[name] for name in names} for dump in dumps]  # type: ignore[literal-required]
    return {"turns": turns, "links": [shown.link(link) for link in chain.links]}


def as_told_before(data: dict[str, Any]) -> dict[str, Any]:
    """Without what 0.1 did not say: that an attempt's answer was refused it told by its words alone."""
    for turn in data["turns"]:
        for attempt in turn["attempts"]:
            attempt.pop("code", None)
    said: dict[str, Any] = json.loads(json.dumps(data))
    return said


async def test_a_store_of_0_1_says_what_it_said(path: Path) -> None:
    async with store_at(path) as store:
        assert as_told_before(await told(store)) == TOLD
    async with store_at(path) as store:
        assert as_told_before(await told(store)) == TOLD


async def test_what_decides_about_the_next_turn_is_known(path: Path) -> None:
    async with store_at(path) as store:
        asked, waiting = await turn_of(store, f"{ID}2"), await turn_of(store, f"{ID}7")
        assert asked.options == TurnOptions(
            tools=(Tool("weather"),), tool_choice=ToolChoice("required", ("weather",)), stop=("END",)
        )
        assert (asked.placed.rule, asked.placed.delta, asked.stop_sequence) == ("id", True, "END")
        assert (await turn_of(store, f"{ID}3")).options == TurnOptions(format={"schema": None})
        assert waiting.placed.at_head
        assert await store.claim(f"{ID}3", None)  # a client named this path: it may go on from there still


async def test_what_0_1_took_in_without_a_look_stays_to_be_seen_and_decides_nothing(path: Path) -> None:
    hostile = {"rule": "head", "wants": 5, "cuts": [7]}
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE turns SET reason = ? WHERE id = ?", (json.dumps(hostile), f"{ID}1"))
        db.execute("UPDATE links SET detail = ? WHERE turn_id = ?", ('{"code":[1],"done":[2],"x":3}', f"{ID}3"))
        db.commit()
    async with store_at(path) as store:
        turn = await turn_of(store, f"{ID}1")
        assert (turn.placed, turn.options) == (Placed(), TurnOptions())
        assert shown.turn(turn)["reason"] == hostile
        (link,) = [link for link in (await told(store))["links"] if link["turn_id"] == f"{ID}3"]
        assert link["detail"] == {"done": [2], "x": 3}


async def test_the_size_of_a_chain_is_that_of_its_texts(path: Path) -> None:
    async with store_at(path):
        pass
    texts = (
        "placed", "options", "evidence", "usage", "timings", "attempts", "input", "output", "tools", "system", "error",
        "call", "images", "stop_sequence", "fallback",
    )  # fmt: skip
    with closing(sqlite3.connect(path)) as db:
        sizes = " + ".join(f"coalesce(length(cast({name} AS BLOB)), 0)" for name in texts)
        lines = "(SELECT coalesce(sum(length(line)), 0) FROM records WHERE turn_id = turns.id)"
        assert db.execute(f"SELECT count(*) FROM turns WHERE bytes != {sizes} + {lines}").fetchone() == (0,)


async def test_an_export_of_0_1_comes_in(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path, claude_config_dir=tmp_path / "claude")
    await moving.import_(settings, "local", HERE / "chain.export", None)
    async with store_at(tmp_path / FILE) as store:
        said = as_told_before(await told(store))
    finished = [turn for turn in TOLD["turns"] if turn["id"] != f"{ID}7"]
    assert said == {"turns": finished, "links": TOLD["links"]}


async def test_what_is_exported_comes_in_as_it_was(path: Path, tmp_path: Path) -> None:
    here, there = (
        Settings(var=var, claude_config_dir=tmp_path / "claude") for var in (path.parent, tmp_path / "other")
    )
    file = tmp_path / "chain.export"
    await moving.export(here, "local", "ada", file)
    await moving.import_(there, "local", file, None)
    async with store_at(path) as store, store_at(there.var / FILE) as other:
        before, after = await told(store), await told(other)
        assert before["turns"][:-1] == after["turns"]
        assert before["links"] == after["links"]
        for n in range(1, 7):
            ours, theirs = await turn_of(store, f"{ID}{n}"), await turn_of(other, f"{ID}{n}")
            assert (ours.placed, ours.options, ours.evidence) == (theirs.placed, theirs.options, theirs.evidence)


async def test_an_export_of_0_1_with_tools_that_are_none_is_refused(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path, claude_config_dir=tmp_path / "claude")
    file = tmp_path / "hostile.export"
    lines = (HERE / "chain.export").read_text().replace('"parallel":true', '"parallel":5').splitlines()[:-1]
    await _sealed(file, lines)
    with pytest.raises(InvalidRequest, match=r"wants\.tool_choice\.parallel"):
        await moving.import_(settings, "local", file, None)


async def _sealed(file: Path, lines: list[str]) -> None:
    async with aiofiles.open(file, "wb") as out:
        writer = portable._Writer(out.write)
        for line in lines:
            await writer.line(json.loads(line))
        await writer.end()


def test_every_setting_of_0_1_is_still_one() -> None:
    settings = load(config=HERE / "settings.toml")
    assert (settings.port, settings.on_context_full, settings.retention_days) == (8788, "error", 30.0)
    assert settings.profile_for(None).tools == ("Read", "Bash")
    assert settings.sandbox.links == {"shared": Path("/x/shared")}
    assert list(settings.keys) == ["ada"]


# --- never under a proxy of an older program


def version(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        (value,) = db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
        return str(value)


async def test_a_store_with_a_living_proxy_is_left_alone(path: Path) -> None:
    proxy = Instances(path.parent)
    proxy.enter()
    with pytest.raises(StoreUnavailable, match=f"proxy {proxy.id[:8]} on this host.*stop every proxy") as raised:
        await SqliteStore(path).open()
    assert raised.value.detail["proxies"] == [f"proxy {proxy.id[:8]} on this host ({socket.gethostname()})"]
    assert (version(path), list(path.parent.glob("*.bak"))) == ("2", [])
    proxy.leave(settled=False)  # it ended without a word: the kernel knows
    async with store_at(path) as store:
        assert (await turn_of(store, f"{ID}1")).placed.rule == "head"


async def test_a_proxy_on_another_host_is_known_by_its_heartbeat(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE proxies (id TEXT NOT NULL, host TEXT NOT NULL, until DOUBLE NOT NULL, PRIMARY KEY (id))"
        )
        db.execute("CREATE TABLE leases (agent_key INTEGER PRIMARY KEY, epoch INTEGER, holder TEXT, wanted TEXT)")
        db.execute("INSERT INTO proxies VALUES ('abcdefghij', 'far', 1e12), ('gone', 'far', 1.0)")
        db.execute("UPDATE meta SET value = '3'")
        db.commit()
    with pytest.raises(StoreUnavailable, match="proxy abcdefgh on far of an older program is on it"):
        await SqliteStore(path).open()
    assert version(path) == "3"
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM proxies")
        db.commit()
    async with store_at(path):
        pass
    assert version(path) == str(newest())
