"""One chain, many models: nothing lost, doubled, reordered or flattened at any of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ...matrix import rest_in_full
from ...talking import running
from .mixed import MODELS, Talk
from .servers import Provider


@pytest.mark.parametrize(("seed", "turns"), rest_in_full((1, 12), (2, 20)))
async def test_many_turns_in_random_order_with_tools_and_images(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path, seed: int, turns: int
) -> None:
    order = random.Random(seed)
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        before = None
        for _ in range(turns):
            model = order.choice(MODELS)
            await talk.tell(model, image=order.random() < 0.3, call=order.random() < 0.3)
            assert talk.shown(model) == talk.told()
            if model == "sonnet":
                seen = upstream.requests[-1]
                assert before is None or seen.prefix_kept(before) == 1.0
                before = seen
    assert provider.refused == []
    assert [why for _, why in upstream.refused] == []
    assert before is not None
