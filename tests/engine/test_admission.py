"""Who may run when many want to: agents in turn, and a Retry-After that is true. On a clock that only waiting moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.engine.lanes import FIRST_GUESS, Lanes, Slots
from cli_session_proxy.errors import QueueFull

from ..simulated import FastLoop


def simulated(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(scenario())


def now() -> float:
    return asyncio.get_running_loop().time()


class Agents:
    """Turns of so many seconds each, told as (agent, event, time): `head` of its lane, `start`, `end`."""

    def __init__(self, lanes: Lanes, slots: Slots) -> None:
        self.lanes = lanes
        self.slots = slots
        self.told: list[tuple[int, str, float]] = []

    async def turn(self, agent: int, seconds: float) -> None:
        """Raises QueueFull at once."""
        place = self.lanes.take(agent)
        async with self.lanes.turn(place):
            self.told.append((agent, "head", now()))
            async with self.slots.slot():
                self.told.append((agent, "start", now()))
                await asyncio.sleep(seconds)
        self.told.append((agent, "end", now()))


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 9.0), st.floats(0.0, 3.0)), min_size=1, max_size=40),
)
def test_no_other_agent_overtakes_a_waiting_one_twice(slots: int, wanted: list[tuple[int, float, float]]) -> None:
    async def scenario() -> None:
        free = Slots(slots)
        agents = Agents(Lanes(1000, 1000, free), free)
        async with asyncio.TaskGroup() as group:
            for agent, seconds, pause in wanted:
                group.create_task(agents.turn(agent, seconds))
                await asyncio.sleep(pause)
        for at, (agent, event, _) in enumerate(agents.told):
            if event == "head":
                rest = agents.told[at + 1 :]
                until = next(n for n, (other, what, _) in enumerate(rest) if (other, what) == (agent, "start"))
                overtaking = Counter(other for other, what, _ in rest[:until] if what == "start")
                assert all(count <= 1 for count in overtaking.values()), (agents.told, agent)
        assert sum(1 for _, event, _ in agents.told if event == "end") == len(wanted)
        assert agents.lanes.total == 0
        assert free.running == 0

    simulated(scenario)


def test_one_agent_with_fifty_turns_keeps_the_others_waiting_for_one() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        agents = Agents(Lanes(1000, 1000, slots), slots)
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(agents.turn(0, 10.0))
            await asyncio.sleep(1.0)
            for agent in range(1, 4):
                group.create_task(agents.turn(agent, 10.0))
        ends = {agent: at for agent, event, at in agents.told if event == "end" and agent}
        assert ends == {1: 20.0, 2: 30.0, 3: 40.0}

    simulated(scenario)


async def _refused(wanted: Callable[[], Awaitable[None]]) -> float:
    with pytest.raises(QueueFull) as refused:
        await wanted()
    assert refused.value.retry_after is not None
    return refused.value.retry_after


@pytest.mark.parametrize("seconds", [0.5, 3.0, 90.0])
def test_the_time_told_for_a_full_lane_is_when_it_is_done(seconds: float) -> None:
    async def scenario() -> None:
        slots = Slots(4)
        agents = Agents(Lanes(8, 1000, slots), slots)
        await agents.turn(1, seconds / 100)  # other agents are much quicker
        await agents.turn(0, seconds)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(agents.turn(0, seconds))
            await asyncio.sleep(seconds / 2)
            told, at = await _refused(lambda: agents.turn(0, seconds)), now()
        assert told == pytest.approx(now() - at, rel=0.1)

    simulated(scenario)


@pytest.mark.parametrize(("slots", "agents"), [(1, 40), (4, 40), (16, 40), (16, 2)])
def test_the_time_told_when_too_many_wait_is_when_they_are_done(slots: int, agents: int) -> None:
    async def scenario() -> None:
        free = Slots(slots)
        all_agents = Agents(Lanes(1000, 40, free), free)
        await all_agents.turn(0, 3.0)
        async with asyncio.TaskGroup() as group:
            for turn in range(40):
                group.create_task(all_agents.turn(turn % agents, 3.0))
            await asyncio.sleep(0.5)
            for turn in range(free.running):  # those which run do not count
                group.create_task(all_agents.turn(turn % agents, 3.0))
            await asyncio.sleep(0)
            told, at = await _refused(lambda: all_agents.turn(99, 3.0)), now()
        assert told / 1.5 < now() - at < told * 1.5

    simulated(scenario)


def test_before_anything_was_measured_it_is_a_guess_and_then_the_truth() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        agents = Agents(Lanes(1, 1000, slots), slots)
        running = asyncio.create_task(agents.turn(0, 0.2))
        await asyncio.sleep(0)
        assert await _refused(lambda: agents.turn(0, 1.0)) == FIRST_GUESS
        await running
        running = asyncio.create_task(agents.turn(0, 0.2))
        await asyncio.sleep(0)
        assert await _refused(lambda: agents.turn(0, 1.0)) == pytest.approx(0.2)
        await running

    simulated(scenario)


def test_what_waits_is_bounded_over_all_agents_and_what_runs_is_not_counted() -> None:
    async def scenario() -> None:
        slots = Slots(2)
        agents = Agents(Lanes(1000, 3, slots), slots)
        async with asyncio.TaskGroup() as group:
            for agent in range(2):
                group.create_task(agents.turn(agent, 1.0))
            await asyncio.sleep(0.1)
            for agent in range(2, 5):
                group.create_task(agents.turn(agent, 1.0))
            await asyncio.sleep(0)
            await _refused(lambda: agents.turn(5, 1.0))
            await asyncio.sleep(1.0)
            group.create_task(agents.turn(5, 1.0))
        assert sum(1 for _, event, _ in agents.told if event == "end") == 6

    simulated(scenario)
