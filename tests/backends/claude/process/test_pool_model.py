"""Whatever agents, CLIs and the clock do, in whatever order: what the pool promises holds after every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest import mock

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cli_session_proxy.backends.base import ProcessHooks
from cli_session_proxy.backends.claude.process import memory
from cli_session_proxy.backends.claude.process.memory import FIRST_WEIGHT
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.errors import ClaudeUnavailable, QueueFull
from cli_session_proxy.settings import Settings

from ....simulated import FastLoop, still
from .acting import Actor, Stage, launch

AGENTS = 5
GATES = ("spawn", "adapt", "boot", "claim", "close")


class Agent:
    """Has one turn at a time, as its lane has it."""

    def __init__(self) -> None:
        self.session: str | None = None
        self.asking: asyncio.Task[None] | None = None
        self.holds: Actor | None = None


async def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class PoolMachine(RuleBasedStateMachine):
    """Agents check processes out and in, leave, and come back; CLIs start, die, refuse and take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=FastLoop)
        self.stage = Stage(self.runner.get_loop().time)
        self.agents = [Agent() for _ in range(AGENTS)]
        self.ending: list[asyncio.Task[None]] = []
        self.shut: set[str] = set()
        self.weight = FIRST_WEIGHT
        self.patches = ExitStack()
        self.patches.enter_context(self.stage.set())
        self.patches.enter_context(mock.patch.object(memory, "weigh", self.weigh))
        self.patches.enter_context(mock.patch("asyncio.to_thread", _at_once))

    def weigh(self, pids: Collection[int]) -> dict[int, int]:
        return dict.fromkeys(pids, self.weight)

    def run(self, work: Coroutine[Any, Any, None] | None = None) -> None:
        async def both() -> None:
            if work is not None:
                await work
            await still()

        self.runner.run(both())

    @initialize(
        processes=st.integers(1, 4),
        spawns=st.integers(1, 3),
        spares=st.integers(0, 2),
        memory=st.one_of(st.none(), st.integers(1, 4)),
    )
    def opens(self, processes: int, spawns: int, spares: int, memory: int | None) -> None:
        self.settings = Settings(
            max_processes=processes,
            max_spawns=spawns,
            spares=spares,
            max_memory=None if memory is None else memory * FIRST_WEIGHT,
        )
        self.pool = Pool(
            self.settings,
            ProcessHooks(on_exit=self.stage.on_exit.append),
            ahead=lambda: (Path("/nowhere"), Path("/nowhere")),
        )
        self.table = self.pool.table

    # --- what agents do

    async def checked_out(self, agent: Agent, model: str) -> None:
        wanted = launch(agent.session, model=model, resume=agent.session is not None)
        current = cast("Actor | None", self.pool.peek(wanted.session_id))
        try:
            if current is not None and current.waiting:
                process = await self.pool.take_waiting(wanted)
                if process is None:
                    return
            else:
                process, _ = await self.pool.checkout(wanted)
        except QueueFull:
            return
        agent.holds = cast(Actor, process)
        agent.holds.waiting = False
        agent.session = process.session_id
        process.started.set()

    # Few rules with much in each: hypothesis leaves whole rules out of a run.
    @rule(
        n=st.integers(0, AGENTS - 1),
        does=st.sampled_from(["asks", "asks", "asks", "is answered", "is answered", "calls", "forgets", "leaves"]),
        model=st.sampled_from(["opus", "opus", "haiku"]),
    )
    def agent(self, n: int, does: str, model: str) -> None:
        agent = self.agents[n]
        match does:
            case "asks":
                self.asks(agent, model)
            case "forgets":
                self.forgets(agent)
            case "leaves":
                self.leaves(agent)
            case _:
                self.is_answered(agent, waits=does == "calls")

    def asks(self, agent: Agent, model: str) -> None:
        if agent.holds is None and (agent.asking is None or agent.asking.done()):

            async def begin() -> None:
                agent.asking = asyncio.create_task(self.checked_out(agent, model))

            self.run(begin())

    def is_answered(self, agent: Agent, *, waits: bool) -> None:
        if (actor := agent.holds) is not None:
            agent.holds, actor.waiting = None, waits and actor.usable
            self.end(self.pool.checkin(cast(ClaudeProcess, actor)))

    def forgets(self, agent: Agent) -> None:
        """A turn failed: its session is discarded, in use or not."""
        if agent.session is not None and (agent.asking is None or agent.asking.done()):
            session, agent.session, agent.holds = agent.session, None, None
            self.end(self.pool.discard(session))

    def leaves(self, agent: Agent) -> None:
        if agent.asking is not None:
            agent.asking.cancel()
        self.run()

    def end(self, work: Coroutine[Any, Any, None]) -> None:
        """It may take as long as the gates are shut."""

        async def begin() -> None:
            self.ending.append(asyncio.create_task(work))

        self.run(begin())

    # --- what CLIs, and the clock, do

    @rule(
        does=st.sampled_from(["dies", "pauses", "answers", "weighs", "time"]),
        which=st.integers(0, 10),
        answer=st.sampled_from([True, False, None]),
    )
    def world(self, does: str, which: int, answer: bool | None) -> None:
        match does:
            case "dies":
                there = sorted(self.table.all(), key=lambda process: process.pid)
                for process in there[which : which + 1]:
                    cast(Actor, process).die()
            case "pauses":
                self.pauses(GATES[which % len(GATES)])
            case "answers":
                self.stage.answers[("adapt", "boot", "claim")[which % 3]] = answer
            case "weighs":
                self.weight = which * FIRST_WEIGHT // 3
            case "time":
                self.run(asyncio.sleep((0.1, 1.0, 3.0, 10.0, 61.0, 1000.0)[which % 6]))
        self.run()

    def pauses(self, gate: str) -> None:
        """Or goes on."""
        self.shut ^= {gate}
        if gate in self.shut:
            self.stage.gates[gate].shut()
        else:
            self.stage.gates[gate].open()

    # --- what holds

    @invariant()
    def never_more_than_allowed_and_one_a_session(self) -> None:
        assert self.stage.most <= self.settings.max_processes + 1  # which may be ending
        assert not self.stage.doubled

    @invariant()
    def who_holds_a_process_holds_it_alone(self) -> None:
        held = [agent.holds for agent in self.agents if agent.holds is not None]
        assert len(held) == len(set(held))
        assert all(cast(ClaudeProcess, actor) in self.table.in_use for actor in held)

    @precondition(lambda self: not self.shut)
    @invariant()
    def nobody_waits_where_there_is_a_place_and_nothing_useless_is_kept(self) -> None:
        asking = [agent for agent in self.agents if agent.asking is not None and not agent.asking.done()]
        held = [agent for agent in self.agents if agent.holds is not None]
        if asking:
            assert held
            assert not self.table.idle()
            assert not self.table.has_room()
        assert self.table.busy() == len(held)
        assert self.table.reserved == 0
        assert not self.table.ending()
        assert not any(self.table.unusable(process) for process in self.table.idle())
        assert len(self.table.spares) <= self.settings.spares

    def teardown(self) -> None:
        async def end() -> None:
            for gate in self.stage.gates.values():
                gate.open()
            await self.pool.close()
            asking = [agent.asking for agent in self.agents if agent.asking is not None]
            for outcome in await asyncio.gather(*asking, *self.ending, return_exceptions=True):
                assert outcome is None or isinstance(outcome, ClaudeUnavailable | asyncio.CancelledError), outcome
            assert not self.stage.living
            assert {actor.pid for actor in self.stage.ever if actor.returncode is not None} == set(self.stage.on_exit)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        try:
            if hasattr(self, "pool"):
                self.run(end())
        finally:
            self.patches.close()
            self.runner.close()


TestPool = PoolMachine.TestCase
TestPool.settings = hypothesis_settings(max_examples=40, stateful_step_count=100, deadline=None)
