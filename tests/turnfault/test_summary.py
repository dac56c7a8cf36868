"""Several runs as one table; each run as its schema says."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from turnfault import cli, summary
from turnfault.rows import ROWS

from .test_targets import ADAPTERS

SCHEMA = json.loads(resources.files("turnfault").joinpath("schema.json").read_text())


def row(name: str, **found: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("doubled", "lost", "reordered", "foreign", "flattened"), 0)
    whole = not found
    told = {"acknowledged": 3, "remembered": 3 if whole else 0, "refused": None, "prefix": 1.0, "cached": 1.0}
    return {"id": name, "group": "g", "name": name, "whole": whole, **counts, **told, "calls": 4, "seconds": 1, **found}


def a_run(target: str, seed: int, *rows: dict[str, Any]) -> dict[str, Any]:
    ran = [one for one in rows if "left_out" not in one]
    whole = sum(one["whole"] for one in ran)
    return {"target": target, "seed": seed, "version": "1", "note": None, "whole": whole, "rows_run": len(ran),
            "rows": list(rows)}  # fmt: skip


def test_the_best_stands_first_with_its_median_and_spread() -> None:
    gone = {"id": "b", "group": "g", "name": "b", "left_out": "it has no files"}
    runs = [
        a_run("worse", 0, row("a", lost=3), gone), a_run("better", 0, row("a"), row("b")),
        a_run("better", 1, row("a"), row("b", lost=1)), a_run("better", 2, row("a"), row("b", lost=3)),
    ]  # fmt: skip
    text = summary.table(runs)
    assert text.index("| better | 1 | 3 | 1 (1 to 2) | 2 | 1 (0 to 3) |") < text.index("| worse | 1 | 1 | 0 | 1 | 3 |")
    assert "| g | a | kept | all lost |" in text
    assert "|  | b | kept 1×; 1 lost 1×; all lost 1× | – |" in text
    assert summary.differing(runs) == ["better, g: b: seed 0: kept; seed 1: 1 lost; seed 2: all lost"]
    assert summary.left_out(runs) == ["worse, rows left out: it has no files (1)"]


def test_every_version_that_was_run_is_told() -> None:
    runs = [{**a_run("it", seed, row("a")), "version": version} for seed, version in ((3, "2"), (1, "1"), (2, "1"))]
    assert summary.contenders(runs)[0].version == "1; 2"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"refused": "HTTP 500"}, "no answer (HTTP 500)"),
        ({"flattened": 3}, "flattened"),
        ({"doubled": 1, "foreign": 2}, "1 doubled, 2 foreign"),
    ],
)
def test_a_verdict_says_what_went_wrong(found: dict[str, Any], says: str) -> None:
    assert summary.verdict(row("a", **found)) == says


def test_runs_are_written_as_the_schema_says_and_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "killed and started again"
    words = ["run", "--target", f"python: {ADAPTERS}:InMemory", "--only", only, "--runs", "2", "-o", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--name", "toy", "--target-version", "7", "--note", "a note"])
        assert not ended.value.code
    assert "seed 1 is in" in capsys.readouterr().out
    for seed in range(2):
        data = json.loads((tmp_path / f"seed-{seed}.json").read_text())
        jsonschema_rs.validate(SCHEMA, data)
        assert (data["target"], data["version"], data["note"], data["seed"]) == ("toy", "7", "a note", seed)
        traces = gzip.decompress((tmp_path / f"seed-{seed}.trace.jsonl.gz").read_bytes()).decode().splitlines()
        assert [json.loads(line)["id"] for line in traces] == ["kill"]
    with pytest.raises(SystemExit):
        cli.main(["table", str(tmp_path)])
    assert "| toy | 7 | 2 | 0 | 1 |" in capsys.readouterr().out


def test_the_schema_refuses_a_run_with_a_row_that_says_less() -> None:
    jsonschema_rs.meta.validate(SCHEMA)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(SCHEMA, {"schema": "turnfault/results/1", "rows": []})


def test_the_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["rows"])
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS)


def test_a_target_that_cannot_be_run_ends_the_command_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--target", "ftp://x"])
    assert ended.value.code == 2
    assert "--target must be" in capsys.readouterr().err
