"""The openai client with its whole history and no name: the history finds the chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import answer_to, facts, served

LONG = 30


async def test_thirty_turns_are_one_chain_and_one_session(
    make_settings: MakeSettings, claude_2: Path, upstream: Upstream
) -> None:
    async with (
        served(make_settings(claude_bin=claude_2), upstream) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url, api_key="none") as client,
    ):
        history: list[Any] = []
        for turn, text in enumerate(facts(LONG)):
            history.append({"role": "user", "content": text})
            if turn % 2:
                stream = await client.chat.completions.create(model="sonnet", messages=history, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
                history.append({"role": "assistant", "content": said})
            else:
                completion = await client.chat.completions.create(model="sonnet", messages=history)
                history.append(completion.choices[0].message)
                said = completion.choices[0].message.content or ""
            assert said == answer_to(turn)
        await proxy.assert_one_chain(facts(LONG))


async def test_an_answer_of_several_texts_comes_back_and_is_known(
    make_settings: MakeSettings, claude_2: Path, upstream: Upstream
) -> None:
    """Streamed and not, the client gets one string; both match the blocks that the model said."""
    texts = [{"type": "text", "text": said} for said in ("First.\n", "\nSecond ", "third.")]
    upstream.when("several", Reply(texts), times=None)
    async with (
        served(make_settings(claude_bin=claude_2), upstream) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url, api_key="none") as client,
    ):
        history: list[Any] = []
        for turn in range(3):
            history.append({"role": "user", "content": f"several {turn}"})
            if turn:
                stream = await client.chat.completions.create(model="sonnet", messages=history, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            else:
                completion = await client.chat.completions.create(model="sonnet", messages=history)
                said = completion.choices[0].message.content or ""
            assert said == "First.\n\nSecond\n\nthird."
            history.append({"role": "assistant", "content": said})
        await proxy.assert_one_chain([f"several {turn}" for turn in range(3)])
