"""What reaches a collector over OTLP, read with the published schemas; and that no turn ever waits for one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Observer
from cli_session_proxy.errors import ConfigError, ProxyError
from cli_session_proxy.settings import CONFIG_FILE, Settings, load
from turnfault.provider.script import Fail
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serve
from ..talking import ask, running
from ..until import until
from ..without_cli import proxied_without_cli
from .collector import Collector, attributes_of, collecting
from .test_spans import ADA, AT, WHOLE

exporting = pytest.importorskip("cli_session_proxy.telemetry.exporting")
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


def settings_of(collector: Collector, **otel: Any) -> Settings:
    return Settings(otel={"endpoint": collector.url, **otel})  # type: ignore[arg-type]


@asynccontextmanager
async def observed(engine: Engine, settings: Settings) -> AsyncIterator[Any]:
    """All that ends in here has been sent behind it."""
    telemetry = exporting.Telemetry(settings)
    engine.observers.append(telemetry)
    try:
        yield telemetry
    finally:
        await asyncio.to_thread(telemetry.close)


async def told(settings: Settings, upstream: Upstream, **headers: str) -> None:
    """One turn of the agent `ada`, over HTTP, until it was sent."""
    async with (
        proxied_without_cli(settings, upstream) as (engine, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http,
        observed(engine, settings),
    ):
        ended = asyncio.Event()
        engine.observers.append(Ended(ended))
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "the launch is at dawn"}]}
        answer = await http.post("/v1/chat/completions", json=body, headers={"X-Agent-Id": "ada", **headers})
        assert answer.status_code == 200
        await asyncio.wait_for(ended.wait(), 60)


class Ended(Observer):
    """Stands behind another observer, which has been told by then."""

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event

    def turn_ended(self, *_: object) -> None:
        self.event.set()


async def test_a_turn_over_http_reaches_the_collector_below_its_callers_span(
    collector: Collector, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(otel={"endpoint": collector.url, "headers": {"x-team": "a-secret-of-a-collector"}})
    await told(settings, upstream, traceparent=f"00-{TRACE}-{CALLER}-01", **{"X-Request-Id": "req-7"})
    root = collector.span("invoke_agent ada")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    children = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert sorted(span.name for span in children) == ["chat sonnet", "commit", "queue", "session"]
    for span in children:
        assert span.trace_id == root.trace_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert collector.span("chat sonnet").kind == 3  # SPAN_KIND_CLIENT
    about = attributes_of(root)
    assert about["cli_session_proxy.request_id"] == "req-7"
    assert about["gen_ai.usage.input_tokens"] > 0
    assert about["gen_ai.usage.output_tokens"] > 0
    (resource,) = collector.traces[0].resource_spans
    assert attributes_of(resource.resource)["service.name"] == "cli-session-proxy"
    assert {scope.schema_url for scope in resource.scope_spans} == {"https://opentelemetry.io/schemas/1.41.0"}
    assert "launch" not in str(collector.traces)
    assert {headers["x-team"] for headers in collector.headers} == {"a-secret-of-a-collector"}


async def test_metrics_of_tokens_and_of_the_models_time_are_sent(
    collector: Collector, make_settings: MakeSettings, upstream: Upstream
) -> None:
    await told(make_settings(otel={"endpoint": collector.url}), upstream)
    tokens = {
        attributes_of(point)["gen_ai.token.type"]: point for point in collector.points("gen_ai.client.token.usage")
    }
    assert set(tokens) == {"input", "output"}
    assert tokens["output"].sum == attributes_of(collector.span("chat sonnet"))["gen_ai.usage.output_tokens"]
    assert list(tokens["input"].explicit_bounds)[:3] == [1, 4, 16]
    (took,) = collector.points("gen_ai.client.operation.duration")
    assert attributes_of(took)["gen_ai.request.model"] == "sonnet"
    assert took.count == 1


async def test_words_go_out_where_the_settings_say_so_and_metrics_can_stay(
    collector: Collector, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(otel={"endpoint": collector.url, "content": True, "metrics": False})
    await told(settings, upstream)
    assert "the launch is at dawn" in attributes_of(collector.span("chat sonnet"))["gen_ai.input.messages"]
    assert collector.metrics == []


async def test_a_caller_that_is_not_sampled_is_not_traced(
    collector: Collector, make_settings: MakeSettings, upstream: Upstream
) -> None:
    await told(make_settings(otel={"endpoint": collector.url}), upstream, traceparent=f"00-{TRACE}-{CALLER}-00")
    assert collector.spans == []
    assert collector.points("gen_ai.client.operation.duration")


@pytest.mark.parametrize("header", ["nonsense", f"00-{TRACE}-{'0' * 16}-01", "00-" + "f" * 4000])
async def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(
    header: str, collector: Collector, make_settings: MakeSettings, upstream: Upstream
) -> None:
    await told(make_settings(otel={"endpoint": collector.url}), upstream, traceparent=header)
    assert collector.span("invoke_agent ada").parent_span_id == b""


async def test_a_repaired_turn_of_the_real_cli_and_a_failed_one(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, collector: Collector
) -> None:
    settings = make_settings(claude_bin=claude_2, otel={"endpoint": collector.url})
    async with running(settings) as engine, observed(engine, settings):
        first = await ask(engine, "hello", agent="ada")
        session = await engine.store.session(first.session_id or "")
        assert session is not None
        await asyncio.to_thread(Path(session.transcript).unlink)
        repaired = await ask(engine, "hello again", agent="ada")
        upstream.when("break", Fail(400), times=None)
        with pytest.raises(ProxyError):
            await ask(engine, "break now", agent="ada")
    roots = {attributes_of(span)["cli_session_proxy.turn.id"]: span for span in collector.spans if "agent" in span.name}
    assert len(roots) == 3
    about = attributes_of(roots[repaired.id])
    assert (about["cli_session_proxy.repaired"], about["cli_session_proxy.repair.found"]) == (True, "missing")
    assert about["gen_ai.response.model"].startswith("claude")
    (failed,) = [span for span in roots.values() if span.status.code == 2]
    assert attributes_of(failed)["error.type"]


# --- a collector that is slow, away, or refuses


def end_turns(telemetry: Any, number: int) -> None:
    for _ in range(number):
        telemetry.turn_ended(WHOLE, (), ADA, AT + 6)


async def test_a_collector_that_does_not_answer_keeps_nobody_waiting_and_what_is_lost_is_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "QUEUE_SIZE", 20)
    monkeypatch.setattr(exporting, "CLOSE_TIMEOUT", 30.0)
    collector.open.clear()
    telemetry = exporting.Telemetry(settings_of(collector, metrics=False))
    end_turns(telemetry, 1)
    assert await asyncio.to_thread(collector.reached.wait, 60)  # its thread waits for the answer now
    end_turns(telemetry, 30)
    assert telemetry.lost == 10
    collector.open.set()
    await until(lambda: len(collector.traces) == 2)  # the queue has room for the word that it ends
    await asyncio.to_thread(telemetry.close)
    arrived = sum(span.name == "invoke_agent ada" for span in collector.spans)
    assert arrived + telemetry.lost == 31


async def test_what_a_collector_refuses_is_counted(collector: Collector) -> None:
    collector.status = 403
    telemetry = exporting.Telemetry(settings_of(collector, metrics=False))
    end_turns(telemetry, 3)
    await asyncio.to_thread(telemetry.close)
    assert telemetry.lost == 3


async def test_a_collector_that_is_not_there_fails_no_turn(make_settings: MakeSettings, upstream: Upstream) -> None:
    await told(make_settings(otel={"endpoint": "http://127.0.0.1:9", "metrics": False}), upstream)


def test_a_turn_of_which_nothing_can_be_told_is_counted(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = exporting.Telemetry(settings_of(collector, metrics=False))
    sent = threading.Event()

    def fails(*_: object) -> None:
        sent.set()
        raise ValueError("no span")

    monkeypatch.setattr(telemetry, "_record", fails)
    end_turns(telemetry, 1)
    assert sent.wait(60)
    monkeypatch.undo()
    end_turns(telemetry, 1)
    telemetry.close()
    assert telemetry.lost == 1
    assert collector.span("invoke_agent ada")


# --- serve


async def test_serve_sends_what_waits_when_it_ends(
    claude_2: Path, make_settings: MakeSettings, collector: Collector, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, self_check=False, otel={"endpoint": collector.url})
    async with serve(settings, tmp_path) as (url, _), httpx.AsyncClient(trust_env=False, timeout=60) as http:
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}], "agent_id": "ada"}
        assert (await http.post(f"{url}/v1/chat/completions", json=body)).status_code == 200
        assert "cli_session_proxy_traces_lost_total 0.0" in (await http.get(f"{url}/metrics")).text
    assert collector.span("invoke_agent ada")


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, cli_session_proxy.http.server; print(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_without_an_endpoint_no_traces_are_counted(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with proxied_without_cli(make_settings(), upstream) as (engine, root), httpx.AsyncClient() as http:
        assert "traces_lost" not in (await http.get(f"{root}/metrics")).text
        assert len(engine.observers) == 1


# --- settings


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", ""])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLI_SESSION_PROXY_OTEL__ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match=r"otel\.endpoint"):
        load()


def test_a_file_that_may_be_anybodys_sends_no_traces_elsewhere() -> None:
    Path(CONFIG_FILE).write_text('[otel]\nendpoint = "http://elsewhere.example"\n')
    with pytest.raises(ConfigError, match="where traces are sent"):
        load()


def test_a_collectors_key_is_never_shown(collector: Collector) -> None:
    settings = settings_of(collector, headers={"authorization": "Basic a-secret-of-a-collector"})
    assert "a-secret" not in repr(settings) + settings.model_dump_json()
