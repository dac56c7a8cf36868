"""A lease that two proxies want, on the in-memory backend."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import Adoptable, Event, Execution, Job
from cli_session_proxy.domain.models import (
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    Link,
    Message,
    Record,
    Session,
    Turn,
)
from cli_session_proxy.engine import ownership
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.ownership import Instances, Ownership
from cli_session_proxy.errors import ClaudeUnavailable, LeaseLost, StoreUnavailable, UpstreamError
from cli_session_proxy.locks import RUN
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import (
    AgentState,
    Granted,
    HeldLease,
    KeptTurn,
    Lease,
    LeaseHeld,
    PeerRequests,
    Proxy,
)
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore
from cli_session_proxy_store_conformance.samples import imported_turns, opened

from ..memory_backend import MemoryBackend
from ..talking import ask, request
from ..until import until
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


class RefusesOnce(SqliteStore):
    """A disk that is full for a moment, just when a lease is given back."""

    refused = 0

    async def release(self, lease: Lease) -> None:
        if not self.refused:
            self.refused += 1
            raise StoreUnavailable("database or disk is full: free space on its disk")
        await super().release(lease)


class ResistsOnce(MemoryBackend):
    """A process that cannot be ended at the first try."""

    refused = 0

    async def retire(self, agent: Agent) -> None:
        if not self.refused:
            self.refused += 1
            raise ClaudeUnavailable("a process could not be ended")
        await super().retire(agent)


@pytest.mark.parametrize("fails", ["the store", "the backend"])
async def test_a_hand_over_that_failed_is_tried_again(settings: Settings, fails: str) -> None:
    store = RefusesOnce(settings.var / FILE)
    backend = ResistsOnce()
    store.refused, backend.refused = int(fails != "the store"), int(fails != "the backend")
    first = Engine(settings, store, backend)
    await first.start()
    try:
        async with core(settings) as (second, _):
            await ask(first, "one")
            await ask(first, "hello", agent="another")  # so that its heartbeat goes on
            async with asyncio.timeout(3 * settings.lease):
                await ask(second, "two")
            assert [turn.status for turn in await turns(second)] == ["completed", "completed"]
    finally:
        await first.stop()
    assert (store.refused, backend.refused) == (1, 1)


class SlowToAsk(SqliteStore):
    """A proxy on a busy machine: a while passes between a turn's acceptance and the first request for the lease."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.var / FILE)
        self.goes_on = asyncio.Event()

    async def acquire(self, agent_key: int, proxy: Proxy, **more: Any) -> Granted | LeaseHeld:
        await self.goes_on.wait()
        return await super().acquire(agent_key, proxy, **more)


class Counting(SqliteStore):
    looks = 0

    async def responds(self, proxy_id: str) -> bool:
        answer = await super().responds(proxy_id)
        self.looks += 1
        return answer


async def test_a_turn_keeps_its_place_while_its_proxy_has_not_asked_for_the_lease_yet(settings: Settings) -> None:
    slow, store = SlowToAsk(settings), Counting(settings.var / FILE)
    first, second = Engine(settings, slow, MemoryBackend()), Engine(settings, store, MemoryBackend())
    await first.start()
    await second.start()
    try:
        one = asyncio.create_task(ask(first, "one"))

        async def accepted() -> bool:
            return await store.agent("local", "a") is not None and len(await turns(second)) == 1

        await until(accepted)
        two = asyncio.create_task(ask(second, "two"))
        await until(lambda: store.looks > 0)
        slow.goes_on.set()
        await asyncio.gather(one, two)
        before, after = await turns(second)
        assert (before.parent_id, after.parent_id) == (None, before.id)
    finally:
        slow.goes_on.set()
        await first.stop()
        await second.stop()


class SleepsAsItAsks(SqliteStore):
    """The machine sleeps for two leases behind a proxy's decision to ask for an agent, once another one has it."""

    slept, asks_made = 0.0, 0

    async def acquire(self, agent_key: int, proxy: Proxy, **more: Any) -> Granted | LeaseHeld:
        self.asks_made += 1
        self.slept = 2 * proxy.lease
        return await super().acquire(agent_key, proxy, **more)


