"""Attacks on what two running `serve` pass on to each other, with the real CLI: who has a dead proxy's port, who writes
rows of the store, who stands between the two, and proxies that are paused, of another cluster, or whose clock is wrong.

What must not happen: the cluster's key, a client's key or a prompt is sent to somebody else; a turn runs twice, or with
other words.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cli_session_proxy.cli import main
from cli_session_proxy.engine import recovery
from cli_session_proxy.http import keys, relay
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE
from cli_session_proxy.wires import answers
from turnfault.ports import free_port
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..forked import Forked
from ..matrix import rest_in_full
from ..recovery.others import paused, store_file
from ..serving import serve, unhurried
from ..until import until
from .cluster import KEY, PATIENCE, Line, whole_answer
from .test_proofs import Stranger, stranger

PROMPT, OTHER = "the word is marmalade", "the word is tangerine"
LEASE = 2.0


@dataclass
class Proxy:
    """One of two `serve` on the same `var`."""

    settings: Settings
    process: Forked
    http: httpx.AsyncClient

    async def say(self, text: str, agent: str = "a", **headers: str) -> httpx.Response:
        async with self.saying(text, agent, headers, stream=False) as answer:
            await answer.aread()
            return answer

    def saying(
        self, text: str, agent: str = "a", headers: dict[str, str] | None = None, *, stream: bool = True
    ) -> AbstractAsyncContextManager[httpx.Response]:
        body = {"model": "sonnet", "stream": stream, "messages": [{"role": "user", "content": text}]}
        return self.http.stream("POST", f"/agents/{agent}/v1/chat/completions", json=body, headers=headers)

    @property
    def key(self) -> str:
        return self.http.headers["authorization"].removeprefix("Bearer ")

    def log(self) -> str:
        return (self.settings.var / "logs" / "proxy.log").read_text()

    def plant(self, **columns: Any) -> None:
        """Write into the row of the store that says where this proxy is reached."""
        named = ", ".join(f"{name} = ?" for name in columns)
        with closing(sqlite3.connect(self.settings.var / FILE)) as conn, conn:
            row = (*columns.values(), self.settings.advertise)
            assert conn.execute(f"UPDATE proxies SET {named} WHERE address = ?", row).rowcount == 1

    def seen_until(self) -> float:
        """When its last heartbeat expires; 0 if it is forgotten already."""
        with closing(sqlite3.connect(self.settings.var / FILE)) as conn:
            query = "SELECT until FROM proxies WHERE address = ?"
            row = conn.execute(query, (self.settings.advertise,)).fetchone()
            return float(row[0]) if row else 0.0

    async def turns(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get("/v1/chains/a")).json()["turns"]
        return found

    async def statuses(self) -> list[str]:
        return [turn["status"] for turn in await self.turns()]


Start = Callable[..., Awaitable[Proxy]]


@pytest.fixture
async def start(make_settings: MakeSettings, claude_2: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts one more proxy on the same `var`, which needs a key."""
    async with AsyncExitStack() as stack:

        async def started(program: Callable[[], None] = unhurried, **more: Any) -> Proxy:
            port = more.pop("port", None) or free_port()
            told = {"advertise": f"http://127.0.0.1:{port}", "cluster_key": SecretStr(KEY), **more}
            settings = make_settings(claude_bin=claude_2, port=port, lease=LEASE, **told)
            key = await asyncio.to_thread(lambda: keys.make_key(settings.var).read_text().strip())
            address, process = await stack.enter_async_context(serve(settings, tmp_path, program))
            as_client = {"Authorization": f"Bearer {key}"}
            http = httpx.AsyncClient(base_url=address, headers=as_client, trust_env=False, timeout=PATIENCE)
            return Proxy(settings, process, await stack.enter_async_context(http))

        yield started


def asked(upstream: Upstream) -> list[str]:
    """The newest words of each request that reached the model."""
    return [request.user_texts()[-1] for request in upstream.requests]


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    continuity: str = answer.headers["x-continuity"]
    return continuity


def nothing_but_a_greeting(other: Stranger, key: str) -> None:
    assert other.connections
    assert other.told.startswith(b"GET /healthz")
    for secret in (KEY, key, "marmalade", "POST"):
        assert secret.encode() not in other.told


def without_looking_after_others() -> None:
    """What a dead proxy left is settled by the agent's next turn only, however slow the machine is."""
    recovery.NEIGHBOUR_CHECK = 1e9
    unhurried()


