"""pydantic-ai: an agent whose message history is handed on from run to run."""

from __future__ import annotations

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import answer_to, facts, served_without_cli


async def test_ten_turns_are_one_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy:
        provider = OpenAIProvider(base_url=proxy.url, api_key="none")
        agent = Agent(OpenAIChatModel("sonnet", provider=provider), instructions="You are ADA.")
        history: list[ModelMessage] = []
        for turn, text in enumerate(facts()):
            if turn % 2:
                async with agent.run_stream(text, message_history=history) as streamed:
                    assert await streamed.get_output() == answer_to(turn)
                    history = streamed.all_messages()
            else:
                result = await agent.run(text, message_history=history)
                assert result.output == answer_to(turn)
                history = result.all_messages()
        await proxy.assert_one_chain(facts())
        await provider.client.close()
    assert upstream.requests[-1].body["system"][-1]["text"] == "You are ADA."
