"""One turn from its lane to its end, on the in-memory backend: limits, refusals, cancellations."""

from __future__ import annotations

import asyncio

import pytest

from cli_session_proxy.backends.base import Adoptable, Execution, Job, Lost
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest, QueueFull, TurnCancelled, TurnTimeout, UpstreamError
from cli_session_proxy.settings import Profile, Settings

from ..memory_backend import MemoryBackend
from ..talking import ask, request
from ..until import until
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


async def test_a_silent_model_ends_the_turn_and_the_next_one_goes_on_without_it(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings.model_copy(update={"idle_timeout": 0.05}), model) as (engine, backend):
        with pytest.raises(TurnTimeout, match=r"nothing came from the model for 0\.05 s"):
            await ask(engine, "one")
        model.open.set()
        second = await ask(engine, "two")
        failed, _ = await turns(engine)
    assert (failed.status, second.parent_id) == ("failed", None)
    assert words(backend.seen[-1]) == ["two"]


async def test_a_turn_that_takes_too_long_is_ended_and_says_so(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings.model_copy(update={"turn_timeout": 0.05}), model) as (engine, _):
        with pytest.raises(TurnTimeout, match=r"the turn took longer than 0\.05 s"):
            await ask(engine, "one")
        (turn,) = await turns(engine)
    assert (turn.status, turn.error and turn.error["code"]) == ("failed", "turn_timeout")


async def test_each_attempt_has_a_frame_of_its_own(settings: Settings) -> None:
    model = Model()
    async with core(settings, model) as (engine, _):
        model.faults = [Lost("it died", UpstreamError("it died"))]
        turn = await ask(engine, "one")
    frames = [attempt["frame_uuid"] for attempt in turn.attempts]
    assert len(frames) == len(set(frames)) == 2
    assert turn.frame_uuid == frames[-1]


class Clumsy(MemoryBackend):
    """What it holds for a turn cannot be put away."""

    async def prepare(self, job: Job) -> Execution | Adoptable:
        execution = await super().prepare(job)
        assert not isinstance(execution, Adoptable)

        async def fails(**_given: bool) -> None:
            raise IsADirectoryError(21, "Is a directory")

        execution.release = execution.discard = fails  # type: ignore[method-assign]
        return execution


async def test_an_answer_whose_process_cannot_be_put_away_stays_on_the_path(settings: Settings) -> None:
    """Its client has not said yet that it has it."""
    engine = Engine(settings, backend=Clumsy(Model()))
    await engine.start()
    try:
        first = await engine.submit(request("one"))
        await first.turn()
        second = await ask(engine, "two")
        first.acknowledge()
        assert words([message for turn in await engine.store.path(second.id) for message in turn.input]) == [
            "one",
            "two",
        ]
    finally:
        await engine.stop()


async def test_why_a_turn_failed_is_told_although_its_process_cannot_be_put_away(settings: Settings) -> None:
    model = Model()
    model.faults = [UpstreamError("overloaded")]
    engine = Engine(settings, backend=Clumsy(model))
    await engine.start()
    try:
        with pytest.raises(UpstreamError, match="overloaded"):
            await ask(engine, "one")
    finally:
        await engine.stop()


async def test_a_full_lane_refuses_and_keeps_what_it_accepted(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings.model_copy(update={"lane_limit": 2}), model) as (engine, backend):
        answers = [await engine.submit(request("first")), await engine.submit(request("second"))]
        with pytest.raises(QueueFull) as refused:
            await engine.submit(request("third"))
        assert refused.value.retry_after
        model.open.set()
        for answer in answers:
            await answer.turn()
            answer.acknowledge()
    assert words(backend.seen[-1]) == ["first", "second"]


async def test_a_queued_turn_can_be_cancelled_and_is_never_sent(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, backend):
        first = await engine.submit(request("first"))
        queued = await engine.submit(request("never"))
        queued.cancel()
        with pytest.raises(TurnCancelled):
            await queued.turn()
        queued.leave()
        model.open.set()
        await first.turn()
        first.acknowledge()
        await ask(engine, "last")
    assert [words(path) for path in backend.seen] == [["first"], ["first", "last"]]


async def test_a_request_whose_last_message_is_an_answer_is_refused(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        with pytest.raises(InvalidRequest):
            await ask(engine, "one", "an answer")
    assert backend.seen == []


async def test_a_profile_with_tools_needs_a_named_agent(settings: Settings) -> None:
    tools = {"profiles": {"coder": Profile(tools=("Read",))}, "profile": "coder"}
    async with core(settings.model_copy(update=tools)) as (engine, backend):
        with pytest.raises(InvalidRequest) as refused:
            await ask(engine, "hello", agent=None)
    assert refused.value.param == "agent_id"
    assert backend.seen == []


async def test_a_cancelled_turn_never_reaches_the_model_again(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, backend):
        answer = await engine.submit(request("one"))
        await model.reached.wait()
        answer.cancel()
        with pytest.raises(TurnCancelled):
            await answer.turn()
        answer.leave()
        model.open.set()
        await ask(engine, "two")
        assert [turn.status for turn in await turns(engine)] == ["cancelled", "completed"]
    assert words(backend.seen[-1]) == ["two"]


async def test_agents_do_not_wait_for_each_other(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, backend):
        waiting = await engine.submit(request("slow", agent="a"))
        await model.reached.wait()
        other = asyncio.create_task(ask(engine, "quick", agent="b"))
        await until(lambda: len(backend.seen) == 2)  # the second path reaches the model beside the first
        model.open.set()
        await other
        await waiting.turn()
        waiting.acknowledge()
