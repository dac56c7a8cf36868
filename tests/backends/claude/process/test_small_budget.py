"""Many agents on few processes: everyone is answered and remembered, and there are never more than allowed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.errors import QueueFull
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....matrix import rest_in_full
from ....talking import ask, running
from ....until import until
from .helpers import is_gone

TURNS = 2


class Alive:
    """The pids of the CLIs between their start and their end, as the journal of the children is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: set[int] = set()
        self.ever: set[int] = set()
        self.most = 0
        on_spawn, on_exit = Instances.on_spawn, Instances.on_exit

        def on_born(instances: Instances, pid: int, start_time: str | None, cwd: Path) -> None:
            self.now.add(pid)
            self.ever.add(pid)
            self.most = max(self.most, len(self.now))
            on_spawn(instances, pid, start_time, cwd)

        def on_reaped(instances: Instances, pid: int) -> None:
            self.now.discard(pid)
            on_exit(instances, pid)

        monkeypatch.setattr(Instances, "on_spawn", on_born)
        monkeypatch.setattr(Instances, "on_exit", on_reaped)


async def test_beyond_the_queue_limit_a_request_is_refused_and_not_kept(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("one", gate)
    async with running(make_settings(claude_bin=claude_2, max_turns=1, queue_limit=1)) as engine:
        first = asyncio.create_task(ask(engine, "one", agent="a"))
        await gate.reached.wait()
        second = asyncio.create_task(ask(engine, "two", agent="b"))
        await until(lambda: engine.queued() == 1)
        with pytest.raises(QueueFull, match="queue_limit") as full:
            await ask(engine, "three", agent="c")
        assert full.value.retry_after
        assert await engine.store.agent("local", "c") is None
        gate.open()
        assert (await first).status == (await second).status == "completed"
    assert [seen.prompt for seen in upstream.requests] == ["one", "two"]


@pytest.mark.parametrize(("agents", "processes"), rest_in_full((4, 2), (24, 4)))
async def test_every_agent_is_answered_and_remembered_on_a_part_of_the_processes(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch,
    agents: int, processes: int,
) -> None:  # fmt: skip
    alive = Alive(monkeypatch)
    said = {f"agent-{n}": [f"agent {n}, turn {turn}" for turn in range(TURNS)] for n in range(agents)}
    async with running(make_settings(claude_bin=claude_2, max_processes=processes, spares=1)) as engine:

        async def talk(agent: str) -> None:
            for one in said[agent]:
                turn = await ask(engine, one, agent=agent)
                assert turn.continuity != "rebuilt"

        async with asyncio.TaskGroup() as group:
            for agent in said:
                group.create_task(talk(agent))
        assert len(alive.now) <= processes
    assert processes <= alive.most <= processes + 1  # one more may be ending
    assert all(is_gone(pid) for pid in alive.ever)
    last = {seen.prompt: seen.user_texts() for seen in upstream.requests}
    assert {agent: last[texts[-1]] for agent, texts in said.items()} == said
    assert len(upstream.requests) == agents * TURNS
