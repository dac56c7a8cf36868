"""Lanes keep the order of acceptance, whatever is cancelled in between."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.engine.lanes import Lanes, Slots
from cli_session_proxy.errors import QueueFull


async def test_turns_of_one_agent_run_one_at_a_time_in_order() -> None:
    lanes, ran, inside = Lanes(10, 1000, Slots(1)), [], 0

    async def work(name: int, place: object) -> None:
        nonlocal inside
        async with lanes.turn(place):  # type: ignore[arg-type]
            inside += 1
            assert inside == 1
            ran.append(name)
            await asyncio.sleep(0)
            inside -= 1

    places = [lanes.take(1) for _ in range(6)]
    async with asyncio.TaskGroup() as group:
        for name in reversed(range(6)):
            group.create_task(work(name, places[name]))
    assert ran == list(range(6))
    assert lanes.waiting(1) == 0


async def test_agents_do_not_wait_for_each_other() -> None:
    lanes = Lanes(10, 1000, Slots(1))
    async with lanes.turn(lanes.take(1)), lanes.turn(lanes.take(2)):
        assert (lanes.waiting(1), lanes.waiting(2)) == (1, 1)


async def test_a_full_lane_refuses_with_the_time_to_wait() -> None:
    lanes = Lanes(2, 1000, Slots(1))
    lanes.take(1), lanes.take(1)
    with pytest.raises(QueueFull) as refused:
        lanes.take(1)
    assert refused.value.retry_after
    lanes.take(2)


async def test_a_place_given_up_lets_the_next_one_in() -> None:
    lanes = Lanes(3, 1000, Slots(1))
    first, second, third = (lanes.take(1) for _ in range(3))
    lanes.give_up(second)
    lanes.give_up(second)
    async with lanes.turn(first):
        assert not third.granted.done()
    async with lanes.turn(third):
        assert lanes.waiting(1) == 1


@given(st.lists(st.sampled_from(["take", "cancel", "step"]), max_size=40), st.data())
def test_whatever_is_cancelled_the_rest_runs_in_order_and_no_place_leaks(
    actions: list[str], data: st.DataObject
) -> None:
    async def scenario() -> None:
        lanes, ran, cancelled = Lanes(1000, 1000, Slots(1)), [], set()
        tasks: list[asyncio.Task[None]] = []

        async def work(name: int, place: object) -> None:
            async with lanes.turn(place):  # type: ignore[arg-type]
                ran.append(name)
                await asyncio.sleep(0)

        for action in actions:
            if action == "take":
                place = lanes.take(1)
                task = asyncio.create_task(work(len(tasks), place))
                # One that is cancelled before its first step never enters: its place is given up for it.
                task.add_done_callback(lambda _, place=place: lanes.give_up(place))  # type: ignore[misc]
                tasks.append(task)
            elif action == "cancel" and tasks:
                victim = data.draw(st.integers(0, len(tasks) - 1))
                tasks[victim].cancel()
                cancelled.add(victim)
            else:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # since Python 3.12 `gather` does not wait for the callbacks of tasks that have ended
        assert ran == sorted(ran)
        assert set(range(len(tasks))) - cancelled <= set(ran)
        assert lanes.waiting(1) == 0

    asyncio.run(scenario())
