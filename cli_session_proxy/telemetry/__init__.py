"""Turns as OpenTelemetry spans and metrics. Nothing here is imported unless `otel.endpoint` is set."""
