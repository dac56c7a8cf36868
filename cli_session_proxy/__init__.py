"""A local proxy that gives the Claude CLI a memory you can rely on.

Importing it is cheap: what it exports is loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sdk.ask import Episode, ask

__all__ = ["Episode", "ask"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".sdk.ask", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
