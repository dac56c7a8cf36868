"""Proxies on several hosts, each with a `var/` of its own, on one PostgreSQL: on the in-memory backend."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.ownership import differences
from cli_session_proxy.errors import LeaseLost, NotFound, ProxyError, StoreUnavailable, UpstreamError
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.stores.postgresql.store import PostgresqlStore, look

from ..memory_backend import MemoryBackend
from ..postgres import HandClock, server
from ..talking import ask, request, text
from ..until import until
from .test_core import Model, words


class Host:
    """A proxy with a `var/` of its own. It can be cut off from the store."""

    def __init__(self, url: str, var: Path, **more: Any) -> None:
        self.settings = Settings(store=SecretStr(url), var=var, claude_config_dir=var, disconnect_grace=0.01, **more)
        self.model = Model()
        self.backend = MemoryBackend(self.model)
        self.store = PostgresqlStore(url)
        self.engine = Engine(self.settings, self.store, self.backend)
        self.reaches = asyncio.Event()
        self.reaches.set()
        self._asks = 0
        for name in ("read", "write"):
            setattr(self.store.database, name, self._through(getattr(self.store.database, name)))

    def _through(self, way: Any) -> Any:
        async def run(*given: Any, **named: Any) -> Any:
            await self.reaches.wait()
            self._asks += 1
            try:
                return await way(*given, **named)
            finally:
                self._asks -= 1

        return run

    async def cut_off(self) -> None:
        """Until it `reaches` the store again. What it has begun there has ended: no heartbeat comes late."""
        self.reaches.clear()
        await until(lambda: not self._asks)


@asynccontextmanager
async def hosts(url: str, tmp_path: Path, count: int = 2, **more: Any) -> AsyncIterator[list[Host]]:
    made = [Host(url, tmp_path / f"host{n}", **more) for n in range(count)]
    for host in made:
        await host.engine.start()
    try:
        yield made
    finally:
        for host in made:
            host.reaches.set()
            host.model.open.set()
        for host in made:
            await host.engine.stop()


async def kept(host: Host) -> list[Turn]:
    agent = await host.store.agent("local", "a")
    assert agent is not None
    return [turn async for turn in host.store.turns(agent.key)]


async def path(host: Host) -> list[str]:
    agent = await host.store.agent("local", "a")
    assert agent is not None
    assert agent.head is not None
    return words([message for turn in await host.store.path(agent.head) for message in turn.input])


async def test_hosts_take_turns_and_none_takes_anothers_lease(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path, 3) as made:
        said = [f"turn {n}" for n in range(9)]
        for number, word in enumerate(said):
            await ask(made[number % 3].engine, word)
        turns = await kept(made[0])
        assert await path(made[1]) == said
        assert [turn.parent_id for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
        assert {turn.status for turn in turns} == {"completed"}
        # handed over each time: nothing was interrupted, and no process of the former holder was left
        assert [len(turn.attempts) for turn in turns] == [1] * 9
        assert [host.backend.retired for host in made] == [["a"] * 3, ["a"] * 3, ["a"] * 2]


async def test_requests_at_once_on_all_hosts_have_one_order(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path) as made:
        await asyncio.gather(*(ask(host.engine, f"{n} {at}") for n in range(6) for at, host in enumerate(made)))
        turns = await kept(made[0])
        assert [turn.parent_id for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
        assert await path(made[1]) == words([message for turn in turns for message in turn.input])


async def test_a_turn_that_runs_on_another_host_is_waited_for(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        first = asyncio.create_task(ask(one.engine, "one"))
        await one.model.reached.wait()
        second = await two.engine.submit(request("two"))
        third = await one.engine.submit(request("three"))
        one.model.open.set()
        await asyncio.gather(first, second.turn(), third.turn())
        assert await path(two) == ["one", "two", "three"]


async def test_the_same_request_elsewhere_gets_the_same_answer(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        first = asyncio.create_task(ask(one.engine, "one", idempotency_key="k"))
        await one.model.reached.wait()
        again = asyncio.create_task(ask(two.engine, "one", idempotency_key="k"))
        await until(lambda: bool(two.engine._live))
        one.model.open.set()
        assert (await first).id == (await again).id
        assert (await ask(two.engine, "one", idempotency_key="k")).id == (await first).id
        assert (len(one.backend.seen), len(two.backend.seen)) == (1, 0)


async def test_who_comes_back_at_another_host_while_the_turn_is_ended_for_want_of_a_client_has_it_run_again(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that every client had left."""
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        fail, is_ending, goes_on = one.store.fail, asyncio.Event(), asyncio.Event()

        async def failed(*given: Any, **more: Any) -> Turn:
            is_ending.set()
            await goes_on.wait()
            return await fail(*given, **more)

        monkeypatch.setattr(one.store, "fail", failed)
        first = await one.engine.submit(request("one"))
        await one.model.reached.wait()
        first.leave()
        await is_ending.wait()
        again = await two.engine.submit(request("one"))
        assert again.turn_id == first.turn_id
        goes_on.set()
        assert (await again.turn()).status == "completed"
        again.acknowledge()
        assert [words(seen) for seen in two.backend.seen] == [["one"]]


