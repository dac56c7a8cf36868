"""Whatever is accepted, cancelled and finished, in whatever order: lanes keep their order, and no slot is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cli_session_proxy.engine.lanes import Lanes, Slots
from cli_session_proxy.errors import QueueFull

from ..simulated import FastLoop, still


@dataclass(eq=False)
class Turn:
    agent: int
    over: asyncio.Event = field(default_factory=asyncio.Event)
    at_head: bool = False
    runs: bool = False
    task: asyncio.Task[None] | None = None


class LanesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=FastLoop)
        self.turns: list[Turn] = []  # that are not over, in the order of acceptance
        self.heads: list[Turn] = []  # that wait for a slot, in the order in which they became the first of their lane
        self.overtaken: list[Turn] = []  # when they got a slot, somebody had waited for longer

    @initialize(slots=st.integers(1, 3), lane=st.integers(1, 4), waiting=st.integers(1, 6))
    def opens(self, slots: int, lane: int, waiting: int) -> None:
        self.limit, self.waiting = lane, waiting
        self.slots = Slots(slots)
        self.lanes = Lanes(lane, waiting, self.slots)

    def now(self, does: Callable[[], None]) -> None:
        """And then everybody goes as far as it goes."""

        async def both() -> None:
            does()
            await still()

        self.runner.run(both())

    async def work(self, turn: Turn, place: object) -> None:
        try:
            async with self.lanes.turn(place):  # type: ignore[arg-type]
                turn.at_head = True
                self.heads.append(turn)
                try:
                    async with self.slots.slot():
                        if self.heads[0] is not turn:
                            self.overtaken.append(turn)
                        self.heads.remove(turn)
                        turn.runs = True
                        await turn.over.wait()
                finally:
                    if turn in self.heads:
                        self.heads.remove(turn)
        finally:
            self.lanes.give_up(place)  # type: ignore[arg-type]  # as the engine does
            self.turns.remove(turn)

    @rule(agent=st.integers(0, 3), times=st.integers(1, 3))
    def accepts(self, agent: int, times: int) -> None:
        def accept() -> None:
            mine = [turn for turn in self.turns if turn.agent == agent]
            full = len(mine) >= self.limit or len(self.turns) - self.slots.running >= self.waiting
            if full:
                with pytest.raises(QueueFull) as refused:
                    self.lanes.take(agent)
                assert refused.value.retry_after
                return
            turn = Turn(agent)
            self.turns.append(turn)
            turn.task = asyncio.create_task(self.work(turn, self.lanes.take(agent)))

        for _ in range(times):
            self.now(accept)

    @rule(which=st.lists(st.integers(0, 8), max_size=3), ends=st.lists(st.integers(0, 8), max_size=3))
    def are_cancelled_while_others_end(self, which: list[int], ends: list[int]) -> None:
        def both() -> None:
            turns = list(self.turns)
            for at in ends:
                if at < len(turns):
                    turns[at].over.set()
            for at in which:
                if at < len(turns) and (task := turns[at].task) is not None:
                    task.cancel()

        self.now(both)

    @rule(seconds=st.floats(0.1, 100.0))
    def time_goes_by(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def as_many_run_as_can_and_the_first_of_each_lane(self) -> None:
        if not hasattr(self, "lanes"):
            return
        running = [turn for turn in self.turns if turn.runs and not turn.over.is_set()]
        firsts = {turn.agent: turn for turn in reversed(self.turns)}
        assert self.slots.running == len(running) == min(self.slots.limit, len(firsts))
        assert all(firsts[turn.agent] is turn for turn in running)
        assert {turn for turn in self.turns if turn.at_head} == set(firsts.values())
        assert not self.overtaken
        assert self.lanes.total == len(self.turns)
        for agent in range(4):
            assert self.lanes.waiting(agent) == sum(turn.agent == agent for turn in self.turns)

    def teardown(self) -> None:
        async def end() -> None:
            tasks = [turn.task for turn in self.turns if turn.task is not None]
            for turn in self.turns:
                turn.over.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [fault for fault in outcomes if isinstance(fault, Exception)] == []

        try:
            self.runner.run(end())
        finally:
            self.runner.close()


TestLanes = LanesMachine.TestCase
TestLanes.settings = hypothesis_settings(max_examples=40, stateful_step_count=50, deadline=None)