async def test_a_machine_that_sleeps_while_a_proxy_asks_for_an_agent_fences_nobody_out(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To it every lease of the others has expired."""
    real, settings = time.time, settings.model_copy(update={"lease": 30.0})

    def clock() -> float:
        return real() + store.slept

    store = SleepsAsItAsks(settings.var / FILE, clock=clock)
    monkeypatch.setattr(time, "time", clock)
    model = Model()
    model.open.clear()
    first = Engine(settings, SqliteStore(settings.var / FILE, clock=clock), MemoryBackend(model))
    second = Engine(settings, store, MemoryBackend())
    await first.start()
    await second.start()
    try:
        one = asyncio.create_task(ask(first, "one"))
        await model.reached.wait()
        two = asyncio.create_task(ask(second, "two"))
        await until(lambda: store.asks_made > 1)
        model.open.set()
        assert [turn.status for turn in await asyncio.gather(one, two)] == ["completed", "completed"]
    finally:
        model.open.set()
        await first.stop()
        await second.stop()


class Watches(MemoryBackend):
    """Sees that somebody wrote into this session."""

    def __init__(self, session_id: str) -> None:
        super().__init__(Model())
        self.session_id = session_id
        self.looked = asyncio.Event()

    async def changes(self) -> AsyncGenerator[str, None]:
        yield self.session_id
        self.looked.set()


async def test_a_change_to_an_old_copy_of_a_session_does_not_take_the_agent_from_its_proxy(settings: Settings) -> None:
    """Another host's CLI writes its last lines when it is ended there."""
    async with core(settings) as (first, _):
        turn = await ask(first, "one")
        backend = Watches(str(turn.session_id))
        second = Engine(settings, backend=backend)
        await second.start()
        try:
            await backend.looked.wait()
            holder = first._ownership.proxy.id
            assert await first.store.asked(holder) == PeerRequests()
            assert (await first.store.whereabouts(turn.agent_key)).holder == holder  # it did not hand it over either
        finally:
            await second.stop()


async def asked_for_long(engine: Engine) -> None:
    """Another proxy wants the agent, and has wanted it for all the time of a lease."""
    owner = engine._ownership
    clock = asyncio.get_running_loop().time
    await until(lambda: any(clock() - since >= owner.proxy.lease for since in owner._requested.values()))


async def mover(engine: Engine, backend: MemoryBackend) -> int:
    """Takes the agent, as a move of the store does, and goes when a turn asks for it; how many turns ran before."""
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    instances = Instances(engine.settings.var)
    instances.enter()
    proxy = Proxy(instances.id, "here", 60.0)

    async def has_it() -> bool:
        return isinstance(await engine.store.acquire(agent.key, proxy), Granted)

    async def is_asked() -> bool:
        [held] = await engine.store.renew(proxy)
        return held.wanted is not None

    try:
        await until(has_it)
        ran = len(backend.seen)
        await until(is_asked)
        await engine.store.resign(proxy.id)
        return ran
    finally:
        instances.leave(settled=True)


async def test_turns_without_a_pause_let_another_proxy_have_the_agent(settings: Settings) -> None:
    settings = settings.model_copy(update={"lease": 2.0})
    model = Model()
    async with core(settings, model) as (engine, backend):
        model.open.clear()
        said = [asyncio.create_task(ask(engine, "one"))]
        await model.reached.wait()
        taking = asyncio.create_task(mover(engine, backend))
        await asked_for_long(engine)
        for word in ("two", "three"):
            answer = await engine.submit(request(word))
            said.append(asyncio.create_task(answer.turn()))
        assert not taking.done()
        model.open.set()
        assert await taking == 1
        assert [(await turn).status for turn in said] == ["completed"] * 3
        assert [words(turn.input) for turn in await turns(engine)] == [["one"], ["two"], ["three"]]
        assert backend.retired == ["a"]  # before it was handed over


async def test_nobody_waits_long_for_a_proxy_that_wanted_the_agent_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "TAKE_WAITS", 2)
    settings = settings.model_copy(update={"lease": 2.0})
    model = Model()
    async with core(settings, model) as (engine, backend):
        model.open.clear()
        first = asyncio.create_task(ask(engine, "one"))
        await model.reached.wait()
        taking = asyncio.create_task(mover(engine, backend))
        await asked_for_long(engine)
        taking.cancel()
        await asyncio.wait([taking])
        second = await engine.submit(request("two"))
        model.open.set()
        assert {(await first).status, (await second.turn()).status} == {"completed"}
        await ask(engine, "three")
        assert backend.retired == ["a"]