async def test_a_host_that_was_paused_takes_no_answer_away_from_the_client_of_another_host(
    postgres_url: str, tmp_path: Path
) -> None:
    """It had forwarded the request, and notes late that its client left. Its note put the answer off the path, although
    it had been given to somebody else meanwhile."""
    async with hosts(postgres_url, tmp_path, 3) as (one, two, three):
        first = await one.engine.submit(request("one"))
        await first.turn()
        first.leave()
        await one.engine.delivery_stored(first.turn_id)
        again = await three.engine.submit(request("one"))
        assert again.turn_id == first.turn_id
        await two.engine.note_arrival(first.turn_id, arrived=False)
        assert [turn.delivery for turn in await kept(two)] == ["pending"]
        again.acknowledge()


@pytest.mark.parametrize("named", [False, True])
async def test_an_answer_that_was_handed_on_over_a_lost_line_is_the_same_turn(
    named: bool, postgres_url: str, tmp_path: Path
) -> None:
    """The host that had answered was ended: nobody could be asked which turn it was, or whether it was answered."""
    async with hosts(postgres_url, tmp_path) as (one, two):
        done = await ask(one.engine, "zero")
        await one.engine.delivery_stored(done.id)
        first = await one.engine.submit(request("one"))
        turn = await first.turn()
        first.via = two.engine.instance_id
        first.acknowledge()
        await one.engine.delivery_stored(turn.id)
        await two.engine.note_lost(turn.agent_key, one.engine.instance_id, turn.id if named else None, turn.fingerprint)
        again = await two.engine.submit(request("one"))
        assert again.turn_id == turn.id
        again.acknowledge()
        await two.engine.delivery_stored(turn.id)
        assert [turn.delivery for turn in await kept(two)] == ["delivered", "delivered"]


@pytest.mark.parametrize("arrives", [0, 1, None])
@pytest.mark.sample(1)
async def test_an_answer_that_two_proxies_have_for_their_clients_is_the_same_turn_until_one_of_them_has_it(
    arrives: int | None, postgres_url: str, tmp_path: Path
) -> None:
    """The second proxy's word that its client had left did not count: the same words again doubled the turn."""
    async with hosts(postgres_url, tmp_path, 3) as (one, *others):
        one.model.open.clear()
        first = await one.engine.submit(request("one", idempotency_key="k"))
        second = await one.engine.submit(request("one", idempotency_key="k"))
        one.model.open.set()
        turn = await first.turn()
        for answer, other in zip((first, second), others, strict=True):
            answer.via = other.engine.instance_id
            answer.acknowledge()
        await one.engine.delivery_stored(turn.id)
        for n, other in enumerate(others):
            if arrives in (n, None):
                await other.engine.note_arrival(turn.id, arrived=arrives is not None)
        again = await one.engine.submit(request("one"))
        assert (again.turn_id == turn.id) == (arrives is None)
        await again.turn()
        again.acknowledge()


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_client_that_left_a_forwarding_proxy_takes_no_answer_from_one_that_is_still_given_it(
    is_done: bool, postgres_url: str, tmp_path: Path
) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        lost = await one.engine.submit(request("one", idempotency_key="k"))
        if is_done:
            one.model.open.set()
            await lost.turn()
        here = await one.engine.submit(request("one", idempotency_key="k"))
        one.model.open.set()
        turn = await lost.turn()
        lost.via = two.engine.instance_id
        lost.acknowledge()
        await one.engine.delivery_stored(turn.id)
        await two.engine.note_arrival(turn.id, arrived=False)
        await ask(one.engine, "two")
        here.acknowledge()
        assert await path(one) == ["one", "two"]


