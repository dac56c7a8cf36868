"""The table of the full matrix (`-m 'full or not full' --table PATH`)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from .report import Report

_REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="run the chaos of this seed once more")
    parser.addoption(
        "--hosts", type=int, default=0, help="the matrix on PostgreSQL, each turn at the next of so many hosts"
    )
    parser.addoption("--table", type=Path, default=None, help="write the continuity table of this run to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = Report()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--table", default=None)
    if path is not None:
        session.config.stash[_REPORT].write(path)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given: int | None = request.config.getoption("--seed")
    return random.randrange(1_000_000) if given is None else given


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    return request.config.stash[_REPORT]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--hosts` the bare CLI, and rows that another host cannot know of, are left out on purpose."""
    if config.getoption("--hosts", default=0) < 2:
        return
    given = [(item, getattr(item, "callspec", None)) for item in items]
    out = [item for item, call in given if call is not None and "row" in call.params and _of_one_host(call.params)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]


def _of_one_host(params: Mapping[str, Any]) -> bool:
    return bool(params.get("bare")) or not params["row"].on_hosts


@pytest.fixture
def host_count(request: pytest.FixtureRequest) -> int:
    """Of the matrix; 0: one host with SQLite."""
    given: int = request.config.getoption("--hosts")
    return given


@pytest.fixture
async def upstream(request: pytest.FixtureRequest) -> AsyncIterator[Upstream]:
    """In the matrix its model thinks before every answer, and its provider enforces the seals of these thoughts."""
    row = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    behave = (lambda seen: Reply(thinking=f"thought {len(seen.messages)}")) if row is not None and row.thinks else None
    async with Upstream(behave=behave) as server:
        yield server
