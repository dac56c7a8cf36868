"""Ollama's API, for the programs that speak only that."""

from __future__ import annotations

from ..base import AddressClaim, Wire
from . import body as ollama
from .errors import OLLAMA
from .routes import OllamaRoutes

# An agent's base URL is the server's own with `/agents/{agent_id}` behind it; what clients ask there is listed, so that
# "/api/" stays a possible part of a name. Those that are not served are there for the words of their refusal.
_ASKED = (
    "chat", "generate", "tags", "show", "ps", "version", "embed", "embeddings", "pull", "push", "create", "copy",
    "delete", "blobs",
)  # fmt: skip

WIRE = Wire(
    name=ollama.WIRE,
    claims=(AddressClaim("/api"),),
    errors=OLLAMA,
    routes=OllamaRoutes,
    bases=tuple(f"/api/{name}" for name in _ASKED),
)
