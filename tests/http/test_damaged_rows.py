"""Rows of the store that were changed by hand: one that is damaged is named, and hides no other."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from cli_session_proxy.commands import moving
from cli_session_proxy.domain.limits import no_constant
from cli_session_proxy.domain.models import Record
from cli_session_proxy.errors import DamagedRow, SandboxError, UpstreamError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sql import damaged
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import a_commit, a_turn, accepted, an_agent, opened

from ..engine.test_core import Model, core
from ..serving import serving
from ..talking import ask, events
from .cluster import cluster

DAMAGED, SOUND = "quince", "medlar"
# Of a turn of the agent `quince`: a column, what it holds, and whether the turn can still be listed.
OF_A_TURN: dict[str, tuple[str, Any]] = {
    "a text for a time": ("created_at", "yesterday"),
    "no time": ("created_at", math.inf),
    "a text for an end": ("finished_at", "later"),
    "endless cost": ("cost_usd", math.inf),
    "half an input": ("input", '[{"role": "user", "content": [{"type"'),
    "an input that is no list": ("input", "7"),
    "content that is no block": ("input", '[{"role": "user", "content": ["hello"]}]'),
    "no input": ("input", ""),
    "a text for the answer": ("output", '"Hi."'),
    "bytes for a status": ("status", b"completed"),
    "bytes for an input": ("input", b"[]"),
    "a line break for a header": ("session_id", "a\r\nb: c"),
    "no size": ("bytes", ""),
    "tokens in words": ("usage", '{"input_tokens": "many"}'),
    "an error that is none": ("error", "[1]"),
    "a number for a prompt": ("system", "5"),
    "no options": ("options", '{"metadata": '),
    "bytes for a model": ("model", b"\xff\xfe"),
    "bytes that are called a text": ("model", "CAST(x'ff6162' AS TEXT)"),
}
# What does not count as a turn that waits.
OF_AN_ENDED_TURN = OF_A_TURN | {"a status that is none": ("status", "paused")}
OF_AN_AGENT: dict[str, tuple[str, Any]] = {
    "a text for a time": ("last_at", "yesterday"),
    "no beginning": ("created_at", -math.inf),
    "endless cost": ("cost_usd", math.inf),
    "turns in words": ("turns", "two"),
}


@pytest.mark.parametrize("home", ["5", "{}", "x", b"\xff", "[" * 100_000])
async def test_a_damaged_home_of_an_agent_is_named(home: str | bytes, tmp_path: Path) -> None:
    """It was a fault of ours in each request for the agent at another proxy, and its log did not say which row."""
    async with opened(lambda: SqliteStore(tmp_path / FILE)) as store:
        agent = await an_agent(store)
        with closing(sqlite3.connect(tmp_path / FILE)) as conn, conn:
            conn.execute("UPDATE leases SET home = ?", (home,))
        with pytest.raises(DamagedRow, match=f"leases with agent_key '{agent.key}'"):
            await store.whereabouts(agent.key)


def newest(settings: Settings) -> int:
    """The key of the newest agent, as the log names it."""
    with closing(sqlite3.connect(settings.var / FILE)) as conn:
        key: int = conn.execute("SELECT max(key) FROM agents").fetchone()[0]
        return key


def damage(settings: Settings, statement: str, *values: Any) -> None:
    if str(values[0]).startswith("CAST"):
        statement, values = statement.replace("?", values[0], 1), values[1:]
    with closing(sqlite3.connect(settings.var / FILE)) as conn, conn:
        assert conn.execute(statement, values).rowcount == 1


async def told(url: str) -> dict[str, httpx.Response]:
    """Every list that shows several agents."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return {
            path: await http.get(path)
            for path in ("/overview?wait=0", "/chains", f"/search?q={SOUND}", "/search?q=said", "/search?since=1d")
        }


