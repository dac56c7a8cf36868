"""Our errors as the exceptions LiteLLM's callers catch, with status, code, `param` and retry-after kept.

400 BadRequestError · ContextWindowExceededError      429 RateLimitError       503 ServiceUnavailableError
401 AuthenticationError                               500 InternalServerError  504 Timeout
404 NotFoundError                                     502 BadGatewayError      others: APIError(status)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

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
    message = f"{redact.text(error.message)} [{error.code}]"
    common: dict[str, Any] = {"message": message, "model": model, "llm_provider": PROVIDER}
    request = httpx.Request("POST", "http://claude-cli/v1/chat/completions")  # only to carry the headers
    response = httpx.Response(error.status, headers=headers, request=request)
    exception: Any
    if error.status == 504:
        exception = exceptions.Timeout(**common, exception_status_code=504, headers=headers)
    elif isinstance(error, ContextTooLong):
        exception = exceptions.ContextWindowExceededError(**common, response=response)
    elif error.status in _BY_STATUS:
        exception = _BY_STATUS[error.status](**common, response=response)
    else:
        exception = exceptions.APIError(error.status, **common)
    exception.code = error.code  # LiteLLM's exceptions take further attributes
    exception.param = error.param
    exception.headers = headers  # what the LiteLLM proxy answers with
    return cast(Exception, exception)
