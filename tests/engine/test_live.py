"""A running turn and its clients: every one hears all of it, and it is known whether anybody has the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Finished, Started, Turn, TurnEvent
from cli_session_proxy.engine.live import Answer, LiveTurn, replay
from cli_session_proxy.errors import QueueFull, UpstreamError

TURN = Turn(
    id="turn_1", seq=1, agent_key=1, parent_id=None, status="completed", model="m", input=(), created_at=0.0,
    output=(
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "text", "text": "hello"},
    ),
    session_id="s", continuity="warm",
)  # fmt: skip


class Fate:
    """What the engine is told of a live turn."""

    def __init__(self) -> None:
        self.deliveries: list[bool] = []
        self.empty = asyncio.Event()

    def live(self, grace: float = 60.0) -> LiveTurn:
        return LiveTurn(TURN, "a", grace=grace, on_empty=self.empty.set, on_delivery=self.deliveries.append)


async def all_of(answer: Answer) -> list[TurnEvent]:
    return [event async for event in answer.events()]


async def test_a_client_that_comes_late_hears_everything_from_the_start() -> None:
    live = Fate().live()
    early = asyncio.create_task(all_of(live.attach()))
    live.publish(BlockStart(0, {"type": "text", "text": ""}))
    live.publish(BlockDelta(0, {"type": "text_delta", "text": "hel"}))
    late = asyncio.create_task(all_of(live.attach(replayed=True)))
    await asyncio.sleep(0)
    live.publish(BlockDelta(0, {"type": "text_delta", "text": "lo"}))
    live.publish(BlockStop(0))
    live.finish(TURN)
    assert await early == await late
    assert (await early)[-1] == Finished(TURN)


async def test_a_failure_reaches_every_client_with_its_data() -> None:
    live = Fate().live()
    answers = [live.attach(), live.attach()]
    live.fail(QueueFull("full", retry_after=3.0))
    for answer in answers:
        with pytest.raises(QueueFull) as raised:
            await answer.turn()
        assert raised.value.retry_after == 3.0
        with pytest.raises(QueueFull):
            await all_of(answer)


async def test_the_answer_is_delivered_when_one_client_acknowledged() -> None:
    fate = Fate()
    live = fate.live()
    gone, there = live.attach(), live.attach()
    live.finish(TURN)
    gone.leave()
    there.acknowledge()
    there.leave()
    assert fate.deliveries == [True]


async def test_the_answer_is_undelivered_when_all_left_without_it() -> None:
    fate = Fate()
    live = fate.live()
    answer = live.attach()
    live.finish(TURN)
    answer.leave()
    answer.acknowledge()
    assert fate.deliveries == [False]


async def test_the_turn_is_given_up_only_when_nobody_comes_back_in_time() -> None:
    fate = Fate()
    live = fate.live(grace=0.0)
    live.attach().leave()
    assert live.abandoned
    back = live.attach()
    await asyncio.sleep(0)
    assert not fate.empty.is_set()
    back.leave()
    async with asyncio.timeout(5):
        await fate.empty.wait()


async def test_cancelling_a_finished_turn_changes_nothing() -> None:
    live = Fate().live()
    answer = live.attach()
    live.finish(TURN)
    answer.cancel()
    live.fail(UpstreamError("too late"))
    assert await answer.turn() == TURN


async def test_a_replay_gives_the_same_blocks_as_the_first_time() -> None:
    live = Fate().live()
    answer = live.attach()
    replay(live)
    events = await all_of(answer)
    assert events[0] == Started("a", "turn_1", "s", "warm")
    deltas: list[dict[str, Any]] = [event.delta for event in events if isinstance(event, BlockDelta)]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "sig"},
        {"type": "text_delta", "text": "hello"},
    ]
