"""docs/security.md names tests that there are, and judges every row."""

from __future__ import annotations

import re

from ..conftest import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()
TESTS = ROOT / "tests"


def test_every_test_that_a_row_leans_on_is_there() -> None:
    named = set(re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", TEXT))
    assert len(named) > 20
    files = {path.name for path in TESTS.rglob("test_*.py")}
    for name in named:
        found = (ROOT / name).is_file() if name.startswith("tests/") else name in files
        assert found, name
    for folder in re.findall(r"`(tests/[\w/]+)`", TEXT):
        assert (ROOT / folder).is_dir(), folder


def test_every_row_says_whether_it_holds_and_how() -> None:
    rows = re.findall(r"^\| (\d+\.\d+\.\d+[^|]*)\| ([^|]*)\| ([^|]+)\|$", TEXT, re.M)
    assert len(rows) > 70
    assert len(rows) == len(re.findall(r"^\| \d+\.\d+\.\d+", TEXT, re.M))
    for requirement, holds, how in rows:
        assert holds.strip() in ("yes", "part", "no", "n.a."), requirement
        assert len(how.split()) > 2, requirement
