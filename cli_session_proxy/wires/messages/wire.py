"""Anthropic's Messages API."""

from __future__ import annotations

from ..base import Claim, Models, Wire
from . import body as messages
from .errors import ANTHROPIC
from .routes import MessagesRoutes

WIRE = Wire(
    name=messages.WIRE,
    claims=(
        Claim("/v1/messages"),
        Claim("/v1/models", by=lambda asked: "anthropic-version" in asked.headers),
    ),
    errors=ANTHROPIC,
    routes=MessagesRoutes,
    models=Models(messages.model_info, messages.model_list),
)
