"""Errors in Google's form, with our stable code in `error.details[0].reason`. Pure."""

from __future__ import annotations

from ... import redact
from ...domain.models import JSON
from ...errors import ProxyError
from ..base import ErrorShape
from ..schemas import TEXT, error_schema

# google.rpc.Code by HTTP status, as its `code.proto` maps them.
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 405: "UNIMPLEMENTED",
    409: "ABORTED", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def google_error(error: ProxyError, request_id: str) -> JSON:
    """`{"error": {code, message, status, details}}`."""
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


GOOGLE = ErrorShape(
    "google",
    google_error,
    error_schema({"code": {"type": "integer"}, "message": TEXT, "status": TEXT, "details": {"type": "array"}}),
)
