"""The core on the in-memory backend: order, retries, leases and crashes in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cli_session_proxy.backends.base import Lost
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import (
    Agent,
    Block,
    Link,
    Message,
    Placed,
    Record,
    Session,
    Tool,
    Turn,
    TurnOptions,
)
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import LeaseLost, ProxyError, TurnCancelled, UpstreamError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import KeptTurn, Proxy

from ..memory_backend import MemoryBackend, echo
from ..talking import ask, request, text


class Model:
    """Answers as `echo`; waits while `open` is not set, and fails as often as `faults` says."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.reached = asyncio.Event()
        self.faults: list[Exception] = []
        self.calls: list[Sequence[Block]] = []

    async def __call__(self, path: Sequence[Message]) -> Sequence[Block]:
        self.reached.set()
        await self.open.wait()
        if self.faults:
            raise self.faults.pop(0)
        return self.calls.pop(0) if self.calls else await echo(path)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", disconnect_grace=0.01)


@asynccontextmanager
async def core(
    settings: Settings, model: Model | None = None, left: dict[str, tuple[Turn, KeptTurn]] | None = None
) -> AsyncIterator[tuple[Engine, MemoryBackend]]:
    """An engine on its own backend. `left`: what a crash left whole, by turn."""
    backend = MemoryBackend(model or Model())
    backend.left = left or {}
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        yield engine, backend
    finally:
        await engine.stop()


def words(path: Sequence[Message]) -> list[str]:
    return [block["text"] for message in path if message.role == "user" for block in message.content]


async def turns(engine: Engine) -> list[Turn]:
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    return [turn async for turn in engine.store.turns(agent.key)]


