"""`migrate`: a store moves beside a proxy that serves it, and the conversation goes on in the new place."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli_session_proxy.cli import app
from cli_session_proxy.commands import moving, terminal
from cli_session_proxy.commands.doctor import examine
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ASKED_POLL, Store
from cli_session_proxy.stores.sql.moving import Move
from cli_session_proxy.stores.sql.store import SqlStore
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import opened

from ..engine.test_ownership import SleepsAsItAsks
from ..memory_backend import MemoryBackend, echo
from ..talking import ask, text
from ..test_cli import done, error_of
from ..until import PATIENCE, POLL, until


async def run(*arguments: str | Path) -> str:
    ran = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)), catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def settings_of(var: Path, url: str | None = None) -> Settings:
    return Settings(var=var, store=None if url is None else SecretStr(url), claude_config_dir=var)


async def test_a_store_moves_under_a_running_proxy_and_back(postgres_url: str, tmp_path: Path) -> None:
    url = postgres_url.replace("proxy@", "proxy:hidden-word@") + "&require_auth=none"  # it asks for no password
    first, third = tmp_path / "var", tmp_path / "var3"
    engine = Engine(settings_of(first), backend=MemoryBackend())
    await engine.start()
    try:
        assert "(1)" in text(await ask(engine, "hello"))
        told = json.loads(await run("migrate", "--var", first, "--to", url, "--json"))
        assert (told["rows"]["turns"], told["rows"]["agents"]) == (1, 1)
        assert "hidden-word" not in str(told)
        for agent in ("a", "new"):
            with pytest.raises(StoreUnavailable, match="was moved to postgresql://proxy@") as refused:
                await ask(engine, "and now?", agent=agent)
            assert refused.value.status == 503
            assert refused.value.detail["moved_to"] == told["place"]
            assert "hidden-word" not in refused.value.message
        assert await engine.state() == "store_unavailable"
        (look,) = [one async for one in examine(settings_of(first)) if one.check == "store"]
        assert (look.level, look.says) == ("error", f"{first}/chains.sqlite3 was moved to {told['place']}")
    finally:
        await engine.stop()
    engine = Engine(settings_of(first, postgres_url), backend=MemoryBackend())
    await engine.start()
    try:
        assert "(2)" in text(await ask(engine, "and now?"))
        third.mkdir()
        (third / "chains.sqlite3.search").write_bytes(b"of a store that was put away")
        assert "moved 1" in await run("migrate", "--var", first, "--store", url, "--to", third)
        with pytest.raises(StoreUnavailable, match=f"was moved to {third}"):
            await ask(engine, "and then?")
        (look,) = [one async for one in examine(settings_of(first, url)) if one.check == "store"]
        assert (look.level, f"was moved to {third}" in look.says) == ("error", True)
    finally:
        await engine.stop()
    assert not (third / "chains.sqlite3.search").exists()
    engine = Engine(settings_of(third), backend=MemoryBackend())
    await engine.start()
    try:
        path = await engine.store.path((await ask(engine, "and then?")).id)
        assert [turn.input[-1].content[0]["text"] for turn in path] == ["hello", "and now?", "and then?"]
    finally:
        await engine.stop()


async def test_the_move_waits_for_a_turn_that_runs(postgres_url: str, tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(path: Sequence[Message]) -> Sequence[Block]:
        begun.set()
        await ended.wait()
        return await echo(path)

    engine = Engine(settings_of(tmp_path / "var"), backend=MemoryBackend(slow))
    await engine.start()
    try:
        turn = asyncio.create_task(ask(engine, "hello"))
        await begun.wait()
        moving = asyncio.create_task(run("migrate", "--var", tmp_path / "var", "--to", postgres_url))
        assert isinstance(engine.store, SqlStore)
        store = engine.store
        await until(lambda: store.asked(engine._instances.id))
        assert not moving.done()
        ended.set()
        answer = await turn
        assert "(1 turn of 1 agent)" in await moving
    finally:
        ended.set()
        await engine.stop()
    there = Engine(settings_of(tmp_path / "var", postgres_url), backend=MemoryBackend())
    await there.start()
    try:
        kept = await there.store.turn(answer.id)
        assert kept is not None
        assert kept.output == answer.output
    finally:
        await there.stop()


async def test_a_move_in_which_the_machine_sleeps_takes_no_agent_from_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To it every lease has expired."""
    real, begun, ended = time.time, asyncio.Event(), asyncio.Event()
    settings = settings_of(tmp_path / "var").model_copy(update={"lease": 3.0})

    async def slow(path: Sequence[Message]) -> Sequence[Block]:
        begun.set()
        await ended.wait()
        return await echo(path)

    def clock() -> float:
        return real() + store.slept

    @asynccontextmanager
    async def opened_or_new(_settings: Settings) -> AsyncIterator[Store]:
        async with opened(lambda: store):
            yield store

    engine = Engine(settings, SqliteStore(settings.var / FILE, clock=clock), MemoryBackend(slow))
    store = SleepsAsItAsks(settings.var / FILE, clock=clock)
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(moving, "opened_or_new", opened_or_new)
    await engine.start()
    try:
        turn = asyncio.create_task(ask(engine, "hello"))
        await begun.wait()
        moved = asyncio.create_task(moving.migrate(settings, str(tmp_path / "there")))
        await until(lambda: store.slept)
        await until(lambda: engine.store.asked(engine._instances.id))
        ended.set()
        assert (await turn).status == "completed"
        assert (await moved).rows["turns"] == 1
    finally:
        ended.set()
        await engine.stop()


