"""The proxy from Python: `ask`, the shared runtime, the LiteLLM provider, the Agent SDK's session store.

The import is cheap: exported names are loaded at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session_store import ChainSessionStore

__all__ = ["ChainSessionStore"]


def __getattr__(name: str) -> Any:
    if name == "ChainSessionStore":
        from .session_store import ChainSessionStore  # noqa: PLC0415 - it needs the Agent SDK

        return ChainSessionStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