async def test_a_conversation_is_one_path_and_each_turn_knows_its_parent(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        said = [await ask(engine, word) for word in ("one", "two", "three")]
        kept = await turns(engine)
    assert words(backend.seen[-1]) == ["one", "two", "three"]
    assert [text(turn) for turn in said] == ["You said: one (1)", "You said: two (2)", "You said: three (3)"]
    assert [turn.parent_id for turn in kept] == [None, said[0].id, said[1].id]
    assert [turn.continuity for turn in kept] == ["started", "warm", "warm"]


async def test_requests_at_once_to_one_agent_run_in_the_order_of_acceptance(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        await asyncio.gather(*(ask(engine, str(n)) for n in range(10)))
        accepted = [words(turn.input)[0] for turn in await turns(engine)]
    assert sorted(accepted) == [str(n) for n in range(10)]
    assert words(backend.seen[-1]) == accepted


async def test_a_lost_exchange_is_repeated_once_and_then_told(settings: Settings) -> None:
    model = Model()
    async with core(settings, model) as (engine, backend):
        model.faults = [Lost("it died", UpstreamError("it died"))]
        turn = await ask(engine, "one")
        assert [entry["status"] for entry in turn.attempts] == ["failed", "completed"]
        model.faults = [Lost("it died", UpstreamError("it died"))] * 2
        with pytest.raises(UpstreamError, match="it died"):
            await ask(engine, "two")
        await ask(engine, "three")
    assert words(backend.seen[-1]) == ["one", "three"]


async def test_a_turn_keeps_what_was_asked_of_it_and_who_answered(settings: Settings) -> None:
    tool = Tool("weather")
    async with core(settings) as (engine, _):
        await ask(engine, "one", tools=(tool,), stop=("never said",))
        await ask(engine, "two", keep_system=False)
        first, second = await turns(engine)
    assert first.options == TurnOptions(tools=(tool,), stop=("never said",))
    assert second.options == TurnOptions()
    assert first.placed == Placed("head", messages=1, matched=0, imported=0, delta=True)
    assert not second.placed.delta
    assert (first.backend, first.model, first.answered_by) == ("memory", "sonnet", "sonnet")
    assert first.evidence == Evidence(records="memory")


async def test_a_stop_sequence_is_kept_with_the_answer(settings: Settings) -> None:
    async with core(settings) as (engine, _):
        turn = await ask(engine, "one stop two", stop=("stop",))
        (kept,) = await turns(engine)
    assert (text(turn), kept.stop_reason, kept.stop_sequence) == ("You said: one ", "stop_sequence", "stop")


async def test_calls_of_the_client_are_answered_by_the_next_turn(settings: Settings) -> None:
    model = Model()
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    model.calls = [(call,)]
    async with core(settings, model) as (engine, backend):
        first = await ask(engine, "where")
        assert (first.status, first.stop_reason) == ("requires_action", "tool_use")
        model.calls = [({"type": "text", "text": "sunny"},)]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}
        second = await ask(engine, Message("user", (result,)))
    assert (second.status, text(second), second.parent_id) == ("completed", "sunny", first.id)
    assert backend.seen[-1][-1].content == (result,)


async def test_a_failed_turn_never_moves_the_head(settings: Settings) -> None:
    model = Model()
    async with core(settings, model) as (engine, _):
        first = await ask(engine, "one")
        model.faults = [UpstreamError("no")]
        with pytest.raises(UpstreamError):
            await ask(engine, "two")
        third = await ask(engine, "three")
    assert third.parent_id == first.id


async def test_a_turn_that_nobody_waits_for_is_cancelled(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, _):
        answer = await engine.submit(request("one"))
        await model.reached.wait()
        answer.leave()
        with pytest.raises(TurnCancelled, match="every client has left"):
            await answer.turn()


async def test_a_holder_that_lost_its_lease_keeps_nothing_and_tells_its_client(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    settings = settings.model_copy(update={"lease": 0.5})  # so long the new holder may take to settle the turn
    async with core(settings, model) as (engine, _):
        answer = await engine.submit(request("one"))
        await model.reached.wait()
        (turn,) = await turns(engine)
        taken = await engine.store.acquire(turn.agent_key, Proxy("other", "here", 60.0), dead=(str(turn.instance),))
        model.open.set()
        with pytest.raises(LeaseLost):
            await answer.turn()
        answer.leave()
        assert (await turns(engine))[0].status == "running"  # the new holder settles it
        assert taken.__class__.__name__ == "Granted"


async def test_another_proxy_is_asked_for_the_agent_and_lets_go_of_it(settings: Settings) -> None:
    async with core(settings) as (one, first), core(settings) as (two, second):
        await ask(one, "one")
        await ask(two, "two")
        assert first.retired == ["a"]
        await ask(one, "three")
        assert second.retired == ["a"]
        assert [turn.status for turn in await turns(one)] == ["completed"] * 3


async def test_what_a_crash_left_whole_is_given_to_the_same_request(settings: Settings, tmp_path: Path) -> None:
    model = Model()
    model.open.clear()
    backend = MemoryBackend(model)
    engine = Engine(settings, backend=backend)
    await engine.start()
    answer = await engine.submit(request("one"))
    await model.reached.wait()
    (turn,) = await turns(engine)
    session = Session(str(turn.session_id), turn.agent_key, turn.id, "", "memory", 1.0)
    whole = ({"type": "text", "text": "from the transcript"},)
    started = Link(None, session.id, turn.id, "started", {}, 1.0)
    kept = KeptTurn((Record("{}"),), session, (started,))
    left = replace(turn, output=whole, stop_reason="end_turn"), kept
    engine._instances.leave(settled=False)  # as the kernel does when a proxy is killed
    async with core(settings, left={turn.id: left}) as (survivor, _):
        again = await ask(survivor, "one")
        assert (again.id, text(again)) == (turn.id, "from the transcript")
        model.open.set()
        with pytest.raises(ProxyError):
            await answer.turn()
        answer.leave()
    await engine.stop()


async def test_what_a_crash_left_open_is_run_again_as_the_same_turn(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    engine = Engine(settings, backend=MemoryBackend(model))
    await engine.start()
    answer = await engine.submit(request("one"))
    await model.reached.wait()
    (turn,) = await turns(engine)
    engine._instances.leave(settled=False)
    async with core(settings) as (survivor, other):
        again = await ask(survivor, "one")
        assert again.id == turn.id
        assert words(other.seen[-1]) == ["one"]
        model.open.set()
        kept = await answer.turn()  # its own was refused
        assert (kept.id, kept.output, kept.attempts) == (again.id, again.output, again.attempts)
        answer.leave()
    await engine.stop()


async def test_an_agent_that_is_deleted_twice_at_once_leaves_the_next_one_its_files(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (engine, _):
        await ask(engine, "one")
        agent, named_by, looks = engine.store.agent, engine.store.named_by, [asyncio.Event(), asyncio.Event()]
        removed: list[str] = []

        async def looked(owner: str, agent_id: str) -> Agent | None:
            found = await agent(owner, agent_id)
            next(look for look in looks if not look.is_set()).set()
            return found

        async def held(key: int) -> list[str]:
            await looks[1].wait()
            return await named_by(key)

        monkeypatch.setattr(engine.store, "agent", looked)
        monkeypatch.setattr(engine.store, "named_by", held)
        monkeypatch.setattr(engine._sandboxes, "remove", removed.append)
        deleting = [asyncio.create_task(engine.delete("local", "a")) for _ in looks]
        assert sorted(await asyncio.gather(*deleting)) == [False, True]
        assert len(removed) == 1


async def test_a_heartbeat_after_a_deletion_ends_no_process_of_the_next_agent_of_that_name(settings: Settings) -> None:
    """Its first turn failed, because its process works in the same directory."""
    async with core(settings) as (engine, backend):
        await ask(engine, "one")
        deleted = await engine.store.agent("local", "a")
        assert deleted is not None
        assert await engine.delete("local", "a")
        await ask(engine, "one")
        await engine._ownership._renew()
        assert not engine._ownership.has(deleted.key)
        await engine._ownership._retire_taken_over(deleted)
        assert backend.retired == []
