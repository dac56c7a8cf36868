"""Metrics for Prometheus: `GET /metrics`. Labels have few known values, never agents.

Each engine has its own registry, so that several in one process count separately. Turns are counted when they end;
gauges are computed when they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ..domain.models import JSON, MARKED_REASONS, Link, Turn
from ..engine.budgets import Budgets
from ..engine.engine import Engine
from ..engine.live import Observer
from ..errors import ProxyError, StoreUnavailable
from ..wires.asgi import RouteDoc, add, owner_of
from .keys import Keys

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# Buckets in seconds. A warm turn's first word takes about 0.1 s beyond the provider's time, a turn with tools minutes.
SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0)

# What was found of a session's file before its repair (`Link.detail["found"]`); anything else is `other`.
FOUND = frozenset({"missing", "tail", "unreadable", "different", "other"})
NAMESPACE = "cli_session_proxy"


class Metrics(Observer):
    """The metrics of one engine, an observer of its turns and of its processes' starts."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(engine))
        self._codes = _codes(ProxyError)
        # `metric.labels(…)`, cached: it takes a lock and several calls. Few combinations exist, see above.
        self._cached = cache(lambda metric, *labels: metric.labels(*labels))
        self._turns = self._counter("turns", "Turns that ended, by status and continuity", "status", "continuity")
        self._errors = self._counter("turn_errors", "Turns that failed or were cancelled, by error", "code")
        self._fallbacks = self._counter(
            "fallbacks", "Turns that another model answered, by that and why", "model", "why"
        )
        self._backends = self._counter("answers", "Turns that were answered, by backend", "backend")
        self._links = self._counter("links", "Links between sessions, by reason", "reason")
        self._repairs = self._counter("repairs", "Sessions repaired before a turn", "reason", "found")
        self._passed_on = self._counter("requests_passed_on", "Requests that were for another proxy", "result")
        self._retries = self._counter("attempts_repeated", "Attempts of a turn beyond its first")
        self._tokens = self._counter("tokens", "Tokens, by kind", "kind")
        self._cost = self._counter("cost_dollars", "What the turns cost, as the CLI reports it")
        self._wait = self._histogram("queue_wait_seconds", "From acceptance until the lane was free", SHORT)
        self._ready = self._histogram(
            "session_ready_seconds", "Until a session was equal to the path, with its process", SHORT, "continuity"
        )
        self._spawn = self._histogram("spawn_seconds", "From a CLI's start until its first word", SHORT)
        self._until_first_block = self._histogram(
            "first_token_seconds", "From acceptance until the answer's first block", LONG
        )
        self._held = self._histogram(
            "event_loop_held_seconds", "How long the event loop was blocked, each time that it was noticed", SHORT
        )
        self._until_commit = self._histogram("turn_seconds", "From acceptance until the commit", LONG)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, buckets=buckets, registry=self.registry)

    def turn_ended(self, turn: Turn, links: Sequence[Link], *_: object) -> None:
        """A turn was committed, with these links, or it failed or was cancelled."""
        self._cached(self._turns, turn.status, turn.continuity or "none").inc()
        if turn.error is not None:
            code = str(turn.error.get("code"))
            self._errors.labels(code if code in self._codes else "other").inc()
        if turn.backend is not None:
            self._cached(self._backends, turn.backend).inc()
        if turn.fallback is not None and turn.fallback.here:  # few values: the operator's models
            self._fallbacks.labels(turn.fallback.model, turn.fallback.why).inc()
        self._count_links(links)
        if len(turn.attempts) > 1:
            self._retries.inc(max(0, sum(1 for attempt in turn.attempts if "frame_uuid" in attempt) - 1))
        at = {step: millis / 1000 for step, millis in turn.timings.items() if isinstance(millis, int | float)}
        if "queued" in at:
            self._wait.observe(max(0.0, at["queued"]))
        if "queued" in at and "session_ready" in at:
            ready = self._cached(self._ready, turn.continuity or "none")
            ready.observe(max(0.0, at["session_ready"] - at["queued"]))
        if "first_block" in at:
            self._until_first_block.observe(max(0.0, at["first_block"]))
        if "committed" in at:
            self._until_commit.observe(max(0.0, at["committed"]))
        usage = turn.usage
        for kind, count in (
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cache_read", usage.cache_read_tokens),
            ("cache_write", usage.cache_write_tokens),
        ):
            self._cached(self._tokens, kind).inc(count)
        self._cost.inc(max(0.0, turn.cost_usd or 0.0))

    def adopted(self, turn: Turn, link: Link) -> None:  # noqa: ARG002 - as all observers
        """A turn was adopted from a session."""
        self._count_links((link,))

    def _count_links(self, links: Sequence[Link]) -> None:
        for link in links:
            self._links.labels(link.reason).inc()
            if link.reason in MARKED_REASONS:
                found = str(link.detail.get("found", "other"))
                self._repairs.labels(link.reason, found if found in FOUND else "other").inc()

    def spawned(self, seconds: float) -> None:
        """A CLI gave its first output this long after its start."""
        self._spawn.observe(seconds)

    def passed_on(self, result: str) -> None:
        """A request was meant for another proxy; `result` is one of `relay.Result`."""
        self._passed_on.labels(result).inc()

    def loop_held(self, seconds: float) -> None:
        """The event loop was blocked for this long (see `watchdog`)."""
        self._held.observe(seconds)

    def text(self) -> bytes:
        """All metrics in the format `MEDIA_TYPE`."""
        return generate_latest(self.registry)


