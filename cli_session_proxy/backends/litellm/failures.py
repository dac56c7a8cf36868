"""Converts LiteLLM's exceptions to the contract's errors, without keys and prompts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime

from ... import redact
from ...errors import (
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    ProxyError,
    RateLimited,
    RequestTooLarge,
    TurnTimeout,
    UpstreamError,
)

TEXT_LIMIT = 500
# The longest Retry-After, in seconds, for which the SDKs of OpenAI and Anthropic wait.
PATIENCE = 60.0

_PREFIX = re.compile(r"^(?:litellm\.)?(?=\w*(?:Error|Exception|Timeout))\w++: (?:\w+Exception - )?")
_CONTEXT = re.compile(r"context (?:window|length)|maximum context|too long|token limit|exceeds? .{0,40}tokens", re.I)
_GUARDED = re.compile(r"content.?(?:policy|filter|management)|safety system", re.IGNORECASE)
_SPAN = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")


def error_for(exc: Exception, model: str, secret: str | None) -> ProxyError:
    """`model`: the name that clients know. `secret`: the key, which is removed from all texts."""
    exc = getattr(exc, "original_exception", None) or exc  # the exception of a broken stream is wrapped
    status = _status(exc)
    text = message_of(exc, secret)
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


def is_guarded(exc: Exception) -> bool:
    """Whether the provider's content filter refused the request: that is a refusal, not an error."""
    if type(exc).__name__ == "ContentPolicyViolationError":
        return True
    return _status(exc) == 400 and _GUARDED.search(str(getattr(exc, "message", exc))) is not None


def message_of(exc: Exception, secret: str | None) -> str:
    """The provider's message, shortened, without the key and LiteLLM's prefixes."""
    text = " ".join(str(getattr(exc, "message", None) or exc).split())
    for _ in range(3):  # LiteLLM stacks its own names in front
        text = _PREFIX.sub("", text)
    with suppress(ValueError):  # some providers' messages contain the whole error body
        body = json.loads(text[text.find("{") : text.rfind("}") + 1].replace("\\'", "'"))
        error = body.get("error") if isinstance(body, dict) else None
        text = str(error.get("message") or text) if isinstance(error, dict) else text
    if secret:
        text = text.replace(secret, "[key]")
    return redact.head(text, TEXT_LIMIT) or type(exc).__name__


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
    spans = [_seconds(headers[name]) for name in headers if name.startswith("x-ratelimit-reset")]
    known = [span for span in spans if span is not None]
    return max(1.0, *known) if known else None


def _seconds(span: str) -> float | None:
    """OpenAI's `6m0s`, `20ms`, `1h2m`."""
    found = _SPAN.fullmatch(span.strip())
    if found is None or not any(found.groups()):
        return None
    hours, minutes, seconds, millis = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + millis / 1000
