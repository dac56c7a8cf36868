"""What both ways to an engine give: chat objects of our own endpoint, with the names of what answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ...domain.models import JSON
from ...errors import TurnTimeout
from ...wires.common import decoded_agent_id, encoded_agent_id

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
