"""One agent's life on the newest CLI and on ones that people may still have; `make versions` has many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import ROOT, required
from .__main__ import lived

OLD = ROOT / ".tools" / "claude-2.1.71" / "node_modules" / ".bin" / "claude"


@pytest.fixture
def claude_2_old() -> Path:
    return required(OLD, "make tools")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cli", "short"),
    [
        ("claude_2", False),
        ("claude_2_old", True),
        pytest.param("claude_2_old", False, marks=pytest.mark.full),
        # A process for each turn takes seconds; engine/test_turns.py has one conversation with it each time.
        pytest.param("claude_1", True, marks=pytest.mark.full),
        pytest.param("claude_1", False, marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(1)
async def test_one_agents_life_keeps_every_acknowledged_turn(
    cli: str, short: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    binary: Path = request.getfixturevalue(cli)
    (folder := tmp_path / "life").mkdir()
    found = await lived(cli, binary, folder, short=short)
    assert found.faults == []
    assert found.errors == []
    assert found.whole == found.answered