async def test_a_turn_elsewhere_keeps_its_place_behind_turns_without_a_pause(settings: Settings) -> None:
    """It has asked for the agent for long, and costs the turns before it no warm process."""
    settings = settings.model_copy(update={"lease": 2.0})
    model = Model()
    async with core(settings, model) as (engine, backend), core(settings) as (other, _):
        model.open.clear()
        said = [asyncio.create_task(ask(engine, "one"))]
        await model.reached.wait()
        for host, word in ((engine, "two"), (engine, "three"), (other, "four")):
            answer = await host.submit(request(word))
            said.append(asyncio.create_task(answer.turn()))
        await asked_for_long(engine)
        model.open.set()
        assert [(await turn).continuity for turn in said] == ["started", "warm", "warm", "rebuilt"]
        assert backend.retired == ["a"]


async def test_turns_without_a_pause_let_another_proxy_try_a_turn_again(settings: Settings) -> None:
    """It has lost its place in the order of acceptance."""
    settings = settings.model_copy(update={"lease": 2.0})
    model, fails = Model(), Model()
    fails.faults = [UpstreamError("overloaded")]
    async with core(settings, model) as (engine, backend), core(settings, fails) as (other, _):
        with pytest.raises(UpstreamError):
            await ask(other, "one", idempotency_key="k")
        model.open.clear()
        said = [asyncio.create_task(ask(engine, "two"))]
        await model.reached.wait()
        answer = await other.submit(request("one", idempotency_key="k"))
        said.append(asyncio.create_task(answer.turn()))
        await asked_for_long(engine)
        answer = await engine.submit(request("three"))
        said.append(asyncio.create_task(answer.turn()))
        model.open.set()
        two, one, three = [await turn for turn in said]
        assert (one.parent_id, three.parent_id) == (two.id, one.id)
        assert backend.retired == ["a"]


@pytest.mark.parametrize("ends", ["cancelled", "fenced out"])
async def test_a_turn_that_ends_before_it_began_holds_up_nobody_who_took_the_agent_over(
    ends: str, settings: Settings
) -> None:
    """Who takes over settles what had begun, and leaves to a living proxy what had not."""
    settings = settings.model_copy(update={"max_turns": 1, "lease": 600.0})
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, _), core(settings) as (other, _):
        running = asyncio.create_task(ask(engine, "hello", agent="b"))
        await model.reached.wait()
        waiting = await engine.submit(request("one"))
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        await until(lambda: engine._ownership.has(agent.key))  # it waits for the slot
        proxy = other._ownership.proxy
        taken = await other.store.acquire(agent.key, proxy, dead=(engine._instances.id,))
        assert isinstance(taken, Granted)
        if ends == "cancelled":
            assert await engine.cancel("local", "a", None) == [waiting.turn_id]
        else:
            await engine._ownership._renew()
            with pytest.raises(LeaseLost):
                await waiting.turn()
        assert [turn.status for turn in await turns(engine)] == ["cancelled" if ends == "cancelled" else "failed"]
        assert (await ask(other, "two")).status == "completed"
        model.open.set()
        await running


