"""Tool loops of real clients over Chat Completions: the model sees each call and result once.

What a client sends is the wire's business, whoever answers it: with `base` there is no CLI behind the server. One
client goes to `cli_base`, which has the real CLI.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import openai
import pydantic_ai
import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..every_wire import proxied
from ..litellm_offline import litellm, provider
from ..matrix import rest_in_full
from ..without_cli import engine_without_cli, proxied_without_cli

USAGE: dict[bool, dict[str, Any]] = {True: {"stream_options": {"include_usage": True}}, False: {}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool_blocks(upstream: Upstream) -> list[tuple[str, str]]:
    """Every call and result of the last request that reached the model, in order."""
    found = []
    for message in upstream.requests[-1].messages:
        for block in message["content"] if isinstance(message["content"], list) else []:
            if block["type"] in ("tool_use", "tool_result"):
                found.append((block["type"], block.get("id") or block["tool_use_id"]))
    return found


def seen_once(upstream: Upstream, count: int) -> None:
    blocks = tool_blocks(upstream)
    calls = [one for kind, one in blocks if kind == "tool_use"]
    assert len(calls) == len(set(calls)) == count
    assert [one for kind, one in blocks if kind == "tool_result"] == calls


@pytest.fixture
async def base(make_settings: MakeSettings, upstream: Upstream) -> AsyncIterator[str]:
    async with proxied_without_cli(make_settings(), upstream) as (_, root):
        yield f"{root}/v1"


@pytest.fixture
async def cli_base(claude_2: Path, make_settings: MakeSettings) -> AsyncIterator[str]:
    async with proxied(make_settings(claude_bin=claude_2)) as (_, root):
        yield f"{root}/v1"


def called(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return f"mcp__client__{name}", arguments


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_openai(stream: bool, cli_base: str, upstream: Upstream) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": CITY}}
        for name in ("get_weather", "get_time")
    ]
    wanted = ToolUse([called("get_weather", city="Rome"), called("get_time", city="Rome")], text="Let me look.")
    upstream.when("where", wanted)
    messages: list[Any] = [{"role": "user", "content": "where"}]
    async with openai.AsyncOpenAI(base_url=cli_base, api_key="unused") as client:

        async def say() -> Any:
            if not stream:
                raw = await client.chat.completions.with_raw_response.create(
                    model="sonnet", messages=messages, tools=tools, tool_choice="auto", parallel_tool_calls=True
                )
                assert "x-ignored-params" not in raw.headers
                return raw.parse()
            state = ChatCompletionStreamState()
            chunks = await client.chat.completions.create(
                model="sonnet", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in chunks:
                state.handle_chunk(chunk)
            return state.get_final_completion()

        first = await say()
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        assert first.usage.completion_tokens > 0
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Rome"}] * 2
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}, warnings=False))
        for call in reversed(choice.message.tool_calls):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} says fine"})
        second = await say()
        assert second.choices[0].message.content == "The tool said: get_time says fine"
        messages.append({"role": "assistant", "content": second.choices[0].message.content})
        messages.append({"role": "user", "content": "list"})
        await say()
    seen_once(upstream, 2)
    assert upstream.requests[-1].prefix_kept(upstream.requests[0]) == 1.0
    assert len(upstream.requests) == 3


async def run_agent(stream: bool, agent: agents.Agent[Any], said: str) -> str:
    if not stream:
        return str((await agents.Runner.run(agent, said)).final_output)
    running_one = agents.Runner.run_streamed(agent, said)
    async for _ in running_one.stream_events():
        pass
    return str(running_one.final_output)


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_openai_agents_with_a_hand_off(stream: bool, base: str, upstream: Upstream) -> None:
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def get_weather(city: str) -> str:
        return f"{city} is sunny"

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def get_time(city: str) -> str:
        return f"{city} has noon"

    client = openai.AsyncOpenAI(base_url=base, api_key="unused")
    model = agents.OpenAIChatCompletionsModel("sonnet", openai_client=client)
    second = agents.Agent(name="clock", instructions="You tell the time.", tools=[get_time], model=model)
    first = agents.Agent(name="desk", instructions="You help.", tools=[get_weather], handoffs=[second], model=model)
    upstream.when("how is Rome", ToolUse([called("get_weather", city="Rome")]))
    upstream.when("sunny", ToolUse([called("transfer_to_clock")]))
    upstream.when("clock", ToolUse([called("get_time", city="Rome")]))
    try:
        done = await run_agent(stream, first, "how is Rome")
    finally:
        await client.close()
    assert done == "The tool said: Rome has noon"
    seen_once(upstream, 3)


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_pydantic_ai_with_tools_and_structured_output(stream: bool, base: str, upstream: Upstream) -> None:
    class Report(BaseModel):
        city: str
        degrees: int

    client = openai.AsyncOpenAI(base_url=base, api_key="unused")
    model = OpenAIChatModel("sonnet", provider=OpenAIProvider(openai_client=client))
    agent = pydantic_ai.Agent(model, output_type=Report)

    @agent.tool_plain  # type: ignore[untyped-decorator, unused-ignore]
    def get_weather(city: str) -> str:
        return f"{city} has 30 degrees"

    upstream.when("Call:", ToolUse([called("get_weather", city="Rome")]))
    upstream.when("30 degrees", ToolUse([called("final_result", city="Rome", degrees=30)]))
    try:
        if stream:
            async with agent.run_stream("how is Rome?") as running_one:
                output, history = await running_one.get_output(), running_one.all_messages()
        else:
            done = await agent.run("how is Rome?")
            output, history = done.output, done.all_messages()
        assert output == Report(city="Rome", degrees=30)
        upstream.when("Call:", ToolUse([called("final_result", city="Rome", degrees=31)]))
        again = await agent.run("and now?", message_history=history)
    finally:
        await client.close()
    assert again.output.degrees == 31
    seen_once(upstream, 2)


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_langchain_create_agent(stream: bool, base: str, upstream: Upstream) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"{city} is sunny"

    chat = ChatOpenAI(base_url=base, api_key="unused", model="sonnet", streaming=stream)  # type: ignore[arg-type]
    agent = create_agent(chat, tools=[get_weather], system_prompt="You help.")
    upstream.when("how is Rome", ToolUse([called("get_weather", city="Rome")]))
    upstream.when("Rome is sunny", ToolUse([called("get_weather", city="Oslo"), called("get_weather", city="Bern")]))
    done = await agent.ainvoke({"messages": [{"role": "user", "content": "how is Rome"}]})
    assert "is sunny" in done["messages"][-1].content
    seen_once(upstream, 3)


async def litellm_loop(upstream: Upstream, stream: bool, **where: Any) -> None:
    names = ("get_weather", "get_time")
    tools = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in names]
    upstream.when("where", ToolUse([called("get_weather", city="Rome"), called("get_time", city="Rome")]))
    messages: list[Any] = [{"role": "user", "content": "where"}]

    async def say() -> Any:
        answer: Any = await litellm.acompletion(messages=messages, tools=tools, stream=stream, **where)
        return litellm.stream_chunk_builder([chunk async for chunk in answer]) if stream else answer

    first = await say()
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.usage.completion_tokens > 0
    messages.append(first.choices[0].message.model_dump())
    for call in first.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} fine"})
    assert (await say()).choices[0].message.content == "The tool said: get_time fine"
    seen_once(upstream, 2)


@pytest.mark.parametrize("stream", rest_in_full(False, True))
async def test_litellm_against_the_endpoint(stream: bool, base: str, upstream: Upstream) -> None:
    await litellm_loop(upstream, stream, model="openai/sonnet", api_base=base, api_key="unused", **USAGE[stream])


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_litellm_in_this_process(stream: bool, make_settings: MakeSettings, upstream: Upstream) -> None:
    provider.register()
    await asyncio.to_thread(
        provider.configure, make_settings(), engine_factory=lambda settings: engine_without_cli(settings, upstream)
    )
    try:
        await litellm_loop(upstream, stream, model="claude-cli/sonnet")
    finally:
        await asyncio.to_thread(provider.close)


async def test_stop_sequences_over_the_wire(base: str, upstream: Upstream) -> None:
    upstream.when("count", Reply("one two STOP three"))
    async with openai.AsyncOpenAI(base_url=base, api_key="unused") as client:
        messages: list[Any] = [{"role": "user", "content": "count"}]
        raw = await client.chat.completions.with_raw_response.create(model="sonnet", messages=messages, stop=["STOP"])
        assert "x-ignored-params" not in raw.headers
        whole = raw.parse().choices[0]
        assert (whole.message.content, whole.finish_reason) == ("one two ", "stop")
        upstream.when("count", Reply("one two STOP three"))
        chunks = await client.chat.completions.create(model="sonnet", messages=messages, stop="STOP", stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(pieces).strip() == "one two"
