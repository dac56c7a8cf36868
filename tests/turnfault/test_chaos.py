"""Random histories on a toy: what is sound passes, what forgets is found and made small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from turnfault import cli
from turnfault.bench import Options
from turnfault.chaos import Step, chaos, history
from turnfault.shrinking import fewest
from turnfault.targets.base import Surface

from .test_targets import ADAPTERS

FULL: frozenset[Surface] = frozenset(get_args(Surface))


def options(kind: str) -> Options:
    return Options((f"python: {ADAPTERS}:{kind}",), name=kind)


def replayed(file: Path, *steps: Step) -> Path:
    told = [{"kind": one.kind, "agent": one.agent, "how": one.how} for one in steps]
    file.write_text(json.dumps({"seed": 1, "steps": told}))
    return file


async def test_what_loses_all_with_its_process_is_found_and_made_small(tmp_path: Path) -> None:
    steps = [Step("says", 0), Step("says", 1), Step("says", 0), Step("kill", 1), Step("says", 1), Step("says", 0)]
    file = replayed(tmp_path / "history.json", *steps)
    (report,) = await chaos(options("InMemory"), print, minutes=5, seed=0, replay=file, output=tmp_path / "out")
    kinds = [one["kind"] for one in report["steps"]]
    assert "kill" in kinds
    assert len(kinds) <= 3
    assert report["fault"]["kinds"] == ["lost"]
    again = await chaos(options("InMemory"), print, minutes=5, seed=0, replay=tmp_path / "out" / "history-1.json")
    assert again[0]["fault"]["kinds"] == ["lost"]


async def test_what_keeps_all_on_disk_is_sound(tmp_path: Path) -> None:
    steps = [Step("says", 0), Step("kill", 0), Step("says", 0), Step("fails", 0, 0), Step("fails", 1, 3),
             Step("leaves", 1), Step("kill answering", 0), Step("model", 1), Step("restart", 1)]  # fmt: skip
    file = replayed(tmp_path / "history.json", *steps)
    assert await chaos(options("OnDisk"), print, minutes=5, seed=0, replay=file) == []


def test_a_history_is_its_seeds_and_holds_only_what_the_target_offers() -> None:
    assert history(1, FULL) == history(1, FULL) != history(2, FULL)
    assert {step.kind for seed in range(20) for step in history(seed, frozenset({"id"}))} == {
        "says", "leaves", "at once", "fails", "model",
    }  # fmt: skip


async def test_the_fewest_steps_are_found_of_a_fault_that_needs_two() -> None:
    tried: list[list[int]] = []

    async def failing(part: list[int]) -> str | None:
        tried.append(part)
        return "broken" if {3, 11} <= set(part) else None

    assert await fewest(16, failing, lambda _part, _shown: None) == ([3, 11], "broken")
    assert await fewest(2, failing, lambda _part, _shown: None) is None


def test_a_file_that_is_no_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SystemExit) as ended:
        cli.main(["chaos", "--target", f"python: {ADAPTERS}:OnDisk", "--replay", str(tmp_path / "x.json")])
    assert ended.value.code == 2
    assert "is no history" in capsys.readouterr().err
