"""A proxy that is stopped in the middle of a turn: its client is told to try again, and the turn is answered once."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cli_session_proxy.domain.models import Turn
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.testing.script import Gate
from cli_session_proxy.testing.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import START, serve

SAID: Any = [{"role": "user", "content": "remember a = 1"}]
ANSWER = "Noted: a is 1."


async def with_openai(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        answer = await client.chat.completions.create(model="sonnet", messages=SAID)
        return answer.choices[0].message.content or ""


async def with_responses(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        return (await client.responses.create(model="sonnet", input=SAID)).output_text


async def with_anthropic(url: str) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k") as client:
        answer = await client.messages.create(model="sonnet", max_tokens=100, messages=SAID)
        return "".join(block.text for block in answer.content if block.type == "text")


async def with_an_anthropic_stream(url: str) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="k") as client,
        client.messages.stream(model="sonnet", max_tokens=100, messages=SAID) as events,
    ):
        return await events.get_final_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def all_turns(settings: Settings) -> list[Turn]:
    store = store_for(settings)
    await store.open()
    try:
        agents = [row.agent async for row in store.summaries("local")]
        return [turn for agent in agents async for turn in store.turns(agent.key)]
    finally:
        await store.close()


@pytest.mark.parametrize("ask", [with_openai, with_responses, with_anthropic, with_an_anthropic_stream])
async def test_a_client_that_retries_by_itself_gets_its_answer_from_the_next_proxy(
    ask: Callable[[str], Coroutine[Any, Any, str]],
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    tmp_path: Path,
) -> None:
    settings = make_settings(claude_bin=claude_2, port=free_port(), drain_timeout=0.2)
    upstream.next(Gate())
    async with AsyncExitStack() as first:
        url, process = await first.enter_async_context(serve(settings, tmp_path))
        asking = asyncio.create_task(ask(url))
        await upstream.arrived()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START) == 0
    async with serve(settings, tmp_path):
        assert await asyncio.wait_for(asking, START) == ANSWER
    (turn,) = await all_turns(settings)
    assert (turn.status, turn.delivery) == ("completed", "delivered")
    assert [attempt.get("code") for attempt in turn.attempts] == ["interrupted", None]
    assert upstream.requests[-1].user_texts() == [SAID[0]["content"]]


async def test_a_stopped_proxy_says_when_to_come_back_and_a_cancelled_turn_is_not_its_doing(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, drain_timeout=0.2)
    upstream.when("background", Gate(), times=None)
    upstream.when("remember", Gate())
    async with serve(settings, tmp_path) as (url, process), httpx.AsyncClient(trust_env=False, timeout=START) as http:
        body = {"model": "sonnet", "input": "background", "background": True}
        mine = (await http.post(f"{url}/v1/responses", json=body)).json()
        other = (await http.post(f"{url}/v1/responses", json=body | {"input": "in the background too"})).json()
        cancelled = (await http.post(f"{url}/v1/responses/{mine['id']}/cancel")).json()
        assert (cancelled["status"], cancelled["error"]) == ("cancelled", None)
        body = {"model": "sonnet", "messages": SAID}
        asking = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
        await upstream.arrived(text="remember")
        process.send_signal(signal.SIGTERM)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        assert int(answer.headers["retry-after"]) > 0
    async with serve(settings, tmp_path) as (url, _), httpx.AsyncClient(trust_env=False) as http:
        again = (await http.get(f"{url}/v1/responses/{mine['id']}")).json()
        assert (again["status"], again["error"]) == ("cancelled", None)
        failed = (await http.get(f"{url}/v1/responses/{other['id']}")).json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "interrupted")
