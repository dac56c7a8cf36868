"""`migrate`: a store moves beside a proxy that serves it, and the conversation goes on in the new place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli_session_proxy.backends.memory import MemoryBackend, echo
from cli_session_proxy.cli import app
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sql.store import SqlStore

from ..talking import ask, text
from ..test_cli import error_of
from ..until import until


async def run(*arguments: str | Path) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def settings_of(var: Path, url: str | None = None) -> Settings:
    return Settings(var=var, store=None if url is None else SecretStr(url), claude_config_dir=var)


async def test_a_store_moves_under_a_running_proxy_and_back(postgres_url: str, tmp_path: Path) -> None:
    url, first, third = postgres_url.replace("proxy@", "proxy:hidden-word@"), tmp_path / "var", tmp_path / "var3"
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
    finally:
        await engine.stop()
    engine = Engine(settings_of(first, postgres_url), backend=MemoryBackend())
    await engine.start()
    try:
        assert "(2)" in text(await ask(engine, "and now?"))
        assert "moved 1" in await run("migrate", "--var", first, "--store", url, "--to", third)
        with pytest.raises(StoreUnavailable, match=f"was moved to {third}"):
            await ask(engine, "and then?")
    finally:
        await engine.stop()
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
        await until(lambda: store.wanted(engine._instances.id))
        assert not moving.done()
        ended.set()
        answer = await turn
        assert "1 turns" in await moving
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
