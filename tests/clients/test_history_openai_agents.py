"""openai-agents: its chat model, with a SQLiteSession and with the input list that a run gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, set_tracing_disabled
from openai import AsyncOpenAI

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import Served, answer_to, facts, served_without_cli

set_tracing_disabled(True)  # traces go to OpenAI otherwise


@asynccontextmanager
async def agent_of(proxy: Served) -> AsyncIterator[Agent[Any]]:
    async with AsyncOpenAI(base_url=proxy.url, api_key="none") as client:
        model = OpenAIChatCompletionsModel("sonnet", openai_client=client)
        yield Agent(name="Ada", instructions="You are ADA.", model=model)


async def test_ten_turns_of_a_sqlite_session_are_one_chain(
    make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    session = SQLiteSession("a conversation", tmp_path / "agents.sqlite")
    async with served_without_cli(make_settings(), upstream) as proxy, agent_of(proxy) as agent:
        for turn, text in enumerate(facts()):
            if turn % 2:
                streamed = Runner.run_streamed(agent, text, session=session)
                async for _ in streamed.stream_events():
                    pass
                said = streamed.final_output
            else:
                said = (await Runner.run(agent, text, session=session)).final_output
            assert said == answer_to(turn)
        await proxy.assert_one_chain(facts())
    session.close()


async def test_ten_turns_of_an_input_list_are_one_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy, agent_of(proxy) as agent:
        given: list[Any] = []
        for turn, text in enumerate(facts()):
            result = await Runner.run(agent, [*given, {"role": "user", "content": text}])
            assert result.final_output == answer_to(turn)
            given = result.to_input_list()
        await proxy.assert_one_chain(facts())