class SlowToNote(SqliteStore):
    """That a turn failed is stored late: behind all that goes on meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.leaving = asyncio.Event()

    async def fail(self, *given: Any, **named: Any) -> Turn:
        await self.leaving.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        return await super().fail(*given, **named)


async def test_how_a_turn_ended_is_stored_before_its_agent_is_handed_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = Model(), SlowToNote(settings.var / FILE)
    model.faults = [UpstreamError("overloaded")]
    model.open.clear()
    engine = Engine(settings, store, MemoryBackend(model))
    leave = engine._ownership._flush

    async def noted(agent: Agent, lease: Lease) -> None:
        store.leaving.set()
        await leave(agent, lease)

    monkeypatch.setattr(engine._ownership, "_flush", noted)
    await engine.start()
    try:
        async with core(settings) as (other, _):
            failing = asyncio.create_task(ask(engine, "one"))
            await model.reached.wait()
            second = await other.submit(request("two"))
            model.open.set()
            with pytest.raises(UpstreamError):
                await failing
            assert (await second.turn()).status == "completed"
            assert [(turn.status, (turn.error or {}).get("code")) for turn in await turns(engine)] == [
                ("failed", "upstream_error"), ("completed", None),
            ]  # fmt: skip
    finally:
        store.leaving.set()
        model.open.set()
        await engine.stop()


class TakenOver(SqliteStore):
    """Another proxy is granted every lease once `lost` is set."""

    lost = False
    told = 0

    async def renew(self, proxy: Proxy) -> list[HeldLease]:
        if not self.lost:
            return await super().renew(proxy)
        self.told += 1
        return []


@pytest.mark.parametrize("notices", ["as it wakes up", "while the process is put away"])
async def test_a_turn_whose_process_the_new_holder_ended_says_that_the_agent_was_taken_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, notices: str
) -> None:
    """Not that its CLI ended: a client that hears of the takeover sends its request again."""
    settings = settings.model_copy(update={"lease": 0.3})
    store = TakenOver(settings.var / FILE)

    async def ended(_path: Sequence[Message]) -> Sequence[Block]:
        store.lost = True
        if notices == "as it wakes up":
            time.sleep(settings.lease)  # noqa: ASYNC251  # the whole proxy is paused
        raise UpstreamError("the CLI ended")

    class PutsAwaySlowly(MemoryBackend):
        async def prepare(self, job: Job) -> Execution | Adoptable:
            execution = await super().prepare(job)

            async def discard(*, owned: bool) -> None:
                if notices != "as it wakes up":
                    await until(lambda: store.told > 0)

            monkeypatch.setattr(execution, "discard", discard)
            return execution

    engine = Engine(settings, store, PutsAwaySlowly(ended))
    await engine.start()
    try:
        with pytest.raises(LeaseLost, match="another proxy has taken this agent over"):
            async with asyncio.timeout(60):
                await ask(engine, "one")
    finally:
        await engine.stop()


class Pauses(SqliteStore):
    """The heartbeat of a proxy that is paused while `goes_on` is not set."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.var / FILE)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def renew(self, proxy: Proxy) -> list[HeldLease]:
        await self.goes_on.wait()
        return await super().renew(proxy)


class SaysSome(MemoryBackend):
    """The model's first words come out, the rest does not: the proxy is paused."""

    def __init__(self, words: str, store: Pauses) -> None:
        super().__init__()
        self.words = words
        self.store = store
        self.said = asyncio.Event()

    async def prepare(self, job: Job) -> Execution | Adoptable:
        execution = await super().prepare(job)

        async def say() -> AsyncGenerator[Event, None]:
            if self.words:
                yield BlockStart(0, {"type": "text", "text": ""})
                yield BlockDelta(0, {"type": "text_delta", "text": self.words})
            self.store.goes_on.clear()
            self.said.set()
            await asyncio.Event().wait()

        object.__setattr__(execution, "say", say)
        return execution