@pytest.mark.parametrize(
    "back", [pytest.param(False, id="to postgresql"), pytest.param(True, id="back", marks=pytest.mark.full)]
)
async def test_what_is_acknowledged_meanwhile_is_in_the_new_place(
    back: bool, postgres_url: str, tmp_path: Path
) -> None:
    ends = settings_of(tmp_path / "var"), settings_of(tmp_path / "elsewhere", postgres_url)
    source, target = reversed(ends) if back else ends
    place = ("--store", postgres_url, "--to", tmp_path / "var") if back else ("--to", postgres_url)
    engine = Engine(source, backend=MemoryBackend())
    await engine.start()
    acknowledged: dict[str, list[str]] = {f"agent {n}": [] for n in range(4)}

    async def talk(agent: str) -> None:
        while True:
            try:
                turn = await ask(engine, f"{len(acknowledged[agent])}", agent=agent)
            except StoreUnavailable as exc:
                assert "moved_to" in exc.detail, exc.message  # noqa: PT017 - any other one is a failure, too
                return
            acknowledged[agent].append(turn.id)
            await asyncio.sleep(2 * ASKED_POLL)  # a client reads what it gets: a lease is handed over between turns

    try:
        talking = [asyncio.create_task(talk(agent)) for agent in acknowledged]
        await until(lambda: all(acknowledged.values()))
        told = json.loads(await run("migrate", "--var", source.var, *place, "--json"))
        await asyncio.gather(*talking)
    finally:
        await engine.stop()
    engine = Engine(target, backend=MemoryBackend())
    await engine.start()
    try:
        for name, ids in acknowledged.items():
            agent = await engine.store.agent("local", name)
            assert agent is not None
            assert [turn.id for turn in await engine.store.path(str(agent.head))] == ids
            whole = [turn.id async for turn in engine.store.turns(agent.key) if turn.status == "completed"]
            assert whole == ids
        assert told["rows"]["turns"] >= sum(map(len, acknowledged.values()))
    finally:
        await engine.stop()


def test_a_terminal_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(spoken(tmp_path / "var"))
    verify, until_seen = Move.verify, time.monotonic() + PATIENCE

    def slow(self: Move) -> None:
        while "moving" not in capsys.readouterr().err:
            assert time.monotonic() < until_seen
            time.sleep(POLL)  # on the move's thread: the bar is another's
        verify(self)

    monkeypatch.setattr(Move, "verify", slow)
    monkeypatch.setattr(terminal, "SOON", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    done("migrate", "--var", tmp_path / "var", "--to", tmp_path / "other")


def test_what_cannot_be_moved_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    var = tmp_path / "var"
    assert "nothing to move" in error_of(capsys, 1, "migrate", "--var", var, "--to", tmp_path / "other")
    assert not var.exists()
    assert not (tmp_path / "other").exists()
    asyncio.run(spoken(var))
    capsys.readouterr()
    assert "holds a store already" in error_of(capsys, 1, "migrate", "--var", var, "--to", var)
    assert "name that file, or the folder" in error_of(capsys, 2, "migrate", "--var", var, "--to", tmp_path / "x.db")
    assert "postgresql://user@host" in error_of(capsys, 2, "migrate", "--var", var, "--to", "mysql://hidden-word")


async def spoken(var: Path) -> None:
    engine = Engine(settings_of(var), backend=MemoryBackend())
    await engine.start()
    try:
        await ask(engine, "hello")
    finally:
        await engine.stop()
