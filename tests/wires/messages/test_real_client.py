"""The anthropic client over a real server: `cli_proxy` has the real CLI behind it, `proxy` none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import ALIASES
from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...every_wire import five_turns, proxied, the_one_chain
from ...matrix import rest_in_full
from ...without_cli import proxied_without_cli

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def proxy(
    make_settings: MakeSettings, upstream: Upstream
) -> AsyncIterator[tuple[Engine, anthropic.AsyncAnthropic]]:
    async with proxied_without_cli(make_settings(), upstream) as (engine, root), client_of(root) as client:
        yield engine, client


@pytest.fixture
async def cli_proxy(
    make_settings: MakeSettings, claude_2: Path
) -> AsyncIterator[tuple[Engine, anthropic.AsyncAnthropic]]:
    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root), client_of(root) as client:
        yield engine, client


@asynccontextmanager
async def client_of(root: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_five_turns_with_the_whole_history_are_one_chain(
    cli_proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream, stream: bool
) -> None:
    engine, client = cli_proxy
    history: list[Any] = []

    async def say(text: str) -> str:
        history.append({"role": "user", "content": text})
        answer: Message
        if stream:
            async with client.messages.stream(model="sonnet", max_tokens=100, messages=history) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(model="sonnet", max_tokens=100, messages=history)
        Message.model_validate(answer.model_dump(), strict=True)
        history.append({"role": "assistant", "content": answer.content})
        [block] = answer.content
        assert block.type == "text"
        assert answer.stop_reason == "end_turn"
        assert answer.usage.input_tokens > 0
        return block.text

    await five_turns(say, upstream)
    turns = await the_one_chain(engine)
    assert [turn.origin for turn in turns] == ["messages"] * 5


async def test_a_named_agent_needs_only_the_new_message(
    proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream
) -> None:
    engine, client = proxy

    async def say(text: str) -> str:
        raw = await client.messages.with_raw_response.create(
            model="sonnet", max_tokens=100, messages=[{"role": "user", "content": text}],
            extra_body={"temperature": 0.5},
            extra_headers={"X-Agent-Id": "a%2Fb"}, metadata={"user_id": "nobody"},
        )  # fmt: skip
        assert raw.headers["x-agent-id"] == "a%2Fb"
        assert raw.headers["x-ignored-params"] == "temperature"
        answer = await raw.parse()
        assert answer.id == f"msg_{raw.headers['x-turn-id'].removeprefix('turn_')}"
        [block] = answer.content
        assert block.type == "text"
        return block.text

    await five_turns(say, upstream)
    await the_one_chain(engine)


async def test_thinking_is_given_signed_streamed_or_not(
    proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream
) -> None:
    _, client = proxy
    upstream.when("hello", Reply("Hi.", thinking="They greet me."), times=3)
    given: dict[str, Any] = {"model": "sonnet", "max_tokens": 100}
    whole = await client.messages.create(messages=HELLO, **given)
    async with client.messages.stream(messages=HELLO, **given) as stream:
        streamed = await stream.get_final_message()
    answers: list[Any] = [whole, streamed]
    for answer in answers:
        assert [block.type for block in answer.content] == ["thinking", "text"]
        thinking = answer.content[0]
        assert (thinking.thinking, bool(thinking.signature)) == ("They greet me.", True)
    kinds = []
    events = await client.messages.create(messages=HELLO, stream=True, **given)
    async for event in events:
        EVENT.validate_python(event.model_dump())
        kinds.append(event.type)
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


async def test_signed_thinking_is_taken_back(
    cli_proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream
) -> None:
    engine, client = cli_proxy
    upstream.when("hello", Reply("Hi.", thinking="They greet me."))
    given: dict[str, Any] = {"model": "sonnet", "max_tokens": 100}
    first: Any = await client.messages.create(messages=HELLO, **given)
    assert [block.type for block in first.content] == ["thinking", "text"]
    assert first.content[0].signature
    again = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "list"}]
    answer = await client.messages.create(messages=again, **given)
    assert answer.content[0].text == "1. hello\n2. list"
    await the_one_chain(engine, 2)


async def test_a_message_thread_falls_back_to_the_whole_history_by_itself(
    proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream
) -> None:
    engine, client = proxy
    thread = client.beta.messages.thread(model="sonnet", max_tokens=100)

    async def say(text: str) -> str:
        answer = await thread.send({"role": "user", "content": text})
        [block] = answer.content
        assert block.type == "text"
        return block.text

    await five_turns(say, upstream)
    await the_one_chain(engine)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.beta.messages.create(
            model="sonnet", max_tokens=100, messages=HELLO, betas=["message-threads-2026-08-12"],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )  # fmt: skip
    body: Any = caught.value.body
    assert body["error"]["details"]["error_code"] == "thread_not_found"
    assert body["request_id"] == caught.value.response.headers["x-request-id"]


async def test_counting_and_models_speak_anthropic(proxy: tuple[Engine, anthropic.AsyncAnthropic]) -> None:
    _, client = proxy
    few = await client.messages.count_tokens(model="sonnet", messages=HELLO)
    many = await client.messages.count_tokens(model="sonnet", messages=HELLO, system="word " * 1000)
    assert 1 <= few.input_tokens < 20
    assert 1000 < many.input_tokens < 2000
    names = ["sonnet", "opus", "haiku", "default", *ALIASES]
    unseen = [f"claude-cli/{name}" for name in names if "claude" not in name]  # Claude Code keeps only what says it
    assert [model.id async for model in client.models.list()] == [*names, *unseen]
    model = await client.models.retrieve("opus")
    assert (model.id, model.type, model.lifecycle) == ("opus", "model", "active")


async def test_calls_of_tools_in_the_history_reach_the_model(
    cli_proxy: tuple[Engine, anthropic.AsyncAnthropic], upstream: Upstream
) -> None:
    engine, client = cli_proxy
    history: Any = [
        {"role": "user", "content": "Remember: the colour is teal"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_x1", "name": "look", "input": {"at": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_x1", "content": "a tree"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "recall"},
    ]  # fmt: skip
    answer: Any = await client.messages.create(model="sonnet", max_tokens=100, messages=history)
    assert answer.content[0].text == "I remember: colour is teal."
    seen = upstream.requests[-1].texts()
    assert any(role == "assistant" and text.endswith('look {"at": 1}') for role, text in seen)
    assert ("user", "tool_result: a tree") in seen
    await the_one_chain(engine, 3)


@pytest.mark.full  # each time: clients/test_cut_streams.py
async def test_the_old_cli_streams_too(make_settings: MakeSettings, claude_1: Path, upstream: Upstream) -> None:
    async with proxied(make_settings(claude_bin=claude_1)) as (_, root), client_of(root) as client:
        async with client.messages.stream(model="sonnet", max_tokens=100, messages=HELLO) as stream:
            said = "".join([piece async for piece in stream.text_stream])
            answer = await stream.get_final_message()
        assert said == "You said: hello (1)"
        assert [block.type for block in answer.content] == ["text"]
