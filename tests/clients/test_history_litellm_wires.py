"""litellm with its whole history and no name, as a client of our Messages and generateContent."""

from __future__ import annotations

import pytest

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .remembering import facts, served_without_cli
from .test_history_litellm import talk

TURNS = 5


@pytest.mark.parametrize(("model", "suffix"), [("anthropic/sonnet", ""), ("gemini/sonnet", "/v1beta")])
async def test_five_turns_are_one_chain(
    make_settings: MakeSettings, upstream: Upstream, model: str, suffix: str
) -> None:
    async with served_without_cli(make_settings(), upstream) as proxy:
        base = proxy.url.removesuffix("/v1") + suffix
        await talk(facts(TURNS), model=model, api_base=base, api_key="none")
        await proxy.assert_one_chain(facts(TURNS))
