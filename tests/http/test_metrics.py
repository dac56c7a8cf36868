"""The numbers count what happened, once, under labels that nobody can make many."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_session_proxy.backends.base import Counts, Observed, Program
from cli_session_proxy.domain.models import Link, Usage
from cli_session_proxy.domain.plan import Plan, PlanWindow
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.http.metrics import NAMESPACE, Metrics
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Fail, HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings
from ..fakes import TURN
from ..serving import serving
from ..talking import ask, request, running

KEY = "a-key-of-32-characters-for-tests"


class Going:
    def queued(self) -> int:
        return 3

    def running(self) -> int:
        return 2

    def waiting_for_limit(self) -> int:
        return 7

    plan = SimpleNamespace(now=lambda: Plan("allowed", 1.0, (PlanWindow("five_hour", 0.42, 1_790_000_000.0),)))

    store = SimpleNamespace(stale_writes=4)
    seen = (
        Observed("frames", "ok", "", False),
        Observed("words", "failed", "", True),
        Observed("records", "not tried", "", False),
    )
    program = Program("2.1.331", "/bin/claude", "2.1.330", seen)
    backend = SimpleNamespace(
        counts=lambda: Counts(busy=2, warm=5, spare=1, memory=300_000_000), program=lambda: Going.program
    )


GOING = cast(Engine, Going())


def samples(text: str) -> dict[str, float]:
    """`name{label=value}` without our prefix, labels in order, to the value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix(f"{NAMESPACE}_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def link(reason: str, **detail: str) -> Link:
    return Link("a", "a", "t", reason, dict(detail), 1.0)  # type: ignore[arg-type]


def test_a_turn_is_counted_with_its_times_tokens_and_cost() -> None:
    metrics = Metrics(GOING)
    turn = replace(
        TURN,
        usage=Usage(input_tokens=10, output_tokens=7, cache_read_tokens=900, cache_write_tokens=30),
        cost_usd=0.25,
        timings={"queued": 40.0, "session_ready": 60.0, "first_block": 700.0, "result": 2200.0, "committed": 2210.0},
        attempts=({"n": 1, "frame_uuid": "x"}, {"n": 2, "frame_uuid": "y"}),
    )
    metrics.turn_ended(turn, (link("rebuilt", found="missing"), link("started")))
    metrics.spawned(0.3)
    told = samples(metrics.text().decode())
    assert told["turns_total{continuity=warm,status=completed}"] == 1
    for kind, count in (("input", 10), ("output", 7), ("cache_read", 900), ("cache_write", 30)):
        assert told[f"tokens_total{{kind={kind}}}"] == count
    assert told["cost_dollars_total"] == 0.25
    assert told["repairs_total{found=missing,reason=rebuilt}"] == 1
    assert told["links_total{reason=started}"] == 1
    assert told["attempts_repeated_total"] == 1
    assert told["queue_wait_seconds_sum"] == pytest.approx(0.04)
    assert told["session_ready_seconds_sum{continuity=warm}"] == pytest.approx(0.02)
    assert told["first_token_seconds_sum"] == pytest.approx(0.7)
    assert told["turn_seconds_sum"] == pytest.approx(2.21)
    assert told["spawn_seconds_count"] == 1
    assert (told["queue_depth"], told["turns_running"]) == (3, 2)
    assert told["stale_writes_total"] == 4
    assert (told["processes{state=busy}"], told["processes{state=warm}"], told["processes{state=spare}"]) == (2, 5, 1)
    assert told["processes_memory_bytes"] == 300_000_000
    assert told["turns_waiting_for_limit"] == 7
    assert told["plan_window_used_ratio{window=five_hour}"] == 0.42
    assert told["plan_window_resets_timestamp_seconds{window=five_hour}"] == 1_790_000_000
    checked = {name: value for name, value in told.items() if name.startswith("cli_")}
    assert checked == {
        "cli_observation{observation=frames}": 1,
        "cli_observation{observation=words}": 0,
        "cli_held_back": 1,
    }


def test_nothing_from_outside_becomes_a_label() -> None:
    metrics = Metrics(GOING)
    for number in range(50):
        failed = replace(TURN, status="failed", continuity=None, error={"code": f"made up {number}"})
        metrics.turn_ended(failed, (link("rebuilt", found=f"path-{number}"),))
    told = samples(metrics.text().decode())
    assert told["turn_errors_total{code=other}"] == 50
    assert told["repairs_total{found=other,reason=rebuilt}"] == 50
    assert told["turns_total{continuity=none,status=failed}"] == 50


async def test_what_the_engine_did_is_what_is_told(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A start that takes longer is not counted: a spare waits for its first prompt for as long as there is none.
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.pool.START_TIME", 30.0)
    settings = make_settings(claude_bin=claude_2)
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as http,
    ):
        first = await ask(engine, "hello", agent="secret-agent-name")
        session = await engine.store.session(first.session_id or "")
        assert session is not None
        await asyncio.to_thread(Path(session.transcript).unlink)
        await ask(engine, "hello again", agent="secret-agent-name")
        upstream.when("break", Fail(400), times=None)
        with pytest.raises(ProxyError):
            await ask(engine, "break now", agent="secret-agent-name")
        gate = HeldReply()
        upstream.when("wait", gate)
        waiting = [await engine.submit(request(text, agent="secret-agent-name")) for text in ("wait", "behind")]
        await asyncio.wait_for(gate.reached.wait(), 60)
        during = samples((await http.get("/metrics")).text)
        gate.open()
        for answer in waiting:
            await answer.turn()
            answer.acknowledge()
        answered = await http.get("/metrics")
    assert (during["turns_running"], during["queue_depth"], during["processes{state=busy}"]) == (1, 1, 1)
    told = samples(answered.text)
    assert sum(value for name, value in told.items() if name.startswith("turns_total{")) == 5
    assert told["repairs_total{found=missing,reason=rebuilt}"] == 1
    assert told["turn_seconds_count"] == 4
    assert told["spawn_seconds_count"] >= 2
    assert told["tokens_total{kind=output}"] > 0
    assert (told["queue_depth"], told["turns_running"], told["processes{state=busy}"]) == (0, 0, 0)
    assert "secret-agent-name" not in answered.text


async def test_the_numbers_need_the_key_as_the_api_does(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", port=0, keys={"alice": KEY})  # type: ignore[dict-item]
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as http,
    ):
        assert (await http.get("/metrics")).status_code == 401
        told = await http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert told.status_code == 200
    assert told.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_dashboard_asks_for_nothing_that_is_not_counted() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(rf"{NAMESPACE}_\w+", target["expr"])}  # fmt: skip
    every = text_string_to_metric_families(Metrics(GOING).text().decode())
    families = [family for family in every if not family.name.endswith("_created")]
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    counted = {family.name + end for family in families for end in ends[family.type]}
    assert len(dashboard["panels"]) == len({panel["title"] for panel in dashboard["panels"]})
    assert asked <= counted
    assert {family.name for family in families} - {f"{NAMESPACE}_links"} <= {
        re.sub("_(total|bucket|sum|count)$", "", name) for name in asked
    }
