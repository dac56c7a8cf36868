"""Nobody waits longer than they said, and nothing that was given up reaches the model afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli_session_proxy.errors import TurnTimeout
from turnfault.provider.script import HeldReply, Stall
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, heard, request, running
from ..until import until
from .test_kill import turns_of
from .test_several_proxies import reached


@pytest.mark.parametrize("after", rest_in_full(1, 0), ids=["mid-stream", "before the first byte"])
async def test_a_stall_upstream_ends_in_bounded_time(
    after: int, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("stalled", Stall(after=after), times=None)
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one")
        # Short only for the turn that stalls: on a busy machine the others have silences of their own.
        patient, engine.settings.idle_timeout = engine.settings.idle_timeout, 2.0
        with pytest.raises(TurnTimeout):
            await ask(engine, "stalled")
        engine.settings.idle_timeout = patient
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]


async def test_a_turn_ends_with_its_own_time(claude_2: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    upstream.when("slow", HeldReply())
    async with running(make_settings(claude_bin=claude_2)) as engine:
        patient, engine.settings.turn_timeout = engine.settings.turn_timeout, 2.0
        with pytest.raises(TurnTimeout, match="the turn took longer than"):
            await ask(engine, "slow")
        engine.settings.turn_timeout = patient  # the next one has the time that a busy machine takes
        await ask(engine, "one")
    assert heard(upstream) == ["one"]


async def test_a_client_waits_no_longer_than_its_timeout_and_can_come_back_for_the_answer(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("slow", gate)
    async with running(make_settings(claude_bin=claude_2, disconnect_grace=30.0)) as engine:
        answer = await engine.submit(request("slow", timeout=0.5))
        await reached(gate)
        with pytest.raises(TurnTimeout, match=r"within the 0\.5 s"):
            async for _ in answer.events():
                pass
        with pytest.raises(TurnTimeout):
            await answer.turn()
        answer.leave()
        again = await engine.submit(request("slow", timeout=30.0))
        assert again.turn_id == answer.turn_id
        gate.open()
        await again.turn()
        again.acknowledge()
        await ask(engine, "next")
    assert heard(upstream) == ["slow", "next"]


async def test_a_queued_turn_whose_client_gave_up_is_never_sent(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(make_settings(claude_bin=claude_2, disconnect_grace=0.1)) as engine:
        first = asyncio.create_task(ask(engine, "first"))
        await reached(gate)
        with pytest.raises(TurnTimeout):
            await ask(engine, "impatient", timeout=0.2)

        async def given_up() -> bool:
            return [turn.status for turn in await turns_of(engine)] == ["running", "cancelled"]

        await until(given_up)
        gate.open()
        await first
        await ask(engine, "last")
    assert heard(upstream) == ["first", "last"]
