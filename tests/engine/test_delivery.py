"""Whether an answer arrived, kept as clients come and go, on the in-memory backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cli_session_proxy.domain.models import Block, CancelledBy, Delivery, Message, Turn
from cli_session_proxy.engine import engine as engines
from cli_session_proxy.engine import live
from cli_session_proxy.engine.attempt import Attempt
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Answer
from cli_session_proxy.errors import ClaudeUnavailable, Interrupted, LeaseLost, StoreUnavailable, TurnCancelled
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Granted, KeptTurn, Lease, Proxy

from .. import memory_backend
from ..talking import ask, request
from ..until import PATIENCE, until
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


async def test_a_background_turn_whose_client_left_while_it_was_accepted_is_not_run(settings: Settings) -> None:
    """It would run on, though the client may have said the same to another proxy that did not know of it yet."""
    looks = iter([False, True])
    async with core(settings) as (engine, backend):
        answer = await engine.submit(request("one", call={"background": True}), lambda: next(looks))
        with pytest.raises(TurnCancelled):
            await answer.turn()
        answer.leave()
        await ask(engine, "two")
    assert [words(seen) for seen in backend.seen] == [["two"]]


async def test_who_comes_back_while_the_turn_is_ended_for_want_of_a_client_has_it_run_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was attached to a turn that nobody could save any more, and was told that every client had left."""
    model = Model()
    model.open.clear()
    async with core(settings, model) as (engine, backend):
        fail, ended = engine.store.fail, engine.ended
        is_ending, goes_on, waits = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def failed(*given: Any, **more: Any) -> Turn:
            is_ending.set()
            await goes_on.wait()
            return await fail(*given, **more)

        async def until_ended(turn_id: str) -> None:
            waits.set()
            await ended(turn_id)

        monkeypatch.setattr(engine.store, "fail", failed)
        monkeypatch.setattr(engine, "ended", until_ended)
        first = await engine.submit(request("one"))
        await model.reached.wait()
        first.leave()
        await is_ending.wait()
        again, waiting = asyncio.create_task(engine.submit(request("one"))), asyncio.create_task(waits.wait())
        await asyncio.wait({again, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        model.open.set()
        goes_on.set()
        turn = await (await again).turn()
        (await again).acknowledge()
        assert (turn.id, turn.status) == (first.turn_id, "completed")
        assert words(backend.seen[-1]) == ["one"]


async def test_an_answer_that_one_client_is_given_is_kept_although_another_one_left_without_it(
    settings: Settings,
) -> None:
    """The second one asked for it again, and left: the next turn went on without an answer that the first one got."""
    async with core(settings) as (engine, backend):
        first = await engine.submit(request("one", idempotency_key="k"))
        await first.turn()
        again = await engine.submit(request("one", idempotency_key="k"))
        assert again.turn_id == first.turn_id
        again.leave()
        await engine.delivery_stored(first.turn_id)
        await ask(engine, "two")
        first.acknowledge()
        assert [words(seen) for seen in backend.seen] == [["one"], ["one", "two"]]


async def test_all_requests_together_wait_once_for_a_note_that_cannot_be_stored(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal requests of an agent are accepted one after the other, and each waited as long as the first one."""

    async def fails(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(live, "NOTED_WITHIN", 0.1)
    async with core(settings) as (engine, _):
        monkeypatch.setattr(engine.store, "set_delivery", fails)
        answer = await engine.submit(request("one"))
        await answer.turn()
        answer.leave()
        monkeypatch.setattr(live, "NOTED_WITHIN", 10 * PATIENCE)
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="what became of the last answer"):
                    await engine.submit(request("one"))


async def test_a_request_waits_only_so_long_while_an_equal_one_is_accepted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ACCEPTED_WITHIN", 0.05)
    async with core(settings) as (engine, backend):
        looked, goes_on = held_up(engine, monkeypatch)
        first = asyncio.create_task(ask(engine, "one"))
        await looked.wait()
        with pytest.raises(StoreUnavailable, match="an equal request"):
            await engine.submit(request("one"))
        goes_on.set()
        await first
    assert [words(path) for path in backend.seen] == [["one"]]


async def test_what_waits_for_an_equal_request_is_not_accepted_any_more_by_a_proxy_that_stops(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was accepted as the one before it ended, and the stop waited for all of them."""
    async with core(settings) as (engine, _):
        looked, goes_on = held_up(engine, monkeypatch)
        first = asyncio.create_task(engine.submit(request("one")))
        await looked.wait()
        others = [asyncio.create_task(engine.submit(request("one"))) for _ in range(3)]
        stopping = asyncio.create_task(engine.stop())
        await until(lambda: not engine.ready)
        goes_on.set()
        await stopping
        await first
        refused = await asyncio.gather(*others, return_exceptions=True)
        assert [type(one) for one in refused] == [ClaudeUnavailable] * 3


def held_up(engine: Engine, patch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The store is slow to look for equal requests: set once it begins, and what it waits for."""
    arrival, looked, goes_on = engine.store.arrival, asyncio.Event(), asyncio.Event()

    async def looks(*of: Any) -> Any:
        looked.set()
        await goes_on.wait()
        return await arrival(*of)

    patch.setattr(engine.store, "arrival", looks)
    return looked, goes_on


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


async def test_the_same_words_again_wait_for_no_disk_to_note_that_the_answer_before_arrived(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (engine, backend):
        note, disk = engine.store.set_delivery, asyncio.Event()

        async def slow(turn_id: str, delivery: Delivery, **how: Any) -> None:
            await disk.wait()
            await note(turn_id, delivery, **how)

        monkeypatch.setattr(engine.store, "set_delivery", slow)
        first = await ask(engine, "one")
        again = asyncio.create_task(ask(engine, "one"))
        await until(again.done)
        disk.set()
        assert (await again).id != first.id
    assert words(backend.seen[-1]) == ["one", "one"]


async def test_a_client_that_leaves_before_its_turn_is_committed_has_left(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that writes side by side may write over what was noted during the commit."""
    async with core(settings) as (engine, backend):
        store, commit = engine.store, engine.store.commit
        submitted = asyncio.Event()

        async def committed(lease: Lease, turn: Turn, kept: KeptTurn | None, **how: Any) -> Turn:
            monkeypatch.setattr(store, "commit", commit)
            await submitted.wait()
            first.leave()

            async def noted() -> bool:
                now = await store.turn(turn.id)
                return now is not None and now.delivery == "undelivered"

            await until(noted)
            return await commit(lease, turn, kept, **how)

        monkeypatch.setattr(store, "commit", committed)
        first = await engine.submit(request("one"))
        submitted.set()
        turn = await first.turn()
        assert turn.delivery == "undelivered"
        again = await engine.submit(request("one"))
        assert (await again.turn()).id == turn.id
        again.acknowledge()
        await ask(engine, "two")
    assert words(backend.seen[-1]) == ["one", "two"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_client_that_comes_back_during_the_commit_gets_the_answer_if_it_is_still_on_the_path(
    goes_on: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was attached, and was given the answer, although another proxy had gone on without it while this one was
    paused behind its commit."""
    async with core(settings.model_copy(update={"disconnect_grace": 30.0})) as (engine, backend):
        store, commit, ended = engine.store, engine.store.commit, engine.ended
        left, waits, again = asyncio.Event(), asyncio.Event(), list[asyncio.Task[Answer]]()

        async def until_ended(turn_id: str) -> None:
            waits.set()
            await ended(turn_id)

        async def committed(lease: Lease, turn: Turn, kept: KeptTurn | None, **how: Any) -> Turn:
            monkeypatch.setattr(store, "commit", commit)
            done = await commit(lease, turn, kept, **how)
            assert done.delivery == "undelivered"
            again.append(asyncio.create_task(engine.submit(request("one"))))
            await until(lambda: again[0].done() or waits.is_set())
            if goes_on:
                granted = await store.acquire(turn.agent_key, Proxy("other", "host", 10.0), dead=(engine.instance_id,))
                assert isinstance(granted, Granted)
                two = replace(turn, id="turn_two", parent_id=None, status="queued", instance="other", fingerprint="2")
                await store.accept(two)
                await store.begin(granted.lease, two, {}, left_off=(turn.id,))
            return done

        async def said(path: Sequence[Message]) -> Sequence[Block]:
            await left.wait()
            return await memory_backend.echo(path)

        backend.model = said
        monkeypatch.setattr(store, "commit", committed)
        monkeypatch.setattr(engine, "ended", until_ended)
        first = await engine.submit(request("one"))
        first.leave()
        await engine.delivery_stored(first.turn_id)
        left.set()
        await until(lambda: bool(again))
        answer = await again[0]
        assert (answer.turn_id == first.turn_id) is not goes_on
        if goes_on:
            with pytest.raises(LeaseLost):  # it is to be sent again
                await answer.turn()
            answer.leave()
        else:
            await answer.turn()
            answer.acknowledge()
    assert len(backend.seen) == 1


async def test_a_client_that_leaves_during_the_commit_takes_no_answer_away_from_a_client_of_another_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (one, _), core(settings) as (two, _):
        commit, again = one.store.commit, list[Answer]()

        async def committed(*given: Any, **how: Any) -> Turn:
            turn = await commit(*given, **how)
            again.append(await two.submit(request("one", is_retry=True)))
            first.leave()
            return turn

        monkeypatch.setattr(one.store, "commit", committed)
        first = await one.submit(request("one"))
        turn = await first.turn()
        await one.delivery_stored(turn.id)
        assert again[0].turn_id == turn.id
        assert [turn.delivery for turn in await turns(one)] == ["uncertain"]
        again[0].acknowledge()


async def test_an_answer_that_was_maybe_kept_is_not_taken_from_a_client_of_another_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (one, _), core(settings) as (two, _):
        commit, fail, again = one.store.commit, one.store.fail, list[Answer]()

        async def lost(*given: Any, **how: Any) -> Turn:
            await commit(*given, **how)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        async def failed(*given: Any, **how: Any) -> Turn:
            again.append(await two.submit(request("one", is_retry=True)))
            monkeypatch.undo()
            return await fail(*given, **how)

        monkeypatch.setattr(one.store, "commit", lost)
        monkeypatch.setattr(one.store, "fail", failed)
        with pytest.raises(StoreUnavailable, match="its answer was not kept"):
            await ask(one, "one")
        await until(lambda: bool(again) and not one._ends.waiting)
        assert [turn.delivery for turn in await turns(one)] == ["uncertain"]
        again[0].acknowledge()


@pytest.mark.parametrize("fails", ["event", "release", "lease"])
async def test_what_fails_behind_a_commit_takes_no_answer_back(
    fails: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process cannot be ended, say, while a slow client is still being given its answer."""

    async def out_of_threads(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async with core(settings) as (engine, backend):
        await ask(engine, "one")
        hold, announce = engine._ownership.hold, Attempt.announce

        @asynccontextmanager
        async def held(*of: Any, **how: Any) -> AsyncIterator[Lease]:
            async with hold(*of, **how) as lease:
                yield lease
            await out_of_threads()

        def published(attempt: Attempt) -> None:
            announce(attempt)
            if attempt.committed:
                raise MemoryError

        with monkeypatch.context() as broken:
            if fails == "event":
                broken.setattr(Attempt, "announce", published)
            if fails == "release":
                broken.setattr(memory_backend._MemoryExecution, "release", out_of_threads)
            if fails == "lease":
                broken.setattr(engine._ownership, "hold", held)
            slow = await engine.submit(request("two"))
            assert (await slow.turn()).status == "completed"
            await engine.ended(slow.turn_id)
        assert (await turns(engine))[1].delivery == "pending"
        await ask(engine, "three")
        slow.acknowledge()
        await ask(engine, "four")
    assert words(backend.seen[-1]) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), StoreUnavailable("the disk is full")])
async def test_a_note_that_fails_behind_a_commit_is_no_failure_of_the_turn_and_its_answer_is_not_left_off(
    error: Exception, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (engine, backend):
        store, commit, submitted, tried = engine.store, engine.store.commit, asyncio.Event(), asyncio.Event()

        async def committed(*given: Any, **how: Any) -> Turn:
            await submitted.wait()
            answer.leave()
            return await commit(*given, **how)

        async def fails(*_: object, **__: object) -> None:
            tried.set()
            raise error

        with monkeypatch.context() as failing:
            failing.setattr(store, "commit", committed)
            failing.setattr(store, "set_delivery", fails)
            answer = await engine.submit(request("one"))
            submitted.set()
            await answer.turn()
            await tried.wait()
            failing.setattr(store, "commit", commit)
            await ask(engine, "two")
            assert words(backend.seen[-1]) == ["one", "two"]
        await engine.delivery_stored(answer.turn_id)  # a note that failed for want of the store is written now
        await ask(engine, "three")
        assert [turn.status for turn in await turns(engine)] == ["completed", "completed", "completed"]
    assert words(backend.seen[-1]) == ["one", "two", "three"]


@pytest.mark.parametrize("by", ["client", "deletion", "stopping", "takeover"])
async def test_a_turn_that_is_cancelled_while_it_is_committed_stays_and_is_answered(
    by: CancelledBy, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(settings) as (engine, backend):
        commit = engine.store.commit

        async def committed(*done: Any, **how: Any) -> Turn:
            turn = await commit(*done, **how)
            engine._live[turn.id].cancel(by)
            await asyncio.sleep(0)
            return turn

        with monkeypatch.context() as cancelling:
            cancelling.setattr(engine.store, "commit", committed)
            await ask(engine, "one")
        await ask(engine, "two")
        assert [turn.status for turn in await turns(engine)] == ["completed", "completed"]
    assert words(backend.seen[-1]) == ["one", "two"]
