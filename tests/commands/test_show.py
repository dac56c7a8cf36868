"""`show`: by a name, an id or a part of one; for people and for programs."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Record, Session
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import NewChain, WholeTurn
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_turn, accepted, an_agent

from ..export.told import every_repair
from ..fakes import SESSION, turn
from ..test_cli import done, error_of, fill


def mended(var: Path) -> None:
    """An agent with every repair, and a failed turn."""

    async def run() -> None:
        store = store_for(Settings(var=var))
        await store.open()
        rows, links = every_repair()
        failed = turn(
            90, status="failed", parent_id=rows[-1].id, error={"code": "upstream_error", "message": "no"}, output=()
        )
        parts = [*(WholeTurn(row, (Record("{}"),)) for row in rows), WholeTurn(failed, ())]
        new = NewChain("local", "mended", "mended", True, 1.0, time.time(), lambda: rows[-1].id)
        await store.import_chain(new, [*parts, Session(SESSION, 0, rows[-1].id, "/t.jsonl", "2.1.329", 1.0), *links])
        await store.close()

    asyncio.run(run())


def test_show_tells_an_agent_a_session_and_a_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "evil\x1b[31m[bold]x[/bold]")
    mended(tmp_path)
    config = tmp_path / "config"
    done("show", "mended", "--var", tmp_path, "--claude-config-dir", config, "--claude-bin", "/c/claude")
    agent = capsys.readouterr().out
    command = f"CLAUDE_CONFIG_DIR={config} /c/claude --resume {SESSION}"
    assert f"by hand   cd {tmp_path}/sandbox/agents/mended && {command}" in agent
    assert "upstream_error" not in agent, "a sentence, and no code"
    failed = next(n for n, line in enumerate(agent.splitlines()) if line.startswith("failed    #"))
    assert agent.splitlines()[failed + 2].split() == ["no"]
    assert {"adopted", "branch"} <= {line.split()[0] for line in agent.splitlines()}, "each by its own name"
    assert "answered  Hello there." in agent
    done("show", SESSION, "--var", tmp_path)
    session = capsys.readouterr().out
    assert "session of agent mended" in session
    assert "file      /t.jsonl" in session
    done("show", "turn_90", "--var", tmp_path, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["turn"]["error"]["code"], told["turn"]["status"]) == ("turn", "upstream_error", "failed")
    done("show", "bold", "--var", tmp_path)
    assert "agent evil\N{REPLACEMENT CHARACTER}[31m[bold]x[/bold]" in capsys.readouterr().out


def test_what_fits_nothing_or_too_much_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is kept" in error_of(capsys, 1, "show", "x")
    fill(tmp_path, "alpha one", "alpha two")
    assert "fits alpha" in error_of(capsys, 1, "show", "alpha", "--var", tmp_path)
    assert "no agent, session or turn" in error_of(capsys, 1, "show", "beta", "--var", tmp_path)
    assert "no agent, session or turn" in error_of(capsys, 1, "show", "alpha one", "--owner", "bob", "--var", tmp_path)


def test_of_a_turn_that_runs_while_the_disk_is_full_show_says_that_it_may_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        store = store_for(Settings(var=tmp_path))
        await store.open()
        await accepted(store, a_turn(await an_agent(store, "ada"), "turn_now"))
        await store.close()

    async def full(self: object) -> None:
        raise StoreUnavailable("database or disk is full: free space on its disk")

    asyncio.run(run())
    for wanted in ("ada", "turn_now"):
        done("show", wanted, "--var", tmp_path)
        assert "unsure" not in capsys.readouterr().out
    monkeypatch.setattr(SqliteStore, "probe", full)
    for wanted in ("ada", "turn_now"):
        done("show", wanted, "--var", tmp_path)
        assert (
            "unsure    it may have ended, but that could not be stored: database or disk is full"
            in capsys.readouterr().out
        )
