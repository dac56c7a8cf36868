"""What is deleted is gone: from the store's pages, log and copies, from what was put aside, and from the logs."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cli_session_proxy import logs
from cli_session_proxy.commands import changing
from cli_session_proxy.domain.models import Agent, Message, Record
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.sandbox import directory_name
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Expiry, WholeTurn
from cli_session_proxy.stores.sqlite.file import copy_aside
from cli_session_proxy.stores.sqlite.store import FILE
from cli_session_proxy_store_conformance.samples import a_finished_turn
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..memory_backend import MemoryBackend
from ..talking import ask, running

WORDS = "marmalade-and-toast"
AGENT, OTHER = "the-agent-that-goes", "the-agent-that-stays"
IMAGE = "iVBORw0KGgo" + "Q" * 300 + "=="


def holders(*folders: Path, of: str) -> list[str]:
    """Every file below that holds these words, or is named by them."""
    found = []
    # A CLI that runs takes its locks away meanwhile: `walk` goes on without them.
    for place, inside, names in (step for folder in folders for step in os.walk(folder)):
        for path in (Path(place, name) for name in (*inside, *names)):
            found += [str(path)] * (of in path.name)
            with suppress(FileNotFoundError):
                found += [str(path)] * (path.is_file() and of.encode() in path.read_bytes())
    return found


async def test_nothing_on_the_disk_holds_a_word_of_a_deleted_agent(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, log_level="debug")
    config = settings.claude_config_dir
    assert config is not None
    async with running(settings) as engine:
        logs.configure(settings)
        try:
            turn = await ask(engine, f"remember x = {WORDS}", agent=AGENT)
            assert turn.session_id is not None
            await ask(engine, "remember y = something else", agent=OTHER)
            # a transcript that was not the chain's is kept aside
            [path] = config.glob(f"projects/*/{turn.session_id}.jsonl")
            path.write_text(path.read_text().replace(WORDS, f"{WORDS}!"))
            assert (await ask(engine, f"remember z = {WORDS}", agent=AGENT)).continuity == "rebuilt"
            log = logs.get("cli_session_proxy.test")
            log.info("about_it", agent=AGENT, turn_id=turn.id)
            log.info("about_another", agent=OTHER)
            copy_aside(settings.var / FILE, settings.var / f"{FILE}.v1.bak")
            (settings.var / "logs" / "proxy.log.1").write_text(f'{{"event": "old", "session": "{turn.session_id}"}}\n')
            await engine.store.index(60.0)  # somebody has searched
            assert b"marmalade" in (settings.var / f"{FILE}.search").read_bytes()
            for trace in (WORDS, AGENT, turn.id, turn.session_id):
                assert holders(settings.var, config, of=trace)
            assert any("salvage" in place for place in holders(settings.var, of=WORDS))
            assert await engine.delete("local", AGENT)
            for trace in (WORDS, AGENT, turn.id):
                assert holders(settings.var, config, of=trace) == []
            # the CLI's own notes elsewhere name sessions by their random ids (plugins/store of 2.1.329)
            assert holders(settings.var, config / "projects", of=turn.session_id) == []
            assert "about_another" in logs.file_of(settings).read_text()
            log.info("still_written")
            assert "still_written" in logs.file_of(settings).read_text()
        finally:
            logs.shut_down()
        assert (await ask(engine, "recall", agent=OTHER)).output[0]["text"] == "I remember: y is something else."
    with sqlite3.connect(settings.var / f"{FILE}.v1.bak") as copy:
        assert copy.execute("SELECT agent_id FROM agents").fetchall() == [(OTHER,)]
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert copy.execute("PRAGMA foreign_key_check").fetchall() == []
    copy.close()


async def filled(engine: Engine, name: str, *, at: float | None = None) -> WholeTurn:
    """An agent with a turn that shows an image."""
    now = time.time()
    agent = await engine.store.ensure_agent("local", name, directory_name("local", name), named=True, now=at or now)
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    turn = a_finished_turn(
        f"turn_{name.replace('-', '')}", agent.key, None, "sonnet", (Message("user", (shown,)),),
        ({"type": "text", "text": f"{WORDS} {name}"},), (Record(f'{{"r": "{name}"}}', "u1"),), at or now, None, 1,
    )  # fmt: skip
    await engine.store.import_turns([turn], head=turn.turn.id)
    return turn


async def test_log_lines_of_an_agent_go_also_if_the_answer_to_its_deletion_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request for it finds no agent."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    async with running(settings) as engine:
        logs.configure(settings)
        try:
            await filled(engine, AGENT)
            logs.get("cli_session_proxy.test").info("about_it", agent=AGENT)
            delete = engine.store.delete_agent

            async def lost(key: int, expiry: Expiry | None = None) -> bool:
                await delete(key, expiry)
                raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

            monkeypatch.setattr(engine.store, "delete_agent", lost)
            with pytest.raises(StoreUnavailable):
                await engine.delete("local", AGENT)
            assert not await engine.delete("local", AGENT)
            assert AGENT not in logs.file_of(settings).read_text()
        finally:
            logs.shut_down()


async def test_a_heartbeat_that_misses_leases_names_no_deleted_agent_in_the_log(tmp_path: Path) -> None:
    """Each deletion was followed by a warning, with the name that was to be gone."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    async with running(settings) as engine:
        logs.configure(settings)
        try:
            for name in (AGENT, OTHER):
                await filled(engine, name)
            async with engine._ownership.hold(await engine.agent_named("local", OTHER)):
                pass
            assert await engine.delete("local", AGENT)
            await engine.store.resign(engine._ownership.proxy.id)
            await engine._ownership._renew()
            (told,) = [line for line in logs.file_of(settings).read_text().splitlines() if "lease_lost" in line]
            assert OTHER in told
            assert AGENT not in logs.file_of(settings).read_text()
        finally:
            logs.shut_down()


