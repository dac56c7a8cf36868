"""LiteLLM itself, imported once, where models are configured: it takes two seconds and 170 MB.

Its price list comes from the package, not from the network; it says nothing on its own, and repeats nothing: we
count retries ourselves.
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


# What it would import at its first request and its first failure, which held the event loop for a second (1.106).
PARTS = ("openai.resources.chat", "fastapi")


@cache
def litellm() -> Any:
    """The module. Raises `ConfigError` where it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read at its import only
    try:
        import litellm as module  # noqa: PLC0415 - a proxy without models never pays for it
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
    """LiteLLM's HTTP clients, for one engine. It makes them at need, keeps them for the process, and closes none when
    their loop ends: the last engine of a loop does. Most are in a cache, by loop; one is for every loop, and has a
    session on the one that used it last."""

    _users: ClassVar[MutableMapping[asyncio.AbstractEventLoop, set[Clients]]] = WeakKeyDictionary()

    def use(self) -> None:
        """A request is about to be sent on this loop."""
        self._users.setdefault(asyncio.get_running_loop(), set()).add(self)

    async def close(self) -> None:
        """No request of this engine is under way any more."""
        loop = asyncio.get_running_loop()
        users = self._users.get(loop, set())
        if self not in users:
            return
        users.remove(self)
        if users:
            return
        cached = litellm().in_memory_llm_clients_cache
        of_this_loop = cached.update_cache_key_with_event_loop("")  # how its keys end
        for key in [key for key in cached.cache_dict if key.endswith(of_this_loop)]:
            client = cached.cache_dict[key]
            cached.delete_cache(key)
            close = getattr(client, "close", None) or getattr(client, "aclose", None)
            try:
                closing = close() if close is not None else None
                if inspect.isawaitable(closing):
                    await closing
            except Exception as exc:  # noqa: BLE001 - of any provider: the others are closed all the same
                log.warning("client_not_closed", error=type(exc).__name__)
        shared = vars(litellm()).get("module_level_aclient")
        session: Any = getattr(getattr(getattr(shared, "client", None), "_transport", None), "client", None)
        if getattr(session, "_loop", None) is loop:  # the next request has a new one
            await session.close()
