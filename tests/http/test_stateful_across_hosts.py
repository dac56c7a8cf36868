"""What a client asked at one host is read, followed and cancelled at another one, on the in-memory backend."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.commands import dumping, listing, verifying
from cli_session_proxy.domain.models import Agent, Turn
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.http import relay
from cli_session_proxy.stores.base import Whereabouts
from cli_session_proxy.stores.redis import RedisRegistry
from cli_session_proxy.wires import answers
from cli_session_proxy.wires.responses.body import response_id

from ..redis import redis
from ..until import until
from .cluster import Host, cluster, lose_the_next_commit
from .cluster import line as a_line

ASKED: dict[str, Any] = {"model": "sonnet", "input": "one"}
# How another host is reached, or not: by its address, or by the store alone.
WAYS = pytest.mark.parametrize(
    "each", [pytest.param([], id="passed on"), pytest.param([{"advertise": "http://127.0.0.1:1"}], id="by the store")]
)
Each = list[dict[str, Any]]


async def begun(host: Host, **more: Any) -> str:
    """The id of a background response that runs there, and waits for the model."""
    host.model.reached.clear()
    host.model.open.clear()
    answer = await host.http.post("/v1/responses", json={**ASKED, "background": True, **more})
    assert answer.status_code == 200, answer.text
    await host.model.reached.wait()
    name: str = answer.json()["id"]
    return name


async def events(stream: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in stream.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@WAYS
@pytest.mark.sample(1)
async def test_a_background_response_is_read_and_followed_elsewhere(
    postgres_url: str, tmp_path: Path, each: Each, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    async with cluster(postgres_url, tmp_path, each=each) as (one, two):
        name = await begun(one)
        assert (await two.http.get(f"/v1/responses/{name}")).json()["status"] == "in_progress"
        async with two.http.stream("GET", f"/v1/responses/{name}?stream=true&starting_after=3") as stream:
            assert stream.status_code == 200
            one.model.open.set()
            told = [event async for event in events(stream)]
        assert [event["sequence_number"] for event in told] == list(range(4, 4 + len(told)))
        assert told[-1]["type"] == "response.completed"
        assert told[-1]["response"]["output"][-1]["content"][0]["text"] == "You said: one (1)"
        assert (await two.http.get(f"/v1/responses/{name}")).json()["status"] == "completed"
        assert two.asked == []


async def test_a_background_response_whose_commit_was_in_doubt_stays_in_the_conversation(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its answer, and its client reads it from the store. The next turn left it out."""
    async with cluster(postgres_url, tmp_path, 1) as (one,):
        lose_the_next_commit(one, monkeypatch)
        name = await begun(one, agent_id="a")
        one.model.open.set()
        await until(lambda: not one.engine.progress() and not one.engine._ends.waiting)
        assert (await one.http.get(f"/v1/responses/{name}")).json()["status"] == "completed"
        await one.chat("two")
        assert one.asked[-1] == ["one", "two"]


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_background_request_whose_line_was_lost_is_one_turn_if_it_is_sent_again(
    postgres_url: str, tmp_path: Path, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its client was told. The end of the turn counted as the arrival of an answer, and the words were said twice.
    Said again after an answer that has the id, they are a new turn."""
    monkeypatch.setattr(relay, "REACHABLE_FOR", 60.0)  # no probe over the lost line
    async with a_line() as there:
        behind = {"port": there.port, "advertise": there.address}
        async with cluster(postgres_url, tmp_path, each=[behind]) as (one, two):
            body = {**ASKED, "background": True, "agent_id": "a"}
            await one.chat("zero")
            await two.chat("nought")
            one.model.open.clear()
            one.model.reached.clear()
            there.lose_answers()
            lost = asyncio.create_task(two.http.post("/v1/responses", json=body))
            await one.model.reached.wait()

            async def ended() -> bool:
                return all(turn.status == "completed" for turn in await one.turns())

            if has_ended:
                one.model.open.set()
                await until(ended)
            there.cut()
            assert (await lost).status_code == 503
            first = (await two.http.post("/v1/responses", json=body)).json()["id"]
            one.model.open.set()
            await until(ended)
            assert one.asked[2:] == [["zero", "nought", "one"]]
            assert (await two.http.post("/v1/responses", json=body)).json()["id"] != first


async def test_a_background_stream_that_was_read_to_its_end_is_answered(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the turn counted as one more client's, who might have the answer: until the proxy that forwarded the
    request had noted that it arrived, the same words elsewhere got the same answer."""
    async with cluster(postgres_url, tmp_path, 2) as (one, two):
        await one.chat("zero")
        body = {**ASKED, "background": True, "stream": True, "agent_id": "a"}
        noted, note = asyncio.Event(), two.engine.note_arrival

        async def late(turn_id: str, *, arrived: bool) -> None:
            await noted.wait()
            await note(turn_id, arrived=arrived)

        monkeypatch.setattr(two.engine, "note_arrival", late)
        async with two.http.stream("POST", "/v1/responses", json=body) as stream:
            told = [event async for event in events(stream)]

            async def ended() -> bool:
                return (await one.turns())[-1].status == "completed" and not one.engine._deliveries._writes

            await until(ended)
            turn = (await one.turns())[-1]
            noted.set()
        assert (turn.delivery, turn.instance) == ("pending", two.engine.instance_id)
        again = (await one.http.post("/v1/responses", json={**body, "stream": False})).json()["id"]
        assert again != told[0]["response"]["id"]


async def test_a_background_stream_that_broke_is_answered_once_its_response_was_asked_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        body = {**ASKED, "background": True, "stream": True, "agent_id": "a"}
        one.model.open.clear()

        async def read(*, whole: bool) -> str:
            async with two.http.stream("POST", "/v1/responses", json=body) as stream:
                if whole:
                    assert [event async for event in events(stream)][-1]["type"] == "response.completed"
                return response_id(stream.headers["x-turn-id"])

        async def is_uncertain() -> bool:
            return (await one.turns())[-1].delivery == "uncertain"

        first = await read(whole=False)
        await until(is_uncertain)
        assert await read(whole=False) == first
        assert (await one.http.get(f"/v1/responses/{first}")).json()["status"] == "in_progress"
        one.model.open.set()
        assert await read(whole=True) != first
        assert one.asked[1:] == [["zero", "one"], ["zero", "one", "one"]]


async def test_a_stream_that_is_followed_elsewhere_comes_as_it_is_made(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    async with cluster(postgres_url, tmp_path) as (one, two):
        name = await begun(one)
        async with two.http.stream("GET", f"/v1/responses/{name}?stream=true") as stream:
            # the head came before the answer was there, from the proxy that makes it
            assert "x-turn-id" in stream.headers
            assert [len(live._waiters) for live in one.engine._live.values()] == [1]
            one.model.open.set()
            assert [event async for event in events(stream)][-1]["type"] == "response.completed"


@WAYS
async def test_a_background_response_is_cancelled_elsewhere(postgres_url: str, tmp_path: Path, each: Each) -> None:
    async with cluster(postgres_url, tmp_path, each=each) as (one, two):
        name = await begun(one)
        ended = await two.http.post(f"/v1/responses/{name}/cancel")
        assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
        assert one.engine.running() == 0
        assert not await two.store.asked(one.engine._instances.id)


async def test_a_cancellation_that_the_store_refused_is_not_carried_out_later(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("the store is away")

    async with cluster(postgres_url, tmp_path, each=[{"advertise": "http://127.0.0.1:1"}]) as (one, two):
        name = await begun(one)
        with monkeypatch.context() as patch:
            patch.setattr(two.store, "cancel", away)
            assert (await two.http.post(f"/v1/responses/{name}/cancel")).status_code == 503
        # Else a turn that this proxy takes over is cancelled, whose client was told that it was not.
        assert two.engine._cancelled_elsewhere == {}
        one.model.open.set()
        await until(lambda: one.engine.running() == 0)
        assert (await two.http.get(f"/v1/responses/{name}")).json()["status"] == "completed"


async def test_a_stream_that_was_cut_is_read_on_at_another_host(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    async with cluster(postgres_url, tmp_path, disconnect_grace=60.0) as (one, two):
        one.model.open.clear()
        async with one.http.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as stream:
            name = response_id(stream.headers["x-turn-id"])
        async with two.http.stream("GET", f"/v1/responses/{name}?stream=true&starting_after=1") as stream:
            one.model.open.set()
            told = [event async for event in events(stream)]
        assert told[0]["sequence_number"] == 2
        assert told[-1]["type"] == "response.completed"
        assert (len(one.asked), two.asked) == (1, [])


async def at_least_two(host: Host) -> list[Turn]:
    there = await host.turns()
    return there if len(there) > 1 else []


@WAYS
@pytest.mark.parametrize("which", ["one turn", "all of them"])
@pytest.mark.sample(2)
async def test_turns_of_an_agent_are_cancelled_from_any_host(
    postgres_url: str, tmp_path: Path, each: Each, which: str
) -> None:
    async with cluster(postgres_url, tmp_path, each=each) as (one, two):
        one.model.open.clear()
        running = asyncio.create_task(one.chat("one"))
        await one.model.reached.wait()
        waiting = asyncio.create_task(one.chat("two"))
        ids = [turn.id for turn in await until(partial(at_least_two, one))]
        body = {"turn": ids[1]} if which == "one turn" else {}
        answer = (await two.http.post("/v1/chains/a/cancel", json=body)).json()
        assert answer["cancelled"] == (ids[1:] if which == "one turn" else ids)
        one.model.open.set()
        assert (await waiting).json()["error"]["code"] == "turn_cancelled"
        assert (await running).status_code == (200 if which == "one turn" else 499)
        assert (await two.http.post("/v1/chains/a/cancel", json={})).status_code == 404


@WAYS
@pytest.mark.sample(1)
async def test_a_turn_of_a_host_that_has_gone_is_settled_by_who_cancels_it(
    postgres_url: str, tmp_path: Path, each: Each
) -> None:
    async with cluster(postgres_url, tmp_path, each=each, lease=0.5) as (one, two):
        name = await begun(one)
        for service in one.engine._tasks._services:  # its heart stops
            service.cancel()
        ended = await two.http.post(f"/v1/responses/{name}/cancel")
        assert ended.json()["status"] in ("cancelled", "failed")
        assert (await two.turns((await two.http.get("/v1/chains")).json()["data"][0]["agent_id"]))[
            0
        ].status == "cancelled"


async def test_an_agent_whose_turn_runs_elsewhere_is_deleted_without_waiting_for_it(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        running = asyncio.create_task(one.chat("one"))
        await one.model.reached.wait()
        assert (await two.http.delete("/v1/chains/a")).status_code == 200
        assert (await running).json()["error"]["code"] == "turn_cancelled"
        assert (await one.http.get("/v1/chains")).json()["data"] == []


async def test_what_a_turn_elsewhere_says_is_seen_as_it_comes(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path, 3) as (one, two, three):
        await one.chat("one")
        one.model.reached.clear()
        one.model.open.clear()
        async with two.http.stream("GET", "/v1/chains/a/events?live=1") as stream:
            assert stream.status_code == 200
            lines = stream.aiter_lines()
            running = asyncio.create_task(three.chat("two"))
            async for line in lines:
                if line == "event: progress":
                    (turn,) = json.loads((await anext(lines)).removeprefix("data: "))["turns"]
                    if turn["doing"] == "thinking":
                        break
            assert turn["turn_id"] == (await one.turns())[-1].id
            one.model.open.set()
            await running
            async for line in lines:
                if line == 'data: {"turns":[]}':
                    break


async def test_who_has_an_agent_is_told_at_every_host(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        (row,) = (await two.http.get("/v1/chains")).json()["data"]
        assert (row["agent_id"], row["address"]) == ("a", one.settings.advertise)
        assert row["host"]


async def test_what_runs_elsewhere_stands_in_the_overview_of_every_host(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        one.model.open.clear()
        running = asyncio.create_task(one.chat("one"))
        await one.model.reached.wait()
        (there,) = (await two.http.get("/v1/overview")).json()["running"]
        (here,) = (await one.http.get("/v1/overview")).json()["running"]
        assert (there["agent_id"], there["turn_id"]) == ("a", here["turn_id"])
        assert there["says"].startswith("runs on ")
        assert here["doing"] == "thinking"
        one.model.open.set()
        await running


async def test_commands_on_another_host_name_the_one_that_has_the_agent(
    postgres_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        listing.print_chains(await listing.chains(two.settings, listing.ChainFilter()))
        assert socket.gethostname() in capsys.readouterr().out
        (there,) = await verifying.verify(two.settings, None, None)
        # this backend keeps no records, which is the chain's own fault
        assert ([one.kind for one in there.differences], [note.kind for note in there.notes]) == (["chain"], ["host"])
        assert str(one.settings.advertise) in there.notes[0].text
        (here,) = await verifying.verify(one.settings, None, None)
        assert "host" not in [note.kind for note in here.notes]
        said: list[str] = []
        await dumping.dump(two.settings, "local", "a", dumping.Shown("markdown"), said.append)
        assert "You said: one (1)" in "".join(said)


async def test_a_registry_that_is_away_is_told_and_takes_nothing_away(postgres_url: str, tmp_path: Path) -> None:
    away = SecretStr("redis://127.0.0.1:1/0")
    async with cluster(postgres_url, tmp_path, registry=away) as (one, two):
        assert (await one.chat("one")).status_code == 200
        assert (await two.chat("two")).status_code == 200
        assert (len(one.asked), two.asked) == (2, [])  # the store has told
        ready = await two.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "registry": "away"})


async def test_a_registry_in_redis_tells_who_has_an_agent(postgres_url: str, tmp_path: Path) -> None:
    with redis(tmp_path) as there:
        async with cluster(postgres_url, tmp_path, registry=SecretStr(there.url)) as (one, two):
            await one.chat("one")
            agent = await one.store.agent("local", "a")
            assert agent is not None
            registry = two.engine.registry
            assert isinstance(registry, RedisRegistry)
            store = registry._store

            async def unasked(agent: Agent) -> Whereabouts:
                raise AssertionError("the store is asked")

            async def noted() -> bool:
                return (await registry.find(agent)).holder == one.engine._instances.id

            await until(noted)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store, "find", unasked)
                assert (await two.chat("two")).json()["choices"][0]["message"]["content"] == "You said: two (2)"
            assert (len(one.asked), two.asked) == (2, [])
            assert (await two.http.get("/readyz")).json() == {"status": "ready", "registry": "ok"}
            assert (await two.http.delete("/v1/chains/a")).status_code == 200
            assert await registry.find(agent) == Whereabouts()
