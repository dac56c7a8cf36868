"""`archive`, as it is called: which agents, where to, and what is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.cli import main
from cli_session_proxy.http.audit import Audit
from cli_session_proxy.settings import Settings

from ..engine.test_core import core
from ..talking import ask
from .test_archiving import objects, talked


def run(settings: Settings, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and what was said on either stream."""
    told = ["--var", str(settings.var), "--claude-config-dir", str(settings.claude_config_dir)]
    try:
        main([words[0], *told, "--archive-key-file", str(settings.archive_key_file), *words[1:]])
    except SystemExit as exc:
        code = exc.code
    else:
        code = 0
    said = capsys.readouterr()
    return int(code or 0), said.out + said.err


async def agents(settings: Settings) -> list[str]:
    async with core(settings) as (engine, _):
        return sorted([row.agent.agent_id async for row in engine.store.summaries()])


def test_agents_are_archived_by_name_and_come_back(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLI_SESSION_PROXY_AUDIT", str(folder.parent / "audit.jsonl"))

    async def talk() -> None:
        async with talked(settings) as engine:
            await ask(engine, "hello", agent="b")
            await ask(engine, "hello", agent="c", owner="alice")

    asyncio.run(talk())
    to = ("--to", str(folder))
    code, said = run(settings, "archive", "--older-than", "0s", "--dry-run", *to, capsys=capsys)
    assert (code, objects(folder)) == (0, [])
    assert said.splitlines() == [f"{name}: would be archived" for name in "abc"]
    code, said = run(settings, "archive", "a", *to, "--json", capsys=capsys)
    (told,) = json.loads(said)
    assert (code, told["stays"], told["turns"]) == (0, None, 3)
    assert objects(folder) == [told["name"]]
    assert asyncio.run(agents(settings)) == ["b", "c"]
    code, said = run(settings, "archive", "--older-than", "0s", "--owner", "alice", *to, capsys=capsys)
    assert (code, said.split(":")[0], len(objects(folder))) == (0, "c", 2)
    code, said = run(settings, "archive", "--older-than", "7d", *to, capsys=capsys)
    assert (code, said) == (0, "no agent was idle for that long\n")
    code, said = run(settings, "import", str(folder / told["name"]), capsys=capsys)
    assert (code, said) == (0, "imported agent a: 3 turns (6 records)\n")
    assert asyncio.run(agents(settings)) == ["a", "b"]
    lines = [line for line in Audit(folder.parent / "audit.jsonl").lines() if line.type == "archive"]
    assert [(line.by, line.what, line.owner) for line in lines] == [
        ("command", "archive a", "local"),
        ("command", "archive c", "alice"),
    ]
    assert lines[0].detail == {"object": told["name"]}


def test_a_named_agent_that_stays_is_exit_1_and_says_why(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def talk() -> None:
        async with talked(settings) as engine:
            sandbox = engine._sandboxes.prepare("a")
            (sandbox / "notes.md").write_text("mine")

    asyncio.run(talk())
    code, said = run(settings, "archive", "a", "--to", str(folder), capsys=capsys)
    assert (code, objects(folder)) == (1, [])
    assert said.startswith("a: stays, there are files in its sandbox")


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--to", "{folder}"], 2, "--older-than 30d"),
        (["a"], 2, "--to DIRECTORY"),
        (["a", "--to", "gs://bucket"], 2, "s3://bucket/prefix"),
        (["a", "--to", "{folder}", "--older-than", "soon"], 2, "--older-than 'soon'"),
        (["a", "--to", "{folder}"], 2, "no store at"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    given: list[Any] = [word.format(folder=folder) for word in words]
    done, said = run(settings, "archive", *given, capsys=capsys)
    assert done == code
    assert why in said
    assert len(said.strip().splitlines()) == 1
    assert not settings.var.exists()
