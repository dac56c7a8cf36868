"""A turn's cost is its own, whatever happened to the process that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from .rows_cli import continue_by_hand
from .talk import EngineTalk, talking

USAGE = {"input_tokens": 1000, "output_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}


async def _cost(talk: EngineTalk) -> float:
    await talk.tell()
    assert talk.turn.cost_usd is not None
    return talk.turn.cost_usd


@old_cli_in_full
@pytest.mark.full
async def test_equal_turns_cost_the_same_warm_restarted_killed_rebuilt_branched_and_after_others(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("", Reply(usage=USAGE), times=None)
    async with talking(make_settings(claude_bin=claude), upstream) as talk:
        costs = {"started": await _cost(talk)}
        first = talk.turn.id
        costs["warm"] = await _cost(talk)
        await talk.restart()
        costs["restarted"] = await _cost(talk)
        talk.kill()
        await talk.all_dead()
        costs["killed"] = await _cost(talk)
        talk.transcript.unlink()
        costs["rebuilt"] = await _cost(talk)
        costs["after it"] = await _cost(talk)
        await talk.restart()
        if "bundled" in str(claude):
            await continue_by_hand(talk)
        costs["adopted"] = await _cost(talk)
        talk.extra["continues"] = first
        costs["branched"] = await _cost(talk)
    assert costs == {name: pytest.approx(costs["started"]) for name in costs}
    assert costs["started"] > 0