@pytest.mark.parametrize("is_early", [False, True])
async def test_an_answer_that_is_handed_on_over_a_line_that_was_given_up_is_the_same_turn(
    is_early: bool, postgres_url: str, tmp_path: Path
) -> None:
    """The host that answers ran on, and only the forwarding one did not reach it. The client was told to send its
    request again: at a third host it was a second turn, while the first one ran, and once it had been handed on."""
    async with hosts(postgres_url, tmp_path, 3) as (one, two, three):
        await ask(one.engine, "zero")
        one.model.open.clear()
        asked = request("one")
        first = await one.engine.submit(asked)
        await two.engine.note_lost(first.accepted.agent_key, one.engine.instance_id, None, asked.fingerprint)
        early = await three.engine.submit(asked) if is_early else None
        one.model.open.set()
        turn = await first.turn()
        first.via = two.engine.instance_id
        first.acknowledge()
        await one.engine.delivery_stored(turn.id)
        again = early or await three.engine.submit(asked)
        assert (await again.turn()).id == turn.id
        again.acknowledge()
        await three.engine.delivery_stored(turn.id)
        assert [kept.delivery for kept in await kept(one)] == ["delivered", "delivered"]
        assert (await ask(three.engine, "one")).id != turn.id


async def test_what_a_forwarding_host_notes_early_takes_no_answer_from_a_client_of_the_host_that_answers(
    postgres_url: str, tmp_path: Path
) -> None:
    """It noted in the other host's name that its own client had left, before that one had noted that it had another."""
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        lost = await one.engine.submit(request("one", idempotency_key="k"))
        here = await one.engine.submit(request("one", idempotency_key="k"))
        one.model.open.set()
        turn = await here.turn()
        await two.engine.note_arrival(turn.id, arrived=False)
        await ask(one.engine, "two")
        lost.via = two.engine.instance_id
        lost.acknowledge()
        here.acknowledge()
        assert await path(one) == ["one", "two"]


