"""How an error looks to clients of the Interactions: `code` is our stable code, a text. Pure."""

from __future__ import annotations

from ... import redact
from ...domain.models import JSON
from ...errors import ProxyError
from ..base import ErrorShape
from ..schemas import TEXT, error_schema


def interactions_error(error: ProxyError) -> JSON:
    return {"error": {"code": error.code, "message": redact.text(error.message)}}


INTERACTIONS = ErrorShape(
    "interactions", lambda error, _: interactions_error(error), error_schema({"code": TEXT, "message": TEXT})
)
