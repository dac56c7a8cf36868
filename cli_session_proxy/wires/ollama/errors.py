"""How an error looks to Ollama's clients: a text; our stable code stands beside it. Pure."""

from __future__ import annotations

from ... import redact
from ...domain.models import JSON
from ...errors import ProxyError
from ..base import ErrorShape
from ..schemas import TEXT, body


def ollama_error(error: ProxyError) -> JSON:
    """`{"error", "code"}`, and the field that is wrong."""
    shown: JSON = {"error": redact.text(error.message), "code": error.code}
    return shown if error.param is None else {**shown, "param": error.param}


OLLAMA = ErrorShape("ollama", lambda error, _: ollama_error(error), body({"error": TEXT, "code": TEXT}, param=TEXT))
