"""Answers a call with the engine in this process. Both functions run on the runtime's loop.

The turn is acknowledged when the caller asks for an item after the last one, because then it has received the last
one. If the caller closes the generator earlier, the turn counts as left by its client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...domain import limits
from ...domain.models import Started
from ...errors import InvalidRequest, RequestTooLarge
from ...wires import common
from ...wires.chat import body as chat
from ...wires.streams import SSE_DONE
from ..runtime import Runtime
from .call import ProviderCall
from .reply import ChatReply, Deadline, Identity

if TYPE_CHECKING:
    from ...engine.engine import Answer

# Seconds. The engine ends a turn at its timeout and says why; this is for waits that it cannot end, as for the queue.
ENGINE_SLACK = 0.5


async def complete(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """Yields one item, the completion. Raises `ProxyError`."""
    deadline = Deadline(call.timeout, slack=ENGINE_SLACK)
    _, answer = await _submit(runtime, call, deadline)
    try:
        turn = await deadline.wait(answer.turn())
        yield ChatReply(chat.completion(turn), Identity(answer.agent_id, turn.id, turn.session_id, turn.continuity))
        answer.acknowledge()
    finally:
        answer.leave()


async def stream(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """Yields the chunks that our endpoint would stream. Raises `ProxyError`."""
    deadline = Deadline(call.timeout, slack=ENGINE_SLACK)
    chat_call, answer = await _submit(runtime, call, deadline)
    identity = Identity(answer.agent_id, answer.turn_id)
    writer = chat.writer(chat_call, answer.turn_id)
    events = aiter(answer.events())
    try:
        while (event := await deadline.wait(anext(events, None))) is not None:
            if isinstance(event, Started):
                identity = Identity(event.agent_id, event.turn_id, event.session_id, event.continuity)
            for data in writer.feed(event):
                if data != SSE_DONE:
                    yield ChatReply(json.loads(data.removeprefix(b"data: ")), identity)
        answer.acknowledge()
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
        answer.leave()


def read(call: ProviderCall, most: int) -> chat.ChatCall:
    """Read the call as the chat wire does. `most`: its most characters. Raises `InvalidRequest`, `RequestTooLarge`."""
    naming = common.naming(call.headers, path_agent=None, request_id=call.headers.get("x-request-id"))
    if limits.is_deeper(call.body):
        raise InvalidRequest(f"the request is nested deeper than {limits.DEPTH} levels: send it flatter")
    if limits.holds_more(call.body, limits.VALUES):
        raise InvalidRequest(f"the request has more than {limits.VALUES:,} values: send less")
    if limits.characters(call.body) > most:
        raise RequestTooLarge(f"the request is over {most} characters: send less, or raise max_body in the settings")
    chat_call = chat.read(call.body, naming)
    return replace(chat_call, request=replace(chat_call.request, timeout=call.timeout))


async def _submit(runtime: Runtime, call: ProviderCall, deadline: Deadline) -> tuple[chat.ChatCall, Answer]:
    engine = await deadline.wait(runtime.engine())
    read_call = await deadline.wait(asyncio.to_thread(read, call, engine.settings.max_body))
    # If the caller leaves meanwhile, the engine handles the turn.
    return read_call, await deadline.wait(engine.submit(read_call.request))