@pytest.mark.parametrize("words", ["", "an", "an answer", "something else"])
async def test_an_answer_that_the_new_holder_found_whole_is_what_the_paused_proxys_client_hears(
    settings: Settings, words: str
) -> None:
    """It is on the path: a client that heard of a failure would not know that the model is told of it."""
    settings = settings.model_copy(update={"lease": 0.5})
    store = Pauses(settings)
    backend = SaysSome(words, store)
    first = Engine(settings, store, backend)
    await first.start()
    try:
        answer = await first.submit(request("one"))
        await backend.said.wait()
        (turn,) = await turns(first)
        session = Session(str(turn.session_id), turn.agent_key, turn.id, "", "memory", 1.0)
        whole = ({"type": "text", "text": "an answer"}, {"type": "text", "text": "and more"})
        started = Link(None, session.id, turn.id, "started", {}, 1.0)
        kept = KeptTurn((Record("{}"),), session, (started,))
        left = replace(turn, output=whole, stop_reason="end_turn"), kept
        async with core(settings, left={turn.id: left}) as (second, _):
            async with asyncio.timeout(60):
                two = await ask(second, "two")
            store.goes_on.set()
            heard = ""
            async with asyncio.timeout(60):
                try:
                    async for event in answer.events():
                        if isinstance(event, BlockDelta):
                            heard += str(event.delta["text"])
                    finished = await answer.turn()
                    answer.acknowledge()
                    assert (finished.output, heard) == (whole, "an answerand more")
                except LeaseLost:
                    assert words == "something else"  # two answers in one would be worse
                finally:
                    answer.leave()
            assert [(one.id, one.status) for one in await turns(second)] == [
                (turn.id, "completed"), (two.id, "completed"),
            ]  # fmt: skip
            assert two.parent_id == turn.id
    finally:
        store.goes_on.set()
        await first.stop()


class ToldMeanwhile(SqliteStore):
    """Somebody writes the agent, under the same lease, between a turn's acceptance and its beginning."""

    engine: Engine | None = None

    async def accept(self, turn: Turn, **beside: Any) -> tuple[Turn, AgentState | None]:
        accepted = await super().accept(turn, **beside)
        if self.engine is not None:
            agent = await self.agent_by_key(turn.agent_key)
            assert agent is not None
            async with self.engine._ownership.hold(agent):
                brought = imported_turns(agent, 1)
                await self.import_turns(brought, brought[-1].turn.id)
        return accepted


async def test_a_turn_goes_on_from_what_was_written_between_its_acceptance_and_its_beginning(
    settings: Settings,
) -> None:
    store = ToldMeanwhile(settings.var / FILE)
    engine = Engine(settings, store, MemoryBackend())
    await engine.start()
    try:
        await ask(engine, "one")
        await ask(engine, "two")
        one, two = await turns(engine)
        assert two.parent_id == one.id
        store.engine = engine
        await ask(engine, "three")
        three, brought = (await turns(engine))[2:]
        assert (brought.origin, three.parent_id) == ("imported", brought.id)
    finally:
        await engine.stop()


async def test_a_lease_is_not_unused_while_something_of_its_former_holder_is_to_be_settled(tmp_path: Path) -> None:
    settled: list[Lease] = []

    async def settle(_agent: Agent, lease: Lease) -> None:
        settled.append(lease)
        if len(settled) == 1:
            raise StoreUnavailable("database or disk is full: free space on its disk")

    async def nothing(*_given: object) -> None: ...

    async with opened(lambda: SqliteStore(tmp_path / FILE)) as store:
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        assert isinstance(await store.acquire(agent.key, Proxy("gone", "here", -1.0)), Granted)
        own = Ownership(
            store, Instances(tmp_path), 60.0, settle=settle, flush=nothing, retire=nothing,
            lease_lost=lambda _key: None, busy=lambda: False, in_lane=lambda _key: False, end=lambda *_: None,
        )  # fmt: skip
        with pytest.raises(StoreUnavailable):
            async with own.hold(agent):
                pass
        assert own.has(agent.key)
        assert own.unused(agent.key) is None
        (tmp_path / RUN).mkdir()
        async with own.hold(agent):
            assert own.unused(agent.key) is None
        unused = own.unused(agent.key)
        assert unused is not None
        for first in (True, False):
            async with own.hold(agent):
                assert own.not_used_since(unused) is first


class Looked(SqliteStore):
    looks = 0

    async def asked(self, proxy_id: str) -> PeerRequests:
        self.looks += 1
        return await super().asked(proxy_id)


