"""Our chat objects as LiteLLM's, and our errors as the exceptions that LiteLLM's callers catch.

An exception keeps the error's status, code, `param` and retry-after:

400 BadRequestError · ContextWindowExceededError      429 RateLimitError       503 ServiceUnavailableError
401 AuthenticationError                               500 InternalServerError  504 Timeout
404 NotFoundError                                     502 BadGatewayError      others: APIError(status)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import httpx
from litellm import ModelResponse, exceptions
from litellm.types.utils import Choices, Delta, Message, ModelResponseStream, StreamingChoices, Usage

from ... import redact
from ...domain.models import JSON
from ...errors import ContextTooLong, ProxyError, UpstreamError
from ...wires.common import retry_headers
from .call import ChatReply


def response(reply: ChatReply) -> ModelResponse:
    """The whole answer, with cost and answer headers where LiteLLM looks for them."""
    data, fields = reply.data, reply.identity.fields()
    choice = data["choices"][0]
    message = Message(**choice["message"], provider_specific_fields=fields)
    made = ModelResponse(
        id=data["id"],
        created=data["created"],
        model=data["model"],
        choices=[Choices(index=0, finish_reason=choice["finish_reason"], message=message)],
        usage=Usage(**data["usage"]),
    )
    made._hidden_params["additional_headers"] = reply.identity.headers()
    if (cost := data["usage"].get("cost")) is not None:
        made._hidden_params["response_cost"] = cost
    return made


class Chunks:
    """One stream's chunks, in the order LiteLLM needs: usage goes before the finish.

    LiteLLM swallows a finish chunk with an empty delta, and stops there; usage after it is lost, and LiteLLM
    then counts tokens of its own (measured on 1.106.2).
    """

    def __init__(self) -> None:
        self._finish: ModelResponseStream | None = None

    def feed(self, reply: ChatReply) -> list[ModelResponseStream]:
        """What LiteLLM gets for this chunk of ours, in order."""
        data = reply.data
        if not data["choices"]:
            if self._finish is None:
                raise UpstreamError("the stream ended without saying why")
            return [_chunk(reply, Delta(), usage=data["usage"]), self._finish]
        choice = data["choices"][0]
        if choice["finish_reason"] is not None:
            self._finish = _chunk(reply, Delta(), finish_reason=choice["finish_reason"])
            return []
        delta = {key: value for key, value in choice["delta"].items() if value is not None}
        return [_chunk(reply, Delta(**delta))]


def _chunk(
    reply: ChatReply, delta: Delta, *, finish_reason: str | None = None, usage: JSON | None = None
) -> ModelResponseStream:
    data = reply.data
    # A usage chunk that names anything else is not empty for LiteLLM, and would reach the client as a delta.
    fields = None if usage else reply.identity.fields()
    return ModelResponseStream(
        id=data["id"],
        created=data["created"],
        model=data["model"],
        choices=[StreamingChoices(index=0, delta=delta, finish_reason=finish_reason)],
        provider_specific_fields=fields,
        **({"usage": usage} if usage else {}),
    )


# --- errors

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
