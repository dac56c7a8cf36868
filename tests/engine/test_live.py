"""A running turn and its clients: every one hears all of it, and it is known whether anybody has the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cli_session_proxy.domain.models import Agent, BlockDelta, BlockStart, BlockStop, Finished, Started, Turn, TurnEvent
from cli_session_proxy.engine.live import AT_ONCE, Answer, Handover, LiveTurn, replay
from cli_session_proxy.errors import QueueFull, UpstreamError

MANY = 10_000
AGENT = Agent(1, "local", "a", "a", named=True, head=None, created_at=0.0)
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
        self.deliveries: list[Handover] = []
        self.empty = asyncio.Event()

    def live(self, grace: float = 60.0) -> LiveTurn:
        return LiveTurn(TURN, AGENT, grace=grace, on_empty=self.empty.set, on_delivery=self.deliveries.append)


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


def say(live: LiveTurn, index: int, *pieces: str) -> None:
    live.publish(BlockStart(index, {"type": "text", "text": ""}))
    for piece in pieces:
        live.publish(BlockDelta(index, {"type": "text_delta", "text": piece}))


def texts(events: Sequence[TurnEvent]) -> list[str]:
    """The texts of the blocks, and whether each that began has ended."""
    out: dict[int, str] = {}
    for event in events:
        if isinstance(event, BlockStart):
            out[event.index] = ""
        elif isinstance(event, BlockDelta):
            out[event.index] += str(event.delta["text"])
    assert sorted(out) == [event.index for event in events if isinstance(event, BlockStop)]
    return list(out.values())


async def test_what_nobody_was_given_is_taken_back() -> None:
    live = Fate().live()
    waits = asyncio.create_task(live.attach().turn())
    say(live, 0, "kept")
    live.publish(BlockStop(0))
    say(live, 1, "void")
    assert live.withdraw({1}) == []
    assert live.output_sent
    assert live.withdraw({0}) == []
    assert not live.output_sent
    say(live, 2, "whole")
    live.publish(BlockStop(2))
    live.finish(TURN)
    assert await waits == TURN
    assert texts(await all_of(live.attach())) == ["whole"]


async def test_taking_back_again_and_again_takes_no_longer_the_more_was_said() -> None:
    """A shell in a CLI's place cuts streams as often as it likes. Each time all that was said was gone through."""
    live = Fate().live()
    say(live, 0, *("x" for _ in range(MANY)))
    live.publish(BlockStop(0))
    began = time.process_time()
    for cut in range(1, MANY):
        live.publish(BlockStart(cut, {"type": "text", "text": ""}))
        assert live.withdraw({cut}) == live.withdraw(set()) == []
    assert time.process_time() - began < 5.0
    live.finish(TURN)
    assert texts(await all_of(live.attach())) == ["x" * MANY]


async def test_what_one_client_was_given_every_client_gets() -> None:
    live = Fate().live()
    quick, slow = live.attach(), live.attach()
    say(live, 0, "a cut ")
    said = quick.batches()
    batch = await anext(said)
    live.publish(BlockDelta(0, {"type": "text_delta", "text": "answer"}))
    live.publish(BlockStop(0))
    assert live.withdraw({0}) == [{"type": "text", "text": "a cut "}]
    say(live, 1, "whole")
    live.publish(BlockStop(1))
    live.finish(TURN)
    rest = [event async for more in said for event in more]
    assert texts([*batch, *rest]) == texts(await all_of(slow)) == ["a cut ", "whole"]


async def test_others_are_served_while_a_client_is_given_very_many_pieces() -> None:
    """To write 600,000 of them at once took 6 s."""
    live = Fate().live()
    say(live, 0, *("x" for _ in range(MANY)))
    live.publish(BlockStop(0))
    live.finish(TURN)
    given: list[TurnEvent] = []
    served = 0

    async def others() -> None:
        nonlocal served
        while True:
            served += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    async for batch in live.attach().batches():
        assert len(batch) <= AT_ONCE
        assert served >= len(given) // AT_ONCE
        given += batch
    beside.cancel()
    assert texts(given) == ["x" * MANY]


async def test_a_block_whose_end_was_given_is_not_ended_twice() -> None:
    live = Fate().live()
    said = live.attach().batches()
    live.publish(BlockStart(0, {"type": "thinking", "thinking": "", "signature": ""}))
    live.publish(BlockDelta(0, {"type": "thinking_delta", "thinking": "hm"}))
    live.publish(BlockStop(0))
    batch = await anext(said)
    assert live.withdraw({0}) == [{"type": "thinking", "thinking": "hm", "signature": ""}]
    live.finish(TURN)
    rest = [event async for more in said for event in more]
    assert [event for event in [*batch, *rest] if isinstance(event, BlockStop)] == [BlockStop(0)]


async def test_the_answer_is_delivered_when_one_client_acknowledged() -> None:
    fate = Fate()
    live = fate.live()
    gone, there = live.attach(), live.attach()
    live.finish(TURN)
    gone.leave()
    there.acknowledge()
    there.leave()
    assert fate.deliveries == ["arrived"]


async def test_the_answer_is_undelivered_when_all_left_without_it() -> None:
    fate = Fate()
    live = fate.live()
    answer = live.attach()
    live.finish(TURN)
    answer.leave()
    answer.acknowledge()
    assert fate.deliveries == ["left"]


async def test_the_turn_is_given_up_only_when_nobody_comes_back_in_time() -> None:
    fate = Fate()
    live = fate.live(grace=0.0)
    live.attach().leave()
    assert live.abandoned
    back = live.attach()
    await asyncio.sleep(0)
    assert not fate.empty.is_set()
    back.leave()
    async with asyncio.timeout(60):
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