@pytest.mark.full
async def test_who_takes_a_dead_proxys_port_is_sent_a_greeting_and_nothing_else(
    start: Start, upstream: Upstream
) -> None:
    """It has a live proxy answer, and says then that all is well."""
    one, two = await start(), await start(without_looking_after_others)
    assert said(await one.say("one")) == "started"
    one.process.kill()
    await one.process.wait()
    one.plant(until=1e12)
    async with stranger(one.settings.port) as other:

        async def passed_on(head: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", two.settings.port)
            writer.write(head)
            answer = await whole_answer(reader)
            writer.close()
            return answer.replace(b" 401 ", b" 200 ")

        other.answer = passed_on
        assert said(await two.say(PROMPT)) == "resumed"
        nothing_but_a_greeting(other, two.key)
    assert asked(upstream) == ["one", PROMPT]
    assert "not_passed_on" in two.log()


@pytest.mark.full
async def test_a_forged_row_leads_a_greeting_to_somebody_else_and_no_prompt(start: Start, upstream: Upstream) -> None:
    """To another program's port, and to the proxy itself under another name."""
    one, two = await start(), await start()
    own = one.settings.advertise
    for agent in ("a", "b"):
        assert said(await one.say("one", agent)) == "started"
    async with stranger() as other:
        for agent, address in (("a", other.address), ("b", f"http://localhost:{two.settings.port}")):
            one.plant(address=address)
            assert said(await two.say(PROMPT, agent)) == "resumed"
            one.settings = one.settings.model_copy(update={"advertise": address})
        one.plant(address=own)
        nothing_but_a_greeting(other, two.key)
    assert asked(upstream) == ["one", "one", PROMPT, PROMPT]


# --- who stands between the two


Change = Callable[[bytes], Awaitable[bytes | None]]


async def _as_it_is(piece: bytes) -> bytes | None:
    return piece


class Between(Line):
    """Reads all that goes by; `request` and `answer` change it, piece by piece. None: both ends are cut."""

    def __init__(self) -> None:
        super().__init__(free_port())
        self.seen = b""
        self.honest()

    def honest(self) -> None:
        self.request: Change = _as_it_is
        self.answer: Change = _as_it_is

    async def carry(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        answers, far = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append((near, far))

        async def way(source: asyncio.StreamReader, target: asyncio.StreamWriter, name: str) -> None:
            while data := await source.read(65536):
                self.seen += data
                changed = await getattr(self, name)(data)
                if changed is None:
                    near.transport.abort()
                    far.transport.abort()
                    return
                target.write(changed)

        with suppress(OSError):
            await asyncio.gather(way(reader, far, "request"), way(answers, near, "answer"))


@asynccontextmanager
async def between() -> AsyncIterator[Between]:
    made = Between()
    server = await asyncio.start_server(made.carry, "127.0.0.1", 0)
    made.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.close()
        await server.wait_closed()


async def test_who_stands_between_two_proxies_learns_no_key_and_has_no_turn_run_twice_or_in_other_words(
    start: Start, upstream: Upstream
) -> None:
    async with between() as there:
        one, two = await start(port=there.port, advertise=there.address), await start()
        assert said(await one.say("one")) == "started"
        assert said(await two.say("two")) == "warm"

        async def attacked(text: str, **how: Change) -> httpx.Response:
            """While it is under way; then the client sends it again, to an honest line."""
            key = {"Idempotency-Key": f"k{len(upstream.requests)}"}
            there.request, there.answer = how.get("request", there.request), how.get("answer", there.answer)
            first = await two.say(text, **key)
            there.honest()
            again = await two.say(text, **key)
            assert said(again) == "warm"
            assert asked(upstream).count(text) == 1
            return first

        async def spliced(piece: bytes) -> bytes | None:
            return piece.replace(b"marmalade", b"tangerine")

        first = await attacked(PROMPT, request=spliced)
        assert (first.status_code, first.json()["error"]["code"]) == (401, "unauthorized")
        assert OTHER not in asked(upstream)

        async def truncated(piece: bytes) -> bytes | None:
            if b"halfway" not in piece:
                return piece
            there._writers[-1][1].write(piece[: len(piece) - 10])
            return None

        assert (await attacked("halfway", request=truncated)).json()["error"]["code"] == "interrupted"

        async def unsigned(piece: bytes) -> bytes | None:
            return piece.replace(b"x-cluster-proof: ", b"x-cluster-proof: 1")

        assert (await attacked("unsigned", answer=unsigned)).json()["error"]["code"] == "interrupted"

        held = asyncio.Event()
        late: list[bytes] = []

        async def kept_back(piece: bytes) -> bytes | None:
            if b"POST" not in piece and not late:
                return piece
            late.append(piece)
            if b"kept back" not in piece:
                return b""
            held.set()
            return None

        assert (await attacked("kept back", request=kept_back)).json()["error"]["code"] == "interrupted"
        assert held.is_set()
        for repeated in (b"".join(late), b"".join(late)):  # it comes after the client's second attempt, and once more
            reader, writer = await asyncio.open_connection("127.0.0.1", one.settings.port)
            writer.write(repeated)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
        assert asked(upstream).count("kept back") == 1

        # The answers to two hops change places.
        said_first, both = list[bytes](), asyncio.Event()

        async def swapped(piece: bytes) -> bytes | None:
            if b"x-turn-id" not in piece.lower():
                return piece
            said_first.append(piece)
            mine = len(said_first)
            if mine == 2:
                both.set()
            await both.wait()
            return said_first[2 - mine]

        assert said(await one.say("one", "b")) == "started"
        there.answer = swapped
        answers = await asyncio.gather(two.say("swapped"), two.say("swapped", "b"))
        assert [answer.json()["error"]["code"] for answer in answers] == ["interrupted"] * 2
        there.honest()
        assert asked(upstream).count("swapped") == 2

        assert b"marmalade" in there.seen
        assert KEY.encode() not in there.seen
        assert two.key.encode() not in there.seen
        texts = [turn["input"][0]["content"][0]["text"] for turn in await two.turns()]
        assert texts == ["one", "two", PROMPT, "halfway", "unsigned", "kept back", "swapped"]


# --- proxies that are not what they were


def believing_for_longer() -> None:
    """Who was heard within 3 s is not asked whether it is there: the pause takes a part of that on a busy machine."""
    relay.REACHABLE_FOR = 3.0
    main()


async def test_a_proxy_that_is_paused_beyond_its_lease_runs_nothing_that_was_sent_to_it(
    start: Start, upstream: Upstream
) -> None:
    """Its kernel took the request; the client's second attempt ran at the other one."""
    one, two = await start(), await start(believing_for_longer)
    assert said(await one.say("one")) == "started"
    assert said(await two.say("two")) == "warm"
    await paused(one.process, store_file(one.settings))
    try:
        first = await two.say(PROMPT)
        if first.status_code == 503:
            assert first.json()["error"]["code"] == "interrupted"
            first = await two.say(PROMPT, **{"x-stainless-retry-count": "1"})
        assert said(first) == "resumed"
    finally:
        one.process.send_signal(signal.SIGCONT)
    await until(lambda: _answers(one))
    assert said(await one.say("three")) == "warm"  # it asks the one that has the agent now
    assert asked(upstream) == ["one", "two", PROMPT, "three"]


async def _answers(proxy: Proxy) -> bool:
    return (await proxy.http.get("/readyz")).status_code == 200


def streaming_at_once() -> None:
    """The head of a stream comes before its turn has said anything."""
    answers.FIRST_SIGN = 0.05
    main()


@pytest.mark.parametrize(
    ("end", "while_it_runs"),
    rest_in_full((signal.SIGSTOP, True), (signal.SIGKILL, False), (signal.SIGSTOP, False), quick=2),
)
@pytest.mark.sample(1)
async def test_who_says_it_again_because_the_proxy_that_forwarded_it_is_gone_has_said_it_once(
    end: signal.Signals, while_it_runs: bool, start: Start, upstream: Upstream
) -> None:
    """The other one still runs the turn, or has given the answer out of its hands: the same words were a new turn."""
    one, two = await start(streaming_at_once), await start()
    assert said(await one.say("one")) == "started"
    gate = HeldReply()
    upstream.when("two", gate)
    client = asyncio.create_task(two.saying("two").__aenter__())
    await gate.reached.wait()
    await paused(two.process, store_file(two.settings))
    if not while_it_runs:
        gate.open()

        async def ended() -> bool:
            return await one.statuses() == ["completed"] * 2

        await until(ended)
    two.process.send_signal(end)
    client.cancel()
    await asyncio.wait([client])
    await until(lambda: two.seen_until() < time.time())
    async with one.saying("two") as again:
        assert again.headers["x-turn-id"] == (await one.turns())[-1]["id"]
        gate.open()
        assert b"[DONE]" in await again.aread()
    two.process.send_signal(signal.SIGCONT)
    assert said(await one.say("three")) == "warm"
    assert asked(upstream) == ["one", "two", "three"]


async def test_the_same_words_twice_are_two_turns_while_the_proxy_that_forwarded_the_first_lives(
    start: Start, upstream: Upstream
) -> None:
    """It holds no lease, and is known to live all the same."""
    one, two = await start(), await start()
    assert said(await one.say("one")) == "started"
    gate = HeldReply()
    upstream.when("two", gate)
    first = asyncio.create_task(two.say("two"))
    await gate.reached.wait()
    expires = two.seen_until()
    await until(lambda: expires < time.time())
    second = asyncio.create_task(one.say("two"))

    async def waits() -> bool:
        return await one.statuses() == ["completed", "running", "queued"]

    await until(waits)
    gate.open()
    assert [said(await first), said(await second)] == ["warm", "warm"]


def an_hour_ahead() -> None:
    now = time.time
    time.time = lambda: now() + 3600.0
    main()


@pytest.mark.full
async def test_a_clock_that_is_an_hour_ahead_changes_nothing(start: Start, upstream: Upstream) -> None:
    one, two = await start(), await start(an_hour_ahead)
    assert said(await one.say("one")) == "started"
    assert said(await two.say("two")) == "warm"
    assert said(await two.say("one", "b")) == "started"
    assert said(await one.say("two", "b")) == "warm"
    assert asked(upstream) == ["one", "two"] * 2


async def test_a_proxy_of_another_cluster_on_the_same_store_is_sent_no_prompt(start: Start, upstream: Upstream) -> None:
    one, two = await start(), await start(cluster_key=SecretStr("the-key-of-another-cluster"))
    assert said(await one.say("one")) == "started"
    assert said(await two.say(PROMPT)) == "resumed"
    assert asked(upstream) == ["one", PROMPT]
    assert "hop_not_proved" in two.log() or "not_passed_on" in two.log()
