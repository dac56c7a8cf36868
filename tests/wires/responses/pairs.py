"""Two proxies over one store, and what a client of OpenAI's Conversations does at them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply, scripted_answer
from turnfault.provider.upstream import Upstream

from ...talking import running
from ...until import until
from ...without_cli import running_without_cli
from .conftest import Door, door_to


class Pair(NamedTuple):
    """Two proxies on one store and one `var/`."""

    a: Door
    b: Door


@asynccontextmanager
async def pair_of(settings: Settings, upstream: Upstream) -> AsyncIterator[Pair]:
    """With the CLI of these settings, or without any."""

    def started() -> Any:
        return running_without_cli(settings, upstream) if settings.claude_bin is None else running(settings)

    upstream.answer = answered
    async with started() as one, started() as two, door_to(one, settings) as a, door_to(two, settings) as b:
        yield Pair(a, b)


def answered(texts: Any) -> str:
    """Says which question it answers, so that a doubled or a lost answer shows."""
    newest = texts[-1][1]
    return f"to {newest}" if newest.startswith("say ") else scripted_answer(texts)


def message(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


async def added(door: Door, conversation: str, *texts: str, role: str = "user") -> list[str]:
    """Items written by hand; their ids."""
    page = await door.openai.conversations.items.create(conversation, items=[message(text, role) for text in texts])
    return [item.id or "" for item in page.data]


async def said(door: Door, conversation: str, given: Any, **more: Any) -> Any:
    return await door.openai.responses.create(model="sonnet", input=given, conversation=conversation, **more)


async def listed(door: Door, conversation: str) -> list[tuple[str, str]]:
    """(id, text) of every item, oldest first."""
    page = await door.openai.conversations.items.list(conversation, order="asc", limit=100)
    return [(item.id or "", part.text) async for item in page for part in getattr(item, "content", [])]


async def texts(door: Door, conversation: str) -> list[str]:
    return [text for _, text in await listed(door, conversation)]


async def id_of(door: Door, conversation: str, text: str) -> str:
    [found] = [item_id for item_id, told in await listed(door, conversation) if told == text]
    return found


async def removed(door: Door, conversation: str, text: str) -> None:
    await door.openai.conversations.items.delete(await id_of(door, conversation, text), conversation_id=conversation)


async def shown(door: Door, conversation: str, upstream: Upstream) -> list[str]:
    """What the model is shown of the conversation by one more turn, and what the items are then, the turn's own left
    out: both have to be the same."""
    told = await said(door, conversation, "say end")
    seen = [text for _, text in upstream.requests[-1].texts()]
    assert seen[-1] == "say end"
    assert (await texts(door, conversation)) == [*seen, told.output_text]
    return seen[:-1]


async def begun(door: Door, conversation: str, upstream: Upstream, text: str) -> tuple[asyncio.Task[Any], HeldReply]:
    """A turn that runs until the gate is opened."""
    gate = HeldReply()
    upstream.when(text, gate)
    task = asyncio.create_task(said(door, conversation, text))
    async with asyncio.timeout(60):
        await gate.reached.wait()
    return task, gate


async def accepted(door: Door, conversation: str, number: int) -> None:
    """So many turns of the conversation are in the store."""

    async def there() -> bool:
        agent = await door.engine.store.agent("local", conversation)
        assert agent is not None
        return len([turn async for turn in door.engine.store.turns(agent.key)]) >= number

    await until(there)


async def left(door: Door, conversation: str, upstream: Upstream, *words: str) -> None:
    """A turn whose client leaves before its answer is there; it is completed all the same. Every second of the words is
    an answer."""
    gate = HeldReply(after=1)
    upstream.when(words[-1], gate)
    given = [message(text, "assistant" if at % 2 else "user") for at, text in enumerate(words)]
    body = {"model": "sonnet", "input": given, "conversation": conversation, "stream": True}
    async with door.http.stream("POST", "/v1/responses", json=body) as response:
        async with asyncio.timeout(60):
            await gate.reached.wait()
        turn_id = response.headers["x-turn-id"]
    gate.open()

    async def undelivered() -> bool:
        turn = await door.engine.store.turn(turn_id)
        return turn is not None and (turn.status, turn.delivery) == ("completed", "undelivered")

    await until(undelivered)
