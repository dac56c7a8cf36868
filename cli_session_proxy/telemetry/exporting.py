"""Sends spans and metrics to an OpenTelemetry collector, over OTLP/HTTP, on a thread of its own.

A turn never waits for it: its span goes into a bounded queue. If the queue is full or the collector refuses it, it is
counted as `lost`. The SDK creates ids, samples (as the caller's `traceparent` says) and sends. Its own environment
variables (`OTEL_*`) apply, except where the settings have a value.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from queue import Empty, Full, Queue
from threading import Thread
from typing import NamedTuple

from .. import logs, redact
from ..domain.models import Link, Turn
from ..engine.live import Observer, Requested
from ..errors import ConfigError
from ..settings import Settings
from .spans import SCHEMA, Operation, Span, of_turn

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as exc:
    raise ConfigError(
        f"otel.endpoint needs the OpenTelemetry SDK ({exc.name} is missing): pip install 'cli-session-proxy[otel]'"
    ) from exc

log = logs.get(__name__)

VERSION = version("cli-session-proxy")
# The most turns that wait to be sent: a few MB; with `otel.content` up to 64 MB.
QUEUE_SIZE = 512
# The most turns in one request.
BATCH = 64
# Seconds to send the last spans when the server ends, and for one request to the collector.
CLOSE_TIMEOUT = 2.0
SEND_TIMEOUT = 10.0
# Histogram buckets of the semantic conventions.
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_KINDS: Mapping[str, SpanKind] = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}


class _EndedTurn(NamedTuple):
    root: Span
    operation: Operation
    trace_context: tuple[str, str] | None


class Telemetry(Observer):
    """An observer of the engine's turns. `close` it after the engine has stopped. Raises `ConfigError`."""

    def __init__(self, settings: Settings) -> None:
        configured = settings.otel
        assert configured.endpoint is not None
        base = configured.endpoint.rstrip("/")
        headers = {name: value.get_secret_value() for name, value in configured.headers.items()} or None
        redact.know((headers or {}).values())
        self._dropped = 0  # lost turns that the event loop counts: the queue was full
        self._failed = 0  # lost turns that the thread counts: the collector did not take them
        self._with_content = configured.content
        self._models = settings.models
        self._queue: Queue[_EndedTurn | None] = Queue(QUEUE_SIZE)
        self._collector_refuses = False
        # We log each failure once; the SDK would log each try.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": "cli-session-proxy", "service.version": VERSION})
        # The SDK collects the spans of a batch in memory. Our thread sends them, so it knows which turns were lost.
        self._finished = InMemorySpanExporter()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = self._provider.get_tracer("cli_session_proxy", VERSION, schema_url=SCHEMA)
        self._exporter: SpanExporter = OTLPSpanExporter(f"{base}/v1/traces", headers=headers, timeout=SEND_TIMEOUT)
        self._meters: MeterProvider | None = None
        if configured.metrics:
            metric_exporter = OTLPMetricExporter(f"{base}/v1/metrics", headers=headers, timeout=SEND_TIMEOUT)
            self._meters = MeterProvider(
                [PeriodicExportingMetricReader(metric_exporter)], resource, shutdown_on_exit=False
            )
            meter = self._meters.get_meter("cli_session_proxy", VERSION, schema_url=SCHEMA)
            self._tokens = meter.create_histogram(
                "gen_ai.client.token.usage", "{token}", "Number of input and output tokens used.",
                explicit_bucket_boundaries_advisory=TOKENS,
            )  # fmt: skip
            self._seconds = meter.create_histogram(
                "gen_ai.client.operation.duration", "s", "GenAI operation duration.",
                explicit_bucket_boundaries_advisory=SECONDS,
            )  # fmt: skip
        self._thread = Thread(target=self._run, name="otel", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Turns whose spans did not reach the collector."""
        return self._dropped + self._failed

    # --- on the engine's event loop

    def turn_ended(self, turn: Turn, links: Sequence[Link], requested: Requested | None, at: float) -> None:
        if requested is None:  # a turn that this proxy did not accept
            return
        try:
            root, operation = of_turn(turn, links, requested, at, self._models, words=self._with_content)
            self._queue.put_nowait(_EndedTurn(root, operation, requested.trace_context))
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Send the queued turns, for at most `CLOSE_TIMEOUT` seconds. Blocks."""
        with suppress(Full):  # the collector has been unreachable for long
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_TIMEOUT)
        with suppress(Empty):
            while True:
                self._dropped += self._queue.get_nowait() is not None
        self._exporter.shutdown()  # ends a request that waits for a retry
        if self._meters is not None:
            self._meters.shutdown(CLOSE_TIMEOUT * 1000)
        self._provider.shutdown()

    # --- on the exporter's thread

    def _run(self) -> None:
        ends = False
        while not ends:
            batch = [self._queue.get()]
            with suppress(Empty):
                while len(batch) < BATCH:
                    batch.append(self._queue.get_nowait())
            ends = None in batch
            turns = [one for one in batch if one is not None]
            try:
                for one in turns:
                    parent = None
                    if one.trace_context is not None:
                        parent = TraceContextTextMapPropagator().extract(
                            dict(zip(("traceparent", "tracestate"), one.trace_context, strict=True))
                        )
                    self._record(one.root, parent)
                    if self._meters is not None:
                        self._measure(one.operation)
                self._send(self._finished.get_finished_spans(), len(turns))
            except Exception:
                self._failed += len(turns)
                log.exception("telemetry_failed")
            finally:
                self._finished.clear()

    def _record(self, ended: Span, parent: Context | None) -> None:
        span = self._tracer.start_span(
            ended.name, parent, _KINDS[ended.kind], dict(ended.attributes), start_time=_nanoseconds(ended.start)
        )
        for name, at in ended.events:
            span.add_event(name, timestamp=_nanoseconds(at))
        if ended.error is not None:
            span.set_status(Status(StatusCode.ERROR, ended.error))
            span.set_attribute("error.type", ended.error)
        within = set_span_in_context(span)
        for child in ended.children:
            self._record(child, within)
        span.end(_nanoseconds(ended.end))

    def _measure(self, operation: Operation) -> None:
        """Add the turn's tokens and seconds to the metrics."""
        attributes = dict(operation.attributes)
        for kind, tokens in (("input", operation.input_tokens), ("output", operation.output_tokens)):
            if tokens:
                self._tokens.record(tokens, {**attributes, "gen_ai.token.type": kind})
        if operation.seconds is not None:
            if operation.error is not None:
                attributes["error.type"] = operation.error
            self._seconds.record(operation.seconds, attributes)

    def _send(self, spans: Sequence[ReadableSpan], turns: int) -> None:
        """Send the spans of so many turns. Logs when the collector begins to refuse spans, and when it stops to."""
        if not spans:
            return
        began = time.monotonic()
        accepted = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if not accepted:
            self._failed += turns
        if accepted is self._collector_refuses:  # the state has changed
            self._collector_refuses = not accepted
            event = "telemetry_arrives_again" if accepted else "telemetry_not_taken"
            log.warning(event, lost=self.lost, seconds=round(time.monotonic() - began, 1))


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
