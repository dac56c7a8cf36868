"""LiteLLM itself: its import, its HTTP clients, and its exceptions as the contract's errors (no key, no prompt).

It is imported only if models are configured: that takes two seconds and 170 MB. Its price list comes from the package,
not from the network. Its telemetry, hints and retries are off: the backend retries.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ... import logs, redact
from ...errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    ProxyError,
    RateLimited,
    RequestTooLarge,
    TurnTimeout,
    UpstreamError,
)

log = logs.get(__name__)

TEXT_LIMIT = 500
# The longest Retry-After, in seconds, for which the SDKs of OpenAI and Anthropic wait.
PATIENCE = 60.0

_PREFIX = re.compile(r"^(?:litellm\.)?(?=\w*(?:Error|Exception|Timeout))\w++: (?:\w+Exception - )?")
_CONTEXT = re.compile(r"context (?:window|length)|maximum context|too long|token limit|exceeds? .{0,40}tokens", re.I)
_CONTENT_FILTER = re.compile(r"content.?(?:policy|filter|management)|safety system", re.IGNORECASE)
# OpenAI's `6m0s`, `20ms`, `1h2m`.
_SPAN = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
# Modules that LiteLLM would import at its first request and first failure, while the event loop waits 1 s (1.106).
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
        with suppress(ImportError):  # another version has it elsewhere, or not at all
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


def error_for(exc: Exception, model: str, secret: str | None) -> ProxyError:
    """The contract's error for an exception of LiteLLM, with the provider's message, shortened.

    `model`: the name that clients know. `secret`: the key, which is removed from the message.
    """
    exc = getattr(exc, "original_exception", None) or exc  # the exception of a broken stream is wrapped
    status = _status(exc)
    text = " ".join(str(getattr(exc, "message", None) or exc).split())
    for _ in range(3):  # LiteLLM stacks its own names in front
        text = _PREFIX.sub("", text)
    with suppress(ValueError):  # some providers' messages contain the whole error body
        body = json.loads(text[text.find("{") : text.rfind("}") + 1].replace("\\'", "'"))
        error = body.get("error") if isinstance(body, dict) else None
        text = str(error.get("message") or text) if isinstance(error, dict) else text
    if secret:
        text = text.replace(secret, "[key]")
    text = redact.head(text, TEXT_LIMIT) or type(exc).__name__
    detail = {} if status is None else {"status": status}
    message = f"{model}: {text}"
    if type(exc).__name__ == "ContextWindowExceededError" or (status == 400 and _CONTEXT.search(text)):
        return ContextTooLong(f"{message}: start a new chain, send less, or set a window", detail=detail)
    if status == 429:
        wait = _wait(exc)
        soon = wait is None or wait <= PATIENCE
        return RateLimited(message, retry_after=wait, detail=detail, retry=None if soon else False)
    if status in (401, 402, 403):
        return UpstreamError(f"{message}: look at this model's key and account", detail=detail, retry=False)
    if status == 404:
        return InvalidRequest(f"{message} (the provider does not know this model)", param="model", detail=detail)
    if status == 413:
        return RequestTooLarge(message, detail=detail)
    if status in (503, 529):
        return Overloaded(message, retry_after=_wait(exc), detail=detail)
    if "Timeout" in type(exc).__name__ or status in (408, 504):
        return TurnTimeout(message, detail=detail)
    if status in (400, 422):
        return InvalidRequest(message, detail=detail)
    return UpstreamError(message, detail={"status": status or 502})


def is_content_refusal(exc: Exception) -> bool:
    """Whether the provider's content filter refused the request: the turn then ends as refused, not as failed."""
    if type(exc).__name__ == "ContentPolicyViolationError":
        return True
    return _status(exc) == 400 and _CONTENT_FILTER.search(str(getattr(exc, "message", exc))) is not None


def _status(exc: Exception) -> int | None:
    status = getattr(exc, "status_code", None)
    return status if isinstance(status, int) else None


def _wait(exc: Exception) -> float | None:
    """Seconds until the provider's reset, from its headers; None without them."""
    response = getattr(exc, "response", None)
    headers: Mapping[str, str] = (
        getattr(response, "headers", None) or getattr(exc, "litellm_response_headers", {}) or {}
    )
    if value := headers.get("retry-after"):
        try:
            return max(1.0, float(value))
        except ValueError:
            pass
        try:
            return max(1.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
    waits = []
    for name in headers:
        span = _SPAN.fullmatch(headers[name].strip()) if name.startswith("x-ratelimit-reset") else None
        if span is not None and any(span.groups()):
            hours, minutes, seconds, millis = (float(part or 0) for part in span.groups())
            waits.append(hours * 3600 + minutes * 60 + seconds + millis / 1000)
    return max(1.0, *waits) if waits else None