async def test_a_lease_is_not_handed_over_between_two_turns_of_a_lane(tmp_path: Path) -> None:
    """The second would find its process ended."""
    in_lane, retired = True, list[str]()

    async def nothing(*_given: object) -> None: ...

    async def retire(agent: Agent) -> None:
        retired.append(agent.agent_id)

    (tmp_path / RUN).mkdir()
    beside = Instances(tmp_path)
    beside.enter()
    store = Looked(tmp_path / FILE)
    async with opened(lambda: store):
        agent = await store.ensure_agent("local", "a", "local-a", named=True, now=1.0)
        own = Ownership(
            store, Instances(tmp_path), 0.3, settle=nothing, flush=nothing, retire=retire,
            lease_lost=lambda _key: None, busy=lambda: False, in_lane=lambda _key: in_lane, end=lambda *_: None,
        )  # fmt: skip
        async with own.hold(agent):
            pass
        assert isinstance(await store.acquire(agent.key, Proxy(beside.id, "here", 60.0)), LeaseHeld)
        handing_over = asyncio.create_task(own.serve_requests())
        await until(lambda: store.looks > 2)
        assert own.has(agent.key)
        assert not retired
        in_lane = False
        await until(lambda: not own.has(agent.key))
        handing_over.cancel()
        await asyncio.wait([handing_over])
    assert retired == ["a"]


class Waited(SqliteStore):
    waits = 0

    async def until_asked(self, proxy_id: str, longest: float) -> None:
        self.waits += 1
        await super().until_asked(proxy_id, longest)


class Looking(Instances):
    looks = 0

    def others(self) -> list[str]:
        self.looks += 1
        return super().others()


async def test_a_proxy_without_peers_waits_for_no_question_until_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look 20 times a second cost half of what an idle proxy took."""

    async def nothing(*_given: object) -> None: ...

    monkeypatch.setattr(ownership, "POLL_ALONE", 0.001)
    (tmp_path / RUN).mkdir()
    store, here, beside = Waited(tmp_path / FILE), Looking(tmp_path), Instances(tmp_path)
    async with opened(lambda: store):
        own = Ownership(
            store, here, 0.3, settle=nothing, flush=nothing, retire=nothing, lease_lost=lambda _key: None,
            busy=lambda: True, in_lane=lambda _key: False, end=lambda *_: None,
        )  # fmt: skip
        handing_over = asyncio.create_task(own.serve_requests())
        await until(lambda: here.looks > 3)
        assert store.waits == 1
        beside.enter()
        await until(lambda: store.waits > 2)
        handing_over.cancel()
        await asyncio.wait([handing_over])


class Paused(SqliteStore):
    """A store of several hosts, two hours ahead of this one. `pauses`: seconds after each reading of its clock in which
    the proxy did not run."""

    def __init__(self, path: Path, pauses: Sequence[float]) -> None:
        super().__init__(path)
        self.steady = 1000.0
        self._pauses = iter(pauses)

    async def clock(self) -> float:
        told = self.steady + 7200.0
        self.steady += next(self._pauses)
        return told


@pytest.mark.parametrize("pauses", [(0.0, 60.0), (60.0, 0.0), (60.0, 0.0, 60.0)])
async def test_a_pause_while_the_stores_clock_is_read_does_not_put_the_clock_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: Sequence[float]
) -> None:
    store = Paused(tmp_path / FILE, pauses)
    monkeypatch.setattr(ownership, "_steady", lambda: store.steady)
    instances = Instances(tmp_path, store)
    for _ in pauses:
        await instances.set_clock()
    assert instances.now() == store.steady + 7200.0


def test_the_steady_clock_of_leases_runs_on_in_sleep(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(time, "CLOCK_MONOTONIC_RAW", 4, raising=False)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: float(asked.append(clock) or 7))  # type: ignore[func-returns-value]
    assert ownership.steady_clock()() == 7.0
    assert asked == [4]
    monkeypatch.setattr(sys, "platform", "linux")  # and CLOCK_BOOTTIME is not there
    assert ownership.steady_clock() is time.monotonic
