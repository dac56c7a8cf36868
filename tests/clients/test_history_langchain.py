"""langchain-openai: a list of messages that grows, invoked and streamed."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import answer_to, facts, served_without_cli


async def test_ten_turns_are_one_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy:
        model = ChatOpenAI(base_url=proxy.url, api_key=SecretStr("none"), model="sonnet")
        history: list[BaseMessage] = [SystemMessage("You are ADA.")]
        for turn, text in enumerate(facts()):
            history.append(HumanMessage(text))
            said: Any = None
            if turn % 2:
                async for chunk in model.astream(history):
                    said = chunk if said is None else said + chunk
            else:
                said = await model.ainvoke(history)
            assert said.content == answer_to(turn)
            history.append(said)
        await proxy.assert_one_chain(facts())
    assert upstream.requests[-1].body["system"][-1]["text"] == "You are ADA."
