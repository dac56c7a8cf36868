"""A small OTLP/HTTP collector: it parses what comes with the published protobuf schemas, whatever the SDK meant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


def attributes_of(what: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in what.attributes}


@dataclass
class Collector:
    """`status`: what it answers. While `open` is not set a request waits."""

    url: str = ""
    status: int = 200
    open: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    headers: list[dict[str, str]] = field(default_factory=list)
    traces: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for request in self.traces for one in request.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def span(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def points(self, name: str) -> list[Any]:
        """Of the newest message."""
        scopes = [scope for one in self.metrics[-1].resource_metrics for scope in one.scope_metrics]
        (found,) = [metric for scope in scopes for metric in scope.metrics if metric.name == name]
        return list(found.histogram.data_points)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.reached.set()
            collector.open.wait(60)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if collector.status == 200:
                if self.path == "/v1/traces":
                    collector.traces.append(ExportTraceServiceRequest.FromString(body))
                else:
                    assert self.path == "/v1/metrics"
                    collector.metrics.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.open.set()
        server.shutdown()
        thread.join()
        server.server_close()
