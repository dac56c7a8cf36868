"""A request that arrives at another host than the one that has its agent, on the in-memory backend."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import psycopg
import pytest
from pydantic import SecretStr
from websockets.asyncio.client import connect

from cli_session_proxy.domain.models import Agent, Delivery, TurnRequest
from cli_session_proxy.engine import passing
from cli_session_proxy.engine.engine import HasLeft
from cli_session_proxy.engine.live import Answer
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.export import explain
from cli_session_proxy.http import bounds, gate, relay
from cli_session_proxy.http.connection import AHEAD
from cli_session_proxy.http.hop import REFUSED, Incoming
from cli_session_proxy.http.proof import HOP_MARK, OLD_MARK, OWNER, Peer, Signer, decisive
from cli_session_proxy.http.relay import Relay
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Profile
from cli_session_proxy.stores import held
from cli_session_proxy.stores.base import Store, Whereabouts
from cli_session_proxy.stores.postgresql.store import PostgresqlStore
from cli_session_proxy.wires import answers

from ..matrix import half
from ..stores.test_registry import certify
from ..until import until
from .cluster import KEY, PATIENCE, Host, Line, cluster, deaf, line, lose_the_next_commit, up
from .test_leaving import Case, Client, Connection, when_it_is_committed, while_it_runs
from .test_metrics import samples


@pytest.fixture(autouse=True)
def _a_silent_stream_begins_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def behind(there: Line) -> dict[str, Any]:
    """A host that the others reach over this line."""
    return {"port": there.port, "advertise": there.address}


async def test_a_request_is_answered_by_the_host_that_has_the_agent_warm(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path, 3) as (one, two, three):
        first = await one.chat("one")
        second = await two.chat("two", headers={"X-Request-Id": "mine"})
        third = await three.chat("three")
        assert [said(answer) for answer in (first, second, third)] == [
            "You said: one (1)", "You said: two (2)", "You said: three (3)",
        ]  # fmt: skip
        assert second.headers["x-continuity"] == "warm"
        assert second.headers.get_list("x-request-id") == ["mine"]
        assert first.headers.keys() == second.headers.keys()
        assert (len(one.asked), two.asked, three.asked) == (3, [], [])
        assert one.backend.retired == []
        # whoever gave the answer to its client notes that it arrived
        await until(lambda: _delivered(one))


async def _delivered(host: Host, turns: int = 1) -> bool:
    """Whether it has so many turns of the agent, and all have arrived."""
    deliveries = [turn.delivery for turn in await host.turns()]
    return len(deliveries) >= turns and set(deliveries) == {"delivered"}


async def test_an_agent_without_a_name_is_known_by_its_history_or_an_id_and_passed_on_then(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        answer = said(await one.chat("one", agent=None))
        assert said(await two.chat("one", answer, "two", agent=None)) == "You said: two (2)"
        body: dict[str, Any] = {"model": "sonnet", "input": "three"}
        begun = (await two.http.post("/v1/responses", json=body)).json()
        assert two.asked == [["three"]]
        body = {"model": "sonnet", "input": "four", "previous_response_id": begun["id"]}
        went_on = await one.http.post("/v1/responses", json=body)
        assert went_on.json()["previous_response_id"] == begun["id"]
        talk = (await one.http.post("/v1/conversations", json={})).json()["id"]
        for host, text in ((one, "five"), (two, "six")):
            await host.http.post("/v1/responses", json={"model": "sonnet", "input": text, "conversation": talk})
        assert [path[-1] for path in one.asked] == ["one", "two", "five", "six"]
        assert two.asked == [["three"], ["three", "four"]]


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_was_read_before_a_hop_is_not_counted_while_it_lasts(
    postgres_url: str, tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that only waited for another proxy's answer kept its part of the memory from all others here."""
    counted: list[dict[str, int]] = []

    async def unreachable(*_: Any) -> bool:
        return False

    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        submit = two.engine.submit

        async def reading(*given: Any, **more: Any) -> Any:
            await held.about_to_read(50)
            counted.append(dict(two.engine.holds.bytes))
            return await submit(*given, **more)

        monkeypatch.setattr(two.engine, "submit", reading)
        if not is_there:
            monkeypatch.setattr(Relay, "_can_accept", unreachable)
        for host in (one, two):
            host.model.reached.clear()
            host.model.open.clear()
        waiting = asyncio.create_task(two.chat("two"))
        await (one if is_there else two).model.reached.wait()
        assert not two.engine.holds.bytes
        for host in (one, two):
            host.model.open.set()
        assert said(await waiting) == "You said: two (2)"
        assert counted == [{"local": 50}] * (1 if is_there else 2)


async def test_a_stream_comes_through_as_it_is_made(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        one.model.open.clear()
        body = {"model": "sonnet", "stream": True, "messages": [{"role": "user", "content": "two"}]}
        async with two.http.stream("POST", "/agents/a/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert await anext(lines) == ": keep-alive"  # the head came before the answer was there
            one.model.open.set()
            told = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])
        assert text == "You said: two (2)"
        assert two.asked == []


