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
    born: Callable[[int, str | None, Path], None],
    reaped: Callable[[int], None],
    started: Callable[[float], None],
) -> Backend:
    """`born` is told the pid, start time and directory of each process, `reaped` its pid when it is gone, `started` how
    many seconds it took to its first word."""
    return ClaudeBackend(settings, store, sandboxes, born=born, reaped=reaped, started=started)
