"""The table of a whole run: `-m 'full or not full' --drift docs/drift.md`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from cli_session_proxy.backends.claude.process import process
from turnfault.provider.upstream import Upstream

from ..remembering import remembering
from .report import DRIFT, Row, write

_ROWS: dict[str, Row] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drift", type=Path, default=None, help="write the table of this run to this file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Here, because the processes of a parallel run send their reports to one."""
    for name, row in report.user_properties:
        if name == DRIFT and report.when == "call":
            found = cast(Row, row)
            _ROWS[found["change"]] = found


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--drift", default=None)
    if path is not None and _ROWS and not hasattr(session.config, "workerinput"):
        write(path, _ROWS)


@pytest.fixture(autouse=True)
def waits_as_serve_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests wait for a CLI for longer; these measure how long a client waits."""
    monkeypatch.setattr(process, "SILENCE", 10.0)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(answer=remembering) as server:
        yield server
