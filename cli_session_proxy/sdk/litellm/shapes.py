"""Our chat objects as LiteLLM's."""

from __future__ import annotations

from litellm import ModelResponse
from litellm.types.utils import Choices, Delta, Message, ModelResponseStream, StreamingChoices, Usage

from ...domain.models import JSON
from ...errors import UpstreamError
from .reply import ChatReply


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
