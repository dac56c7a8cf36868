"""What a proxy that ended leaves in the store, settled by the next one, on the in-memory backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cli_session_proxy.backends.base import Adoptable
from cli_session_proxy.domain.models import Agent, Turn
from cli_session_proxy.engine import recovery
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.rewinding import rewind
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import KeptTurn

from ..memory_backend import MemoryBackend
from ..talking import ask, events, request
from ..until import until
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


async def killed(settings: Settings, *said: str) -> None:
    """A proxy that is gone while the first of these turns runs and the others wait."""
    model = Model()
    model.open.clear()
    engine = Engine(settings, backend=MemoryBackend(model))
    await engine.start()
    for text in said:
        await engine.submit(request(text))
    await model.reached.wait()
    engine._instances.leave(settled=False)  # as the kernel does when a proxy is killed
    engine.kill()


async def test_queued_turns_of_a_proxy_that_ended_are_cancelled_and_never_sent(settings: Settings) -> None:
    await killed(settings, "one", "two", "three")
    async with core(settings) as (survivor, backend):
        await ask(survivor, "four")
        kept = await turns(survivor)
    assert [turn.status for turn in kept] == ["cancelled"] * 3 + ["completed"]
    assert {turn.error["code"] for turn in kept if turn.error} == {"interrupted"}
    assert [words(path) for path in backend.seen] == [["four"]]


async def test_an_answer_that_a_dead_proxy_was_delivering_is_uncertain_and_stays_on_the_path(
    settings: Settings,
) -> None:
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    answer = await engine.submit(request("one"))
    await answer.turn()
    engine._instances.leave(settled=False)
    engine.kill()
    async with core(settings) as (survivor, _):

        async def uncertain() -> bool:
            return (await turns(survivor))[0].delivery == "uncertain"

        await until(uncertain)
        second = await ask(survivor, "two")
        assert second.parent_id == answer.turn_id


@pytest.mark.parametrize("hours", [23, 25])
@pytest.mark.parametrize("settled", [True, False])
async def test_an_answer_that_may_have_arrived_is_claimed_for_as_long_as_a_key_is_known(
    hours: int, settled: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the same words are said anew, behind that answer. `settled`: it is `uncertain`, else `pending`."""
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    answer = await engine.submit(request("one"))
    await answer.turn()
    engine._instances.leave(settled=False)
    engine.kill()
    if not settled:
        monkeypatch.setattr(recovery.Recovery, "_mark_uncertain", lambda *_: asyncio.sleep(0))
    async with core(settings) as (survivor, backend):

        async def known() -> bool:
            return (await turns(survivor))[0].delivery == ("uncertain" if settled else "pending")

        await until(known)
        clock = survivor._placement._clock
        monkeypatch.setattr(survivor._placement, "_clock", lambda: clock() + hours * 3600)
        again = await ask(survivor, "one")
        if hours < settings.idempotency_hours:
            assert again.id == answer.turn_id
            assert backend.seen == []
        else:
            assert again.parent_id == answer.turn_id
            assert words(backend.seen[-1]) == ["one", "one"]


async def test_an_answer_that_may_have_arrived_is_not_claimed_after_a_rewind(settings: Settings) -> None:
    """It is on no path then: who got it would be asked about it, and nobody would know."""
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    await ask(engine, "zero")
    answer = await engine.submit(request("one"))
    await answer.turn()
    engine._instances.leave(settled=False)
    engine.kill()
    async with core(settings) as (survivor, backend):

        async def uncertain() -> bool:
            return (await turns(survivor))[1].delivery == "uncertain"

        await until(uncertain)
        agent = await survivor.store.agent("local", "a")
        assert agent is not None
        await rewind(survivor.store, survivor._ownership, agent, "-1")
        again = await ask(survivor, "one")
        assert again.id != answer.turn_id
        after = await ask(survivor, "two")
        assert after.parent_id == again.id
        assert words(backend.seen[-1]) == ["zero", "one", "two"]


async def test_a_living_proxys_turns_stay_its_own(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (one, _):
        answer = await one.submit(request("one"))
        await model.reached.wait()
        async with core(settings) as (two, _):
            await ask(two, "elsewhere", agent="b")
            assert [turn.status for turn in await turns(two)] == ["running"]
        model.open.set()
        await answer.turn()
        answer.acknowledge()


# --- one agent's fault is no other's


class Faulty(MemoryBackend):
    """Fails, as nobody expects, at one agent, as long as `faults` holds its name."""

    def __init__(self) -> None:
        super().__init__(Model())
        self.faults: set[str] = set()
        self.writes: asyncio.Queue[str] = asyncio.Queue()  # sessions that somebody else writes to

    def _check(self, agent: Agent) -> None:
        if agent.agent_id in self.faults:
            raise KeyError("message")

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        self._check(agent)
        return await super().recover_turn(agent, turn)

    async def adoptable(self, agent: Agent, parent: Turn) -> Adoptable | None:
        self._check(agent)
        return await super().adoptable(agent, parent)

    async def retire(self, agent: Agent) -> None:
        self._check(agent)
        await super().retire(agent)

    async def changes(self) -> AsyncGenerator[str, None]:
        while True:
            yield await self.writes.get()


@asynccontextmanager
async def faulty(settings: Settings, *faults: str) -> AsyncIterator[tuple[Engine, Faulty]]:
    backend = Faulty()
    backend.faults = set(faults)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        yield engine, backend
    finally:
        await engine.stop()


async def test_an_agent_that_cannot_be_settled_holds_up_no_start_and_is_settled_later(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.open.clear()
    dead = Engine(settings, backend=MemoryBackend(model))
    await dead.start()
    for agent in ("a", "b"):
        await dead.submit(request("one", agent=agent))
    await until(lambda: dead.running() == 2)
    dead._instances.leave(settled=False)
    dead.kill()
    async with faulty(settings, "a") as (survivor, backend):
        assert [turn.status for turn in await turns(survivor)] == ["running"]
        other = await survivor.store.agent("local", "b")
        assert other is not None
        assert [turn.status async for turn in survivor.store.turns(other.key)] == ["cancelled"]
        assert [event["agent"] for event in events(caplog) if event["event"] == "not_settled"] == ["a"]
        assert dead._instances.id in survivor._instances.others()  # not forgotten
        backend.faults.clear()
        await ask(survivor, "two")
        assert [turn.status for turn in await turns(survivor)] == ["cancelled", "completed"]


async def test_a_neighbour_that_cannot_settle_an_agent_goes_on_to_look_at_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "NEIGHBOUR_CHECK", 0.01)
    async with faulty(settings, "a") as (survivor, backend):
        await killed(settings, "one")
        await until(lambda: [event for event in events(caplog) if event["event"] == "not_settled"])
        backend.faults.clear()

        async def settled() -> bool:
            return [turn.status for turn in await turns(survivor)] == ["cancelled"]

        await until(settled)


async def test_an_agent_whose_session_cannot_be_read_ends_no_service_of_the_others(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with faulty(settings) as (engine, backend):
        mine, other = await ask(engine, "one"), await ask(engine, "one", agent="b")
        backend.faults.add("a")
        for turn in (mine, other):
            backend.writes.put_nowait(turn.session_id or "")
        await until(backend.writes.empty)
        await until(lambda: [event for event in events(caplog) if event["event"] == "not_adopted"])
        async with faulty(settings) as (second, _):  # both leases are asked for
            elsewhere = asyncio.create_task(ask(second, "two"))
            await ask(second, "two", agent="b")
            await until(lambda: [event for event in events(caplog) if event["event"] == "lease_not_handed_over"])
            backend.faults.clear()
            await elsewhere
