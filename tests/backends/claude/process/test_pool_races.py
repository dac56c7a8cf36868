"""What happens to the pool between two awaits: each moment is held still by a gate, none is slept into."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from cli_session_proxy.backends.base import ProcessHooks
from cli_session_proxy.backends.claude.process import memory
from cli_session_proxy.backends.claude.process import pool as pools
from cli_session_proxy.backends.claude.process.child import Launch
from cli_session_proxy.backends.claude.process.memory import FIRST_WEIGHT
from cli_session_proxy.backends.claude.process.pool import CALM, Pool
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.errors import ClaudeUnavailable, QueueFull
from cli_session_proxy.settings import Settings

from ....simulated import FastLoop, still
from ....until import until
from .acting import Actor, Stage, launch


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage().set() as stage:
        yield stage


@asynccontextmanager
async def pooled(stage: Stage, **changes: Any) -> AsyncIterator[Pool]:
    settings = Settings(**{"max_processes": 4, "max_spawns": 4, "max_memory": None, "spares": 0, **changes})
    pool = Pool(
        settings, ProcessHooks(on_exit=stage.on_exit.append), ahead=lambda: (Path("/nowhere"), Path("/nowhere"))
    )
    try:
        yield pool
    finally:
        for gate in stage.gates.values():
            gate.open()
        await pool.close()
        assert not stage.living


async def taken(pool: Pool, wanted: Launch | None = None) -> Actor:
    """The process of this launch; it has said its first word."""
    process, _ = await pool.checkout(wanted or launch())
    process.started.set()
    return cast(Actor, process)


async def idle(pool: Pool, wanted: Launch | None = None) -> Actor:
    actor = await taken(pool, wanted)
    await given(pool, actor)
    return actor


async def given(pool: Pool, actor: Actor) -> None:
    await pool.checkin(cast(ClaudeProcess, actor))


async def spare(pool: Pool) -> Actor:
    """The one that is ready."""
    ready: Callable[[], list[ClaudeProcess]] = lambda: [one for one in pool.table.spares if one.usable]  # noqa: E731
    await until(lambda: bool(ready()))
    return cast(Actor, ready()[0])


async def test_who_waits_for_a_place_gets_it_before_who_comes_later(stage: Stage) -> None:
    async with pooled(stage, max_processes=1) as pool:
        first = await taken(pool)
        waiting = asyncio.create_task(taken(pool))
        await still()
        given_back = asyncio.create_task(given(pool, first))
        later = asyncio.create_task(taken(pool))  # runs before the one that waits has noticed
        await given_back
        second = await asyncio.wait_for(waiting, 60)
        assert not later.done()
        await given(pool, second)
        await asyncio.wait_for(later, 60)


async def test_no_more_idle_ones_end_than_there_are_who_wait(stage: Stage) -> None:
    async with pooled(stage) as pool:
        actors = [await idle(pool) for _ in range(4)]
        stage.gates["close"].shut()
        waiting = [asyncio.create_task(taken(pool)) for _ in range(2)]
        await still()
        assert pool.counts().warm == 2
        stage.gates["close"].open()
        await asyncio.gather(*waiting)
        assert [actor.alive for actor in actors] == [False, False, True, True]


async def test_one_that_takes_long_to_end_keeps_nobody_from_another_place(stage: Stage) -> None:
    async with pooled(stage, max_processes=2) as pool:
        await idle(pool)
        busy = await taken(pool)
        stage.gates["close"].shut()
        waiting = asyncio.create_task(taken(pool))
        await stage.gates["close"].reached()
        busy.returncode, busy.closes_at_once = 0, True
        await given(pool, busy)
        assert (await asyncio.wait_for(waiting, 60)).alive


async def test_processes_that_weigh_less_than_thought_let_the_next_one_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def weigh(pids: Collection[int]) -> dict[int, int]:
        loop.call_soon_threadsafe(weighed.set)
        return dict.fromkeys(pids, FIRST_WEIGHT // 4)

    monkeypatch.setattr(memory, "weigh", weigh)
    async with pooled(stage, max_memory=FIRST_WEIGHT) as pool:
        first, _ = await pool.checkout(launch())
        waiting = asyncio.create_task(taken(pool))
        await still()
        assert not waiting.done()
        first.started.set()
        await asyncio.wait_for(weighed.wait(), 60)
        await asyncio.wait_for(waiting, 60)  # nobody has given anything back


@pytest.mark.parametrize("limits", [{"max_processes": 1}, {"max_processes": 100, "max_memory": 1}])
def test_the_wait_that_is_told_is_as_long_as_processes_are_in_use(limits: dict[str, int]) -> None:
    async def scenario(stage: Stage) -> None:
        async with pooled(stage, **limits) as pool:
            actor = await taken(pool)
            await asyncio.sleep(30)
            await given(pool, actor)
            await taken(pool, actor.launch)
            with pytest.raises(QueueFull) as full:
                await taken(pool)
            assert full.value.retry_after == pytest.approx(60)  # the one in use, and we

    with asyncio.Runner(loop_factory=FastLoop) as runner, Stage(runner.get_loop().time).set() as stage:
        runner.run(scenario(stage))


async def test_a_closed_pool_has_ended_what_was_being_started(stage: Stage) -> None:
    async with pooled(stage) as pool:
        stage.gates["spawn"].shut()
        late = asyncio.create_task(taken(pool))
        await stage.gates["spawn"].reached()
        stage.gates["close"].shut()
        closing = asyncio.create_task(pool.close())
        await still()
        stage.gates["spawn"].open()
        await stage.gates["close"].reached()
        stage.ever[0].started.set()
        await still()
        assert not closing.done()
        stage.gates["close"].open()
        await closing
        assert not stage.living
        with pytest.raises(ClaudeUnavailable, match="shutting down"):
            await late


async def test_one_that_cannot_be_killed_keeps_no_other_from_being_ended(stage: Stage) -> None:
    async with pooled(stage) as pool:
        stuck, other = await idle(pool), await taken(pool)
        stuck.unkillable = True
        await pool.close()
        assert not other.alive
        assert stage.on_exit == [other.pid]  # the next proxy looks after the other


@pytest.mark.parametrize("fault", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no new thread")])
async def test_one_that_cannot_be_closed_properly_keeps_no_other_from_being_ended(
    stage: Stage, fault: Exception
) -> None:
    async with pooled(stage) as pool:
        stuck, other, last = await idle(pool), await idle(pool), await taken(pool)
        stuck.fault = last.fault = fault
        stuck.die()
        await until(lambda: stage.on_exit == [stuck.pid])
        other.die()  # the reaper goes on
        await until(lambda: stage.on_exit == [stuck.pid, other.pid])
        behind = await idle(pool)
        await pool.close()
        assert not last.alive
        assert not behind.alive
        assert sorted(stage.on_exit[2:]) == [last.pid, behind.pid]


async def test_processes_that_cannot_be_weighed_for_a_moment_are_weighed_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def weigh(pids: Collection[int]) -> dict[int, int]:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dict.fromkeys(pids, 1)

    monkeypatch.setattr(memory, "weigh", weigh)
    monkeypatch.setattr(pools, "WEIGH_EVERY", 0.0)
    async with pooled(stage, max_memory=10 * FIRST_WEIGHT) as pool:
        actor = await idle(pool)
        await until(lambda: tried == 1)
        await given(pool, await taken(pool, actor.launch))  # it was used again
        await until(lambda: pool.table.weight() == 1)


async def test_who_needs_its_place_does_not_suffer_for_one_that_cannot_be_killed(stage: Stage) -> None:
    async with pooled(stage, max_processes=1) as pool:
        (await idle(pool)).unkillable = True
        assert (await taken(pool)).alive


async def test_a_cancelled_end_is_noted_all_the_same(stage: Stage) -> None:
    async with pooled(stage) as pool:
        actor = await idle(pool)
        stage.gates["close"].shut()
        ending = asyncio.create_task(pool.discard(actor.session_id))
        await stage.gates["close"].reached()
        ending.cancel()
        await still()
        assert pool.peek(actor.session_id) is None
        stage.gates["close"].open()
        await asyncio.wait([ending])
        assert ending.cancelled()
        assert stage.on_exit == [actor.pid]


async def test_one_that_dies_while_idle_is_reaped_at_once(stage: Stage) -> None:
    async with pooled(stage) as pool:
        actor, other = await idle(pool), await idle(pool)
        await still()  # the reaper has gone to sleep for a quarter of an hour
        actor.die()
        await until(lambda: stage.on_exit == [actor.pid])
        assert pool.counts()[:3] == (0, 1, 0)
        assert other.alive


@pytest.mark.parametrize("on_exit", [True, False])
async def test_how_an_idle_one_ended_is_told_to_the_next_turn_of_its_session_once(stage: Stage, on_exit: bool) -> None:
    async with pooled(stage) as pool:
        actor = await idle(pool)
        other = await idle(pool)
        actor.die()
        if on_exit:
            await until(lambda: stage.on_exit == [actor.pid])
        for died in (actor, other):
            await given(pool, await taken(pool, died.launch))
        assert [pool.take_end(one.session_id) for one in (actor, actor, other)] == [(-9, False), None, None]


async def test_a_session_that_its_process_could_not_write_is_told_to_its_next_turn_once(stage: Stage) -> None:
    async with pooled(stage) as pool:
        actor = await idle(pool)
        actor.writes_lost = "ENOSPC"
        await pool.discard(actor.session_id)
        assert [pool.take_end(actor.session_id) for _ in range(2)] == [(None, True), None]


async def test_one_whose_client_left_while_it_was_told_something_is_ended_at_once(stage: Stage) -> None:
    async with pooled(stage) as pool:
        actor = await idle(pool)
        stage.gates["adapt"].shut()
        leaving = asyncio.create_task(taken(pool, actor.launch))
        await stage.gates["adapt"].reached()
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: stage.on_exit == [actor.pid])
        assert pool.counts()[:3] == (0, 0, 0)


async def test_one_that_has_ended_makes_room_before_one_that_lives(stage: Stage) -> None:
    async with pooled(stage, max_processes=2) as pool:
        older, newer = await idle(pool), await idle(pool)
        newer.die()
        await taken(pool)
        assert older.alive


# --- spares


async def test_a_spare_that_is_claimed_while_its_like_is_ended_stays(stage: Stage) -> None:
    async with pooled(stage, max_processes=8, spares=2) as pool:
        await idle(pool)
        await until(lambda: pool.counts().spare == 2)
        await spare(pool)
        stage.gates["close"].shut()
        await idle(pool, launch(model="opus"))
        await stage.gates["close"].reached()  # the first of the two is being ended
        claimed = await taken(pool)
        stage.gates["close"].open()
        await until(lambda: len(stage.on_exit) == 1)
        await still()
        assert claimed.alive
        assert claimed.pid not in stage.on_exit


def test_among_agents_that_talk_at_once_no_spare_is_started_until_they_pause() -> None:
    async def scenario(stage: Stage) -> None:
        async with pooled(stage, max_spawns=2, spares=1) as pool:
            one, two = await idle(pool), await idle(pool)
            for _ in range(30):  # each asks again soon after its answer: for moments a core is free
                await taken(pool, one.launch)
                await taken(pool, two.launch)
                await asyncio.sleep(0.2)
                await given(pool, one)
                await asyncio.sleep(0.1)
                await given(pool, two)
                assert stage.ever == [one, two]
            await asyncio.sleep(2 * CALM)
            assert len(stage.ever) == 3

    with asyncio.Runner(loop_factory=FastLoop) as runner, Stage(runner.get_loop().time).set() as stage:
        runner.run(scenario(stage))


async def test_a_spare_that_died_is_replaced_for_the_next_new_session(stage: Stage) -> None:
    async with pooled(stage, spares=1) as pool:
        await idle(pool)
        dead = await spare(pool)
        dead.die()
        await idle(pool)
        assert await spare(pool) is not dead


async def test_spares_that_die_at_once_are_not_started_again_and_again(stage: Stage) -> None:
    stage.answers["boot"] = None
    async with pooled(stage, max_processes=8, spares=1) as pool:
        first = await taken(pool)
        await still()
        await given(pool, first)
        await until(lambda: len(stage.on_exit) == 1)
        await pool.table.services["ahead"]
        assert len(stage.ever) == 2


async def test_a_claim_that_nobody_answered_is_no_refusal(stage: Stage) -> None:
    async with pooled(stage, spares=1) as pool:
        await idle(pool)
        lost = await spare(pool)
        stage.answers["claim"] = None  # it broke off, and its end is not noticed yet
        await idle(pool)
        assert lost.pid in stage.on_exit
        assert await spare(pool) is not lost


async def test_a_client_that_leaves_during_the_claim_leaves_no_process(stage: Stage) -> None:
    async with pooled(stage, spares=1) as pool:
        await idle(pool)
        half = await spare(pool)
        stage.gates["claim"].shut()
        leaving = asyncio.create_task(taken(pool))
        await stage.gates["claim"].reached()
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: half.pid in stage.on_exit)
        assert pool.counts().busy == 0
