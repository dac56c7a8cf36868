"""litellm with its whole history and no name: as an OpenAI-compatible endpoint, and as a provider in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..litellm_offline import litellm, provider
from ..without_cli import engine_without_cli
from .remembering import answer_to, facts, served_without_cli


async def talk(texts: list[str], **call: Any) -> None:
    history: list[Any] = []
    for turn, text in enumerate(texts):
        history.append({"role": "user", "content": text})
        if turn % 2:
            stream: Any = await litellm.acompletion(messages=history, stream=True, **call)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            history.append({"role": "assistant", "content": said})
        else:
            completion: Any = await litellm.acompletion(messages=history, **call)
            said = completion.choices[0].message.content
            history.append(completion.choices[0].message)
        assert said == answer_to(turn)


async def test_ten_turns_to_the_endpoint_are_one_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy:
        await talk(facts(), model="openai/sonnet", api_base=proxy.url, api_key="none")
        await proxy.assert_one_chain(facts())


async def test_ten_turns_in_this_process_are_one_chain(make_settings: MakeSettings, upstream: Upstream) -> None:
    settings = make_settings()
    provider.register()
    await asyncio.to_thread(
        provider.configure, settings, engine_factory=lambda given: engine_without_cli(given, upstream)
    )
    try:
        await talk(facts(), model="claude-cli/sonnet")
    finally:
        await asyncio.to_thread(provider.close)
    # the engine of the provider is closed now: its store is read by another one on the same file
    async with served_without_cli(settings, upstream) as proxy:
        await proxy.assert_one_chain(facts())
