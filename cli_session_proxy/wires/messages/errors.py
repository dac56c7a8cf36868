"""Errors in Anthropic's form, with our stable code in `error.details.error_code`. Pure."""

from __future__ import annotations

from ... import redact
from ...domain.models import JSON
from ...errors import ProxyError
from ..base import ErrorShape
from ..schemas import TEXT, error_schema

# anthropic 2.11, types/shared/error_type.py, which has no type for 405 and 499.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
    499: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: ProxyError, request_id: str) -> JSON:
    """`{"type": "error", "error": {type, message, details}, "request_id"}`."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    details: JSON = {"error_code": error.detail.get("error_code", error.code)}
    if error.param is not None:
        details["param"] = error.param
    body = {"type": kind, "message": redact.text(error.message), "details": details}
    return {"type": "error", "error": body, "request_id": request_id}


ANTHROPIC = ErrorShape(
    "anthropic",
    anthropic_error,
    error_schema(
        {"type": TEXT, "message": TEXT, "details": {"type": "object"}}, type={"const": "error"}, request_id=TEXT
    ),
)
