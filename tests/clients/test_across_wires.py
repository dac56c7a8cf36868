"""One conversation that changes its wire at every turn, named by a header: one chain, all remembered.

The eighth turn is a person's, who resumes the session in the agent's sandbox; the proxy is not told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..every_wire import google_client, ollama_client, proxied, the_one_chain
from ..litellm_offline import litellm
from ..talking import by_hand

NAMED = {"X-Agent-Id": "a"}


async def test_every_turn_by_another_wire_is_remembered(
    make_settings: MakeSettings, claude_2: Path, upstream: Upstream
) -> None:
    async with (
        proxied(make_settings(claude_bin=claude_2)) as (engine, root),
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0, default_headers=NAMED) as of_openai,
        anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0, default_headers=NAMED) as of_anthropic,
        google_client(root, NAMED) as of_google,
        ollama_client(root, **NAMED) as of_ollama,
    ):

        async def chat(text: str) -> str:
            messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            answer = await of_openai.chat.completions.create(model="sonnet", messages=messages)
            return answer.choices[0].message.content or ""

        async def responses(text: str) -> str:
            return (await of_openai.responses.create(model="sonnet", input=text)).output_text

        async def messages(text: str) -> str:
            answer = await of_anthropic.messages.create(
                model="sonnet", max_tokens=100, messages=[{"role": "user", "content": text}]
            )
            return "".join(block.text for block in answer.content if block.type == "text")

        async def generate(text: str) -> str:
            return (await of_google.models.generate_content(model="sonnet", contents=text)).text or ""

        async def interactions(text: str) -> str:
            made: Any = await of_google.interactions.create(model="sonnet", input=text)
            return str(made.output_text)

        async def lines(text: str) -> str:
            answer = await of_ollama.chat(model="sonnet", messages=[{"role": "user", "content": text}])
            return answer.message.content or ""

        async def lite(text: str) -> str:
            answer: Any = await litellm.acompletion(
                model="anthropic/sonnet", api_base=root, api_key="k", extra_headers=NAMED,
                messages=[{"role": "user", "content": text}],
            )  # fmt: skip
            return str(answer.choices[0].message.content)

        said = [await say(fact(number)) for number, say in enumerate((chat, responses, messages, generate))]
        said += [await interactions(fact(4)), await lite(fact(5)), await lines(fact(6))]
        turns = await the_one_chain(engine, 7)
        # one process from the first turn on: the system prompt of the first holds, nothing is sent twice
        assert [turn.continuity for turn in turns] == ["started"] + ["warm"] * 6
        assert upstream.requests[-1].user_texts() == [fact(number) for number in range(7)]
        assert turns[-1].session_id is not None
        said.append(await by_hand(engine.settings, turns[-1].session_id, fact(7)))
        assert said == [f"Noted: number {number} is {number * 7}." for number in range(8)]
        facts = "; ".join(f"number {number} is {number * 7}" for number in range(8))
        assert await chat("recall") == f"I remember: {facts}."
        turns = await the_one_chain(engine, 9)
        wires = ["chat", "responses", "messages", "generate", "interactions", "messages", "ollama", "adopted", "chat"]
        assert [turn.origin for turn in turns] == wires
        assert upstream.requests[-1].user_texts() == [*(fact(number) for number in range(8)), "recall"]


def fact(number: int) -> str:
    return f"Remember: number {number} is {number * 7}"
