"""`find`: what it prints, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_find_without_a_store_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done("find", "x", "--var", tmp_path / "none")
    assert "none of 0 agents" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_what_find_cannot_ask_for_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--until 'soon': use 30m" in error_of(capsys, 2, "find", "x", "--until", "soon", "--var", tmp_path)
    assert "--status must be one of" in error_of(capsys, 2, "find", "x", "--status", "faild", "--var", tmp_path)
