"""`find`: what it prints, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_session_proxy.commands import finding
from cli_session_proxy.domain.searching import Search
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, running
from ..test_cli import done, error_of, fill


def test_find_prints_where_it_is_and_the_words_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "first", "evil\x1b[31m[bold]x[/bold]")
    done("find", "hello THER", "--var", tmp_path)
    assert "nothing found: none of 2 agents (2 turns) has it" in capsys.readouterr().out
    done("find", "hello", "ther", "--var", tmp_path)
    out = capsys.readouterr().out
    assert "first  #1 turn_" in out
    assert "Hello there." in out
    assert "2 hits in 2 agents (2 turns)" in out
    assert "\x1b" not in out
    assert "[bold]x[/bold]" in out
    done("find", "irst", "--var", tmp_path, "--json")
    told = json.loads(capsys.readouterr().out)
    assert [(hit["kind"], hit["agent_id"]) for hit in told["data"]] == [("agent", "first")]
    done("find", "hello", "--status", "failed", "--var", tmp_path)
    assert "nothing found" in capsys.readouterr().out


def test_find_without_a_store_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done("find", "x")
    assert "none of 0 agents" in capsys.readouterr().out
    assert not list((tmp_path / "here").iterdir())


async def test_of_a_repaired_turn_it_tells_the_question_and_the_repair(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        await ask(engine, "Remember: the colour is teal.", agent="ada")
    (transcript,) = (settings.claude_config_dir or Path()).glob("projects/*/*.jsonl")
    transcript.unlink()
    async with running(settings) as engine:
        await ask(engine, "What is the\n colour?", agent="ada")
    wanted = Search("", None, repaired=True)
    finding.print_found(wanted, (hits := await finding.find(settings, wanted))[0], hits[2])
    where, question, repair, total = capsys.readouterr().out.splitlines()
    assert where.startswith("ada  #2 turn_")
    assert (question, repair) == ("  What is the colour?", "  Session file was missing; restored.")
    assert total.startswith("1 hit ")
    wanted = Search("teal", None)
    finding.print_found(wanted, (hits := await finding.find(settings, wanted))[0], hits[2])
    assert "Remember: the colour is teal." in capsys.readouterr().out


def test_what_find_cannot_ask_for_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--until 'soon': use 30m" in error_of(capsys, 2, "find", "x", "--until", "soon", "--var", tmp_path)
    assert "--status must be one of" in error_of(capsys, 2, "find", "x", "--status", "faild", "--var", tmp_path)
