"""Our errors as the exceptions LiteLLM's callers catch, with status, code, `param` and retry-after kept.

400 BadRequestError · ContextWindowExceededError      429 RateLimitError       503 ServiceUnavailableError
401 AuthenticationError                               500 InternalServerError  504 Timeout
404 NotFoundError                                     502 BadGatewayError      others: APIError(status)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from litellm import exceptions

from ... import redact
from ...errors import ContextTooLong, ProxyError
from ...wires.common import retry_headers

PROVIDER = "claude-cli"

_BY_STATUS: dict[int, Callable[..., Exception]] = {
    400: exceptions.BadRequestError,
    401: exceptions.AuthenticationError,
    404: exceptions.NotFoundError,
    429: exceptions.RateLimitError,
    500: exceptions.InternalServerError,
    502: exceptions.BadGatewayError,
    503: exceptions.ServiceUnavailableError,
}


def translate(error: ProxyError, model: str) -> Exception:
    """The LiteLLM exception of the same status; its text ends with our stable code."""
    headers = {name.lower(): value for name, value in retry_headers(error).items()}
    exception = _exception(error, model, headers)
    exception.code = error.code  # type: ignore[attr-defined]  # LiteLLM's exceptions take further attributes
    exception.param = error.param  # type: ignore[attr-defined]
    exception.headers = headers  # type: ignore[attr-defined]  # what the LiteLLM proxy answers with
    return exception


def _exception(error: ProxyError, model: str, headers: dict[str, str]) -> Exception:
    message = f"{redact.text(error.message)} [{error.code}]"
    common: dict[str, Any] = {"message": message, "model": model, "llm_provider": PROVIDER}
    if error.status == 504:
        return exceptions.Timeout(**common, exception_status_code=504, headers=headers)
    request = httpx.Request("POST", "http://claude-cli/v1/chat/completions")  # only to carry the headers
    response = httpx.Response(error.status, headers=headers, request=request)
    if isinstance(error, ContextTooLong):
        return exceptions.ContextWindowExceededError(**common, response=response)
    kind = _BY_STATUS.get(error.status)
    if kind is None:
        return exceptions.APIError(error.status, **common)
    return kind(**common, response=response)
