"""Anthropic's Messages API."""

from __future__ import annotations

from ..base import AddressClaim, Models, Wire
from . import body as messages
from .errors import ANTHROPIC
from .routes import MessagesRoutes

WIRE = Wire(
    name=messages.WIRE,
    claims=(
        AddressClaim("/v1/messages"),
        AddressClaim("/v1/models", by=lambda asked: "anthropic-version" in asked.headers),
    ),
    errors=ANTHROPIC,
    routes=MessagesRoutes,
    models=Models(messages.model_info, messages.model_list),
)
