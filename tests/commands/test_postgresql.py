"""The commands on a store in PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli_session_proxy.cli import app
from cli_session_proxy.commands.doctor import examine
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings

from ..memory_backend import MemoryBackend
from ..talking import ask


async def spoken(url: str, var: Path) -> None:
    engine = Engine(Settings(store=SecretStr(url), var=var, claude_config_dir=var), backend=MemoryBackend())
    await engine.start()
    try:
        await ask(engine, "hello")
    finally:
        await engine.stop()


async def finding(url: str, var: Path) -> tuple[str, str, str]:
    async for one in examine(Settings(store=SecretStr(url), var=var, claude_config_dir=var)):
        if one.check == "store":
            return one.level, one.says, one.mend
    raise AssertionError("it did not look at the store")


async def test_doctor_looks_at_the_server_and_changes_nothing(postgres_url: str, tmp_path: Path) -> None:
    for _ in range(2):
        level, says, _ = await finding(postgres_url, tmp_path)
        assert (level, says.endswith("an empty database")) == ("ok", True)
    await spoken(postgres_url, tmp_path)
    level, says, _ = await finding(postgres_url, tmp_path)
    assert level == "ok"
    assert "1 agent, schema" in says
    level, says, mend = await finding("postgresql://proxy:hidden@127.0.0.1:1/none", tmp_path)
    assert (level, mend) == ("error", "start PostgreSQL, or correct `store`")
    assert "hidden" not in says


async def test_commands_read_the_same_store(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await spoken(postgres_url, tmp_path / "var")
    monkeypatch.setenv("CLI_SESSION_PROXY_STORE", postgres_url)
    monkeypatch.setenv("CLI_SESSION_PROXY_VAR", str(tmp_path / "elsewhere"))
    for said, arguments in (
        ('"agent_id": "a"', ("chains", "--json")),
        ("You said: hello (1)", ("dump", "a", "--format", "markdown")),
        ("agent a", ("show", "a")),
        ("1 hit in 1 agent (1 turn)", ("find", "hello")),
        ("agent a", ("show", "turn_")),
    ):
        ran = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
        assert said in ran.output + str(ran.exception or "")
        assert ran.exit_code == 0
    assert not (tmp_path / "elsewhere").exists()
