"""How an error looks on each wire, and which wire a request speaks. Pure.

    openai        {"error": {message, type, param, code}}
    anthropic     {"type": "error", "error": {type, message, details}, "request_id"}
    google        {"error": {code, message, status, details}}
    interactions  {"error": {code, message}}                                        `code` is a text

Our stable code stands where the wire has a place for one: `code`, `details.error_code`, `details[0].reason`, `code`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from .. import redact
from ..domain.models import JSON
from ..errors import ProxyError
from .common import as_openai_error

Wire = Literal["openai", "anthropic", "google", "interactions"]
# The error, and the id of the request it belongs to.
Shape = Callable[[ProxyError, str], JSON]

# anthropic 2.11, types/shared/error_type.py; a 405 or a 499 has no type of its own there.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
    499: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip

# google.rpc.Code by HTTP status, as its `code.proto` maps them.
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 405: "UNIMPLEMENTED",
    409: "ABORTED", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def openai(error: ProxyError, request_id: str) -> JSON:  # noqa: ARG001 - a Shape; the id is in a header
    return as_openai_error(error)


def anthropic(error: ProxyError, request_id: str) -> JSON:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    details: JSON = {"error_code": error.detail.get("error_code", error.code)}
    if error.param is not None:
        details["param"] = error.param
    body = {"type": kind, "message": redact.text(error.message), "details": details}
    return {"type": "error", "error": body, "request_id": request_id}


def google(error: ProxyError, request_id: str) -> JSON:
    status = _GOOGLE_STATUSES.get(error.status, "UNAVAILABLE" if error.status > 500 else "INVALID_ARGUMENT")
    metadata = {"request_id": request_id} | ({"field": error.param} if error.param is not None else {})
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": error.code,
        "domain": "cli-session-proxy",
        "metadata": metadata,
    }
    message = redact.text(error.message)
    return {"error": {"code": error.status, "message": message, "status": status, "details": [info]}}


def interactions(error: ProxyError, request_id: str) -> JSON:  # noqa: ARG001 - a Shape; the id is in a header
    return {"error": {"code": error.code, "message": redact.text(error.message)}}


SHAPES: Mapping[Wire, Shape] = {
    "openai": openai, "anthropic": anthropic, "google": google, "interactions": interactions,
}  # fmt: skip

_INTERACTIONS = re.compile(r"/v1(beta)?/interactions(/.*)?", re.S)
_GENERATE = re.compile(r"/v1beta/.*|/v1/models/.*:\w+", re.S)
_MESSAGES = re.compile(r"/v1/messages(/.*)?", re.S)
_MODELS = re.compile(r"/v1/models(/.*)?", re.S)


def wire_of(path: str, headers: Mapping[str, str], query: str = "") -> Wire:
    """Who asks. `path` has no agent prefix, `headers` have lower-case names.

    GET /v1/models means three things: it is told apart by what only that vendor's clients send.
    """
    if _INTERACTIONS.fullmatch(path):
        return "interactions"
    if _GENERATE.fullmatch(path):
        return "google"
    if _MESSAGES.fullmatch(path):
        return "anthropic"
    if _MODELS.fullmatch(path):
        if "anthropic-version" in headers:
            return "anthropic"
        if "x-goog-api-key" in headers or re.search(r"(^|&)key=", query):
            return "google"
    return "openai"
