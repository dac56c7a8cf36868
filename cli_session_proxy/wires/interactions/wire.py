"""Google's Interactions."""

from __future__ import annotations

from ..base import AddressClaim, Wire
from . import body as interactions
from .errors import INTERACTIONS
from .routes import InteractionsRoutes

WIRE = Wire(
    name=interactions.WIRE,
    claims=(AddressClaim("/v1/interactions"), AddressClaim("/v1beta/interactions")),
    errors=INTERACTIONS,
    routes=InteractionsRoutes,
    bases=("/v1/", "/v1beta/"),
    key_in_address=True,
)