async def test_what_retention_forgets_is_gone_from_the_copies_too(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    long_ago = time.time() - 3 * 24 * 3600
    async with running(settings) as engine:
        await filled(engine, AGENT, at=long_ago)
        await filled(engine, OTHER)
        copy_aside(settings.var / FILE, settings.var / f"{FILE}.v1.bak")
        await engine.forgetting.idle(days=1)
    assert holders(settings.var, of=f"{WORDS} {AGENT}") == []
    assert len(holders(settings.var, of=f"{WORDS} {OTHER}")) == 2
    assert len(holders(settings.var, of=IMAGE)) == 2  # the other one shows it too


async def test_a_servers_clock_that_is_years_ahead_makes_nothing_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")) as engine:
        await filled(engine, AGENT)
        monkeypatch.setattr(engine.forgetting, "_now", lambda: time.time() + 10 * 365 * 24 * 3600)
        await engine.forgetting.idle(days=365, unnamed_hours=720)
        assert [row.agent.agent_id async for row in engine.store.summaries()] == [AGENT]


async def test_an_agent_that_cannot_be_deleted_keeps_no_other_from_being_forgotten(tmp_path: Path) -> None:
    class Resists(MemoryBackend):
        async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
            if agent.agent_id == AGENT:
                raise IsADirectoryError(21, "Is a directory")

    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    engine = Engine(settings, backend=Resists())
    await engine.start()
    try:
        for number, name in enumerate((AGENT, OTHER)):
            await filled(engine, name, at=time.time() - (4 - number) * 24 * 3600)
        await engine.forgetting.idle(days=1)
        assert [row.agent.agent_id async for row in engine.store.summaries()] == [AGENT]
    finally:
        await engine.stop()


async def test_a_copy_that_cannot_be_cleaned_is_said_and_nothing_is_deleted(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    copy = settings.var / f"{FILE}.v1.bak"
    async with running(settings) as engine:
        await filled(engine, AGENT)
        copy.write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match=r"v1\.bak") as caught:
        await changing.delete(settings, AGENT)
    assert "remove it" in caught.value.message
    async with running(settings) as engine:
        assert await engine.store.agent("local", AGENT) is not None
    copy.unlink()
    await changing.delete(settings, AGENT)
    assert holders(settings.var, of=WORDS) == []


async def test_a_copy_of_an_older_schema_is_cleaned_as_well(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    copy = settings.var / f"{FILE}.v1.bak"
    async with running(settings) as engine:
        await filled(engine, AGENT)
        await filled(engine, OTHER)
        copy_aside(settings.var / FILE, copy)
        with sqlite3.connect(copy) as old:
            old.execute("PRAGMA foreign_keys=OFF")
            for table in ("items", "conversations"):
                old.execute(f"DROP TABLE {table}")
        old.close()
        assert await engine.delete("local", AGENT)
    with sqlite3.connect(copy) as old:
        assert old.execute("SELECT agent_id FROM agents").fetchall() == [(OTHER,)]
    old.close()
    assert holders(settings.var, of=f"{WORDS} {AGENT}") == []
