"""Tool loops of the vendors' own clients over the other wires: of each maker on the real CLI (`cli_base`)."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, OpenAIResponsesModel, function_tool, set_tracing_disabled
from google.genai import types

from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..every_wire import google_client
from ..matrix import rest_in_full
from .test_tools_chat import CITY, base, called, cli_base, run_agent, seen_once

__all__ = ["base", "cli_base"]

NAMES = ("get_weather", "get_time")
SAID = "Let me look."
DONE = "The tool said: get_time is fine"


def asked(upstream: Upstream) -> None:
    upstream.when("where", ToolUse([called(name, city="Rome") for name in NAMES], text=SAID))


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_anthropic(stream: bool, cli_base: str, upstream: Upstream) -> None:
    tools: Any = [{"name": name, "description": name, "input_schema": CITY} for name in NAMES]
    asked(upstream)
    messages: list[Any] = [{"role": "user", "content": "where"}]
    async with anthropic.AsyncAnthropic(base_url=cli_base.removesuffix("/v1"), api_key="unused") as client:

        async def say() -> Any:
            wanted: Any = {"model": "sonnet", "max_tokens": 1000, "messages": messages, "tools": tools}
            if not stream:
                return await client.messages.create(**wanted)
            async with client.messages.stream(**wanted) as events:
                return await events.get_final_message()

        first = await say()
        assert (first.stop_reason, [block.type for block in first.content]) == (
            "tool_use",
            ["text", "tool_use", "tool_use"],
        )
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Rome"}] * 2
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"{call.name} is fine"}
            for call in reversed(calls)
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await say()
        assert (second.stop_reason, second.content[0].text) == ("end_turn", DONE)
        upstream.when("count", Reply("one STOP two"))
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "count"}]
        third = await client.messages.create(
            model="sonnet", max_tokens=10, messages=messages, tools=tools, stop_sequences=["STOP"]
        )
        assert (third.stop_reason, third.stop_sequence) == ("stop_sequence", "STOP")
    seen_once(upstream, 2)
    assert upstream.requests[-1].prefix_kept(upstream.requests[0]) == 1.0


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_openai_responses_by_previous_id(stream: bool, cli_base: str, upstream: Upstream) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": CITY, "strict": False} for name in NAMES]
    asked(upstream)
    async with openai.AsyncOpenAI(base_url=cli_base, api_key="unused") as client:

        async def say(**more: Any) -> Any:
            if not stream:
                return await client.responses.create(model="sonnet", tools=tools, **more)
            async with client.responses.stream(model="sonnet", tools=tools, **more) as events:
                return await events.get_final_response()

        first = await say(input="where")
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}] * 2
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{call.name} is fine"}
            for call in reversed(calls)
        ]
        second = await say(input=results, previous_response_id=first.id)
        assert second.output_text == DONE
        await say(input="list", previous_response_id=second.id)
    seen_once(upstream, 2)
    assert upstream.requests[-1].prefix_kept(upstream.requests[0]) == 1.0


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_openai_agents_over_responses(stream: bool, base: str, upstream: Upstream) -> None:
    set_tracing_disabled(True)

    @function_tool
    def get_weather(city: str) -> str:
        return f"{city} is sunny"

    @function_tool
    def get_time(city: str) -> str:
        return f"{city} has noon"

    client = openai.AsyncOpenAI(base_url=base, api_key="unused")
    model = OpenAIResponsesModel("sonnet", openai_client=client)
    clock = Agent(name="clock", instructions="You tell the time.", tools=[get_time], model=model)
    desk = Agent(name="desk", instructions="You help.", tools=[get_weather], handoffs=[clock], model=model)
    upstream.when("how is Rome", ToolUse([called("get_weather", city="Rome")]))
    upstream.when("sunny", ToolUse([called("transfer_to_clock")]))
    upstream.when("clock", ToolUse([called("get_time", city="Rome")]))
    try:
        done = await run_agent(stream, desk, "how is Rome")
    finally:
        await client.close()
    assert done == "The tool said: Rome has noon"
    seen_once(upstream, 3)


@pytest.mark.parametrize("stream", rest_in_full(False, True))
async def test_google_genai(stream: bool, cli_base: str, upstream: Upstream) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"{city} is sunny"

    def get_time(city: str) -> str:
        """The time in a city."""
        return f"{city} has noon"

    upstream.when("where", ToolUse([called(name, city="Rome") for name in NAMES]))
    async with google_client(cli_base.removesuffix("/v1")) as client:
        chat = client.chats.create(model="sonnet", config=types.GenerateContentConfig(tools=[get_weather, get_time]))
        if stream:
            pieces = [piece.text or "" async for piece in await chat.send_message_stream("where")]
            said = "".join(pieces)
        else:
            said = (await chat.send_message("where")).text or ""
        await chat.send_message("list")
    assert "Rome has noon" in said
    seen_once(upstream, 2)


async def interact(client: Any, stream: bool, **given: Any) -> tuple[str, str, list[Any]]:
    """Id, status and steps of one interaction; of a stream, as its events tell them."""
    if not stream:
        whole = await client.interactions.create(model="sonnet", **given)
        return whole.id, whole.status, list(whole.steps)
    steps: list[Any] = []
    async for event in await client.interactions.create(model="sonnet", stream=True, **given):
        if event.event_type == "step.start":
            steps.append(event.step)
        elif event.event_type == "step.delta" and getattr(event.delta, "text", None):
            steps.append(event.delta.text)
        elif event.event_type == "interaction.completed":
            return event.interaction.id, event.interaction.status, steps
    raise AssertionError("the stream ended without its interaction")


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_google_interactions(stream: bool, cli_base: str, upstream: Upstream) -> None:
    tools: Any = [{"type": "function", "name": name, "description": name, "parameters": CITY} for name in NAMES]
    asked(upstream)
    async with google_client(cli_base.removesuffix("/v1")) as client:
        first, status, steps = await interact(client, stream, input="where", tools=tools)
        assert status == "requires_action"
        calls = [step for step in steps if getattr(step, "type", "") == "function_call"]
        results: Any = [
            {"type": "function_result", "call_id": call.id, "name": call.name, "result": f"{call.name} is fine"}
            for call in calls
        ]
        _, status, said = await interact(client, stream, input=results, tools=tools, previous_interaction_id=first)
    assert status == "completed"
    assert DONE in (str(said) if not stream else "".join(one for one in said if isinstance(one, str)))
    seen_once(upstream, 2)