class BudgetMetrics(Collector):
    """What keys have spent of their budgets, as last read. Names of keys are few."""

    def __init__(self, budgets: Budgets) -> None:
        self._refused = budgets.refused
        self.rows: Sequence[JSON] = ()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        text = "Requests that were refused because a budget was used up"
        refused = CounterMetricFamily(f"{NAMESPACE}_budget_refusals", text, labels=["scope", "unit", "per"])
        for labels, number in self._refused.items():
            refused.add_metric(labels, number)
        yield refused
        for name, text in (("used", "Spent of a key's budget in this period"), ("limit", "A key's budget")):
            gauge = GaugeMetricFamily(f"{NAMESPACE}_budget_{name}", text, labels=["key", "unit", "per"])
            for one in self.rows:
                gauge.add_metric([one["name"], one["unit"], one["per"]], one[name])
            yield gauge


def _codes(error: type[ProxyError]) -> frozenset[str]:
    """The error codes of the contract. Others, e.g. in an older store, count as `other`."""
    return frozenset({error.code}.union(*(_codes(kind) for kind in error.__subclasses__())))


class _Now(Collector):
    """Gauges, read when they are scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        yield GaugeMetricFamily(f"{NAMESPACE}_queue_depth", "Turns that wait for their lane", self._engine.queued())
        yield GaugeMetricFamily(f"{NAMESPACE}_turns_running", "Turns that are being run", self._engine.running())
        text = "Turns that wait for the end of a limit of the provider"
        yield GaugeMetricFamily(f"{NAMESPACE}_turns_waiting_for_limit", text, self._engine.waiting_for_limit())
        text = "Share of a window of the subscription that is used, as the provider said last; none without one"
        used = GaugeMetricFamily(f"{NAMESPACE}_plan_window_used_ratio", text, labels=["window"])
        text = "When a window of the subscription is reset (UTC seconds), as the provider said last"
        resets = GaugeMetricFamily(f"{NAMESPACE}_plan_window_resets_timestamp_seconds", text, labels=["window"])
        plan = self._engine.plan.now()
        for window in plan.windows if plan is not None else ():
            if window.used is not None:
                used.add_metric([window.name], window.used)
            if window.resets_at is not None:
                resets.add_metric([window.name], window.resets_at)
        yield used
        yield resets
        text = "Writes that were refused because another proxy had taken their agent over"
        yield CounterMetricFamily(f"{NAMESPACE}_stale_writes", text, self._engine.store.stale_writes)
        processes = GaugeMetricFamily(f"{NAMESPACE}_processes", "CLI processes", labels=["state"])
        now = self._engine.backend.counts()
        processes.add_metric(["busy"], now.busy)
        processes.add_metric(["warm"], now.warm)
        processes.add_metric(["spare"], now.spare)
        yield processes
        text = "Memory of the CLI processes, as last measured (0 without max_memory)"
        yield GaugeMetricFamily(f"{NAMESPACE}_processes_memory_bytes", text, now.memory)
        program = self._engine.backend.program()
        text = "Results of the CLI's self-check: 1 works, 0 does not; none before the check"
        seen = GaugeMetricFamily(f"{NAMESPACE}_cli_observation", text, labels=["observation"])
        for one in program.observed if program is not None else ():
            if one.outcome != "not tried":
                seen.add_metric([one.name], one.outcome == "ok")
        yield seen
        text = "1 while turns go on with an older CLI, because the installed one failed its self-check"
        other = program is not None and program.runs != program.version
        yield GaugeMetricFamily(f"{NAMESPACE}_cli_held_back", text, other)


class TelemetryMetrics(Collector):
    """Counts of exported and lost OpenTelemetry data. `lost`: see `Telemetry.lost`."""

    def __init__(self, lost: Callable[[], int]) -> None:
        self._lost = lost

    def collect(self) -> Iterable[CounterMetricFamily]:
        text = "Turns of which no span reached the OpenTelemetry collector"
        yield CounterMetricFamily(f"{NAMESPACE}_traces_lost", text, self._lost())


def add_metrics(app: Starlette, engine: Engine, keys: Keys) -> None:
    """Serve `GET /metrics`, which needs a key if there are keys."""
    metrics, budgets = Metrics(engine), BudgetMetrics(engine.budgets)
    metrics.registry.register(budgets)
    engine.observers.append(metrics)
    app.state.metrics = metrics

    async def handle(request: Request) -> Response:
        """Only operators are shown what other keys spend."""
        owner = owner_of(request)
        shown_owner = None if keys.is_operator(owner) else owner
        try:
            budgets.rows = await engine.budgets.shown(engine.store, shown_owner, None, time.time())
        except StoreUnavailable:  # all other metrics do not need the store
            budgets.rows = []
        return Response(metrics.text(), media_type=MEDIA_TYPE)

    add(app, "GET", "/metrics", handle, RouteDoc(media=("text/plain",)))
