"""Items named by their ids in `input`, as the Vercel AI SDK sends its history."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...every_wire import the_one_chain
from ...without_cli import proxied_without_cli


async def test_a_named_item_is_what_it_says_and_a_made_up_one_is_refused(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with (
        proxied_without_cli(make_settings(), upstream) as (engine, root),
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client,
    ):
        first = await client.responses.create(model="sonnet", input="Remember: the colour is teal")
        asked: Any = {"role": "user", "content": "Remember: the colour is teal"}
        again: Any = [
            asked,
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "recall"},
        ]
        assert (await client.responses.create(model="sonnet", input=again)).output_text == "I remember: colour is teal."
        await the_one_chain(engine, 2)
        await client.responses.delete(first.id)
        for name in (str(first.output[0].id), "msg_unknown_0", "msg", "rs_x_1"):
            again[1] = {"type": "item_reference", "id": name}
            with pytest.raises(openai.BadRequestError, match="not found: send the item itself") as caught:
                await client.responses.create(model="sonnet", input=again)
            assert caught.value.param == "input[1].id"
        with pytest.raises(openai.BadRequestError, match="item_reference"):
            await client.conversations.create(items=again)