async def test_a_client_that_leaves_is_known_to_have_left_where_its_turn_runs(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        leaving = await under_way(one, two)
        leaving.cancel()
        await asyncio.wait([leaving])

        async def ended() -> bool:
            return (await one.turns())[-1].status == "cancelled"

        await until(ended)
        assert ((await one.turns())[-1].error or {})["detail"] == {"by": "left"}


Pieces = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


def comes_back(patch: pytest.MonkeyPatch, pieces: Pieces) -> None:
    """How the answers to turns come back from the other host."""
    read = httpx.Response.aiter_raw

    def all_of(response: httpx.Response) -> AsyncIterator[bytes]:
        passed_on = HOP_MARK in response.request.headers and "x-turn-id" in response.headers
        return pieces(read(response)) if passed_on else read(response)

    patch.setattr(httpx.Response, "aiter_raw", all_of)


async def never(_asked: Incoming) -> None:
    """A proxy that is held up notices only when it is asked that a client has left."""
    await asyncio.Event().wait()


def as_its_answer_comes_back(client: Client, _store: Store, patch: pytest.MonkeyPatch) -> None:
    """The other host has given the answer out of its hands, and does not know that nobody takes it."""

    async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        whole = [piece async for piece in answer]
        patch.undo()
        client.leave_and_say_it_again()
        for piece in whole:
            yield piece

    comes_back(patch, pieces)


def when_it_is_known_that_it_left(client: Client, store: Store, patch: pytest.MonkeyPatch) -> None:
    """The same is said again while it is noted that nobody took the answer: before the note is stored, the other host
    has read what is known of the turn, unless this one waits for the note."""
    note, arrival = store.set_delivery, PostgresqlStore.arrival
    looked = asyncio.Event()

    async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        whole = [piece async for piece in answer]
        client.leave()
        for piece in whole:
            yield piece

    async def looks(at: PostgresqlStore, *of: Any) -> Any:
        found = await arrival(at, *of)
        looked.set()
        return found

    async def noted(turn_id: str, delivery: Delivery, **how: Any) -> None:
        patch.undo()
        patch.setattr(PostgresqlStore, "arrival", looks)
        client.second.say()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await looked.wait()
        await note(turn_id, delivery, **how)

    comes_back(patch, pieces)
    patch.setattr(store, "set_delivery", noted)


@pytest.mark.parametrize(
    ("case", "stream"),
    half(
        [
            while_it_runs,
            when_it_is_committed,
            as_its_answer_comes_back,
            when_it_is_known_that_it_left,
        ],
        [False, True],
    ),
)
@pytest.mark.parametrize("at", [0, 1, 2], ids=["where it runs", "there again", "at a third one"])
@pytest.mark.sample(5)
async def test_who_left_the_host_that_passed_it_on_and_says_the_same_again_has_said_it_once(
    at: int, case: Case, stream: bool, postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path, 3, disconnect_grace=30.0) as proxies:
        one, two, _ = proxies
        await one.chat("zero")
        one.model.open.clear()
        client = Client(two.settings.port, proxies[at].settings.port, stream=stream)
        client.first.say()
        await until(lambda: len(one.asked) == 2)
        with pytest.MonkeyPatch.context() as patch:
            case(client, one.store if case is when_it_is_committed else two.store, patch)
            one.model.open.set()
            assert b"200 OK" in await client.second.answer()
            await until(lambda: not any(host.engine.progress() for host in proxies))
        assert [path[-1] for host in proxies for path in host.asked] == ["zero", "one"]


@pytest.mark.parametrize("at", [0, 2], ids=["where it runs", "at a third one"])
@pytest.mark.sample(1)
async def test_who_left_before_its_request_was_accepted_elsewhere_and_says_the_same_again_has_said_it_once(
    at: int, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request looked for the turn of the first while that was being stored, and became one of its own."""
    monkeypatch.setattr(Incoming, "left", never)
    async with cluster(postgres_url, tmp_path, 3, disconnect_grace=30.0) as proxies:
        one, two, _ = proxies
        await one.chat("zero")
        accept, stores, goes_on = one.store.accept, asyncio.Event(), asyncio.Event()

        async def slow(*given: Any, **how: Any) -> Any:
            stores.set()
            await goes_on.wait()
            return await accept(*given, **how)

        monkeypatch.setattr(one.store, "accept", slow)
        client = Client(two.settings.port, proxies[at].settings.port, stream=False)
        client.first.say()
        await stores.wait()
        client.leave_and_say_it_again()
        await until(lambda: any(lock._waiters for lock in one.engine._acceptance_locks.values()))
        goes_on.set()
        assert b"200 OK" in await client.second.answer()
        await until(lambda: not any(host.engine.progress() for host in proxies))
        assert [path[-1] for host in proxies for path in host.asked] == ["zero", "one"]


async def test_the_end_of_a_forwarded_stream_is_sent_as_soon_as_its_client_is_seen_there(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that left in the loop's next iteration was sent it nevertheless: it had the answer, and said the same
    again."""
    async with cluster(postgres_url, tmp_path, 2) as (one, two):
        await one.chat("zero")
        client = Connection(two.settings.port, stream=True)
        client.socket.setblocking(False)
        has_left, received = Incoming.has_left, bytearray()

        def look() -> None:
            with suppress(BlockingIOError):
                received.extend(client.socket.recv(64 * 1024))

        def looked_at(incoming: Incoming) -> bool:
            asyncio.get_running_loop().call_soon(look)
            return has_left(incoming)

        monkeypatch.setattr(Incoming, "has_left", looked_at)
        client.say()
        await until(lambda: _delivered(one, 2))
        assert b"data: [DONE]" in received


async def silent(*_: object) -> bool:
    return False


async def test_who_left_unnoticed_and_says_the_same_at_a_proxy_that_cannot_pass_it_on_has_said_it_once(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the proxy that runs the turn, and that one asks the proxy that forwarded the first request."""
    monkeypatch.setattr(Incoming, "left", never)
    async with cluster(postgres_url, tmp_path, 3, disconnect_grace=30.0) as (one, two, three):
        await one.chat("zero")
        one.model.open.clear()
        client = Client(two.settings.port, three.settings.port, stream=False)
        client.first.say()
        await until(lambda: len(one.asked) == 2)
        monkeypatch.setattr(Relay, "_can_accept", silent)
        client.leave_and_say_it_again()
        await until(lambda: bool(three.engine._live))
        one.model.open.set()
        assert b"200 OK" in await client.second.answer()
        assert [path[-1] for host in (one, two, three) for path in host.asked] == ["zero", "one"]


@pytest.mark.parametrize("again_at", [0, 1], ids=["where it ran", "where it was waited for"])
async def test_who_left_both_proxies_that_had_the_turn_for_it_and_says_the_same_again_has_said_it_once(
    again_at: int, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second proxy took the answer over for nobody, and said that it knew of no client that had left."""
    async with cluster(postgres_url, tmp_path, 2, disconnect_grace=30.0) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        first, second = (Connection(host.settings.port) for host in (one, two))
        first.say()
        await until(lambda: len(one.asked) == 2)
        first.socket.close()
        monkeypatch.setattr(Relay, "_can_accept", silent)
        second.say()
        await until(lambda: bool(two.engine._live))
        [waiting] = two.engine._live.values()
        second.socket.close()
        await until(lambda: waiting.abandoned)
        one.model.open.set()
        await until(lambda: not two.engine._live)
        third = Connection((one, two)[again_at].settings.port)
        third.say()
        assert b"200 OK" in await third.answer()
        assert [path[-1] for host in (one, two) for path in host.asked] == ["zero", "one"]


async def test_who_got_an_uncertain_answer_and_says_the_same_at_another_proxy_has_said_it_twice(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other proxy gave the answer once more, while it was being noted that it had arrived."""
    monkeypatch.setattr(Relay, "_can_accept", silent)
    async with cluster(postgres_url, tmp_path, 2) as (one, two):
        await one.chat("one")

        async def is_delivered() -> bool:
            return (await one.turns())[-1].delivery == "delivered"

        await until(is_delivered)
        with psycopg.connect(postgres_url, autocommit=True) as conn:
            conn.execute("UPDATE turns SET delivery = 'uncertain'")
        note, noting, goes_on = two.store.set_delivery, asyncio.Event(), asyncio.Event()

        async def noted(*given: Any, **how: Any) -> None:
            noting.set()
            await goes_on.wait()
            await note(*given, **how)

        monkeypatch.setattr(two.store, "set_delivery", noted)
        settle, asked = two.engine.settled, asyncio.Event()

        async def settled(*of: Any, **how: Any) -> bool:
            asked.set()
            return await settle(*of, **how)

        monkeypatch.setattr(two.engine, "settled", settled)
        assert said(await two.chat("one")) == "You said: one (1)"
        await noting.wait()
        again = asyncio.create_task(one.chat("one"))
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait({again, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        goes_on.set()
        assert said(await again) == "You said: one (2)"


@pytest.mark.parametrize(("probed", "closed"), [(False, False), (False, True), (True, True)])
@pytest.mark.sample(2)
async def test_who_left_and_says_the_same_where_its_first_request_comes_later_has_said_it_once(
    probed: bool, closed: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy that forwarded the first one waited for the rest of an answer that had not begun. `probed`: the other
    one has shown meanwhile that it runs. `closed`: what is between them closes a connection whose client has left."""
    if not closed:
        monkeypatch.setattr(relay, "ON_ITS_WAY", 0.0)
    monkeypatch.setattr(relay, "READ_ON", 10 * PATIENCE)
    async with cluster(postgres_url, tmp_path, 2, silence=1.0 if probed else 10.0) as (one, two):
        await one.chat("zero")
        has_ended, was_asked = Relay._has_ended, asyncio.Event()

        async def asked(self: Relay, hop: relay.Hop, within: float) -> bool:
            ended = await has_ended(self, hop, within)
            was_asked.set()
            return ended

        monkeypatch.setattr(Relay, "_has_ended", asked)
        submit, held, goes_on, is_gone = one.engine.submit, asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def submitted(request: TurnRequest, has_left: HasLeft | None = None) -> Answer:
            monkeypatch.setattr(one.engine, "submit", submit)
            held.set()
            await goes_on.wait()
            assert has_left is not None
            if closed:
                await until(has_left)
            try:
                return await submit(request, has_left if closed else None)
            finally:
                is_gone.set()

        monkeypatch.setattr(one.engine, "submit", submitted)
        client = Client(two.settings.port, one.settings.port, stream=False)
        client.first.say()
        await held.wait()
        if probed:
            await was_asked.wait()
        client.leave_and_say_it_again()
        assert b"200 OK" in await client.second.answer()
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            await is_gone.wait()
    assert [path[-1] for path in one.asked] == ["zero", "one"]


@pytest.mark.parametrize("answers", [True, False])
async def test_the_same_words_are_a_turn_of_their_own_unless_the_first_client_may_have_left_a_proxy_that_is_silent(
    answers: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        if not answers:
            assert one.engine.passing is not None
            monkeypatch.setattr(one.engine.passing, "settle", silent)
        first = asyncio.create_task(two.chat("one"))
        await until(lambda: len(one.asked) == 2)
        second = asyncio.create_task(one.chat("one"))
        await until(lambda: sum(len(live._answers) for live in one.engine._live.values()) == 2)
        one.model.open.set()
        assert (await first).status_code == (await second).status_code == 200
        assert [path[-1] for path in one.asked] == ["zero", "one", *["one"] * answers]


@pytest.mark.parametrize("at", [0, 1], ids=["where it ran", "at a third one"])
@pytest.mark.sample(1)
async def test_a_large_answer_that_a_silent_proxy_has_not_read_is_given_to_the_client_that_left_it(
    at: int, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()  # until then the proxy is paused

    async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        await goes_on.wait()
        async for piece in answer:
            yield piece

    comes_back(monkeypatch, pieces)
    monkeypatch.setattr(Incoming, "left", never)
    async with cluster(postgres_url, tmp_path, 3) as (one, two, three):
        await one.chat("zero")
        one.model.calls.append([{"type": "text", "text": "x" * 15 * 1024 * 1024}])
        client = Client(two.settings.port, (one, three)[at].settings.port, stream=False)
        client.first.say()

        async def ended() -> bool:
            return len(turns := await one.turns()) == 2 and turns[-1].status == "completed"

        await until(ended)
        assert one.engine.passing is not None
        monkeypatch.setattr(one.engine.passing, "settle", silent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Relay, "_can_accept", silent)
            client.leave_and_say_it_again()
            assert b"200 OK" in await client.second.answer()
        goes_on.set()
        assert [path[-1] for host in (one, two, three) for path in host.asked] == ["zero", "one"]


async def test_a_proxy_that_stops_still_says_that_its_client_is_there(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        first = asyncio.create_task(two.chat("one"))
        await until(lambda: len(one.asked) == 2)
        two.engine.ready = False  # as long as its turns run on
        second = asyncio.create_task(one.chat("one"))
        await until(lambda: sum(len(live._answers) for live in one.engine._live.values()) == 2)
        one.model.open.set()
        assert (await first).status_code == (await second).status_code == 200
        assert [path[-1] for path in one.asked] == ["zero", "one", "one"]


async def test_a_proxy_that_stops_notes_first_that_answers_of_others_arrived(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client had all of the answer, said the same again as its next turn, and was given the answer again."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        close, noted = two.store.close, list[Delivery]()

        async def closed() -> None:
            noted.append((await one.turns())[-1].delivery)
            await close()

        monkeypatch.setattr(two.store, "close", closed)
        first = asyncio.create_task(two.chat("one"))
        await until(lambda: len(one.asked) == 2)
        stopping = asyncio.create_task(two.engine.stop())
        await until(lambda: not two.engine.ready)
        one.model.open.set()
        assert said(await first) == "You said: one (2)"
        await stopping
        assert noted == ["delivered"]
        assert said(await one.chat("one")) == "You said: one (3)"


async def test_a_proxy_that_stops_waits_for_answers_of_others_as_long_as_for_its_own(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path, drain_timeout=0.1) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        first = asyncio.create_task(two.chat("one"))
        await until(lambda: len(one.asked) == 2)
        async with asyncio.timeout(PATIENCE):
            await two.engine.stop()
        assert not first.done()
        one.model.open.set()
        assert said(await first) == "You said: one (2)"


async def test_an_answer_that_ended_with_an_error_did_not_arrive(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream had begun, and the commit had succeeded, which nobody could know. The proxy between took the stream's
    end for that of the answer, and the client, which was told to send the request again, doubled its turn."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        lose_the_next_commit(one, monkeypatch)
        one.model.open.clear()
        body = {"model": "sonnet", "stream": True, "messages": [{"role": "user", "content": "one"}]}
        async with two.http.stream("POST", "/agents/a/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            one.model.open.set()
            assert "send it again" in "".join([line async for line in lines])
        assert "You said: one (2)" in (await two.chat("one", stream=True)).text
        assert one.asked == [["zero"], ["zero", "one"]]


async def test_the_same_words_after_a_stream_wait_for_the_note_that_it_arrived(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy that ran the turn stops just then: it is slow to hand the answer on, and says nothing any more."""

    async def says_nothing(*_: object) -> bool:
        return False

    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        hand_on, arrival, looked = one.store.hand_on, two.store.arrival, asyncio.Event()

        async def handed_on(*given: Any) -> None:
            await looked.wait()
            await hand_on(*given)

        async def looks(*of: Any) -> Any:
            found = await arrival(*of)
            looked.set()
            return found

        monkeypatch.setattr(one.store, "hand_on", handed_on)
        assert two.engine.passing is not None
        monkeypatch.setattr(two.engine.passing, "settle", says_nothing)
        assert "You said: one (2)" in (await two.chat("one", stream=True)).text
        monkeypatch.setattr(two.store, "arrival", looks)
        assert "You said: one (3)" in (await two.chat("one", stream=True)).text


@pytest.mark.parametrize("is_handed_on", [True, False], ids=["handed on", "handed on later"])
async def test_a_stream_whose_proxy_does_not_say_how_it_ended_arrived_if_it_is_handed_on(
    postgres_url: str, tmp_path: Path, is_handed_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has all of the answer, and says the same again as its next turn."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        hand_on, note = one.store.hand_on, Relay._note
        ended, noted = asyncio.Event(), asyncio.Event()

        async def handed_on(*given: Any) -> None:
            if not is_handed_on:
                ended.set()
                await noted.wait()
            await hand_on(*given)
            ended.set()

        async def asked_in_vain(*_: object) -> bool:
            await ended.wait()
            return False

        async def notes(*of: Any) -> None:
            await note(*of)
            noted.set()

        monkeypatch.setattr(one.store, "hand_on", handed_on)
        monkeypatch.setattr(Relay, "_has_stored", asked_in_vain)
        monkeypatch.setattr(Relay, "_note", notes)
        assert "You said: one (2)" in (await two.chat("one", stream=True)).text
        await noted.wait()
        assert ((await one.turns())[-1].delivery == "delivered") is is_handed_on
        assert "You said: one (3)" in (await two.chat("one", stream=True)).text


async def test_an_answer_that_is_known_to_have_arrived_while_its_proxy_was_asked_in_vain_is_not_given_again(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        note, asked = one.store.set_delivery, asyncio.Event()

        async def slow(*what: Any, **how: Any) -> None:
            await asked.wait()
            await note(*what, **how)

        async def silent(*_: object) -> bool:
            asked.set()
            await until(lambda: _delivered(one))
            return False

        monkeypatch.setattr(one.store, "set_delivery", slow)
        assert two.engine.passing is not None
        monkeypatch.setattr(two.engine.passing, "settle", silent)
        assert said(await one.chat("go on")) == "You said: go on (1)"
        assert said(await two.chat("go on")) == "You said: go on (2)"


async def test_a_request_that_says_it_is_a_retry_asks_no_other_proxy_whether_its_client_left(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(*_: object) -> bool:
        raise AssertionError("it was asked")

    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        assert two.engine.passing is not None
        monkeypatch.setattr(two.engine.passing, "settle", asked)
        first = asyncio.create_task(one.chat("one"))
        await until(lambda: len(one.asked) == 2)
        second = asyncio.create_task(two.chat("one", headers={"X-Stainless-Retry-Count": "1"}))
        await until(lambda: second.done() or sum(len(live._answers) for live in one.engine._live.values()) == 2)
        one.model.open.set()
        assert said(await first) == said(await second) == "You said: one (2)"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_left_and_has_its_answer_from_elsewhere_is_not_passed_on(
    stream: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that was paused reads requests whose clients left meanwhile."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        client, seen_alive = Client(two.settings.port, stream=stream), two.engine.seen_alive

        async def paused() -> None:
            client.leave()
            assert said(await one.chat("one")) == "You said: one (2)"
            await until(lambda: _delivered(one))
            await seen_alive()

        monkeypatch.setattr(two.engine, "seen_alive", paused)
        client.first.say()

        async def left() -> bool:
            return sum((await passed_on(two)).values()) == 1

        await until(left)
        assert said(await one.chat("two")) == "You said: two (3)"
        assert await passed_on(two) == {"left": 1}


async def test_who_left_a_proxy_whose_line_was_lost_and_says_the_same_again_has_said_it_once(
    postgres_url: str, tmp_path: Path
) -> None:
    """The proxy that runs the turn does not hear that the other one has closed its connection."""
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        client = Client(two.settings.port, one.settings.port, stream=False)
        client.first.say()
        await until(lambda: len(one.asked) == 2)
        there.lose()
        client.leave_and_say_it_again()
        await until(lambda: sum(len(live._answers) for live in one.engine._live.values()) == 2)
        one.model.open.set()
        assert b"200 OK" in await client.second.answer()
        await until(lambda: not one.engine.progress())
        assert [path[-1] for path in one.asked] == ["zero", "one"]


async def test_who_left_a_connection_that_is_not_read_any_more_has_left(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said more than the server holds: it does not hear the end."""
    async with cluster(postgres_url, tmp_path, disconnect_grace=30.0) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        client, arrival, looked = Client(two.settings.port, stream=False), one.store.arrival, asyncio.Event()
        client.first.say()
        await until(lambda: len(one.asked) == 2)

        async def looks(*of: Any) -> Any:
            found = await arrival(*of)
            looked.set()
            return found

        monkeypatch.setattr(one.store, "arrival", looks)
        client.first.socket.sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * (AHEAD + 1))
        client.leave_and_say_it_again()
        await looked.wait()
        one.model.open.set()
        assert b"200 OK" in await client.second.answer()
        await until(lambda: not one.engine.progress())
        assert [path[-1] for path in one.asked] == ["zero", "one"]


class HeldUp:
    """A host that is held up just when the answer comes back: it goes on when it is `released`, and its client has
    left. `notes` are what it notes of answers."""

    def __init__(self, host: Host, client: socket.socket, patch: pytest.MonkeyPatch) -> None:
        self.released = asyncio.Event()
        self.notes: set[Delivery] = set()
        note = host.store.set_delivery

        async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in answer:
                if b"You said" in piece:
                    await self.released.wait()
                    client.close()
                yield piece

        async def noted(turn_id: str, delivery: Delivery, **how: Any) -> None:
            await note(turn_id, delivery, **how)
            self.notes.add(delivery)

        comes_back(patch, pieces)
        patch.setattr(host.store, "set_delivery", noted)
        patch.setattr(relay, "PROBE_TIMEOUT", PATIENCE)  # the other host says in time that it has stored its part


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.sample(1)
async def test_an_answer_that_came_where_it_was_made_is_kept_although_it_was_lost_on_another_way(
    stream: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_url, tmp_path, disconnect_grace=30.0) as (one, two):
        await one.chat("zero")
        one.model.open.clear()
        lost = Connection(two.settings.port, stream=stream, key="k")
        held_up = HeldUp(two, lost.socket, monkeypatch)
        lost.say()
        await until(lambda: len(one.asked) == 2)
        again = asyncio.create_task(one.chat("one", headers={"Idempotency-Key": "k"}, stream=stream))
        await until(lambda: any(len(live._answers) == 2 for live in one.engine._live.values()))
        one.model.open.set()
        assert "You said: one" in (await again).text
        await until(lambda: _delivered(one))
        held_up.released.set()
        await until(lambda: held_up.notes == {"undelivered"})
        await one.chat("two")
        assert one.asked[-1] == ["zero", "one", "two"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("where", ["here", "there", "on the way back"])
async def test_a_background_request_whose_client_left_without_the_id_is_one_turn_if_it_is_sent_again(
    where: str, stream: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its turn counted as the arrival of its answer, and the words were said twice. Or the proxy that had
    the answer for its client put the turn off the path."""
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    body = {"model": "sonnet", "stream": stream, "background": True, "input": "one"}
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("zero")
        comes, goes_on = asyncio.Event(), asyncio.Event()

        async def held_up(*_given: Any, **_how: Any) -> None:
            comes.set()
            await goes_on.wait()

        async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            whole = [piece async for piece in answer]
            await held_up()
            for piece in whole:
                yield piece

        async def is_uncertain() -> bool:
            return (await one.turns())[-1].delivery == "uncertain"

        with monkeypatch.context() as patch:
            if where == "on the way back":
                comes_back(patch, pieces)
            else:
                one.model.open.clear()
                patch.setattr(answers.Client, "write", held_up)
            port = (one if where == "here" else two).settings.port
            leaves = Connection(port, stream=stream, path="responses", background=True, input="one")
            leaves.say()
            await comes.wait()
            leaves.socket.close()
            await until(is_uncertain)

        async def again() -> str:
            answer = await two.http.post("/agents/a/v1/responses", json=body)
            return str(answer.headers["x-turn-id"])

        asked = asyncio.create_task(again())
        one.model.open.set()
        first = await asked
        assert [turn.id for turn in await one.turns()][1:] == [first]
        assert await again() != first
        await one.chat("two")
        assert one.asked[-1] == ["zero", "one", "one", "two"]


@pytest.mark.parametrize("in_time", [True, False])
async def test_an_answer_of_which_the_client_had_all_is_kept_although_it_left_before_the_end_was_known(
    in_time: bool, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "READ_ON", PATIENCE if in_time else 0.0)
    async with cluster(postgres_url, tmp_path, disconnect_grace=30.0) as (one, two):
        await one.chat("zero")
        client, left, noticed = Connection(two.settings.port, stream=True), Incoming.left, asyncio.Event()

        async def leaves(asked: Incoming) -> None:
            await left(asked)
            noticed.set()

        async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in answer:
                yield piece
            if noticed.is_set():  # the answer to "two"
                return
            told = b""
            while b"[DONE]" not in told:
                told += await client.answer()
            client.socket.close()
            await noticed.wait()
            for _ in range(100):  # whoever waits for that goes on before
                await asyncio.sleep(0)
            if not in_time:
                await asyncio.Event().wait()

        monkeypatch.setattr(Incoming, "left", leaves)
        comes_back(monkeypatch, pieces)
        client.say()
        await noticed.wait()
        await two.chat("two")
        assert one.asked[-1] == ["zero", "one", "two"]
        if in_time:
            await until(lambda: _delivered(one))


@pytest.mark.full
async def test_an_answer_whose_end_was_dropped_while_it_waited_for_room_did_not_arrive(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_url, tmp_path, disconnect_grace=30.0) as (one, two):
        await one.chat("zero")
        one.model.calls.append([{"type": "text", "text": "x" * 15 * 1024 * 1024}])
        client = Connection(two.settings.port)
        notes, note = set[Delivery](), two.store.set_delivery

        async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            whole = b"".join([piece async for piece in answer])
            yield whole[:-100]  # more than the kernel takes: the rest waits for room
            asyncio.get_running_loop().call_soon(client.socket.close)
            yield whole[-100:]

        async def noted(turn_id: str, delivery: Delivery, **how: Any) -> None:
            await note(turn_id, delivery, **how)
            notes.add(delivery)

        comes_back(monkeypatch, pieces)
        monkeypatch.setattr(gate, "PIECE", 1 << 30)  # all but the end is given to the server at once
        monkeypatch.setattr(two.store, "set_delivery", noted)
        client.say()
        await until(lambda: bool(notes))
        assert notes == {"undelivered"}


async def test_a_slow_store_holds_up_nobody_else(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_url, tmp_path, lease=600.0) as (one, two):
        for agent in ("a", "b"):
            await one.chat("zero", agent=agent)
        goes_on, note = asyncio.Event(), two.store.set_delivery

        async def noted(turn_id: str, delivery: Delivery, **how: Any) -> None:
            noting.set()
            await goes_on.wait()
            await note(turn_id, delivery, **how)

        monkeypatch.setattr(two.store, "set_delivery", noted)
        client, noting = Connection(two.settings.port), asyncio.Event()

        async def pieces(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            client.socket.close()
            async for piece in answer:
                yield piece

        comes_back(monkeypatch, pieces)
        client.say()
        await noting.wait()
        assert said(await two.chat("one", agent="b")) == "You said: one (2)"
        goes_on.set()


async def test_a_refusal_of_the_other_host_comes_back_as_it_is(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path, lane_limit=1) as (one, two):
        await one.chat("one")
        running = await under_way(one, one)
        there, here = await two.chat("three"), await one.chat("three")
        assert (there.status_code, there.json()["error"]) == (429, here.json()["error"])
        assert there.headers["retry-after"] == here.headers["retry-after"]
        one.model.open.set()
        await running


@pytest.mark.parametrize("how", ["nobody listens", "it is paused", "it has another key"])
@pytest.mark.sample(1)
async def test_where_the_other_host_is_not_reached_the_turn_runs_here(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "it is paused":
        monkeypatch.setattr(relay, "PROBE_TIMEOUT", 1.0)
    async with deaf() as address:
        own: dict[str, dict[str, Any]] = {
            "nobody listens": {"advertise": "http://127.0.0.1:1"},
            "it is paused": {"advertise": address},
            "it has another key": {"cluster_key": SecretStr("the-key-of-another-cluster")},
        }
        async with cluster(postgres_url, tmp_path, each=[own[how]]) as (one, two):
            await one.chat("one")
            answer = await two.chat("two")
            assert said(answer) == "You said: two (2)"
            assert REFUSED not in answer.headers
            assert [path[-1] for path in two.asked] == ["two"]
            assert one.backend.retired == ["a"]
            assert [turn.status for turn in await two.turns()] == ["completed"] * 2
            assert await passed_on(two) == {"ran_here": 1}


async def test_a_host_that_stops_lets_its_agents_go_on_elsewhere(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        assert said(await two.chat("two")) == "You said: two (2)"
        await one.engine.stop()  # its server answers still, and takes nothing
        assert said(await two.chat("three")).startswith("You said: three")
        assert (len(one.asked), len(two.asked)) == (2, 1)


async def test_a_host_that_does_not_reach_the_store_is_given_no_turn(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, and would keep its agents for as long as it is cut off."""

    async def away(*given: Any, **named: Any) -> Any:
        raise StoreUnavailable("the store does not answer")

    async with cluster(postgres_url, tmp_path, lease=3.0) as (one, two):
        await one.chat("one")
        for way in ("read", "write"):
            monkeypatch.setattr(one.store.database, way, away)
        assert (await one.http.get("/healthz")).status_code == 200
        assert said(await two.chat("two")) == "You said: two (2)"
        assert [path[-1] for path in two.asked] == ["two"]
        assert one.asked == [["one"]]


async def passed_on(host: Host) -> dict[str, float]:
    """How many requests this host was to pass on, by what became of them."""
    told = samples((await host.http.get("/metrics")).text)
    name = "requests_passed_on_total{result="
    return {label.removeprefix(name).rstrip("}"): count for label, count in told.items() if label.startswith(name)}


async def test_what_becomes_of_requests_that_are_passed_on_is_counted(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one")
        assert await passed_on(two) == {}
        await two.chat("two")
        assert await passed_on(two) == {"answered": 1}
        for how in ("left", "interrupted"):
            one.model.reached.clear()
            one.model.open.clear()
            running = asyncio.create_task(two.chat(how))
            await one.model.reached.wait()
            if how == "left":
                running.cancel()
            else:
                monkeypatch.setattr(relay, "PROBE_TIMEOUT", 0.5)  # the turn is not over before it
                there.cut()
            await asyncio.wait([running])

            async def counted(how: str = how) -> bool:
                return (await passed_on(two)).get(how) == 1

            await until(counted)
            one.model.open.set()
        assert await passed_on(two) == {"answered": 1, "left": 1, "interrupted": 1}


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_hop_over_tls_goes_to_who_is_trusted_alone(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    key, certificate = await asyncio.to_thread(certify, tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with line(tls) as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one")
        assert said(await two.chat("two")) == "You said: two (2)"
        assert (len(one.asked), len(two.asked)) == ((2, 0) if trusted else (1, 1))


async def test_nothing_is_passed_on_twice(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them believes that the other one has the agent."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        for host, other in ((one, two), (two, one)):

            async def find(agent: Agent, other: Host = other) -> Whereabouts:
                return Whereabouts("the other one", other.settings.advertise)

            assert host.engine.registry is not None
            monkeypatch.setattr(host.engine.registry, "find", find)
        assert said(await one.chat("one")) == "You said: one (1)"
        assert (one.asked, two.asked) == ([], [["one"]])
        assert said(await one.chat("two")) == "You said: two (2)"
        assert said(await two.chat("three")) == "You said: three (3)"


async def test_a_hop_is_believed_by_the_key_of_the_cluster_alone(postgres_url: str, tmp_path: Path) -> None:
    keys = {"alice": SecretStr("a-secret-of-alice"), "bob": SecretStr("a-secret-of-bob-s")}
    async with cluster(postgres_url, tmp_path, keys=keys) as (one, two):
        as_alice, as_bob = ({"Authorization": f"Bearer {key.get_secret_value()}"} for key in keys.values())
        assert said(await one.chat("one", headers=as_alice)) == "You said: one (1)"
        for marks in (
            {HOP_MARK: "", OWNER: "alice"}, {HOP_MARK: f"1 2 {KEY}", OWNER: "alice"}, {OWNER: "alice"},
            {OLD_MARK: KEY, OWNER: "alice"},
        ):  # fmt: skip
            refused = await one.chat("spoofed", headers=marks)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        # a client's own word for its owner is no more than any other header
        assert said(await two.chat("two", headers={**as_alice, OWNER: "bob"})) == "You said: two (2)"
        assert said(await two.chat("mine", headers=as_bob)) == "You said: mine (1)"
        assert [path[-1] for path in one.asked] == ["one", "two"]


async def test_a_key_in_an_address_goes_no_further(postgres_url: str, tmp_path: Path) -> None:
    keys = {"alice": SecretStr("a-secret-of-alice")}
    seen: list[str] = []
    async with cluster(postgres_url, tmp_path, keys=keys) as (one, two):
        body = {"contents": [{"role": "user", "parts": [{"text": "one"}]}]}
        own = "key=a-secret-of-alice&%6Be%79=a-secret-of-alice&k=a%20b"
        path = f"/agents/a/v1beta/models/sonnet:generateContent?{own}&alt=json"
        assert (await one.http.post(path, json=body)).status_code == 200

        original = Relay._request

        def noted(self: Relay, *given: Any) -> httpx.Request:
            request = original(self, *given)
            seen.append(f"{request.extensions['target']!r} {request.headers!r}")
            return request

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Relay, "_request", noted)
            assert (await two.http.post(path, json=body)).status_code == 200
        assert len(one.asked) == 2
        (told,) = seen
        assert "?k=a%20b&alt=json" in told
        assert "a-secret-of-alice" not in told


@pytest.mark.parametrize("owner", ["%ff", "%00", "a%20b", "%C3%A4", "x" * 65])
async def test_an_owner_that_nobody_can_be_is_refused_in_words(postgres_url: str, tmp_path: Path, owner: str) -> None:
    """By a holder of the cluster's key: it was a 500, here or in the store."""
    async with cluster(postgres_url, tmp_path, 1) as (one,):
        signer = Signer(KEY, None, "x")
        peer = Peer(one.engine.instance_id, 0.0)
        address = str(one.settings.advertise)
        marks = signer.request("GET", "/v1/chains", owner, address, peer, decisive(()))
        answer = await one.http.get("/v1/chains", headers=marks)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, OWNER)
        assert REFUSED in answer.headers


async def test_what_is_between_two_neighbours_and_what_connection_names_goes_no_further(
    postgres_url: str, tmp_path: Path
) -> None:
    seen: list[str] = []
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        original = Relay._request

        def noted(self: Relay, *given: Any) -> httpx.Request:
            request = original(self, *given)
            seen.append(repr(request.headers.raw))
            return request

        own = {
            "Connection": "keep-alive, X-Mine ,X-Other",
            "X-Mine": "marmalade",
            "X-Other": "marmalade",
            "X-Kept": "kept",
        }
        known = dict.fromkeys(("Proxy-Authorization", "X-Cluster-Owner", "Cookie", "TE", "X-Api-Key"), "marmalade")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Relay, "_request", noted)
            assert said(await two.chat("two", headers=own | known)) == "You said: two (2)"
        assert one.asked == [["one"], ["one", "two"]]
        (told,) = seen
        assert "kept" in told
        assert "marmalade" not in told


async def test_what_a_neighbour_adds_to_an_answer_for_its_connection_goes_no_further(
    postgres_url: str, tmp_path: Path
) -> None:
    """As a reverse proxy before the other host does."""
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one")
        pump = there._pump

        async def adding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            original = writer.write

            def write(data: bytes | bytearray | memoryview) -> None:
                added = b"\r\nConnection: x-near\r\nX-Near: 1\r\nUpgrade: h2c\r\nX-Far: 1\r\n"
                original(bytes(data).replace(b"\r\n", added, 1) if b"x-turn-id" in bytes(data) else data)

            writer.write = write  # type: ignore[method-assign]
            await pump(reader, writer)

        there._pump = adding  # type: ignore[method-assign]
        answer = await two.chat("two")
        assert said(answer) == "You said: two (2)"
        assert answer.headers["x-far"] == "1"
        assert not {"x-near", "upgrade"} & answer.headers.keys()


async def test_a_space_behind_a_headers_value_is_no_part_of_it(postgres_url: str, tmp_path: Path) -> None:
    """The client of a hop refuses such a value: each attempt was `interrupted`. Here it named another agent."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        for host, text in ((one, "one"), (two, "two")):
            body = json.dumps({"model": "sonnet", "messages": [{"role": "user", "content": text}]})
            reader, writer = await asyncio.open_connection("127.0.0.1", host.http.base_url.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}X-Agent-Id: a \t\r\nConnection: close \r\n\r\n{body}".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert one.asked == [["one"], ["one", "two"]]


@pytest.mark.parametrize(
    "headers", [{"Accept-Language": "x" * 64_500}, {f"X-{at}": "" for at in range(118)}], ids=["long", "many"]
)
async def test_a_request_that_the_marks_of_a_hop_make_too_large_runs_here(
    postgres_url: str, tmp_path: Path, headers: dict[str, str]
) -> None:
    """The other proxy refused its head as one of a stranger's: each attempt was `interrupted`."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        assert said(await two.chat("two", headers=headers)) == "You said: two (2)"
        assert (one.asked, two.asked) == ([["one"]], [["one", "two"]])


async def test_of_too_many_proxies_the_one_asked_longest_ago_is_forgotten(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster whose proxies get new ports every day had no hops after so many."""
    monkeypatch.setattr(relay, "MOST_PROXIES", 1)
    async with cluster(postgres_url, tmp_path, 3) as hosts:
        await hosts[0].chat("one", agent="a")
        await hosts[1].chat("one", agent="b")
        for text in ("two", "three"):
            assert said(await hosts[2].chat(text, agent="a")).startswith(f"You said: {text}")
            assert said(await hosts[2].chat(text, agent="b")).startswith(f"You said: {text}")
        assert [len(host.asked) for host in hosts] == [3, 3, 0]


async def test_a_proxy_that_is_asked_just_now_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client was closed while it was used."""
    monkeypatch.setattr(relay, "MOST_PROXIES", 1)
    engine: Any = SimpleNamespace(settings=SimpleNamespace(advertise=None), instance_id="here", passing=None)
    made = Relay(engine, KEY, 1.0, lambda _result: None)
    async with made._use("http://a") as one:
        async with made._use("http://b") as two:
            assert not one.client.is_closed
        async with made._use("http://c"):
            assert (one.client.is_closed, two.client.is_closed) == (False, True)
    await made.close()
    assert one.client.is_closed


async def told_by(lines: AsyncIterator[str]) -> Any:
    """The turns of the next `progress` event."""
    async with asyncio.timeout(PATIENCE):
        async for line in lines:
            if line == "event: progress":
                return json.loads((await anext(lines)).removeprefix("data: "))["turns"]
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(
    ("between", "name"),
    [
        pytest.param(b'{"turns":[{"text":"%b"}]}' % (b"x" * 2_000_000), "a", id="too long"),
        pytest.param(b"nonsense", "a", id="no JSON"),
        pytest.param(b'{"turns":5}', "a", id="no list"),
        pytest.param(b"[" * 5000, "a", id="deep"),
        pytest.param(b"\xff", "a", id="no text"),
        pytest.param(b'{"turns":[]}', "%2E%2E", id="a name that leads upward"),
    ],
)
@pytest.mark.sample(3)
async def test_what_runs_elsewhere_is_told_whatever_else_is_said_on_that_line(
    postgres_url: str, tmp_path: Path, between: bytes, name: str
) -> None:
    """It was read without a bound, and ended with what was no event."""
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one", agent=name)
        waiting = await under_way(one, one, agent=name)
        pump = there._pump

        async def adding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            original = writer.write

            def write(data: bytes | bytearray | memoryview) -> None:
                original(data)
                if b": following\n\n" in bytes(data):
                    event = b"event: progress\ndata: %b\n\n" % between
                    original(b"%x\r\n%b\r\n" % (len(event), event))

            writer.write = write  # type: ignore[method-assign]
            await pump(reader, writer)

        there._pump = adding  # type: ignore[method-assign]
        async with two.http.stream("GET", f"/v1/chains/{name}/events?live=1") as stream:
            (turn,) = await told_by(stream.aiter_lines())
            assert turn["doing"] == "thinking"
        await there.close()
        one.model.open.set()
        assert said(await waiting) == "You said: two (2)"


async def test_what_is_passed_on_is_counted_where_it_came_in(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SPARE_REQUESTS", 0)
    async with cluster(postgres_url, tmp_path, each=[{"queue_limit": 1, "max_turns": 1}]) as (one, two):
        await one.chat("one")
        key = {"Idempotency-Key": "k"}
        sent = [await under_way(one, two, headers=key)]
        sent += [asyncio.create_task(two.chat("two", headers=key)) for _ in range(2)]
        await until(lambda: one.engine._live and len(next(iter(one.engine._live.values()))._answers) == 3)
        assert (await one.http.get("/v1/models")).status_code == 200  # two at once are allowed here, and none is open
        one.model.open.set()
        assert len({(await task).headers["x-turn-id"] for task in sent}) == 1


async def test_a_connection_that_breaks_once_it_was_asked_makes_no_second_turn(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one")
        lost = await under_way(one, two)
        with monkeypatch.context() as while_it_runs:
            while_it_runs.setattr(relay, "PROBE_TIMEOUT", 0.5)
            there.cut()
            answer = await lost
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        assert answer.headers["retry-after"] == "1"
        assert "x-should-retry" not in answer.headers
        again = asyncio.create_task(two.chat("two", headers={"x-stainless-retry-count": "1"}))
        await until(lambda: any(len(live._answers) == 2 for live in one.engine._live.values()))
        one.model.open.set()
        assert said(await again) == "You said: two (2)"
        assert [path[-1] for path in one.asked] == ["one", "two"]
        assert two.asked == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("again_at", [0, 1], ids=["there", "here"])
async def test_a_request_that_something_between_two_proxies_sends_again_is_one_turn(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_at: int, stream: bool
) -> None:
    """A reverse proxy that did not get the answer. The other proxy had handed it on, and refused the second request."""
    send = httpx.AsyncClient.send

    async def twice(client: httpx.AsyncClient, request: httpx.Request, **how: Any) -> httpx.Response:
        if request.method == "POST" and HOP_MARK in request.headers:
            lost = await send(client, request, **how)
            await lost.aread()
            await lost.aclose()
        return await send(client, request, **how)

    async with cluster(postgres_url, tmp_path) as hosts:
        one, two = hosts
        await one.chat("one")
        with monkeypatch.context() as patch:
            patch.setattr(httpx.AsyncClient, "send", twice)
            failed = await two.chat("two", stream=stream)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "interrupted")
        assert (await hosts[again_at].chat("two", stream=stream)).status_code == 200
        assert [path[-1] for host in hosts for path in host.asked] == ["one", "two"]


async def test_an_answer_that_breaks_off_is_cut_for_the_client_too(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        await one.chat("one")
        one.model.open.clear()
        body = {"model": "sonnet", "stream": True, "messages": [{"role": "user", "content": "two"}]}
        async with two.http.stream("POST", "/agents/a/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            monkeypatch.setattr(relay, "PROBE_TIMEOUT", 0.5)
            there.cut()
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass


async def test_a_host_that_says_nothing_any_more_is_not_waited_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)], silence=2.0) as (one, two):
        await one.chat("one")
        waiting = await under_way(one, two)
        there.carries.clear()
        monkeypatch.setattr(relay, "PROBE_TIMEOUT", 1.0)
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")


@pytest.mark.parametrize("stream", [False, True], ids=["before its head", "after its head"])
@pytest.mark.sample(1)
async def test_a_line_that_was_lost_without_a_sign_is_waited_for_as_long_as_the_turn_runs(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The other host answers on other lines: a client waited for ever. The same words again are the same turn."""
    ask, still_runs, has_ended = relay.Relay._has_ended, asyncio.Event(), asyncio.Event()

    async def asked(self: relay.Relay, hop: relay.Hop, within: float) -> bool:
        ended = await ask(self, hop, within)
        (has_ended if ended else still_runs).set()
        return ended

    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)], silence=2.0) as (one, two):
        await one.chat("one")
        monkeypatch.setattr(relay.Relay, "_has_ended", asked)
        one.model.reached.clear()
        one.model.open.clear()
        body = {"model": "sonnet", "stream": stream, "messages": [{"role": "user", "content": "two"}]}
        begun = asyncio.Event()

        async def asking() -> httpx.Response:
            async with two.http.stream("POST", "/agents/a/v1/chat/completions", json=body) as answer:
                if stream:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    begun.set()
                    with pytest.raises(httpx.RemoteProtocolError):
                        async for _ in lines:
                            pass
                else:
                    await answer.aread()
                return answer

        waiting = asyncio.create_task(asking())
        await (begun if stream else one.model.reached).wait()
        there.lose()
        await still_runs.wait()
        assert (await one.http.get("/healthz?answering=guessed")).status_code == 200  # a stranger is told nothing
        assert not waiting.done()
        assert not has_ended.is_set()
        one.model.open.set()
        answer = await waiting
        assert has_ended.is_set()
        if not stream:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        again = await two.http.post("/agents/a/v1/chat/completions", json=body)
        assert (again.status_code, "two (2)" in again.text) == (200, True)
        assert [path[-1] for path in one.asked] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True], ids=["before its head", "after its head"])
@pytest.mark.sample(1)
async def test_an_answer_that_was_lost_with_its_host_is_the_same_turn(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """That host had handed it on, and can be asked nothing any more. The same words again doubled the turn."""
    probe = relay.Relay._probe
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)], silence=2.0) as (one, two):
        await one.chat("one")
        one.model.reached.clear()
        one.model.open.clear()

        async def handed_on() -> bool:
            agent = await two.store.agent("local", "a")
            assert agent is not None
            last = [turn async for turn in two.store.turns(agent.key)][-1]
            return (last.status, last.delivery, last.instance) == ("completed", "pending", two.engine.instance_id)

        async def does_not_answer(self: relay.Relay, address: str, path: str, within: float) -> bool:
            if path == "/healthz":
                await until(handed_on)
                return False
            return await probe(self, address, path, within)

        async def is_not_asked(*_: object) -> bool:
            return False

        monkeypatch.setattr(relay.Relay, "_probe", does_not_answer)
        monkeypatch.setattr(relay.Relay, "_has_ended", is_not_asked)
        body = {"model": "sonnet", "stream": stream, "messages": [{"role": "user", "content": "two"}]}
        begun = asyncio.Event()

        async def asking() -> None:
            async with two.http.stream("POST", "/agents/a/v1/chat/completions", json=body) as answer:
                begun.set()
                with suppress(httpx.RemoteProtocolError):
                    await answer.aread()

        waiting = asyncio.create_task(asking())
        await (begun if stream else one.model.reached).wait()
        with monkeypatch.context() as for_nothing:
            for_nothing.setattr(relay, "PROBE_TIMEOUT", 0.5)
            there.lose()
            one.model.open.set()
            await waiting
        again = await two.http.post("/agents/a/v1/chat/completions", json=body)
        assert (again.status_code, "two (2)" in again.text) == (200, True)
        assert [path[-1] for path in one.asked] == ["one", "two"]


async def test_a_client_that_reads_the_end_of_an_answer_slowly_gets_it(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host has sent everything, and does not answer the request any more: that looked like a lost line."""
    ask, forward, told = relay.Relay._has_ended, relay.Relay._forward, 0
    has_read = asyncio.Event()

    async def asked(self: relay.Relay, hop: relay.Hop, within: float) -> bool:
        nonlocal told
        ended = await ask(self, hop, within)
        told += ended
        if told == 3:
            has_read.set()
        return ended

    async def to_a_slow_client(self: relay.Relay, incoming: Incoming, *given: Any) -> bool:
        send = incoming.send

        async def when_there_is_room(message: Any) -> None:
            if message["type"] == "http.response.body" and not message["more_body"]:
                await has_read.wait()
            await send(message)

        incoming.send = when_there_is_room
        return await forward(self, incoming, *given)

    async with cluster(postgres_url, tmp_path, silence=3.0) as (one, two):
        await one.chat("one")
        monkeypatch.setattr(relay.Relay, "_has_ended", asked)
        monkeypatch.setattr(relay.Relay, "_forward", to_a_slow_client)
        body = {"model": "sonnet", "stream": True, "messages": [{"role": "user", "content": "two"}]}
        answer = await two.http.post("/agents/a/v1/chat/completions", json=body)
        assert "two (2)" in answer.text
        assert told == 3


async def test_the_same_request_meets_its_running_turn_at_every_host(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path, 3) as (one, two, three):
        one.model.open.clear()
        key = {"Idempotency-Key": "k"}
        sent = [asyncio.create_task(one.chat("one", headers=key))]
        await one.model.reached.wait()
        sent += [asyncio.create_task(host.chat("one", headers=key)) for host in (two, three)]
        await until(lambda: any(len(live._answers) == 3 for live in one.engine._live.values()))
        one.model.open.set()
        answers = [await task for task in sent]
        assert {said(answer) for answer in answers} == {"You said: one (1)"}
        assert len({answer.headers["x-turn-id"] for answer in answers}) == 1
        replayed = await three.chat("one", headers=key)
        assert replayed.headers["x-turn-id"] == answers[0].headers["x-turn-id"]
        assert (len(one.asked), two.asked, three.asked) == (1, [], [])


# --- profiles with tools: their files are on one host

TOOLS: dict[str, Any] = {"profiles": {"coder": Profile(tools=("Bash",))}, "profile": "coder"}


async def test_an_agent_with_tools_keeps_to_the_host_that_has_its_files(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path, **TOOLS) as (one, two):
        await one.chat("one")
        agent = await one.store.agent("local", "a")
        assert agent is not None
        await one.store.resign(one.engine._instances.id)  # as after a restart: nobody holds it
        one.engine._ownership._held.clear()
        assert said(await two.chat("two")) == "You said: two (2)"
        assert [path[-1] for path in one.asked] == ["one", "two"]
        assert two.asked == []


async def test_hosts_of_one_name_and_one_path_are_two_and_proxies_on_one_var_are_one(
    postgres_url: str, tmp_path: Path
) -> None:
    """Each took the other's files for its own: a turn ran without them, and said nothing."""

    def name(host: Host) -> str:
        assert host.engine.passing is not None
        assert host.engine.passing.home is not None
        return host.engine.passing.home.host.replace(str(host.settings.var), "/var/lib/proxy")

    beside = Host(postgres_url, tmp_path / "host0")
    async with cluster(postgres_url, tmp_path) as (one, two), up(beside):
        assert name(one) == name(beside) != name(two)


def test_a_var_without_hard_links_has_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    assert passing._id_of(tmp_path) == passing._id_of(tmp_path)
    assert list(tmp_path.glob("*id")) == [tmp_path / "id"]


def test_of_two_proxies_that_begin_to_use_a_var_at_once_both_have_its_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    var = tmp_path / "var"
    var.mkdir()
    first = passing._id_of(var)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as the other one saw it
    assert passing._id_of(var) == first
    assert [path.name for path in var.iterdir()] == ["id"]


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_agent_is_deleted_where_its_files_are(is_there: bool, postgres_url: str, tmp_path: Path) -> None:
    """An agent of the same name found them there."""
    home: dict[str, Any] = {} if is_there else {"advertise": "http://127.0.0.1:1"}
    async with cluster(postgres_url, tmp_path, each=[home], silence=2.0, **TOOLS) as (one, two):
        await one.chat("one")
        agent = await one.store.agent("local", "a")
        assert agent is not None
        sandbox = Sandboxes(one.settings).prepare(agent.dir)
        (sandbox / "notes").touch()
        assert (await two.http.delete("/v1/chains/a")).status_code == 200
        assert await two.store.agent("local", "a") is None
        assert sandbox.exists() is not is_there


async def test_a_late_request_to_delete_an_agent_does_not_delete_the_next_one_of_its_name(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "ON_ITS_WAY", 0.0)
    async with cluster(postgres_url, tmp_path, **TOOLS) as (one, two):
        await one.chat("one")
        delete, comes, goes_on = one.engine.delete, asyncio.Event(), asyncio.Event()
        is_over = asyncio.Event()

        async def late(*of: Any, **how: Any) -> bool:
            monkeypatch.setattr(one.engine, "delete", delete)
            comes.set()
            await goes_on.wait()
            try:
                return await delete(*of, **how)
            finally:
                is_over.set()

        monkeypatch.setattr(one.engine, "delete", late)
        asking = asyncio.create_task(two.http.delete("/v1/chains/a"))
        await comes.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert (await two.http.delete("/v1/chains/a")).status_code == 200
        await one.chat("two")
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            await is_over.wait()
        await one.chat("three")
        assert one.asked[-1] == ["two", "three"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.sample(1)
async def test_a_turn_away_from_its_files_says_so(
    postgres_url: str, tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 60.0)  # a stream's first keep-alive would bring its headers sooner
    lost = {"advertise": "http://127.0.0.1:1"}
    async with cluster(postgres_url, tmp_path, each=[lost], silence=2.0, **TOOLS) as (one, two):
        await one.chat("one")
        answer = await two.chat("two", stream=stream)
        assert answer.headers["x-continuity-note"] == "files_elsewhere=1"
        assert [path[-1] for path in two.asked] == ["two"]
        turn = (await two.turns())[-1]
        assert turn.evidence.files_at == "http://127.0.0.1:1"
        assert "The agent's files are on http://127.0.0.1:1" in explain.turn(turn.evidence, turn.attempts)[0].says
        # from now on they are here
        assert "x-continuity-note" not in (await two.chat("three")).headers


async def test_hosts_that_share_their_sandboxes_pass_on_for_warmth_alone(postgres_url: str, tmp_path: Path) -> None:
    lost = {"advertise": "http://127.0.0.1:1"}
    async with cluster(postgres_url, tmp_path, each=[lost], sandboxes="shared", **TOOLS) as (one, two):
        await one.chat("one")
        answer = await two.chat("two")
        assert "x-continuity-note" not in answer.headers
        assert said(answer) == "You said: two (2)"


async def under_way(runs: Host, asked: Host, **options: Any) -> asyncio.Task[httpx.Response]:
    """A turn "two" that was sent to `asked`, and whose model at `runs` says nothing until it is `open`."""
    runs.model.reached.clear()
    runs.model.open.clear()
    sent, reached = asyncio.create_task(asked.chat("two", **options)), asyncio.create_task(runs.model.reached.wait())
    await asyncio.wait({sent, reached}, return_when=asyncio.FIRST_COMPLETED)
    if sent.done():
        reached.cancel()
        raise AssertionError(f"it did not run there: {sent.result()}")
    return sent


async def message(host: Host, text: str) -> dict[str, Any]:
    """The last event of the answer to a message over a WebSocket."""
    url = f"ws{str(host.http.base_url).removeprefix('http').rstrip('/')}/v1/responses"
    async with connect(url, additional_headers={"X-Agent-Id": "a"}) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "sonnet", "input": text}))
        async with asyncio.timeout(PATIENCE):
            while True:
                event: dict[str, Any] = json.loads(await socket.recv())
                if event["type"] in ("response.completed", "response.failed", "error"):
                    return event


async def test_a_message_over_a_websocket_never_runs_without_its_agents_files(
    postgres_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, tmp_path, **TOOLS) as (one, two):
        await one.chat("one")
        refused = await message(two, "two")
        assert (refused["type"], refused["status"], refused["code"]) == ("error", 409, "session_busy")
        assert refused["headers"] == {"x-should-retry": "false"}
        assert "send the same as a POST" in refused["message"]
        assert two.asked == []
        sent = await two.http.post(
            "/v1/responses", json={"model": "sonnet", "input": "two"}, headers={"X-Agent-Id": "a"}
        )
        assert sent.status_code == 200
        assert [path[-1] for path in one.asked] == ["one", "two"]
        assert (await message(one, "three"))["type"] == "response.completed"
        assert len(one.asked) == 3


async def test_a_message_over_a_websocket_runs_where_it_arrives(postgres_url: str, tmp_path: Path) -> None:
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        assert (await message(two, "two"))["type"] == "response.completed"
        assert two.asked == [["one", "two"]]
        assert one.backend.retired == ["a"]
        assert said(await one.chat("three")) == "You said: three (3)"  # two has it now
        assert len(one.asked) == 1
