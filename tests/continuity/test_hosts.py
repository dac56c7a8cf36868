"""The real CLI on PostgreSQL: breakages of one host, and every turn at another host than the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.testing.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from . import test_matrix
from .report import Report
from .rows import ROWS
from .talk import EngineTalk, talking
from .test_matrix import clis, lab

__all__ = ["clis", "lab"]

# One of each kind that the store has a part in; the others are for `make full`.
ALWAYS = ("last line cut", "kill -9 after it")
# Their other proxies are given their settings as text, without the store's URL: `tests.engine.test_hosts` has those.
OF_SQLITE = ("several proxies",)


class HostsTalk(EngineTalk):
    """Through the engines of several hosts, one after the other."""

    def __init__(self, hosts: list[Settings], upstream: Upstream) -> None:
        super().__init__(hosts[0], upstream)
        self.hosts = hosts
        self.engines: list[Engine] = []
        self.at = 0

    async def up(self, **changes: Any) -> None:
        self.engines = [Engine(host) for host in self.hosts]
        for engine in self.engines:
            await engine.start()
        self.engine = self.engines[self.at]

    async def down(self) -> None:
        for engine in self.engines:
            await engine.stop()

    async def _say(self, said: str) -> str:
        self.at = (self.at + 1) % len(self.hosts)
        self.engine, self.settings = self.engines[self.at], self.hosts[self.at]
        return await super()._say(said)


@pytest.fixture
def on_hosts(make_settings: MakeSettings, upstream: Upstream, postgres_url: str, tmp_path: Path) -> Callable[..., Any]:
    """A conversation over so many hosts: each has its own `var/` and its own directory of the CLI."""

    @asynccontextmanager
    async def started(claude: Path, count: int = 2, **more: Any) -> AsyncIterator[HostsTalk]:
        hosts = [
            make_settings(
                claude_bin=claude, store=postgres_url, var=tmp_path / f"host-{n}" / "var",
                claude_config_dir=tmp_path / f"host-{n}" / "config", **more,
            )
            for n in range(count)
        ]  # fmt: skip
        talk = HostsTalk(hosts, upstream)
        await talk.up()
        try:
            yield talk
        finally:
            await talk.down()

    return started


@old_cli_in_full
async def test_every_turn_at_another_host_is_remembered_and_extends_the_one_before(
    claude: Path, on_hosts: Callable[..., Any], upstream: Upstream
) -> None:
    async with on_hosts(claude) as talk:
        await talk.tell()
        for _ in range(3):
            before = upstream.requests[-1]
            score = await talk.probe()
            assert score.whole, score
            assert talk.turn.continuity == "rebuilt"
            assert upstream.requests[-1].prefix_kept(before) == 1.0
        # A transcript of some turns ago holds nothing that the chain has not: nothing is put aside for it.
        assert not [kept for host in talk.hosts for kept in (host.var / "salvage").glob("*")]


@pytest.mark.parametrize("alike", [True, False], ids=["the same paths", "other paths"])
async def test_a_profile_with_tools_keeps_the_prefix_where_all_hosts_have_the_same_paths(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, postgres_url: str, tmp_path: Path, alike: bool
) -> None:
    """The CLI's own system prompt names its directories. One host after the other stands at the same path here."""
    profiles = {"worker": Profile(tools=("Bash",))}
    for n in range(3):
        place, away = tmp_path / ("host" if alike else f"host-{n % 2}"), tmp_path / f"away-{n % 2}"
        if away.exists():
            away.rename(place)
        at = {"var": place / "var", "claude_config_dir": place / "config"}
        host = make_settings(claude_bin=claude_2, store=postgres_url, profiles=profiles, profile="worker", **at)
        async with talking(host, upstream) as talk:
            fact = talk.new_fact()
            before = upstream.requests[-1] if n else None
            await talk.tell(fact)
        assert len(upstream.requests[-1].user_texts()) == n + 1
        if before is not None:
            assert (upstream.requests[-1].prefix_kept(before) == 1.0) == alike
        place.rename(away)


def _rows() -> list[Any]:
    return [
        pytest.param(row, id=str(row), marks=() if row.name in ALWAYS else (pytest.mark.full,))
        for row in ROWS
        if "2.1" in row.quick and row.group not in OF_SQLITE
    ]


@pytest.mark.parametrize("row", _rows())
async def test_what_breaks_is_repaired_as_on_sqlite(
    row: Any, lab: Path, make_settings: MakeSettings, upstream: Upstream, report: Report, postgres_url: str
) -> None:
    def on_postgresql(**given: Any) -> Settings:
        return make_settings(store=postgres_url, **given)

    await test_matrix.test_what_is_acknowledged_is_remembered(row, "2.1", False, lab, on_postgresql, upstream, report)
