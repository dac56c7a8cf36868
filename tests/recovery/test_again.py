"""The same request once more: attached, replayed or run again, but never twice in the conversation.

What is interrupted, and what is left off a session, is tried on the real CLI; the rest no CLI decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.domain.models import BlockDelta
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Answer
from cli_session_proxy.errors import InvalidRequest, ProxyError, TurnCancelled
from turnfault.provider.script import Fail, HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, heard, request, running
from ..without_cli import running_without_cli
from .test_kill import turns_of
from .test_several_proxies import reached


async def undelivered(engine: Engine, said: str, **more: Any) -> str:
    """A turn whose client leaves with the answer there, unacknowledged."""
    answer = await engine.submit(request(said, **more))
    turn = await answer.turn()
    answer.leave()
    return turn.id


async def first_delta(answer: Answer) -> None:
    async for event in answer.events():
        if isinstance(event, BlockDelta):
            return


async def test_a_key_is_replayed_after_a_restart_and_belongs_to_one_body(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    async with running_without_cli(settings, upstream) as engine:
        first = await ask(engine, "one", idempotency_key="k")
        await ask(engine, "two")
    async with running_without_cli(settings, upstream) as engine:
        again = await ask(engine, "one", idempotency_key="k")
        with pytest.raises(InvalidRequest) as refused:
            await ask(engine, "something else", idempotency_key="k")
        assert refused.value.param == "Idempotency-Key"
        await ask(engine, "three")
    assert again.id == first.id
    assert heard(upstream) == ["one", "two", "three"]


async def test_a_key_is_forgotten_after_its_time(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with running_without_cli(make_settings(idempotency_hours=1e-9), upstream) as engine:
        first = await ask(engine, "one", idempotency_key="k")
        again = await ask(engine, "one", idempotency_key="k")
    assert first.id != again.id
    assert heard(upstream) == ["one", "one"]


async def test_the_same_request_twice_at_once_is_one_turn_with_a_key_and_two_without(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        one, two = await asyncio.gather(*(ask(engine, "one", idempotency_key="k") for _ in range(2)))
        assert one.id == two.id
        assert heard(upstream) == ["one"]
        await asyncio.gather(*(ask(engine, "ok") for _ in range(2)))
    assert heard(upstream) == ["one", "ok", "ok"]


async def test_a_clients_own_retry_is_the_same_turn_whatever_became_of_it(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("slow", gate)
    upstream.when("broken", Fail(400), times=None)
    async with running_without_cli(make_settings(), upstream) as engine:
        first = await engine.submit(request("slow"))
        await reached(gate)
        attached = await engine.submit(request("slow", is_retry=True))
        gate.open()
        assert (await first.turn()).id == (await attached.turn()).id
        first.leave()
        attached.acknowledge()
        assert (await ask(engine, "slow", is_retry=True)).id == first.turn_id
        with pytest.raises(ProxyError):
            await ask(engine, "broken")
        upstream.clear()
        once, twice = await asyncio.gather(*(ask(engine, "broken", is_retry=True) for _ in range(2)))
        assert once.id == twice.id
        turns = await turns_of(engine)
    assert heard(upstream) == ["slow", "broken"]
    assert [[entry["status"] for entry in turn.attempts] for turn in turns] == [["completed"], ["failed", "completed"]]


@pytest.mark.parametrize("when", ["before the first byte", "mid-stream"])
async def test_who_comes_back_in_time_is_attached_without_saying_that_it_retries(
    when: str, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply(after=0 if when == "before the first byte" else 1)
    upstream.when("one", gate)
    async with running_without_cli(make_settings(disconnect_grace=60.0), upstream) as engine:
        answer = await engine.submit(request("one"))
        await reached(gate)
        if when == "mid-stream":
            async with asyncio.timeout(60):
                await first_delta(answer)
        answer.leave()
        again = await engine.submit(request("one"))
        assert again.turn_id == answer.turn_id
        assert again.replayed
        gate.open()
        await again.turn()
        again.acknowledge()
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]


async def test_a_turn_that_nobody_comes_back_for_is_interrupted(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("one", gate)
    async with running(make_settings(claude_bin=claude_2, disconnect_grace=0.1)) as engine:
        answer = await engine.submit(request("one"))
        await reached(gate)
        answer.leave()
        with pytest.raises(TurnCancelled, match="every client has left"):
            await answer.turn()
        await ask(engine, "one")
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]


async def test_an_undelivered_answer_is_claimed_by_the_same_request_even_after_a_restart(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    async with running_without_cli(settings, upstream) as engine:
        first = await undelivered(engine, "one")
    async with running_without_cli(settings, upstream) as engine:
        assert (await ask(engine, "one")).id == first
        await ask(engine, "two")
        # Delivered by now: the same words are new ones.
        assert (await ask(engine, "one")).id != first
    assert heard(upstream) == ["one", "two", "one"]


@pytest.mark.parametrize("key", rest_in_full(None, "k"))
async def test_another_request_leaves_an_undelivered_answer_off_and_then_the_same_words_are_new(
    key: str | None, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        left = await undelivered(engine, "one", idempotency_key=key)
        gate = HeldReply()
        upstream.when("two", gate)
        other = asyncio.create_task(ask(engine, "two"))
        await reached(gate)
        # "two" runs without it, so this client must not be given an answer that the conversation does not hold.
        again = asyncio.create_task(ask(engine, "one", idempotency_key=key))
        gate.open()
        await other
        assert (await again).id != left
        assert heard(upstream) == ["two", "one"]
        await ask(engine, "three")
    assert heard(upstream) == ["two", "one", "three"]


async def test_a_replay_that_is_cut_does_not_take_a_delivered_answer_back(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        await ask(engine, "one", idempotency_key="k")
        replayed = await engine.submit(request("one", idempotency_key="k"))
        replayed.leave()
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]


async def test_a_cancellation_that_comes_during_the_commit_comes_too_late(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running_without_cli(make_settings(), upstream) as engine:
        commit = engine.store.commit
        answer = await engine.submit(request("one"))

        async def slow_commit(*args: Any, **how: Any) -> object:
            answer.cancel()
            await asyncio.sleep(0)
            return await commit(*args, **how)

        engine.store.commit = slow_commit  # type: ignore[method-assign,assignment]
        assert (await answer.turn()).status == "completed"
        answer.acknowledge()
        engine.store.commit = commit  # type: ignore[method-assign]
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]
