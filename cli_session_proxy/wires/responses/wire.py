"""OpenAI Responses and Conversations, and where the retired Assistants were."""

from __future__ import annotations

from ..base import AddressClaim, Wire
from ..openai import OPENAI
from . import body as responses
from .routes import RETIRED, SOCKET, ResponsesRoutes

WIRE = Wire(
    name=responses.WIRE,
    claims=tuple(AddressClaim(root) for root in ("/v1/responses", "/v1/conversations", *RETIRED)),
    errors=OPENAI,
    routes=ResponsesRoutes,
    sockets=frozenset({SOCKET}),
)
