"""What all HTTP answers share: headers as they came and as they go out, and an error in the words of its wire."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.types import Scope, Send

from .. import logs
from ..domain.models import JSON
from ..errors import ProxyError
from .base import Wire
from .common import retry_headers

log = logs.get(__name__)


def headers_of(scope: Scope) -> dict[str, str]:
    """Lower-case names, latin-1 values; the first of equal names, as a proxy in front would read it."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent, still percent-encoded: only there an encoded slash differs from a real one."""
    raw = scope.get("raw_path")
    return raw if isinstance(raw, bytes) else quote(scope["path"]).encode()


def as_proxy_error(exc: Exception) -> ProxyError:
    """The error to show. One that nobody foresaw is logged by its frames alone: its text may hold a prompt."""
    if isinstance(exc, ProxyError):
        return exc
    frames = "".join(traceback.format_tb(exc.__traceback__))
    log.error("unexpected error", error=type(exc).__name__, frames=frames)
    return ProxyError("the proxy failed unexpectedly: its log has the details under this X-Request-Id")


def error_body(scope: Scope, error: ProxyError) -> JSON:
    """The error in the words of the wire that this request speaks."""
    state = scope["state"]
    wire: Wire = state["wire"]
    return wire.errors.write(error, state["request_id"])


async def send_error(send: Send, scope: Scope, error: ProxyError, headers: Mapping[str, str] | None = None) -> None:
    """The whole answer for an error, before anything else was sent."""
    await send_json(send, error.status, error_body(scope, error), {**(headers or {}), **retry_headers(error)})


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": encoded(sent)})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
