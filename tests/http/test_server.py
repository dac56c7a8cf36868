"""The HTTP door over a real socket, with the real openai client and an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from cli_session_proxy import errors, logs
from cli_session_proxy.domain.models import Finished
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.server import Server, create_app
from cli_session_proxy.settings import ALIASES, Settings
from cli_session_proxy.wires import answers

from ..fakes import AGENT, SESSION, TURN, FakeEngine, Step, hello, started, text, turn
from ..until import until

SOON = 60.0
HELLO: dict[str, Any] = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
Serving = Callable[..., "contextlib.AbstractAsyncContextManager[Door]"]


class Door:
    """A server on a free port with its engine, and clients of it."""

    def __init__(self, engine: FakeEngine, port: int, server: Server) -> None:
        self.engine = engine
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=SOON)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="k",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def post(self, body: object = None, **options: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=HELLO if body is None else body, **options)

    async def raw(self, head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head)
        await writer.drain()
        return reader, writer

    async def ask(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a bare connection, so that the test can leave when it likes."""
        data = json.dumps(body).encode()
        return await self.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @contextlib.asynccontextmanager
    async def run(
        script: Callable[[Any], list[Step]] | None = None, engine: FakeEngine | None = None, **options: Any
    ) -> AsyncIterator[Door]:
        engine = engine or FakeEngine(script)
        settings = Settings(var=tmp_path / "var", drain_timeout=1, stop_grace=0, **options)
        listener = socket.create_server(("127.0.0.1", 0))
        server = Server(create_app(engine.as_engine(), settings), settings)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait_for(server.ready.wait(), SOON)
        door = Door(engine, listener.getsockname()[1], server)
        try:
            yield door
        finally:
            await door.http.aclose()
            await door.openai.close()
            server.should_exit = True
            await asyncio.wait_for(task, SOON)
            await engine.aside.close()

    return run


async def finished(door: Door) -> Any:
    """The last answer, once the door is done with it."""
    answer = door.engine.answers[-1]
    await asyncio.wait_for(answer.done.wait(), SOON)
    return answer


def events(raw: str) -> list[str]:
    return [line.removeprefix("data: ") for line in raw.split("\n\n") if line]


# --- a turn, with the real client -------------------------------------------------------------------------


async def test_the_openai_client_gets_an_answer(serving: Serving) -> None:
    async with serving() as door:
        raw = await door.openai.chat.completions.with_raw_response.create(
            model="sonnet", messages=[{"role": "user", "content": "hello"}], extra_headers={"X-Agent-Id": "a%2Fb"},
            temperature=0.5, service_tier="flex",
        )  # fmt: skip
        completion = raw.parse()
        assert completion.choices[0].message.content == "Hello there."
        assert completion.usage is not None
        assert completion.usage.total_tokens == 5
        named = {name: raw.headers[name] for name in ("x-agent-id", "x-turn-id", "x-session-id", "x-continuity")}
        assert named == {"x-agent-id": "a%2Fb", "x-turn-id": "turn_1", "x-session-id": SESSION, "x-continuity": "warm"}
        assert raw.headers["x-ignored-params"] == "service_tier"
        assert raw.headers["x-request-id"] == door.engine.requests[0].request_id
        assert door.engine.requests[0].agent_id == "a/b"
        assert (await finished(door)).acknowledged


