"""A proxy that is stopped in the middle of a turn: its client is told to try again, and the turn is answered once."""

from __future__ import annotations

import asyncio
import signal
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
from turnfault.ports import free_port
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..serving import START, serve
from ..until import until
from .test_several_proxies import reached

PATIENCE = 600.0
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


async def all_turns(settings: Settings) -> list[Turn]:
    store = store_for(settings)
    await store.open()
    try:
        agents = [row.agent async for row in store.summaries("local")]
        return [turn for agent in agents async for turn in store.turns(agent.key)]
    finally:
        await store.close()


@pytest.mark.parametrize("ask", rest_in_full(with_an_anthropic_stream, with_openai, with_responses, with_anthropic))
async def test_a_client_that_retries_by_itself_gets_its_answer_from_the_next_proxy(
    ask: Callable[[str], Coroutine[Any, Any, str]],
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    tmp_path: Path,
) -> None:
    settings = make_settings(claude_bin=claude_2, port=free_port(), drain_timeout=0.2, keepalive=PATIENCE)
    upstream.next(HeldReply())
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


WORDS = "stop here"
CONTENTS = {"contents": [{"parts": [{"text": WORDS}]}]}
MESSAGES = {"model": "sonnet", "messages": [{"role": "user", "content": WORDS}]}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", MESSAGES),
    "responses": ("/v1/responses", {"model": "sonnet", "input": WORDS}),
    "messages": ("/v1/messages", MESSAGES | {"max_tokens": 100}),
    "generate": ("/v1beta/models/sonnet:generateContent", CONTENTS),
    "interactions": ("/v1beta/interactions", {"model": "sonnet", "input": WORDS}),
}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}, streamed": (route, body | {"stream": True}) for name, (route, body) in ANSWERS.items()
}
STREAMS["generate, streamed"] = ("/v1beta/models/sonnet:streamGenerateContent?alt=sse", CONTENTS)


def code_of(wire: str, body: dict[str, Any]) -> str:
    """Our code, where the wire has a place for it."""
    error = body["error"]
    if wire.startswith("messages"):
        return str(error["details"]["error_code"])
    return str(error["details"][0]["reason"] if wire.startswith("generate") else error["code"])


async def test_every_wire_says_that_the_proxy_stopped_and_when_to_come_back(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """A turn of each wire runs when the proxy is stopped, streamed and not. Nothing of an answer is out yet."""
    settings = make_settings(claude_bin=claude_2, drain_timeout=0.2)
    upstream.when(WORDS, HeldReply(), times=None)
    wires = ANSWERS | STREAMS
    async with serve(settings, tmp_path) as (url, process), httpx.AsyncClient(trust_env=False, timeout=START) as http:
        asking: dict[str, asyncio.Task[httpx.Response]] = {}
        for kind in (ANSWERS, STREAMS):  # a stream begins by itself after 5 s: the CLIs of the others have started then
            for wire, (route, body) in kind.items():
                asked = http.post(url + route, json=body, headers={"X-Agent-Id": f"of {wire}"})
                asking[wire] = asyncio.create_task(asked)
            if kind is ANSWERS:
                await upstream.arrived(text=WORDS)

        async def all_accepted() -> bool:
            return len(await all_turns(settings)) == len(wires)

        await until(all_accepted)
        process.send_signal(signal.SIGTERM)
        answers = {wire: await task for wire, task in asking.items()}
    assert {wire: answer.status_code for wire, answer in answers.items()} == dict.fromkeys(wires, 503)
    assert {wire: code_of(wire, answer.json()) for wire, answer in answers.items()} == dict.fromkeys(
        wires, "interrupted"
    )
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers.values())


async def test_a_stream_of_responses_that_a_stop_ends_fails_with_our_code(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, drain_timeout=0.2)
    gate = HeldReply(after=1)
    upstream.when(WORDS, gate)
    async with (
        serve(settings, tmp_path) as (url, process),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        events = await client.responses.create(model="sonnet", input=WORDS, stream=True)
        async for event in events:
            if event.type == "response.created":
                await reached(gate)
                process.send_signal(signal.SIGTERM)
            if event.type == "response.failed":
                break
    assert event.type == "response.failed"
    assert event.response.status == "failed"
    assert event.response.error is not None
    assert str(event.response.error.code) == "interrupted"  # ours; the SDK's type knows OpenAI's only


async def test_a_stopped_proxy_says_when_to_come_back_and_a_cancelled_turn_is_not_its_doing(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, drain_timeout=0.2)
    upstream.when("background", HeldReply(), times=None)
    upstream.when("remember", HeldReply())
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
