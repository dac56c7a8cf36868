"""Chooses the backend of an engine by its settings.

A package adds one by an entry point of the group `cli_session_proxy.backends`: the name that `backend` is set to, and a
callable that takes what `backend_for` takes and returns a `base.Backend`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from ..errors import ConfigError
from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Store
from .base import Backend, ProcessHooks
from .claude.backend import ClaudeBackend

GROUP = "cli_session_proxy.backends"
CLAUDE = "claude"


def backend_for(settings: Settings, store: Store, sandboxes: Sandboxes, hooks: ProcessHooks) -> Backend:
    """Raises `ConfigError` for a backend that is not installed, and for a model that cannot be used."""
    own: Backend
    if settings.backend == CLAUDE:  # skip the search through all installed packages
        own = ClaudeBackend(settings, store, sandboxes, hooks)
    else:
        found = entry_points(group=GROUP)
        if settings.backend not in found.names:
            known = ", ".join(sorted({CLAUDE, *found.names}))
            raise ConfigError(f"backend = {settings.backend!r}: no installed package has it; there is {known}")
        own = found[settings.backend].load()(settings, store, sandboxes, hooks)
    if not settings.models:
        return own
    from .choosing import Backends  # noqa: PLC0415 - LiteLLM takes two seconds: only where it is needed
    from .litellm.backend import LiteLLMBackend  # noqa: PLC0415

    return Backends(own, LiteLLMBackend(settings, store, own.history_records))
