"""`status`: one screen that says whether it works, what it costs and what must be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import Observation
from cli_session_proxy.commands import status as command
from cli_session_proxy.commands.prerequisites import login_of
from cli_session_proxy.domain import times
from cli_session_proxy.domain.models import Status, Usage
from cli_session_proxy.domain.plan import Plan, PlanWindow
from cli_session_proxy.export.status import ProxyStatus, Remembered, costs, lines, persistent_error, remembered, windows
from cli_session_proxy.selfcheck.keeping import KeptBinaries
from cli_session_proxy.selfcheck.service import RUN
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import TurnFacts
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serving
from ..talking import ask, running
from ..test_cli import done, error_of, fill
from ..zones import machine_in

NOON = 1_795_521_600.0  # 2026-11-24 12:00 UTC
DAY = 86_400.0


def fact(
    created_at: float, cost: float | None = None, status: Status = "completed", code: str | None = None
) -> TurnFacts:
    return TurnFacts("t", 1, 1, "local", status, "sonnet", created_at, created_at, cost, Usage(), code, 0)


def test_today_and_the_week_are_days_of_the_zone_that_is_shown() -> None:
    facts = [fact(NOON, 1.0), fact(NOON - DAY / 2, 2.0), fact(NOON - DAY / 2 - 1, 4.0), fact(NOON - 6.4 * DAY, 8.0)]
    every = [*facts, fact(NOON - 6.6 * DAY, 16.0), fact(NOON)]
    with machine_in("UTC"):
        assert costs(every, NOON) == (3.0, 15.0)
    with machine_in("Asia/Tokyo"):
        assert costs(every, NOON) == (7.0, 31.0)
    with machine_in("Asia/Tokyo", "utc"):
        assert costs(every, NOON) == (3.0, 15.0)


def test_what_the_last_days_cost_is_listed_by_day_and_by_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "ada", "bob")
    done("chains", "--by", "day", "--var", tmp_path)
    first, today, yesterday, *_, total = capsys.readouterr().out.splitlines()
    assert first.split() == ["day", f"({times.name()})", "turns", "failed", "repairs", "tokens", "cost"]
    assert len(yesterday.split()) == 1, "what did not happen is blank"
    done("chains", "--by", "model", "--json", "--var", tmp_path)
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["turns"] for row in rows) == int(today.split()[1]) == 2
    assert total == f"${sum(row['cost_usd'] for row in rows):.2f} in the last 14 days"
    assert "day, model, key" in error_of(capsys, 2, "chains", "--by", "week", "--var", tmp_path)


def test_only_an_error_that_others_meet_too_is_a_problem() -> None:
    assert persistent_error([fact(2.0, status="failed", code="claude_not_logged_in"), fact(1.0)]) == (
        "the CLI is not logged in: run `cli-session-proxy login`"
    )
    assert persistent_error([fact(2.0, status="failed", code="context_too_long")]) is None
    earlier = fact(1.0, status="failed", code="claude_unavailable")
    assert persistent_error([fact(3.0, status="running"), fact(2.0), earlier]) is None


def test_what_is_missing_is_said_loudly() -> None:
    assert remembered(Remembered(1, 7, 7)) == "nothing forgotten: 7 of 7 turns sent in the newest request of 1 agent"
    assert remembered(Remembered(2, 7, 6)).startswith("SOMETHING IS MISSING: 6 of 7 turns")


def test_the_plan_is_told_with_its_shares_and_resets() -> None:
    week = PlanWindow("seven_day", 0.3, NOON + 3 * DAY, "allowed")
    plan = Plan("rejected", NOON, (PlanWindow("five_hour", 1.0, NOON, "rejected"), week), "five_hour", NOON)
    five = "five hours: 100 % used until 2026-11-24 12:00:00 UTC LIMIT REACHED"
    told = f"{five}, week: 30 % used until 2026-11-27 12:00:00 UTC"
    assert windows(plan) == told
    seen = ProxyStatus(None, None, 0, 0, 0.0, 0.0, None, plan, 2)
    assert ProxyStatus.from_json(seen.as_json()) == seen
    said = list(lines(seen, "http://127.0.0.1:8787"))
    assert f"plan        {told}" in said
    assert "0 turns running, 2 until a limit is over" in said[1]


async def test_the_plan_is_known_without_a_server_too(claude_2: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        engine.plan.report({"status": "allowed", "rateLimitType": "five_hour", "utilization": 0.5, "resetsAt": 9e10})
    seen, served = await command.look(settings)
    assert served is None
    assert seen.plan is not None
    assert seen.plan.windows == (PlanWindow("five_hour", 0.5, 9e10, "allowed"),)


async def test_a_server_tells_that_it_works_and_that_nothing_is_forgotten(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine, serving(engine, settings) as url:
        (settings.var / "serve.json").write_text(json.dumps({"url": url.removesuffix("/v1"), "uds": None, "pid": 1}))
        for agent in ("ada", "ada", "bob"):
            await ask(engine, "hello", agent=agent)
        seen, served = await command.look(settings)
        assert (seen.problem, seen.running, seen.remembered) == (None, 0, Remembered(2, 3, 3))
        assert seen.cost_today == seen.cost_week > 0
        said = list(lines(seen, str(served)))
        assert said[0] == "working"
        assert any("nothing forgotten: 3 of 3 turns sent" in line for line in said)
        assert any("2.1." in line for line in said)


async def test_without_a_server_it_says_how_to_start_one_and_makes_nothing(
    claude_2: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(claude_bin=claude_2)
    seen, served = await command.look(settings)
    assert served is None
    assert seen.problem == f"no server runs on {settings.var}: start it with `cli-session-proxy serve`"
    assert not list(settings.var.glob("*.sqlite3"))


async def test_without_a_server_it_says_what_the_self_check_saw(claude_2: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        assert ", not checked yet" in ((await command.look(settings))[0].cli or "")
        found = await capability.version(claude_2, {})
        assert found is not None
        sha256 = KeptBinaries(settings.var / "cli").sha256(capability.identity_of(claude_2))
        seen = {"start": Observation.of("start", "ok", "").as_json(), RUN: {"version": found[0]}}
        await engine.store.keep_findings(f"{sha256} {found[0]}", seen)
    assert (await command.look(settings))[0].cli == f"Claude CLI {found[0]}, 1 of 1 checks passed"


async def test_a_missing_login_is_the_problem_before_all(claude_2: Path, tmp_path: Path) -> None:
    settings = Settings(
        var=tmp_path / "var", claude_bin=claude_2, claude_config_dir=tmp_path / "config",
        claude_env={"HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert "no Claude login" in ((await login_of(settings)).advice or "")
    assert "no Claude login" in ((await command.look(settings))[0].problem or "")
