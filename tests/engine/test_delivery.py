"""Whether an answer arrived, kept as clients come and go, on the in-memory backend."""

from __future__ import annotations

import asyncio

import pytest

from cli_session_proxy.errors import Interrupted, TurnCancelled
from cli_session_proxy.settings import Settings

from ..talking import ask, request
from ..until import until
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


async def test_an_acknowledged_answer_is_delivered_and_the_next_turn_continues_it(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        await ask(engine, "one")

        async def delivered() -> bool:
            return (await turns(engine))[0].delivery == "delivered"

        await until(delivered)
        await ask(engine, "two")
    assert words(backend.seen[-1]) == ["one", "two"]


async def test_an_answer_that_nobody_took_is_left_off_the_path(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        answer = await engine.submit(request("one"))
        await answer.turn()
        answer.leave()

        async def undelivered() -> bool:
            return (await turns(engine))[0].delivery == "undelivered"

        await until(undelivered)
        await ask(engine, "two")
    assert words(backend.seen[-1]) == ["two"]


async def test_nothing_is_run_for_a_client_that_left_before_its_request_was_accepted(settings: Settings) -> None:
    looks: list[int] = []

    def has_left() -> bool:
        looks.append(engine.queued())
        return True

    async with core(settings) as (engine, backend):
        await ask(engine, "one")
        with pytest.raises(Interrupted, match="nothing was run"):
            await engine.submit(request("two"), has_left)
        assert looks == [1]  # at the last moment: it had its place in the lane
        assert engine.queued() == 0
        assert [words(turn.input) for turn in await turns(engine)] == [["one"]]
        await ask(engine, "two")
    assert [words(seen) for seen in backend.seen] == [["one"], ["one", "two"]]


async def test_the_same_request_claims_an_answer_that_nobody_took(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        answer = await engine.submit(request("one"))
        first = await answer.turn()
        answer.leave()

        async def undelivered() -> bool:
            return (await turns(engine))[0].delivery == "undelivered"

        await until(undelivered)
        again = await ask(engine, "one")
    assert again.id == first.id
    assert len(backend.seen) == 1


async def test_a_client_that_comes_back_in_time_keeps_the_turn_running(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings.model_copy(update={"disconnect_grace": 30.0}), model) as (engine, backend):
        answer = await engine.submit(request("one"))
        await model.reached.wait()
        answer.leave()
        back = await engine.submit(request("one"))
        assert back.turn_id == answer.turn_id
        model.open.set()
        await back.turn()
        back.acknowledge()
        assert [turn.status for turn in await turns(engine)] == ["completed"]
    assert len(backend.seen) == 1


async def test_a_turn_that_a_client_of_another_proxy_waits_for_is_not_given_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (one, _), core(settings) as (two, _):
        answer = await one.submit(request("one"))
        await model.reached.wait()
        elsewhere = asyncio.create_task(ask(two, "one", is_retry=True))

        async def followed() -> bool:
            return bool(await one.store.followers(answer.turn_id))

        await until(followed)
        followers, looked = one.store.followers, asyncio.Event()

        async def noting(turn_id: str) -> list[str]:
            looked.set()
            return await followers(turn_id)

        monkeypatch.setattr(one.store, "followers", noting)
        answer.leave()
        await looked.wait()
        model.open.set()
        assert (await elsewhere).id == answer.turn_id


async def test_a_follower_that_has_ended_does_not_keep_a_turn(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, _):
        answer = await engine.submit(request("one"))
        await model.reached.wait()
        await engine.store.follow(answer.turn_id, "gone")
        answer.leave()
        with pytest.raises(TurnCancelled, match="every client has left"):
            await answer.turn()
