"""Chooses the backend of an engine by its settings."""

from __future__ import annotations

from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Store
from .base import Backend, ProcessHooks
from .claude.backend import ClaudeBackend


def backend_for(settings: Settings, store: Store, sandboxes: Sandboxes, hooks: ProcessHooks) -> Backend:
    claude = ClaudeBackend(settings, store, sandboxes, hooks)
    if not settings.models:
        return claude
    from .choosing import Backends  # noqa: PLC0415 - LiteLLM takes two seconds: only where it is wanted
    from .litellm.backend import LiteLLMBackend  # noqa: PLC0415

    return Backends(claude, LiteLLMBackend(settings, store, claude.imported))
