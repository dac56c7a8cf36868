"""Two proxies prove to each other that they have the cluster's key, and never send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import insert

from cli_session_proxy.domain.models import Agent
from cli_session_proxy.http import proof, relay
from cli_session_proxy.http.hop import REFUSED
from cli_session_proxy.http.proof import BODY, HOP_MARK, OWNER, PROOF, TARGET, Peer, Signer, decisive
from cli_session_proxy.stores.base import Whereabouts
from cli_session_proxy.stores.sql.tables import proxies
from turnfault.ports import free_port

from .cluster import KEY, Host, cluster, line, whole_answer
from .test_passing_on import behind, said

PROMPT = "the word is marmalade"


class Stranger:
    """A program on another proxy's port: all that it was sent. `answers` makes its answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"
        self.told = b""
        self.connections = 0
        self.answer: Callable[[bytes], Any] = _fine

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.told += head
                writer.write(await self.answer(head))


async def _fine(_head: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-cluster-proof: 1 2 3\r\n\r\n{}"


@asynccontextmanager
async def stranger(port: int | None = None) -> AsyncIterator[Stranger]:
    made = Stranger(port or free_port())
    server = await asyncio.start_server(made.serve, "127.0.0.1", made.port)
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


async def named(host: Host, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry and a row of the store say that a live proxy has every agent at this address."""
    row = {"id": "planted", "host": "h", "lease": 600.0, "until": time.time() + 600, "address": address}
    known = {column.name for column in proxies.columns}
    values = {name: value for name, value in row.items() if name in known}
    await host.store._db.write(lambda conn: conn.execute(insert(proxies).values(**values)))

    async def find(_agent: Agent) -> Whereabouts:
        return Whereabouts("planted", address)

    monkeypatch.setattr(host.engine.registry, "find", find)


async def test_a_program_on_a_dead_proxys_port_gets_neither_the_key_nor_a_prompt(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write rows of the store or the registry leads a greeting there, and nothing else."""
    async with stranger() as other, cluster(postgres_url, tmp_path, 1) as (one,):
        await named(one, other.address, monkeypatch)
        for attempt in range(3):
            assert said(await one.chat(PROMPT, agent=f"a{attempt}")) == f"You said: {PROMPT} (1)"
        assert other.connections
        assert other.told.startswith(b"GET /healthz")
        assert KEY.encode() not in other.told
        assert b"marmalade" not in other.told
        assert b"POST" not in other.told


async def test_a_proof_of_another_proxy_proves_nothing(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger has a live proxy of the cluster answer the greeting."""
    async with stranger() as other, cluster(postgres_url, tmp_path) as (one, two):
        await named(one, other.address, monkeypatch)
        answers = []

        async def passed_on(head: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", two.settings.port)
            writer.write(head)
            answer = await whole_answer(reader)
            writer.close()
            answers.append(answer)
            return answer

        other.answer = passed_on
        assert said(await one.chat(PROMPT)) == f"You said: {PROMPT} (1)"
        assert b" 401 " in answers[0].splitlines()[0]
        assert PROOF.encode() not in answers[0].lower()
        assert two.asked == []
        assert b"marmalade" not in other.told


@pytest.mark.parametrize("between", ["/@", "?@", "/x@"])
@pytest.mark.sample(1)
async def test_a_live_proxy_does_not_prove_an_address_that_ends_with_its_own(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """The stranger has it answer the greeting and the question, and would then be sent the prompt."""
    async with stranger() as other, cluster(postgres_url, tmp_path) as (one, two):
        await named(one, f"{other.address}{between}{two.settings.advertise}", monkeypatch)

        async def passed_on(head: bytes) -> bytes:
            asked, _, rest = head.partition(b" HTTP/1.1")
            question = b"/readyz" if asked.endswith(b"/readyz") else b"/healthz"
            reader, writer = await asyncio.open_connection("127.0.0.1", two.settings.port)
            writer.write(b"GET " + question + b" HTTP/1.1" + rest)
            answer = await whole_answer(reader)
            writer.close()
            return answer

        other.answer = passed_on
        assert said(await one.chat(PROMPT)) == f"You said: {PROMPT} (1)"
        assert other.connections
        assert b"POST" not in other.told
        assert b"marmalade" not in other.told


async def test_an_address_that_no_live_row_names_is_not_asked(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stranger() as other, cluster(postgres_url, tmp_path, 1) as (one,):

        async def find(_agent: Agent) -> Whereabouts:
            return Whereabouts("nobody", other.address)

        monkeypatch.setattr(one.engine.registry, "find", find)
        assert said(await one.chat(PROMPT)) == f"You said: {PROMPT} (1)"
        assert other.connections == 0


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "http://",
        "http://[::1",
        "http://h:99999",
        "ftp://h",
        f"http://{'a' * 300}",
        "http://a b",
        "http://\0",
        "http://b\u00fccher:80",
        "http://127.0.0.1:1\u0660",
        "http://xn--a",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:1/\u00e4",
    ],
)
@pytest.mark.sample(5)
async def test_an_address_that_is_none_leads_nowhere(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    async with cluster(postgres_url, tmp_path, 1) as (one,):

        async def addresses() -> frozenset[str]:
            return frozenset({address})

        async def find(_agent: Agent) -> Whereabouts:
            return Whereabouts("planted", address)

        monkeypatch.setattr(one.store, "addresses", addresses)
        monkeypatch.setattr(one.engine.registry, "find", find)
        assert said(await one.chat(PROMPT)) == f"You said: {PROMPT} (1)"


async def test_the_key_of_the_cluster_crosses_no_line_and_what_crossed_is_good_for_nothing(
    postgres_url: str, tmp_path: Path
) -> None:
    """Every byte of a hop, replayed as it was and with one thing changed."""
    keys = {"alice": SecretStr("a-secret-of-alice"), "bob": SecretStr("a-secret-of-bob-s")}
    as_alice = {"Authorization": "Bearer a-secret-of-alice"}
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)], keys=keys) as (one, two):
        sent = b""
        pump = there._pump

        async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            original = writer.write

            def write(data: bytes | bytearray | memoryview) -> None:
                nonlocal sent
                sent += data
                original(data)

            writer.write = write  # type: ignore[method-assign]
            await pump(reader, writer)

        there._pump = noted  # type: ignore[method-assign]
        assert said(await one.chat("one", headers=as_alice)) == "You said: one (1)"
        assert said(await two.chat("two", headers=as_alice)) == "You said: two (2)"
        assert KEY.encode() not in sent
        assert b"a-secret-of-alice" not in sent
        start = sent.index(b"POST ")
        hop = sent[start : sent.index(b'"two"}', start) + 20]
        head, _, rest = hop.partition(b"\r\n\r\n")
        size = next(int(one.split(b":")[1]) for one in head.splitlines() if one.lower().startswith(b"content-length"))
        whole = head + b"\r\n\r\n" + rest[:size]
        changes: list[tuple[bytes, bytes]] = [
            (b"", b""), (b'"two"', b'"owt"'), (b"x-cluster-owner: alice", b"x-cluster-owner: bob"),
            (b"X-Agent-Id: a", b"X-Agent-Id: b"), (b"/v1/chat/completions", b"/v1/chat/completion2"), (b"POST", b"PUT"),
        ]  # fmt: skip
        for was, becomes in changes:
            index = whole.lower().find(was.lower())
            assert index >= 0, was
            changed = whole[:index] + becomes + whole[index + len(was) :]
            reader, writer = await asyncio.open_connection("127.0.0.1", one.settings.port)
            writer.write(changed)
            answer = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            # What came before may have been accepted: a refusal would let the caller run it as well. A body comes last.
            status = b" 503 " if was in (b"", b'"two"') else b" 401 "
            assert status in answer.splitlines()[0], (was, answer)
            assert REFUSED.encode() not in answer
        assert [path[-1] for path in one.asked] == ["one", "two"]


async def test_a_proxy_with_another_key_is_sent_nothing(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"cluster_key": SecretStr("the-key-of-another-cluster")}
    async with cluster(postgres_url, tmp_path, each=[other]) as (one, two):
        await one.chat("one")
        assert said(await two.chat(PROMPT)) == f"You said: {PROMPT} (2)"
        assert one.asked == [["one"]]
        assert "not_passed_on" in caplog.text


@pytest.mark.parametrize("says", [b"", b"x"], ids=["nothing", "a byte now and then"])
@pytest.mark.sample(1)
async def test_who_has_the_port_of_a_proxy_that_was_just_heard_holds_no_turn_up(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    """Nothing was sent there, so the turn runs here."""
    monkeypatch.setattr(relay, "PROBE_TIMEOUT", 2.0)
    told: list[bytes] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            told.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while not reader.at_eof():
                writer.write(says)
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.1)

    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (two, one):
        assert said(await two.chat("one")) == "You said: one (1)"
        assert said(await one.chat("one", "You said: one (1)", "two")) == "You said: two (2)"
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        try:
            there.port = server.sockets[0].getsockname()[1]
            there.cut()
            asked = ("one", "You said: one (1)", "two", "You said: two (2)", PROMPT)
            assert said(await one.chat(*asked)).startswith(f"You said: {PROMPT}")
        finally:
            server.close()  # not its connections: Python 3.12 would wait for them
        assert [len(host.asked) for host in (two, one)] == [2, 1]
        assert told
        assert all(head.startswith(b"GET /healthz") for head in told)


async def test_an_answer_that_is_not_signed_is_none(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a reverse proxy keeps a connection whose backend is another program by now."""
    async with cluster(postgres_url, tmp_path) as (one, two):
        await one.chat("one")
        monkeypatch.setattr(Signer, "prove", lambda *_given: "1 2 3")
        monkeypatch.setattr(relay, "REACHABLE_FOR", 600.0)
        await two.chat("two")  # not proved: it runs here
        assert two.asked == [["one", "two"]]


async def test_who_stands_between_makes_no_second_turn_by_a_refusal(postgres_url: str, tmp_path: Path) -> None:
    """A refused hop runs where it came in. So it is signed, and nobody adds it to an answer."""
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        pump = there._pump

        async def adding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            original = writer.write

            def write(data: bytes | bytearray | memoryview) -> None:
                if b"x-turn-id" in bytes(data).lower():
                    data = bytes(data).replace(b"\r\n", b"\r\n" + REFUSED.encode() + b": 1\r\n", 1)
                original(data)

            writer.write = write  # type: ignore[method-assign]
            await pump(reader, writer)

        there._pump = adding  # type: ignore[method-assign]
        assert said(await one.chat("one")) == "You said: one (1)"
        answer = await two.chat("two")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        assert (one.asked, two.asked) == ([["one"], ["one", "two"]], [])


async def test_an_answer_to_a_question_is_read_no_further_than_one_goes(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stands between may go on behind a signed head for ever: all that came in time was kept."""
    monkeypatch.setattr(relay, "PROBE_TIMEOUT", 600.0)
    async with line() as there, cluster(postgres_url, tmp_path, each=[behind(there)]) as (one, two):
        pump = there._pump

        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            original = writer.write

            def write(data: bytes | bytearray | memoryview) -> None:
                if b"x-cluster-proof" not in bytes(data).lower() or b'"ready"' not in bytes(data):
                    original(data)
                    return
                head = bytes(data).partition(b"\r\n\r\n")[0]
                fields = [one for one in head.split(b"\r\n") if not one.lower().startswith(b"content-length")]
                original(b"\r\n".join(fields) + b"\r\ncontent-length: 4000000\r\n\r\n")
                for _ in range(1000):
                    original(b" " * 3000)

            writer.write = write  # type: ignore[method-assign]
            await pump(reader, writer)

        there._pump = endless  # type: ignore[method-assign]
        assert said(await one.chat("one")) == "You said: one (1)"
        async with asyncio.timeout(60):
            assert said(await two.chat("two")) == "You said: two (2)"
        assert (one.asked, two.asked) == ([["one"]], [["one", "two"]])


# --- the signer itself


def signers() -> tuple[Signer, Signer]:
    return Signer(KEY, "http://a:1", "a-1"), Signer(KEY, "http://b:1", "b-1")


def scope(method: str = "POST", target: str = "/x?y=1", headers: Any = ()) -> dict[str, Any]:
    path, _, query = target.partition("?")
    return {
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": headers,
    }


def test_a_request_is_good_once_for_one_instance_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, peer = signers()
    greeting = caller.request("GET", "/healthz", "", "http://b:1", None, decisive(()))
    peer.check(scope("GET", "/healthz"), greeting)
    known = caller.peer(greeting, 200, peer.prove(greeting, 200))
    assert known is not None
    assert known.instance == "b-1"
    assert caller.peer(greeting, 503, peer.prove(greeting, 200)) is None
    assert caller.peer(greeting, 200, "nonsense") is None
    assert caller.peer(greeting, 503, peer.prove(greeting, 503), True) is None
    assert caller.peer(greeting, 503, peer.prove(greeting, 503, True)) is None
    assert caller.peer(greeting, 503, peer.prove(greeting, 503, True), True) is not None

    def made(to: Peer) -> dict[str, str]:
        return caller.request("POST", "/x?y=1", "ada", "http://b:1", to, decisive(()))

    marks = made(known)
    peer.check(scope(), marks)
    peer.once(marks)
    for again in (marks, made(Peer("b-0", 0.0)), made(Peer("b-1", -60.0)), made(Peer("b-1", 60.0))):
        peer.check(scope(), again)
        with pytest.raises(Exception, match="repeated or an old one"):
            peer.once(again)
    now = proof._clock()
    monkeypatch.setattr(proof, "_clock", lambda: now + 3600)  # our clock, and the peer's with it
    later = made(known)
    peer.once(later)
    assert len(peer._seen) == len(peer._order) == 1


def test_of_equal_headers_the_order_is_signed() -> None:
    """The first one counts."""
    ada, bob = (b"X-Agent-Id", b"ada"), (b"x-agent-id", b"bob")
    assert decisive([ada, bob]) != decisive([bob, ada])
    assert decisive([ada, (b"x-chain", b"new")]) == decisive([(b"X-Chain", b"new"), ada])


def test_clocks_that_differ_by_an_hour_are_told_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two hosts do, of which one started later."""
    caller, peer = signers()
    now = proof._clock()
    greeting = caller.request("GET", "/healthz", "", "http://b:1", None, decisive(()))
    monkeypatch.setattr(proof, "_clock", lambda: now + 3600)
    proved = peer.prove(greeting, 200)
    monkeypatch.setattr(proof, "_clock", lambda: now)
    known = caller.peer(greeting, 200, proved)
    assert known is not None
    marks = caller.request("POST", "/x?y=1", "ada", "http://b:1", known, decisive(()))
    monkeypatch.setattr(proof, "_clock", lambda: now + 3600)
    peer.once(marks)


def test_a_clock_that_is_set_makes_no_request_good_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set ahead, it forgot what it had seen; set back, it took that once more, and forgot nothing for as long."""
    caller, peer = signers()
    known, now = Peer("b-1", 0.0), time.time()

    def made() -> dict[str, str]:
        return caller.request("POST", "/x?y=1", "ada", "http://b:1", known, decisive(()))

    first = made()
    peer.once(first)
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    peer.once(made())
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(Exception, match="repeated or an old one"):
        peer.once(first)


@pytest.mark.parametrize("name", [HOP_MARK, OWNER, TARGET, BODY])
@pytest.mark.parametrize("value", ["", "1 2 3", "x", "é" * 500, " " * 9])
def test_what_nobody_signed_is_refused_in_words(name: str, value: str) -> None:
    caller, peer = signers()
    marks = caller.request("POST", "/x?y=1", "ada", "http://b:1", Peer("b-1", 0.0), decisive(()))
    with pytest.raises(Exception, match="not signed with the key"):
        peer.check(scope(), {**marks, name: value})
    with pytest.raises(Exception, match="meant for the proxy at"):
        caller.check(scope(), marks)
