"""The page of `make peers`: made of the runs that are there, the best first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import peers

from ..turnfault.test_summary import a_run, row


def test_every_contender_has_a_folder_of_its_own() -> None:
    assert len({peers.slug(one.name) for one in peers.PEERS}) == len(peers.PEERS) >= 8
    assert peers.slug("cli-session-proxy, PostgreSQL, 3 hosts") == "cli-session-proxy-postgresql-3-hosts"


def test_the_page_names_who_ran_how_often_and_what_differed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    runs = [a_run("ours", 1, row("a")), a_run("theirs", 1, row("a")), a_run("theirs", 2, row("a", lost=3))]
    runs[0]["whole"] = 0
    for number, run in enumerate(runs):
        (tmp_path / f"seed-{number}.json").write_text(json.dumps(run))
    page = peers.page()
    assert page.index("| theirs | 1 | 2 |") < page.index("| ours | 1 | 1 |")
    assert "- theirs, g: a: seed 1: kept; seed 2: all lost" in page


def test_a_contender_that_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "TOOLS", tmp_path)
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["peers", "--only", "openai", "--runs", "1"])
    peers.main()
    assert "left out: openai-agents is not installed" in capsys.readouterr().out
