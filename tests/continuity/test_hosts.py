"""The real CLI on PostgreSQL: breakages of one host, and every turn at another host than the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.settings import Profile
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..matrix import rest_in_full
from .hosts import HostsTalk, host_settings
from .report import Report
from .row import Row
from .rows import ROWS
from .talk import EngineTalk, talking
from .test_matrix import binary_of, clis, lab, remembered, talk_on

__all__ = ["clis", "lab"]

# Of each kind that the store has a part in, one row, with one host or with several.
ALWAYS = ("last line cut",)
ON_HOSTS = ("kill -9 after it",)


@pytest.fixture
def on_hosts(make_settings: MakeSettings, upstream: Upstream, postgres_url: str, tmp_path: Path) -> Callable[..., Any]:
    """A conversation over so many hosts: each has its own `var/` and its own directory of the CLI."""

    @asynccontextmanager
    async def started(claude: Path, count: int = 2, **more: Any) -> AsyncIterator[HostsTalk]:
        talk = HostsTalk(
            host_settings(make_settings, postgres_url, tmp_path, count, claude_bin=claude, **more), upstream
        )
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


@pytest.mark.parametrize("alike", rest_in_full("var", "sandbox_root", None), ids=lambda alike: f"the same {alike}")
@pytest.mark.full
async def test_a_profile_with_tools_keeps_the_prefix_where_all_hosts_have_the_same_paths(
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    postgres_url: str,
    tmp_path: Path,
    alike: str | None,
) -> None:
    """The CLI's own system prompt names its directories. One host after the other stands at the same path here."""
    profiles = {"worker": Profile(tools=("Bash",))}
    for n in range(3):
        own = tmp_path / f"host-{n % 2}"
        place, away = tmp_path / "host" if alike else own, tmp_path / f"away-{n % 2}"
        if away.exists():
            away.rename(place)
        at = {"var": (place if alike == "var" else own) / "var", "claude_config_dir": place / "config"}
        if alike == "sandbox_root":
            at["sandbox_root"] = place / "sandbox"
        host = make_settings(claude_bin=claude_2, store=postgres_url, profiles=profiles, profile="worker", **at)
        async with talking(host, upstream) as talk:
            fact = talk.new_fact()
            before = upstream.requests[-1] if n else None
            await talk.tell(fact)
        assert len(upstream.requests[-1].user_texts()) == n + 1
        if before is not None:
            assert (upstream.requests[-1].prefix_kept(before) == 1.0) == (alike is not None)
        place.rename(away)


def _rows(always: tuple[str, ...]) -> list[Any]:
    """The others are for `make continuity-hosts`."""
    return [pytest.param(row, id=str(row)) for row in ROWS if row.name in always]


@pytest.mark.parametrize("row", _rows(ALWAYS))
@pytest.mark.full
async def test_what_breaks_is_repaired_as_on_sqlite(
    row: Row, lab: Path, make_settings: MakeSettings, upstream: Upstream, report: Report, postgres_url: str
) -> None:
    settings = make_settings(store=postgres_url, claude_bin=binary_of(row, "2.1", lab), **row.settings)
    await remembered(row, "2.1", EngineTalk(settings, upstream), report)


@pytest.mark.parametrize("row", _rows(ON_HOSTS))
async def test_what_breaks_while_every_turn_is_at_another_host_is_remembered_as_on_one(
    row: Row, lab: Path, make_settings: MakeSettings, upstream: Upstream, report: Report, postgres_url: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    given = {"claude_bin": binary_of(row, "2.1", lab), **row.settings}
    hosts = host_settings(make_settings, postgres_url, tmp_path, 3, **given)
    await remembered(row, "2.1", talk_on(hosts, row, upstream), report)
