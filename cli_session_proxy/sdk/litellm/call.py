"""A call of LiteLLM as the chat request that our own endpoint would have got, and what both transports give for it.

How LiteLLM 1.106.2 calls a custom handler, measured: unknown body fields arrive in `optional_params`, `metadata` and
the client's headers in `litellm_params`, `extra_headers` in `headers`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from litellm.responses.utils import ResponsesAPIRequestUtils

from ...domain.models import JSON
from ...errors import InvalidRequest, TurnTimeout
from ...wires.common import checked_agent_id, decoded_agent_id, encoded_agent_id

# The client's headers that are forwarded: those that name or deduplicate a request.
FORWARDED = ("x-chain", "idempotency-key", "x-stainless-retry-count", "x-request-id")
# LiteLLM's own parameters among those of the client.
NOT_OURS = ("max_retries", "extra_body", "extra_headers", "stream", "stream_options")
# Set by the LiteLLM proxy if it generated the session id (`missing_session_id: generate`): different for each request.
GENERATED_SESSION = "litellm_session_id_generated"


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One call: the chat body, its headers (lower case), the address and the timeout in seconds."""

    model: str
    body: JSON
    headers: dict[str, str]
    api_base: str | None = None
    api_key: str | None = None
    timeout: float | None = None


def read(kwargs: Mapping[str, Any], *, stream: bool) -> ProviderCall:
    """Convert LiteLLM's keyword arguments. Raises `InvalidRequest` for an invalid agent name."""
    params = _mapping(kwargs.get("litellm_params"))
    proxied = _mapping(params.get("proxy_server_request"))  # the LiteLLM proxy's own request
    sent: dict[str, str] = {}
    for source in (_mapping(params.get("metadata")).get("headers"), proxied.get("headers"), kwargs.get("headers")):
        sent.update({str(key).lower(): str(value) for key, value in _mapping(source).items()})
    optional = dict(_mapping(kwargs.get("optional_params")))
    optional.update(_mapping(optional.get("extra_body")))  # the openai client's way to send unknown fields
    body: JSON = {"model": kwargs["model"], "messages": kwargs["messages"]}
    body.update({key: value for key, value in optional.items() if key not in NOT_OURS})
    if stream:
        body.update(stream=True, stream_options={"include_usage": True})
    name = _agent_id(sent, body.pop("agent_id", None), params)
    previous = _mapping(proxied.get("body")).get("previous_response_id")
    if isinstance(previous, str):  # the id that LiteLLM's Responses bridge made of ours
        decoded = ResponsesAPIRequestUtils._decode_responses_api_response_id(previous)
        body["previous_response_id"] = str(decoded.get("response_id") or previous)
    headers = {key: sent[key] for key in FORWARDED if key in sent}
    if name is not None:
        headers["x-agent-id"] = encoded_agent_id(name)
    return ProviderCall(
        model=str(kwargs["model"]),
        body=body,
        headers=headers,
        api_base=kwargs.get("api_base") or None,
        api_key=kwargs.get("api_key") or None,
        timeout=_seconds(kwargs.get("timeout")),
    )


def _seconds(timeout: Any) -> float | None:
    """The timeout of LiteLLM's caller. It may come from the client, so it is checked: NaN or infinity would never
    end."""
    if isinstance(timeout, httpx.Timeout):
        timeout = timeout.read
    try:
        seconds = None if timeout is None else float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if seconds is not None and not math.isfinite(seconds):
        raise InvalidRequest("timeout must be a number of seconds", param="timeout")
    return seconds


def _agent_id(headers: Mapping[str, str], in_body: Any, params: Mapping[str, Any]) -> str | None:
    """The agent's name, first match wins: header, body, metadata, LiteLLM's session id. `user` is never one."""
    if "x-agent-id" in headers:
        return decoded_agent_id(headers["x-agent-id"].encode("utf-8", "surrogatepass"))
    metadata = _mapping(params.get("metadata"))
    sent = _mapping(_mapping(params.get("proxy_server_request")).get("body"))
    # Not a session id that LiteLLM made up or took from a trace id: those change with each request.
    session = params.get("litellm_session_id")
    is_trace = not metadata.get("session_id") and session == metadata.get("trace_id")
    for value in (
        in_body,
        sent.get("agent_id"),
        metadata.get("agent_id"),
        _mapping(metadata.get("requester_metadata")).get("agent_id"),
        str(session) if session and not metadata.get(GENERATED_SESSION) and not is_trace else None,
    ):
        if value is not None:
            return checked_agent_id(value)
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# --- replies: chat objects of our own endpoint, with the names of what answered

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answered. On a stream, None stands for what is not known yet."""

    agent_id: str | None = None
    turn_id: str | None = None
    session_id: str | None = None
    continuity: str | None = None

    def fields(self) -> dict[str, str]:
        """For `provider_specific_fields`."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def headers(self) -> dict[str, str]:
        """For `additional_headers`: the answer headers of the contract, lower case."""
        named = {f"x-{name.replace('_', '-')}": value for name, value in self.fields().items()}
        if self.agent_id is not None:
            named["x-agent-id"] = encoded_agent_id(self.agent_id)
        return named

    @staticmethod
    def from_headers(headers: Mapping[str, str]) -> Identity:
        """From a `serve`'s answer headers."""
        agent = headers.get("x-agent-id")
        return Identity(
            agent_id=None if agent is None else decoded_agent_id(agent.encode("latin-1")),
            turn_id=headers.get("x-turn-id"),
            session_id=headers.get("x-session-id"),
            continuity=headers.get("x-continuity"),
        )


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A `chat.completion`, or one `chat.completion.chunk` of a stream."""

    data: JSON
    identity: Identity


class Deadline:
    """LiteLLM passes a timeout to custom handlers and never enforces it: this does.

    `seconds`: the timeout; None waits without end. `slack`: more seconds, for an error that the work itself raises.
    """

    def __init__(self, seconds: float | None, *, slack: float = 0.0) -> None:
        self._seconds = seconds
        self._ends_at = None if seconds is None else time.monotonic() + seconds + slack

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when time is up. Raises `TurnTimeout`."""
        remaining = None if self._ends_at is None else self._ends_at - time.monotonic()
        scope = asyncio.timeout(remaining)
        try:
            async with scope:
                return await work
        except TimeoutError as exc:
            if not scope.expired():
                raise  # the work's own timeout
            raise TurnTimeout(f"no answer within the call's timeout of {self._seconds:g} s: give it more") from exc
