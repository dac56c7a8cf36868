"""What a turn takes, measured on so few turns that it only shows that everything works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.capacity import LONG, SHORT

from ..postgres import needed, programs
from .running import run


@pytest.mark.full  # a dozen processes; tests.bench.test_bench measures a proxy on PostgreSQL in every run
@pytest.mark.usefixtures("claude_2")
async def test_what_a_turn_takes_is_counted_in_the_store_and_on_the_processor(tmp_path: Path) -> None:
    needed(programs(), "PostgreSQL")
    few = ("--turns", "4", "--rest", "0.2", "--starts", "2")
    await run("bench.capacity", *few, "--json", str(tmp_path / "found.json"), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for length in (SHORT, LONG):
        assert found[f"rows of turns a turn, question of {length} bytes"] == 1
        assert found[f"of them acknowledged by the disk, question of {length} bytes"] >= 2  # begin, commit
        assert found[f"log bytes a turn, question of {length} bytes"] > length
    assert found["CPU of a turn that starts its process, ms"] > found["CPU of a warm turn, one at a time, ms"] > 0
