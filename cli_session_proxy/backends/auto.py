"""Chooses the backend of an engine by its settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Store
from .base import Backend
from .claude.backend import ClaudeBackend


def backend_for(
    settings: Settings,
    store: Store,
    sandboxes: Sandboxes,
    *,
    on_spawn: Callable[[int, str | None, Path], None],
    on_exit: Callable[[int], None],
    on_first_output: Callable[[float], None],
) -> Backend:
    """`on_spawn` is told the pid, start time and directory of each process, `on_exit` its pid when it is gone,
    `on_first_output` how many seconds it took to its first word."""
    claude = ClaudeBackend(
        settings, store, sandboxes, on_spawn=on_spawn, on_exit=on_exit, on_first_output=on_first_output
    )
    if not settings.models:
        return claude
    from .choosing import Backends  # noqa: PLC0415 - LiteLLM takes two seconds: only where it is wanted
    from .litellm.backend import LiteLLMBackend  # noqa: PLC0415

    return Backends(claude, LiteLLMBackend(settings, store, claude.imported))
