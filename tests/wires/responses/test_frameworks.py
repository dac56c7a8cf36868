"""The frameworks that speak Responses, with their own ways to remember."""

from __future__ import annotations

from typing import Any

import agents
import pytest
from agents.memory import OpenAIConversationsSession
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from turnfault.provider.upstream import Upstream

from ...matrix import rest_in_full
from ...talking import heard
from .conftest import ANY_KEY, Door

SAID = [f"remember fact{n} = value{n}" for n in range(4)] + ["recall"]
TOLD = "I remember: " + "; ".join(f"fact{n} is value{n}" for n in range(4)) + "."


@pytest.fixture(autouse=True)
def _no_tracing() -> None:
    agents.set_tracing_disabled(True)


@pytest.mark.parametrize(
    ("way", "streamed"),
    rest_in_full(
        ("previous_response_id", True), ("conversation_id", False), ("session", True), ("history", False),
        ("previous_response_id", False), ("conversation_id", True), ("session", False), ("history", True), quick=4,
    ),
)  # fmt: skip
@pytest.mark.sample(2)
async def test_openai_agents(door: Door, upstream: Upstream, way: str, streamed: bool) -> None:
    agent = agents.Agent(
        name="a", model=agents.OpenAIResponsesModel(model="sonnet", openai_client=door.openai), instructions="Be kind."
    )
    options: dict[str, Any] = {}
    if way == "conversation_id":
        options["conversation_id"] = (await door.openai.conversations.create()).id
    elif way == "session":
        options["session"] = OpenAIConversationsSession(openai_client=door.openai)
    history: list[Any] = []
    for one in SAID:
        given: Any = [*history, {"role": "user", "content": one}] if way == "history" else one
        if streamed:
            result: Any = agents.Runner.run_streamed(agent, given, **options)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, given, **options)
        if way == "previous_response_id":
            options["previous_response_id"] = result.last_response_id
        history = result.to_input_list()
    assert result.final_output == TOLD
    assert heard(upstream) == SAID
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


@pytest.mark.parametrize("deltas", rest_in_full(True, False))
async def test_langchain_openai(door: Door, upstream: Upstream, deltas: bool) -> None:
    model = ChatOpenAI(
        model="sonnet", base_url=door.url, api_key=SecretStr(ANY_KEY), use_responses_api=True,
        use_previous_response_id=deltas, max_retries=0,
    )  # fmt: skip
    history: list[Any] = []
    for n, one in enumerate(SAID):
        history.append(HumanMessage(one))
        if n % 2:
            whole: Any = None
            async for piece in model.astream(history):
                whole = piece if whole is None else whole + piece
            history.append(whole)
        else:
            history.append(await model.ainvoke(history))
    assert history[-1].text == TOLD
    assert heard(upstream) == SAID
    sent = [len(seen.user_texts()) for seen in upstream.requests]
    assert sent == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("auto", rest_in_full(True, False))
async def test_pydantic_ai(door: Door, upstream: Upstream, auto: bool) -> None:
    model = OpenAIResponsesModel("sonnet", provider=OpenAIProvider(openai_client=door.openai))
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto") if auto else None
    agent = Agent(model, model_settings=settings)
    history: list[Any] = []
    for n, one in enumerate(SAID):
        if n % 2:
            async with agent.run_stream(one, message_history=history) as streamed:
                output = await streamed.get_output()
                history = streamed.all_messages()
        else:
            result = await agent.run(one, message_history=history)
            output, history = result.output, result.all_messages()
    assert output == TOLD
    assert heard(upstream) == SAID
