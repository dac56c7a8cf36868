"""Imports LiteLLM, only if models are configured: it takes two seconds and 170 MB.

Its price list comes from the package, not from the network. Its telemetry, hints and retries are off: we retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
from collections.abc import MutableMapping
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ... import logs
from ...errors import ConfigError

log = logs.get(__name__)


# Modules that LiteLLM imports at its first request and first failure: the event loop stood still for 1 s (1.106).
PARTS = ("openai.resources.chat", "fastapi")


@cache
def litellm() -> Any:
    """The module. Raises `ConfigError` if it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # only read at the import
    try:
        import litellm as module  # noqa: PLC0415 - not loaded by a proxy without models
    except ImportError as exc:
        raise ConfigError(
            "[models.*] needs LiteLLM, which is not installed: pip install 'cli-session-proxy[models]'"
        ) from exc
    for part in PARTS:
        with contextlib.suppress(ImportError):  # another version has it elsewhere, or not at all
            importlib.import_module(part)
    module.telemetry = False
    module.suppress_debug_info = True
    return module


class Clients:
    """Closes LiteLLM's HTTP clients with the last engine of their loop, because LiteLLM keeps them for the process.

    Most are in a cache, by loop. One is shared by all loops, and has a session on the loop that used it last."""

    _users: ClassVar[MutableMapping[asyncio.AbstractEventLoop, set[Clients]]] = WeakKeyDictionary()

    def use(self) -> None:
        """A request is about to be sent on this loop."""
        self._users.setdefault(asyncio.get_running_loop(), set()).add(self)

    async def close(self) -> None:
        """Called when no request of this engine runs any more."""
        loop = asyncio.get_running_loop()
        users = self._users.get(loop, set())
        if self not in users:
            return
        users.remove(self)
        if users:
            return
        cached = litellm().in_memory_llm_clients_cache
        of_this_loop = cached.update_cache_key_with_event_loop("")  # the suffix of its keys
        for key in [key for key in cached.cache_dict if key.endswith(of_this_loop)]:
            client = cached.cache_dict[key]
            cached.delete_cache(key)
            close = getattr(client, "close", None) or getattr(client, "aclose", None)
            try:
                closing = close() if close is not None else None
                if inspect.isawaitable(closing):
                    await closing
            except Exception as exc:  # noqa: BLE001 - of any provider's client: the others must still be closed
                log.warning("client_not_closed", error=type(exc).__name__)
        shared = vars(litellm()).get("module_level_aclient")
        session: Any = getattr(getattr(getattr(shared, "client", None), "_transport", None), "client", None)
        if getattr(session, "_loop", None) is loop:  # the next request opens a new one
            await session.close()