async def test_a_host_that_is_paused_while_it_gives_an_answer_of_another_host_keeps_it_on_the_path(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn's own host took it for one that nobody waited for."""

    async def nobody(_followers: object) -> bool:
        return False

    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        first = await one.engine.submit(request("one"))
        elsewhere = await two.engine.submit(request("one", is_retry=True))
        one.model.open.set()
        turn = await first.turn()
        assert (await elsewhere.turn()).id == turn.id  # its client is given it
        monkeypatch.setattr(one.engine._instances, "any_waits", nobody)
        first.leave()
        await one.engine.delivery_stored(turn.id)
        await ask(one.engine, "two")
        elsewhere.acknowledge()
        assert await path(one) == ["one", "two"]


async def test_who_was_given_an_answer_that_another_proxy_has_too_may_say_the_same_again(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        elsewhere = await one.engine.submit(request("one", idempotency_key="k"))
        here = await one.engine.submit(request("one", idempotency_key="k"))
        one.model.open.set()
        turn = await here.turn()
        elsewhere.via = two.engine.instance_id
        elsewhere.acknowledge()
        await one.engine.delivery_stored(turn.id)
        note, disk = one.store.set_delivery, asyncio.Event()

        async def slow(*given: Any, **how: Any) -> None:
            await disk.wait()
            await note(*given, **how)

        monkeypatch.setattr(one.store, "set_delivery", slow)
        here.acknowledge()
        again = asyncio.create_task(one.engine.submit(request("one")))
        await until(lambda: again.done() or turn.id not in one.engine._deliveries.arrived)
        disk.set()
        assert (await again).turn_id != turn.id
        await (await again).turn()
        (await again).acknowledge()


async def test_a_retry_is_known_by_a_host_whose_clock_has_jumped(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(postgres_url, tmp_path) as [one, two]:
        first = await ask(one.engine, "hello")
        await ask(one.engine, "and then?")
        host_clock = time.time
        monkeypatch.setattr(time, "time", lambda: host_clock() + 7200)
        again = await ask(two.engine, "hello", is_retry=True)
        later = await ask(two.engine, "more")
    assert again.id == first.id
    assert abs(later.created_at - first.created_at) < 600
    assert later.created_at <= (later.started_at or 0) <= (later.finished_at or 0)


async def test_a_lease_that_is_lost_is_told_though_the_stores_clock_cannot_be_read(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(postgres_url, tmp_path) as [one, _]:
        await ask(one.engine, "hello")
        agent = await one.store.agent("local", "a")
        assert agent is not None
        ownership = one.engine._ownership
        assert ownership.has(agent.key)

        async def away() -> float:
            raise StoreUnavailable("away")

        await one.store.resign(ownership.proxy.id)
        monkeypatch.setattr(one.store, "clock", away)
        with pytest.raises(StoreUnavailable):
            await ownership._renew()
        assert not ownership.has(agent.key)


async def test_a_host_that_is_cut_off_is_replaced_and_its_commit_refused(postgres_url: str, tmp_path: Path) -> None:
    clock = HandClock(postgres_url)
    async with hosts(postgres_url, tmp_path) as (one, two):
        await ask(one.engine, "before")
        one.model.reached.clear()
        one.model.open.clear()
        lost = asyncio.create_task(ask(one.engine, "lost"))
        await one.model.reached.wait()
        await one.cut_off()
        waiting = asyncio.create_task(ask(two.engine, "after"))
        agent = await two.store.agent("local", "a")
        assert agent is not None
        await until(lambda: two.store.asked(one.engine._instances.id))
        assert not waiting.done()  # its lease has not expired: the host may live
        await clock.advance(one.settings.lease + 1)
        assert (await waiting).status == "completed"
        one.model.open.set()
        one.reaches.set()
        with pytest.raises(ProxyError) as told:
            await lost
        assert told.value.status == 503
        turns = await kept(two)
        assert [(words(turn.input), turn.status) for turn in turns] == [
            (["before"], "completed"), (["lost"], "cancelled"), (["after"], "completed"),
        ]  # fmt: skip
        await ask(one.engine, "lost")
        assert await path(two) == ["before", "after", "lost"]
        assert one.backend.seen[-1][-2:] != ()  # it ran here again, behind what the other host said


async def test_the_warm_process_of_a_host_that_was_replaced_is_retired(postgres_url: str, tmp_path: Path) -> None:
    clock = HandClock(postgres_url)
    async with hosts(postgres_url, tmp_path) as (one, two):
        await ask(one.engine, "one")
        await one.cut_off()
        await clock.advance(one.settings.lease + 1)
        await ask(two.engine, "two")
        assert one.backend.retired == []
        one.reaches.set()
        await until(lambda: one.backend.retired == ["a"])
        await ask(one.engine, "three")
        assert await path(two) == ["one", "two", "three"]


async def test_a_stale_commit_is_refused_by_the_store_itself(postgres_url: str, tmp_path: Path) -> None:
    clock = HandClock(postgres_url)
    async with hosts(postgres_url, tmp_path) as (one, two):
        refused: list[Exception] = []
        kept_commit = one.store.commit

        async def late(*done: Any, **how: Any) -> Turn:
            await one.cut_off()  # else its heartbeat renews the lease, if it comes before the other host asks for it
            await clock.advance(one.settings.lease + 1)
            assert (await ask(two.engine, "after")).status == "completed"
            one.reaches.set()
            try:
                return await kept_commit(*done, **how)
            except LeaseLost as exc:
                refused.append(exc)
                raise

        one.store.commit = late  # type: ignore[method-assign]
        one.engine._lease_lost = lambda agent_key: None  # type: ignore[method-assign]  # it has not noticed yet
        with pytest.raises(ProxyError) as told:
            await ask(one.engine, "late")
        assert told.value.status == 503
        assert len(refused) == 1
        # The commit, and that the turn failed.
        assert (one.engine.store.stale_writes, two.engine.store.stale_writes) == (2, 0)
        assert await path(two) == ["after"]


async def test_what_a_host_left_that_does_not_come_back_is_settled(postgres_url: str, tmp_path: Path) -> None:
    clock = HandClock(postgres_url)
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        lost = asyncio.create_task(ask(one.engine, "lost"))
        await one.model.reached.wait()
        await one.cut_off()
        await clock.advance(5 * 60)

        async def settled() -> bool:
            (turn,) = await kept(two)
            return turn.status == "cancelled" and not await two.store.silent(0.0)

        await until(settled)
        one.reaches.set()
        one.model.open.set()
        with pytest.raises(ProxyError):
            await lost
        assert text(await ask(one.engine, "lost")) == "You said: lost (1)"


async def test_a_servers_clock_that_went_back_keeps_no_agent_from_other_hosts(
    postgres_url: str, tmp_path: Path
) -> None:
    """A host that ends after that was taken for one that responds, for as long as the clock had gone back."""
    clock = HandClock(postgres_url)
    async with hosts(postgres_url, tmp_path) as (one, two):
        await ask(one.engine, "one")
        await clock.advance(-3600)
        await one.engine._ownership._renew()
        await one.cut_off()
        await clock.advance(one.settings.lease + 1)
        assert text(await ask(two.engine, "two")) == "You said: two (2)"
        one.reaches.set()


@pytest.mark.parametrize("limit_wait", [None, '{"until": 1e12, "since": 1.0, "why": "limit", "asked": 1}'])
async def test_a_turn_whose_end_the_store_has_forgotten_keeps_nobody_waiting(
    postgres_url: str, tmp_path: Path, limit_wait: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby or a backup has it as queued, by a proxy that lives and does not have it any more."""
    monkeypatch.setattr("cli_session_proxy.engine.recovery.SETTLE_SILENT_AFTER", 0.1)
    monkeypatch.setattr("cli_session_proxy.engine.recovery.NEIGHBOUR_CHECK", 0.1)
    async with hosts(postgres_url, tmp_path) as (one, two):

        async def ended() -> bool:
            return (await kept(one))[-1].status == "cancelled"

        await ask(one.engine, "one")
        one.model.faults.append(UpstreamError("lost"))
        with pytest.raises(UpstreamError):
            await ask(one.engine, "two")
        with psycopg.connect(postgres_url) as conn:
            queued = "UPDATE turns SET status = 'queued', error = NULL, attempts = '[]', limit_wait = %s"
            conn.execute(f"{queued} WHERE status = 'failed'", (limit_wait,))
        if limit_wait is not None:  # another proxy would take it over, and wait
            await until(ended)
        assert text(await ask(two.engine, "three")) == "You said: three (2)"
        assert [turn.status for turn in await kept(two)] == ["completed", "cancelled", "completed"]
        await ask(one.engine, "two")
        assert await path(two) == ["one", "three", "two"]


async def test_a_lease_whose_turn_was_cancelled_while_it_was_granted_keeps_nobody_waiting(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host responds, so nobody took it from there, until a turn of this agent ran there."""
    async with hosts(postgres_url, tmp_path, lease=1.0) as (one, two):
        acquire, granted = two.store.acquire, asyncio.Event()

        async def unheard(*given: Any, **named: Any) -> Any:
            await acquire(*given, **named)
            granted.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(two.store, "acquire", unheard)
        answer = await two.engine.submit(request("one"))
        await granted.wait()
        answer.leave()
        with pytest.raises(ProxyError):
            await answer.turn()
        async with asyncio.timeout(60):
            assert text(await ask(one.engine, "two")) == "You said: two (1)"


async def test_a_row_of_a_proxy_that_is_named_as_a_path_removes_nothing_there(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its folder and its lock are removed where proxies keep theirs, and nowhere else."""
    kept_files = [tmp_path / "folder" / "file", tmp_path / "file.lock"]
    for file in kept_files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    async with hosts(postgres_url, tmp_path, 1) as (one,):
        ids = [str(tmp_path / "folder"), "../../folder", str(tmp_path / "file"), "../../file", "..", "."]
        with psycopg.connect(postgres_url) as conn:
            conn.cursor().executemany("INSERT INTO proxies VALUES (%s, 'host', 0)", [(proxy,) for proxy in ids])
        assert await one.engine._recovery.recover(one.engine._ownership.hold_if_free)
        assert not await one.store.silent(0.0)
    assert all(file.exists() for file in kept_files)


async def test_a_turn_that_waits_without_a_lease_is_not_taken_for_a_dead_hosts(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its host has no lease while all its slots are taken: a heartbeat says that it lives."""
    async with hosts(postgres_url, tmp_path, lease=1.0, max_turns=1) as (one, two):
        one.model.open.clear()
        busy = asyncio.create_task(ask(one.engine, "busy", agent="another"))
        await one.model.reached.wait()
        waiting = await one.engine.submit(request("one"))
        began = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > began + 2 * one.settings.lease)
        second = asyncio.create_task(ask(two.engine, "two"))
        await until(lambda: two.engine._lanes.total == 1)
        one.model.open.set()
        await busy
        assert (await waiting.turn()).status == "completed"
        await second
        assert await path(two) == ["one", "two"]


async def test_a_turn_that_was_maybe_accepted_keeps_nobody_waiting(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        accept = one.store.accept

        async def lost(*new: Any, **beside: Any) -> Any:
            one.store.accept = accept  # type: ignore[method-assign]
            await accept(*new, **beside)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        one.store.accept = lost  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="this turn was not run"):
            await ask(one.engine, "one")
        await ask(two.engine, "two")
        await ask(one.engine, "one")
        assert await path(two) == ["two", "one"]
        assert [turn.status for turn in await kept(two)].count("completed") == 2


@pytest.mark.parametrize("kept", [True, False])
async def test_a_turn_that_was_maybe_accepted_again_can_be_tried_again(
    kept: bool, postgres_url: str, tmp_path: Path
) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        one.model.faults = [UpstreamError("overloaded")]
        with pytest.raises(UpstreamError):
            await ask(one.engine, "one", idempotency_key="k")
        requeue = one.store.requeue

        async def lost(*given: Any) -> Turn:
            one.store.requeue = requeue  # type: ignore[method-assign]
            if kept:
                await requeue(*given)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        one.store.requeue = lost  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreUnavailable, match="this turn was not run"):
            await ask(one.engine, "one", idempotency_key="k")
        one.model.open.clear()
        one.model.reached.clear()
        again = asyncio.create_task(ask(one.engine, "one", idempotency_key="k"))
        await one.model.reached.wait()
        await until(lambda: not one.engine._ends.waiting)
        one.model.open.set()
        assert (await again).status == "completed"
        assert await path(two) == ["one"]


async def test_an_answer_that_was_maybe_kept_is_given_to_the_same_request(postgres_url: str, tmp_path: Path) -> None:
    async with hosts(postgres_url, tmp_path) as (one, two):
        keep = one.store.commit

        async def lost(*done: Any, **how: Any) -> Turn:
            await keep(*done, **how)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        one.store.commit = lost  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="its answer was not kept"):
            await ask(one.engine, "one")
        one.store.commit = keep  # type: ignore[method-assign]
        await ask(two.engine, "one")
        assert await path(two) == ["one"]
        assert (len(one.backend.seen), len(two.backend.seen)) == (1, 0)


async def test_who_is_told_that_an_answer_was_not_kept_does_not_double_it_at_another_host(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit had succeeded, and the host did not reach the store any more. Its client was told to send the request
    again before that was known, and another host took it for a new turn."""
    async with hosts(postgres_url, tmp_path) as (one, two):
        commit, fail = one.store.commit, one.store.fail
        tried, back, calls = asyncio.Event(), asyncio.Event(), list[int]()

        async def lost(*given: Any, **how: Any) -> Turn:
            await commit(*given, **how)
            raise StoreUnavailable("the connection was lost", detail={"in_doubt": True})

        async def away(*given: Any, **how: Any) -> Turn:
            if back.is_set():
                return await fail(*given, **how)
            calls.append(1)
            if len(calls) > 1:
                tried.set()
            raise StoreUnavailable("the server does not answer")

        monkeypatch.setattr(one.store, "commit", lost)
        monkeypatch.setattr(one.store, "fail", away)
        first = asyncio.create_task(ask(one.engine, "one"))
        await tried.wait()
        assert not first.done()
        back.set()
        with pytest.raises(StoreUnavailable, match="send it again"):
            await first
        again = await ask(two.engine, "one")
        assert [turn.id for turn in await kept(two)] == [again.id]


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.full)])
async def test_a_server_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, times: int) -> None:
    with server() as mortal:
        async with hosts(mortal.new_url(), tmp_path) as made:
            acknowledged: list[str] = []
            told: set[type[ProxyError]] = set()
            ended = asyncio.Event()

            async def talks(host: Host, name: str) -> None:
                for number in itertools.count():
                    while not ended.is_set():
                        try:
                            await ask(host.engine, f"{name} {number}")
                            acknowledged.append(f"{name} {number}")
                            break
                        except ProxyError as exc:
                            told.add(type(exc))
                            await asyncio.sleep(0.01)
                    if ended.is_set():
                        return

            talking = [asyncio.create_task(talks(host, f"host {at}")) for at, host in enumerate(made)]
            for _ in range(times):
                before = len(acknowledged)
                await until(lambda before=before: len(acknowledged) > before + 4)  # type: ignore[misc]
                await until(lambda: _state(made[0], "ready"))
                await asyncio.to_thread(mortal.stop, signal.SIGKILL)
                await until(lambda: _state(made[0], "store_unavailable"))
                await asyncio.to_thread(mortal.start)
                await until(lambda: _state(made[0], "ready"))
            before = len(acknowledged)
            await until(lambda: len(acknowledged) > before + 4)
            ended.set()
            await asyncio.gather(*talking)
            said = await path(made[1])
            assert told <= {StoreUnavailable, NotFound, LeaseLost}
            assert len(set(said)) == len(said)
            assert set(acknowledged) <= set(said)
            assert [word for word in said if word in acknowledged] == acknowledged


async def _state(host: Host, wanted: str) -> bool:
    return await host.engine.state() == wanted


async def test_a_host_that_differs_is_named_with_what_differs(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(postgres_url, tmp_path, lease=5.0) as (one, _):
        await until(lambda: _hosts_known(one, 2))
        assert differences(await one.store.hosts()) == {}
        other = Host(postgres_url, tmp_path / "other", lease=7.0, profiles={"worker": Profile(tools=("Bash",))})
        await other.engine.start()
        await until(lambda: caplog.text.count("hosts_differ") == 2)
        found = look(postgres_url).hosts
        told = {what: sorted(values) for what, values in differences(found).items()}
        assert told == {"lease": ["5 s", "7 s"], "profile worker": ["", '{"tools":["Bash"]}']}
        await other.engine.stop()
        assert len(await one.store.hosts()) == 2


async def _hosts_known(host: Host, count: int) -> bool:
    return len(await host.store.hosts()) == count


async def test_a_warm_turn_asks_the_store_for_nothing_that_leases_are_about(postgres_url: str, tmp_path: Path) -> None:
    """Heartbeats and looks at what others want go on beside it; its own writes check the lease as they write."""
    async with hosts(postgres_url, tmp_path, lease=600.0) as (one, _):
        await ask(one.engine, "first")
        asked: list[str] = []

        def counted(name: str) -> None:
            call = getattr(one.store, name)

            def noted(*given: Any, **named: Any) -> Any:
                asked.append(name)
                return call(*given, **named)

            setattr(one.store, name, noted)

        for name in ("acquire", "renew", "release", "responds", "unfinished_of"):
            counted(name)
        await ask(one.engine, "warm")
        assert not asked