async def test_the_openai_client_streams_an_answer(serving: Serving) -> None:
    async with serving() as door:
        stream = await door.openai.chat.completions.create(
            model="sonnet", messages=[{"role": "user", "content": "hello"}], stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        headers = stream.response.headers
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there."
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert (headers["x-session-id"], headers["x-continuity"], headers["x-turn-id"]) == (SESSION, "warm", "turn_1")
        assert headers["content-type"].startswith("text/event-stream")
        assert (await finished(door)).acknowledged


async def test_a_delta_is_passed_on_before_the_next_one_exists(serving: Serving) -> None:
    gate = asyncio.Event()
    head, first, second, stop = text("Hello", " there.")
    async with serving(lambda _: [started(), head, first, gate, second, stop, Finished(TURN)]) as door:
        stream = await door.openai.chat.completions.create(
            model="sonnet", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        got = ""
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
            if got == "Hello":
                assert not door.engine.answers[0].done.is_set()
                gate.set()
        assert got == "Hello there."


async def test_an_agent_is_named_by_the_path_for_every_client(serving: Serving) -> None:
    async with serving() as door:
        for agent_id in ("plain", "a/b", "agents/agents/x", "Zoë 猫", "x/v1/models"):
            client = door.openai.with_options(base_url=f"{door.url}/agents/{quote(agent_id, safe='')}/v1")
            await client.chat.completions.create(model="sonnet", messages=[{"role": "user", "content": "hello"}])
            assert door.engine.requests[-1].agent_id == agent_id
            assert [model.id async for model in client.models.list()][:2] == ["sonnet", "opus"]
        bad = await door.http.post("/agents/%ff/v1/chat/completions", json=HELLO)
        empty = await door.http.post("/agents//v1/chat/completions", json=HELLO)
        assert [r.json()["error"]["param"] for r in (bad, empty)] == ["agent_id", "agent_id"]


async def test_models_are_listed_and_looked_up(serving: Serving) -> None:
    async with serving() as door:
        assert [m.id async for m in door.openai.models.list()] == ["sonnet", "opus", "haiku", "default", *ALIASES]
        assert (await door.openai.models.retrieve("claude-cli/opus")).id == "opus"


async def test_what_the_headers_say_reaches_the_engine(serving: Serving) -> None:
    async with serving() as door:
        headers = {"X-Chain": "new", "Idempotency-Key": "k1", "x-stainless-retry-count": "1", "X-Request-Id": "trace-1"}
        answer = await door.post(headers=headers)
        request = door.engine.requests[0]
        assert (request.fresh, request.idempotency_key, request.is_retry) == (True, "k1", True)
        assert request.request_id == answer.headers["x-request-id"] == "trace-1"
        forged = await door.post(headers={"X-Request-Id": "not one id"})
        assert forged.headers["x-request-id"].startswith("req_")


# --- errors -----------------------------------------------------------------------------------------------

TREE = [
    (errors.QueueFull("the lane is full: wait", retry_after=1.2), 429, "queue_full", "2", openai.RateLimitError),
    (errors.RateLimited("limit", retry_after=3600), 429, "rate_limited", "3600", openai.RateLimitError),
    (errors.ClaudeNotLoggedIn("log in"), 401, "claude_not_logged_in", None, openai.AuthenticationError),
    (errors.UpstreamError("failed"), 502, "upstream_error", None, openai.InternalServerError),
    (errors.Overloaded("busy"), 529, "overloaded", None, openai.InternalServerError),
    (errors.TurnTimeout("late"), 504, "turn_timeout", None, openai.InternalServerError),
    (errors.StoreUnavailable("disk"), 503, "store_unavailable", None, openai.InternalServerError),
    (errors.TurnCancelled("cancelled"), 499, "turn_cancelled", None, openai.APIStatusError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry_after", "raised"), TREE)
async def test_an_error_has_its_real_status_streamed_or_not(
    serving: Serving, error: Exception, status: int, code: str, retry_after: str | None, raised: Any, stream: bool
) -> None:
    async with serving(lambda _: [started(), error]) as door:
        with pytest.raises(raised) as caught:
            await door.openai.chat.completions.create(
                model="sonnet", messages=[{"role": "user", "content": "hello"}], stream=stream
            )
        assert caught.value.status_code == status
        assert caught.value.code == code
        response = caught.value.response
        assert response.headers.get("retry-after") == retry_after
        assert response.headers["x-turn-id"] == "turn_1"
        assert (await finished(door)).left


async def test_an_error_of_submit_is_answered_too(serving: Serving) -> None:
    def full(_request: object) -> list[Step]:
        raise errors.QueueFull("the lane is full: wait", retry_after=2)

    async with serving(full) as door:
        answer = await door.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


async def test_an_error_in_mid_stream_ends_it_without_done(serving: Serving) -> None:
    head, first, _stop = text("Hel")
    async with serving(lambda _: [started(), head, first, errors.UpstreamError("cut")]) as door:
        answer = await door.post({**HELLO, "stream": True})
        assert answer.status_code == 200
        *_, last = events(answer.text)
        assert json.loads(last)["error"]["code"] == "upstream_error"
        stream = await door.openai.chat.completions.create(
            model="sonnet", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        with pytest.raises(openai.APIError, match="cut"):
            async for _ in stream:
                pass
        assert (await finished(door)).left


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unforeseen_error_is_a_500_that_tells_nothing(serving: Serving, stream: bool, tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var")
    logs.configure(settings)
    try:
        async with serving(lambda _: [RuntimeError("the PROMPT was in here")]) as door:
            answer = await door.post({**HELLO, "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
        logged = logs.file_of(settings).read_text()
    finally:
        logs.shut_down()
    assert "PROMPT" not in answer.text + logged
    assert "RuntimeError" in logged


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_drain_did_not_wait_for_is_a_503_to_come_back_for(
    stream: bool, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server cancels what is left then; of itself it would say 500 in plain text."""
    monkeypatch.setattr("cli_session_proxy.http.server.LAST_BYTES", -1)  # the drain of these tests is a second
    submitted = asyncio.Event()

    def script(_request: object) -> list[Step]:
        submitted.set()
        return [asyncio.Event()]

    async with serving(script) as door:
        asking = asyncio.create_task(door.post({**HELLO, "stream": stream}))
        await asyncio.wait_for(submitted.wait(), SOON)
        door.server.should_exit = True
        answer = await asyncio.wait_for(asking, SOON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "interrupted")
        assert int(answer.headers["retry-after"]) > 0


async def test_a_stream_that_ends_without_its_turn_is_an_error(serving: Serving) -> None:
    async with serving(lambda _: [started()]) as door:
        answer = await door.post({**HELLO, "stream": True})
        assert answer.status_code == 500
        assert (await finished(door)).left


async def test_broken_bodies_are_refused_by_field(serving: Serving) -> None:
    async with serving() as door:
        for content in (b"", b"{", b"[]", b'{"a": NaN}', b"\xff", b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"):
            answer = await door.http.post("/v1/chat/completions", content=content)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_request"
        answer = await door.post({**HELLO, "n": 2})
        assert answer.json()["error"]["param"] == "n"
        assert door.engine.requests == []


async def test_a_body_over_the_limit_is_refused_declared_or_not(serving: Serving) -> None:
    async def dripping() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1024

    async with serving(max_body=2048) as door:
        declared = await door.post({**HELLO, "user": "x" * 2048})
        chunked = await door.http.post("/v1/chat/completions", content=dripping())
        for answer in (declared, chunked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await door.post()).status_code == 200


async def test_a_large_body_is_parsed_aside(serving: Serving) -> None:
    async with serving() as door:
        long = "word " * 500_000
        answer = await door.post({**HELLO, "messages": [{"role": "user", "content": long}]})
        assert answer.status_code == 200
        assert door.engine.requests[0].messages[0].content[0]["text"] == long


async def test_unknown_routes_and_methods_say_what_to_do(serving: Serving) -> None:
    async with serving() as door:
        unknown = await door.http.post("/v1/embeddings", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
        wrong = await door.http.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert "POST" in wrong.json()["error"]["message"]
        # An address of several methods is several routes, and Google's pattern covers each model's address.
        for path, methods in (("/v1/conversations/conv_1", "DELETE, GET, POST"), ("/v1/models/opus", "GET, POST")):
            several = await door.http.put(path, json={})
            assert (several.status_code, several.headers["allow"]) == (405, methods)
            assert f"use {methods}" in several.json()["error"]["message"]
        assert "x-request-id" in wrong.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8787"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 400),
        ({"Host": "127.0.0.1.evil.example"}, 400),
        ({"Host": ""}, 400),
        ({"Origin": "http://localhost:3000"}, 400),
        ({"Origin": "https://evil.example"}, 400),
        ({"Origin": "null"}, 400),
    ],
)
async def test_what_a_browser_was_tricked_into_is_refused(
    serving: Serving, headers: dict[str, str], status: int
) -> None:
    async with serving() as door:
        answer = await door.post(headers=headers)
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers
        assert len(door.engine.requests) == (status == 200)


# --- who is there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_is_noticed(serving: Serving, stream: bool) -> None:
    never = asyncio.Event()
    submitted = asyncio.Event()

    def script(_request: object) -> list[Step]:
        submitted.set()
        return [started(), never]

    async with serving(script) as door:
        _reader, writer = await door.ask({**HELLO, "stream": stream})
        await asyncio.wait_for(submitted.wait(), SOON)
        writer.close()
        await writer.wait_closed()
        answer = await finished(door)
        assert answer.left
        assert not answer.acknowledged


async def test_a_client_that_leaves_in_mid_stream_is_noticed(serving: Serving) -> None:
    never = asyncio.Event()
    async with serving(lambda _: [started(), *text("Hel"), never]) as door:
        reader, writer = await door.ask({**HELLO, "stream": True})
        await asyncio.wait_for(reader.readuntil(b'"Hel"'), SOON)
        writer.close()
        await writer.wait_closed()
        assert (await finished(door)).left


async def test_an_answer_ready_after_the_client_left_is_not_acknowledged(serving: Serving) -> None:
    ready = asyncio.Event()
    async with serving(lambda _: [started(), ready, *hello()[1:]]) as door:
        _reader, writer = await door.ask(HELLO)
        await until(lambda: door.engine.answers)
        writer.transport.abort()
        await asyncio.wait_for(door.engine.answers[0].done.wait(), SOON)
        ready.set()
        assert not (await finished(door)).acknowledged


async def test_a_client_that_does_not_read_gets_its_end_only_when_it_does(serving: Serving) -> None:
    """More than the buffers of a connection hold: nothing is acknowledged before it is handed over."""
    big = "0123456789" * 2_000_000
    whole = turn(1, output=({"type": "text", "text": big},))
    pieces = [big[at : at + 100_000] for at in range(0, len(big), 100_000)]
    async with serving(lambda _: [started(), *text(*pieces), Finished(whole)]) as door:
        reader, writer = await door.ask({**HELLO, "stream": True})
        await asyncio.wait_for(reader.readuntil(b"01234"), SOON)
        assert not door.engine.answers[0].done.is_set()
        writer.transport.abort()
        answer = await finished(door)
        assert answer.left
        assert not answer.acknowledged


async def test_silence_is_filled_with_comments_that_clients_skip(serving: Serving) -> None:
    gate = asyncio.Event()
    async with serving(lambda _: [started(), gate, *hello()[1:]], keepalive=0.05) as door:
        reader, writer = await door.ask({**HELLO, "stream": True})
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON)
        assert b"x-session-id: " + SESSION.encode() in head
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), SOON)
        gate.set()
        await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), SOON)
        assert (await finished(door)).acknowledged
        writer.close()
        await writer.wait_closed()


async def test_the_first_comment_does_not_wait_for_the_others(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FIRST_SIGN", 0.05)
    gate = asyncio.Event()
    async with serving(lambda _: [started(), gate, *hello()[1:]], keepalive=3600) as door:
        reader, writer = await door.ask({**HELLO, "stream": True})
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), SOON)
        gate.set()
        rest = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), SOON)
        assert b"keep-alive" not in rest
        assert (await finished(door)).acknowledged
        writer.close()
        await writer.wait_closed()


async def test_the_openai_client_reads_over_the_comments(serving: Serving) -> None:
    gate = asyncio.Event()
    async with serving(lambda _: [started(), gate, *hello()[1:]], keepalive=0.05) as door:
        stream = await door.openai.chat.completions.create(
            model="sonnet", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        gate.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello there."


async def test_an_error_after_the_first_comment_is_an_event(serving: Serving) -> None:
    gate = asyncio.Event()
    async with serving(lambda _: [started(), gate, errors.UpstreamError("failed")], keepalive=0.05) as door:
        reader, writer = await door.ask({**HELLO, "stream": True})
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), SOON)
        gate.set()
        rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), SOON)
        assert b"upstream_error" in rest
        assert b"[DONE]" not in rest
        writer.close()
        await writer.wait_closed()


# --- administration ---------------------------------------------------------------------------------------


async def test_health_and_readiness(serving: Serving) -> None:
    async with serving() as door:
        assert (await door.http.get("/healthz")).status_code == 200
        assert (await door.http.get("/readyz")).status_code == 200
        door.engine.ready = False
        assert (await door.http.get("/readyz")).status_code == 503


@pytest.mark.parametrize("agent_id", ["a", "a/b", "Zoë 猫", "a/events"])
async def test_chains_are_listed_dumped_and_deleted(serving: Serving, agent_id: str) -> None:
    engine = FakeEngine()
    engine.fake_store.agents[agent_id] = replace(AGENT, agent_id=agent_id)
    engine.fake_store.rows = [turn(1), turn(2)]
    async with serving(engine=engine) as door:
        listed = (await door.http.get("/v1/chains")).json()["data"]
        assert [row["agent_id"] for row in listed] == [agent_id]
        path = f"/v1/chains/{quote(agent_id, safe='')}"
        dump = await door.http.get(path)
        assert dump.headers["content-type"] == "application/json"
        assert [row["id"] for row in dump.json()["turns"]] == ["turn_1", "turn_2"]
        assert dump.json()["sandbox"].endswith("/sandbox/agents/a")
        told = await door.http.get(path, params={"format": "markdown"})
        assert told.headers["content-type"] == "text/markdown; charset=utf-8"
        assert "Hello there." in told.text
        assert (await door.http.get(path, params={"format": "pdf"})).json()["error"]["param"] == "format"
        assert (await door.http.delete(path)).json()["deleted"] is True
        assert engine.deleted == [agent_id]
        assert (await door.http.delete(path)).status_code == 404
        assert (await door.http.get(path)).json()["error"]["code"] == "not_found"


async def test_a_dump_that_fails_half_way_is_cut_not_ended(serving: Serving) -> None:
    engine = FakeEngine()
    engine.fake_store.agents["a"] = AGENT
    engine.fake_store.rows = [turn(1), turn(2)]
    engine.fake_store.fail_after = 1
    async with serving(engine=engine) as door:
        with pytest.raises(httpx.RemoteProtocolError):
            await door.http.get("/v1/chains/a")


async def test_small_packets_of_an_answer_are_not_held_back(tmp_path: Path) -> None:
    """Else an answer of two writes waits 40 ms for the client's delayed acknowledgement (Nagle)."""
    at_once = asyncio.get_running_loop().create_future()

    def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with contextlib.closing(bind(Settings(var=tmp_path, port=0))) as listener:
        server = await asyncio.start_server(connected, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await at_once
            writer.close()