async def the_others_are_shown(url: str) -> None:
    for path, answer in (await told(url)).items():
        assert answer.status_code == 200, (path, answer.text)
        json.loads(answer.text, parse_constant=no_constant)
        if not path.startswith("/overview"):
            assert SOUND in [row["agent_id"] for row in answer.json()["data"]], path


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The damaged rows in the log, each once."""
    said = [event["row"] for event in events(caplog) if event["event"] == "damaged_row"]
    assert len(said) == len(set(said))
    return said


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damaged, "_logged", set())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", port=0)


@pytest.mark.parametrize(("column", "value"), OF_AN_ENDED_TURN.values(), ids=OF_AN_ENDED_TURN)
@pytest.mark.sample(6)
async def test_a_damaged_turn_is_named_and_hides_no_other(
    settings: Settings, caplog: pytest.LogCaptureFixture, column: str, value: Any
) -> None:
    async with core(settings) as (engine, _):
        for agent in (SOUND, DAMAGED):
            turn = [await ask(engine, f"{word} {agent}", agent=agent) for word in ("one", "two")][-1]
    async with core(settings) as (engine, _), serving(engine, settings) as url:  # no index was made yet
        damage(settings, f"UPDATE turns SET {column} = ? WHERE id = ?", value, turn.id)
        await the_others_are_shown(url)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            shown = (await http.get(f"/chains/{DAMAGED}/turns")).json()["data"]
            assert [(row["asked"], row["error"]) for row in shown] == [("", DamagedRow.code), (f"one {DAMAGED}", None)]
            row = next(row for row in named(caplog) if row.startswith("turns with seq '4': "))
            assert row.endswith((column, "its JSON"))
            assert row in shown[0]["why"]
            for kind in ("json", "markdown", "mermaid", "html"):
                assert (await http.get(f"/chains/{DAMAGED}?format={kind}")).status_code == 200, kind
        # Nothing is forgotten in silence: the agent's own next turn says why it is not run.
        with pytest.raises(DamagedRow, match="seq '4'"):
            await ask(engine, "three", agent=DAMAGED)
        assert (await ask(engine, "three", agent=SOUND)).depth == 3
        assert await engine.delete("local", DAMAGED)


@pytest.mark.parametrize(("column", "value"), OF_AN_AGENT.values(), ids=OF_AN_AGENT)
@pytest.mark.sample(2)
async def test_a_damaged_agent_is_named_and_hides_no_other(
    settings: Settings, caplog: pytest.LogCaptureFixture, column: str, value: Any
) -> None:
    async with core(settings) as (engine, _), serving(engine, settings) as url:
        for agent in (SOUND, DAMAGED):
            await ask(engine, f"one {agent}", agent=agent)
        damage(settings, f"UPDATE agents SET {column} = ? WHERE agent_id = ?", value, DAMAGED)
        await the_others_are_shown(url)
        agent = f"agents with key '{newest(settings)}': "
        assert [row for row in named(caplog) if row.startswith(agent) and row.endswith(column)]


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("agents", "named", "yesterday"),
        ("agents", "head", b"x"),
        ("agents", "created_at", math.inf),
        ("turns", "id", b"x"),
    ],
)
async def test_a_damaged_row_of_an_agent_that_needs_attention_is_named_on_the_overview(
    settings: Settings, caplog: pytest.LogCaptureFixture, table: str, column: str, value: Any
) -> None:
    model = Model()
    async with core(settings, model) as (engine, _), serving(engine, settings) as url:
        for agent in (SOUND, DAMAGED):
            model.faults = [UpstreamError("no")]
            with pytest.raises(UpstreamError):
                await ask(engine, "one", agent=agent)
        key = "key" if table == "agents" else "seq"
        damage(settings, f"UPDATE {table} SET {column} = ? WHERE {key} = (SELECT max({key}) FROM {table})", value)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            answer = await http.get("/overview?wait=0")
        assert answer.status_code == 200, answer.text
        shown = {row["agent_id"]: row["title"] for row in answer.json()["attention"]}
        assert shown.pop(SOUND) == SOUND
        assert len(named(caplog)) == 1
        if table == "agents":
            assert f"agents with key '{newest(settings)}': {column}" in shown[""]


BESIDE = {
    "what a host is like": (
        "INSERT INTO proxies VALUES ('p', 'h', 9e9, NULL); INSERT INTO meta VALUES ('facts of p', '{')"
    ),
    "what was found out": "INSERT INTO findings VALUES ('plan', 'plan', '[1', 1.0, NULL)",
    "what was forgotten": "INSERT INTO forgotten VALUES (unixepoch(), 'local', 'sonnet', 'two', 9e999)",
    "what was spent": "INSERT INTO spent VALUES ('key local', 'day', 'today', 1, 1, 1.0, 1, 1.0)",
    "a number for a link": "INSERT INTO links SELECT 9, max(key), NULL, 'x', head, 'rebuilt', '7', 9.0 FROM agents",
    "a link": "INSERT INTO links SELECT 9, max(key), NULL, 'x', head, 'rebuilt', '{', 'now' FROM agents",
}


@pytest.mark.parametrize("statement", BESIDE.values(), ids=BESIDE)
@pytest.mark.sample(3)
async def test_what_is_damaged_beside_turns_hides_nothing(
    settings: Settings, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    async with core(settings) as (engine, _):
        for agent in (SOUND, DAMAGED):
            await ask(engine, f"one {agent}", agent=agent)
    with closing(sqlite3.connect(settings.var / FILE)) as conn:
        conn.executescript(statement)
    async with core(settings) as (engine, _), serving(engine, settings) as url:
        await the_others_are_shown(url)
        assert (await engine.store.hosts(), await engine.store.spent()) == ([], [])
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            assert (await http.get(f"/chains/{DAMAGED}")).status_code == 200
        assert (await ask(engine, "two", agent=DAMAGED)).depth == 2
        assert len(named(caplog)) == 1


@pytest.mark.parametrize(
    ("column", "value"), [("metadata", ""), ("metadata", "[7]"), ("removed", "7"), ("removed", "[{}]"), ("data", "7")]
)
async def test_a_damaged_conversation_is_named(settings: Settings, column: str, value: str) -> None:
    async with (
        core(settings) as (engine, _),
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        items = [{"role": "user", "content": "hello"}]
        made = (await http.post("/conversations", json={"items": items})).json()["id"]
        damage(settings, f"UPDATE {'items' if column == 'data' else 'conversations'} SET {column} = ?", value)
        error = (await http.get(f"/conversations/{made}/items")).json()["error"]
        assert error["code"] == DamagedRow.code
        assert (await http.delete(f"/conversations/{made}")).status_code == 200


async def test_a_damaged_folder_of_an_agent_names_no_file_of_its_export(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (engine, _):
        await ask(engine, "one")
    damage(settings, "UPDATE agents SET dir = ?", str(tmp_path / "other"))
    (tmp_path / "other.export.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SandboxError):
        await moving.export(settings, "local", "a", None)


OF_A_RECORD: dict[str, tuple[str, Any]] = {
    "a text for a line": ("line", "{}"),
    "half a character": ("line", b"\xff"),
    "half a list of images": ("images", "[[1"),
    "an image without a place": ("images", "[7]"),
    "an image that is not there": ("images", json.dumps([[0, "a" * 64]])),
    "bytes for a uuid": ("uuid", b"x"),
}


@pytest.mark.parametrize(("column", "value"), OF_A_RECORD.values(), ids=OF_A_RECORD)
async def test_a_damaged_record_is_named(tmp_path: Path, column: str, value: Any) -> None:
    settings = Settings(var=tmp_path)
    async with opened(lambda: SqliteStore(tmp_path / FILE)) as store:
        agent = await an_agent(store)
        for turn_id in ("t1", "t2"):
            turn = await accepted(store, a_turn(agent, turn_id))
            await store.commit(**a_commit(turn, agent, records=(Record('{"type":"summary"}'),)))
        damage(settings, f"UPDATE records SET {column} = ? WHERE turn_id = ?", value, "t1")
        for read in (store.records, store.own_records):
            with pytest.raises(DamagedRow, match=f"records with turn_id 't1', n '0': ({column}|its JSON)"):
                await read("t1")
            assert len(await read("t2")) == 1


@pytest.mark.parametrize(("column", "value"), OF_A_TURN.values(), ids=OF_A_TURN)
@pytest.mark.sample(6)
async def test_a_proxy_starts_though_a_turn_that_waited_is_damaged(
    settings: Settings, caplog: pytest.LogCaptureFixture, column: str, value: Any
) -> None:
    async with core(settings) as (engine, _):
        for agent in (SOUND, DAMAGED):
            turn = await ask(engine, f"one {agent}", agent=agent)
    damage(
        settings, f"UPDATE turns SET status = 'running', instance = 'dead', {column} = ? WHERE id = ?", value, turn.id
    )
    async with core(settings) as (engine, _), serving(engine, settings) as url:
        await the_others_are_shown(url)
        assert named(caplog)
        assert (await ask(engine, "two", agent=SOUND)).depth == 2
        with pytest.raises(DamagedRow):
            await ask(engine, "two", agent=DAMAGED)


async def test_a_damaged_agent_keeps_no_proxy_from_starting_nor_from_settling_the_others(settings: Settings) -> None:
    async with core(settings) as (engine, _):
        for agent in (DAMAGED, SOUND):
            turn = await ask(engine, f"one {agent}", agent=agent)
    with closing(sqlite3.connect(settings.var / FILE)) as conn, conn:
        conn.execute("UPDATE turns SET status = 'running', instance = 'dead'")
        conn.execute("UPDATE agents SET created_at = 1e300 WHERE agent_id = ?", (DAMAGED,))
    async with core(settings) as (engine, _):
        settled = await engine.store.turn(turn.id)
        assert settled is not None
        assert settled.status == "cancelled"


@pytest.mark.parametrize(
    ("column", "value"), [("cost_usd", "NaN"), ("created_at", "Infinity"), ("created_at", "1e300"), ("input", "[{")]
)
@pytest.mark.sample(2)
async def test_a_damaged_turn_of_a_server_is_named_and_hides_no_other(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    async with cluster(postgres_url, tmp_path, 1) as (host,):
        for agent in (SOUND, DAMAGED):
            turn_id = (await host.chat(f"one {agent}", agent=agent)).headers["x-turn-id"]
        with psycopg.connect(postgres_url) as conn:
            assert conn.execute(f"UPDATE turns SET {column} = %s WHERE id = %s", (value, turn_id)).rowcount == 1
        await the_others_are_shown(f"{host.http.base_url}/v1")
        (shown,) = (await host.http.get(f"/v1/chains/{DAMAGED}/turns")).json()["data"]
        assert (shown["error"], [row.endswith(column) for row in named(caplog)]) == (DamagedRow.code, [True])
