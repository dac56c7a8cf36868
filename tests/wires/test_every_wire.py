"""Errors and lists in the words of the wire that asks, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from anthropic import APIStatusError, AsyncAnthropic
from google.genai.errors import APIError as GoogleError
from openai import APIError, AsyncOpenAI

from cli_session_proxy.domain.models import TurnRequest
from cli_session_proxy.engine.engine import HasLeft
from cli_session_proxy.engine.live import cancelled
from cli_session_proxy.errors import Interrupted, Overloaded, ProxyError
from cli_session_proxy.settings import ModelSettings, Settings

from ..every_wire import google_client, ollama_client
from ..fakes import FakeAnswer, FakeEngine, hello, started, text
from ..serving import serving
from ..until import until

MESSAGES = "/v1/messages"
GENERATE = "/v1beta/models/sonnet:generateContent"
STREAM = "/v1/models/sonnet:streamGenerateContent?alt=sse"
INTERACTIONS = "/v1beta/interactions"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "sonnet", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]},
    GENERATE: {"contents": [{"parts": [{"text": "hello"}]}]},
    STREAM: {"contents": [{"parts": [{"text": "hello"}]}]},
    INTERACTIONS: {"model": "sonnet", "input": "hello"},
    OLLAMA_CHAT: {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]},
    OLLAMA_GENERATE: {"model": "sonnet", "prompt": "hello"},
}
LIMIT = 4096


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    engine = FakeEngine()
    settings = Settings(var=tmp_path / "var", port=0, max_body=LIMIT)
    async with serving(engine.as_engine(), settings) as url:
        base = url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
            yield engine, client


def assert_shape(answer: httpx.Response, path: str, status: int, code: str) -> str:
    """The error is in the wire's own shape, with our code. Returns its message."""
    assert answer.status_code == status, answer.text
    return assert_error(answer.json(), path, status, code, answer.headers["x-request-id"])


def assert_error(body: Any, path: str, status: int, code: str, request_id: str) -> str:
    if "/api/" in path:
        assert body["code"] == code
        said: str = body["error"]
        return said
    error: dict[str, Any] = body["error"]
    if "/messages" in path:
        assert (body["type"], body["request_id"]) == ("error", request_id)
        assert error["details"]["error_code"] == code
        assert error["type"].endswith("error")
    elif "interactions" in path:
        assert error["code"] == code
    else:
        assert (error["code"], error["details"][0]["reason"]) == (status, code)
        assert error["status"].isupper()
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", BODIES)
async def test_every_kind_of_refusal_is_in_the_wires_shape(
    door: tuple[FakeEngine, httpx.AsyncClient], path: str
) -> None:
    engine, client = door
    for content in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1e999}', b'{"a":' * 500 + b"1" + b"}" * 500):
        assert_shape(await client.post(path, content=content), path, 400, "invalid_request")
    assert_shape(await client.post(path, content=b"x" * (LIMIT + 1)), path, 413, "request_too_large")
    assert_shape(await client.put(path, json={}), path, 405, "method_not_allowed")
    away = await client.post(path, json=BODIES[path], headers={"Host": "evil.example"})
    assert_shape(away, path, 400, "invalid_request")
    assert_shape(await client.post(f"/agents/%ff{path}", json=BODIES[path]), path, 400, "invalid_request")
    assert engine.requests == []
    engine.script = lambda _: [started(), Overloaded("busy: wait", retry_after=3)]
    failed = await client.post(path, json=BODIES[path])
    assert assert_shape(failed, path, 529, "overloaded") == "busy: wait"
    assert (failed.headers["retry-after"], failed.headers["x-turn-id"]) == ("3", "turn_1")
    engine.script = lambda _: [RuntimeError("the PROMPT was in here")]
    broken = await client.post(path, json=BODIES[path])
    assert "PROMPT" not in assert_shape(broken, path, 500, "internal_error")


@pytest.mark.parametrize(
    ("path", "at"),
    [(MESSAGES, "/v1/messages/batches"), (GENERATE, "/v1beta/models/sonnet:embedContent"), (GENERATE, "/v1beta/files"),
     (GENERATE, "/v1/models/sonnet:predict"), (INTERACTIONS, "/v1/interactions/a/b/c"),
     (OLLAMA_CHAT, "/api/embed"), (OLLAMA_CHAT, "/agents/a/api/pull")],
)  # fmt: skip
async def test_an_unknown_route_is_in_the_shape_of_its_neighbours(
    door: tuple[FakeEngine, httpx.AsyncClient], path: str, at: str
) -> None:
    _, client = door
    assert_shape(await client.post(at, json={}), path, 404, "not_found")


@pytest.mark.parametrize("path", [MESSAGES, STREAM, INTERACTIONS, OLLAMA_CHAT, OLLAMA_GENERATE])
async def test_an_error_in_mid_stream_is_in_the_wires_shape(
    door: tuple[FakeEngine, httpx.AsyncClient], path: str
) -> None:
    engine, client = door
    head, first, _ = text("Hel")
    engine.script = lambda _: [started(), head, first, ProxyError("it broke")]
    answer = await client.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    between = "\n" if "/api/" in path else "\n\n"
    frames = [frame for frame in answer.text.strip().split(between) if frame != "data: [DONE]"]
    assert "He" in "".join(frames[:-1])  # Google's holds the last letter back for its end
    last = json.loads(frames[-1].splitlines()[-1].removeprefix("data: "))
    assert assert_error(last, path, 500, "internal_error", answer.headers["x-request-id"]) == "it broke"


@pytest.mark.parametrize("error", [Overloaded("it broke"), cancelled("client"), cancelled("stopping")])
async def test_the_vendors_clients_are_told_of_an_error_in_mid_stream(
    door: tuple[FakeEngine, httpx.AsyncClient], error: ProxyError
) -> None:
    engine, http = door
    head, first, _ = text("Hel")
    engine.script = lambda _: [started(), head, first, error]
    root = str(http.base_url)
    said: list[Any] = [{"role": "user", "content": "hello"}]
    async with AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as openai:
        with pytest.raises(APIError, match=error.message):
            await drawn(await openai.chat.completions.create(model="sonnet", messages=said, stream=True))
        failed = (await drawn(await openai.responses.create(model="sonnet", input="hello", stream=True)))[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == ("cancelled" if error.code == "turn_cancelled" else "failed")
    told = failed.response.error
    assert told is None if error.code == "turn_cancelled" else (told.code, told.message) == (error.code, error.message)
    async with AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as anthropic:
        with pytest.raises(APIStatusError, match=error.message):
            await drawn(await anthropic.messages.create(model="sonnet", max_tokens=1, messages=said, stream=True))
    async with google_client(root) as google:
        with pytest.raises(GoogleError, match=error.message):
            await drawn(await google.models.generate_content_stream(model="sonnet", contents="hello"))
        interaction: Any = await google.interactions.create(model="sonnet", input="hello", stream=True)
        last = (await drawn(interaction))[-1]
        if error.code == "turn_cancelled":
            assert last.status == "cancelled"
        else:
            assert (last.error.code, last.error.message) == (error.code, error.message)
    async with ollama_client(root) as lines:
        with pytest.raises(ollama.ResponseError, match=error.message):
            await drawn(await lines.chat(model="sonnet", messages=said, stream=True))


@pytest.mark.parametrize("generate", [False, True])
async def test_the_ollama_client_reads_on_over_keep_alives(tmp_path: Path, generate: bool) -> None:
    said = asyncio.Event()
    engine = FakeEngine(lambda _: [started(), said, *hello()[1:]])
    settings = Settings(var=tmp_path / "var", port=0, keepalive=0.05)
    async with serving(engine.as_engine(), settings) as url, ollama_client(url.removesuffix("/v1")) as client:
        parts: list[Any] = []
        wanted: Any = {"prompt": "hello"} if generate else {"messages": [{"role": "user", "content": "hello"}]}
        async for part in await (client.generate if generate else client.chat)(model="sonnet", stream=True, **wanted):
            parts.append(part)
            if len(parts) == 3:  # nothing was said yet: these are all lines without words
                said.set()
    texts = [part.response if generate else part.message.content for part in parts]
    assert texts[:3] == [""] * 3
    assert ("".join(texts), parts[-1].done) == ("Hello there.", True)


async def drawn(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]


async def test_a_stream_without_events_is_not_served(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    _, client = door
    answer = await client.post("/v1beta/models/sonnet:streamGenerateContent", json=BODIES[STREAM])
    assert "alt=sse" in assert_shape(answer, STREAM, 400, "invalid_request")


@pytest.mark.parametrize("path", BODIES)
async def test_an_agent_is_named_by_the_path_on_every_wire(
    door: tuple[FakeEngine, httpx.AsyncClient], path: str
) -> None:
    engine, client = door
    for prefix, agent_id in (("/agents/a%2Fb", "a/b"), ("", None)):
        assert (await client.post(prefix + path, json=BODIES[path])).status_code == 200
        assert engine.requests[-1].agent_id == agent_id
    by_body = {**BODIES[path], "metadata": {"agent_id": "c"}}
    assert (await client.post(path, json=by_body)).headers["x-agent-id"] == "c"


class Slow(FakeEngine):
    """Accepts nothing until the client has left."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.noticed = asyncio.Event()

    async def submit(self, request: TurnRequest, has_left: HasLeft | None = None) -> FakeAnswer:
        assert has_left is not None
        assert not has_left()
        self.asked.set()
        await until(has_left)
        self.noticed.set()
        raise Interrupted("nothing was run", retry_after=0.0)


@pytest.mark.parametrize("path", [*BODIES, "/v1/chat/completions", "/v1/responses"])
async def test_the_engine_can_ask_whether_the_client_has_left(tmp_path: Path, path: str) -> None:
    engine = Slow()
    said = {"model": "sonnet", "input": "hello", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        serving(engine.as_engine(), Settings(var=tmp_path / "var", port=0)) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60) as client,
    ):
        asking = asyncio.create_task(client.post(path, json=BODIES.get(path, said)))
        await asyncio.wait_for(engine.asked.wait(), 60)
        asking.cancel()
        await asyncio.wait_for(engine.noticed.wait(), 60)


async def test_the_models_list_has_three_meanings(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    _, client = door
    anthropic, google = {"anthropic-version": "2023-06-01", "x-api-key": "k"}, {"x-goog-api-key": "k"}
    listed = (await client.get("/v1/models", headers=anthropic | google)).json()
    assert (listed["data"][0]["type"], listed["first_id"], listed["has_more"]) == ("model", "sonnet", False)
    assert any("claude" in model["id"] for model in listed["data"])  # Claude Code keeps no other
    for path, headers in (("/v1/models", google), ("/v1/models?key=k", {}), ("/v1beta/models", {})):
        assert (await client.get(path, headers=headers)).json()["models"][0]["name"] == "models/sonnet"
    assert (await client.get("/v1/models")).json()["object"] == "list"
    assert (await client.get("/v1/models/opus", headers=anthropic)).json()["display_name"] == "Opus"
    assert (await client.get("/v1beta/models/opus")).json()["name"] == "models/opus"
    assert (await client.get("/v1/models/us.anthropic.claude-opus-4-v1:0")).json()["object"] == "model"
    bad = await client.get("/v1/models/--help", headers=anthropic)
    assert_shape(bad, MESSAGES, 400, "invalid_request")


@pytest.mark.parametrize("any_model", [False, True])
async def test_a_model_that_nobody_knows_is_not_there(tmp_path: Path, any_model: bool) -> None:
    settings = Settings(
        var=tmp_path / "var", port=0, any_model=any_model, models={"local": ModelSettings(litellm="ollama/a")}
    )
    async with (
        serving(FakeEngine().as_engine(), settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as client,
    ):
        anthropic = {"anthropic-version": "2023-06-01", "x-api-key": "k"}

        async def asked(name: str) -> list[int]:
            answers = [
                await client.get(f"/v1/models/{name}"),
                await client.get(f"/v1/models/{name}", headers=anthropic),
                await client.get(f"/v1beta/models/{name}"),
                await client.post("/api/show", json={"model": name}),
            ]
            return [answer.status_code for answer in answers]

        assert await asked("llama3:8b") == [200 if any_model else 404] * 4
        for known in ("opus[1m]", "claude-sonnet-5-5", "local", "gpt-5", "claude-cli/haiku", "opusplan"):
            assert await asked(known) == [200] * 4, known


async def test_a_count_says_that_it_is_an_estimate(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    _, client = door
    for path, at, field in (
        (MESSAGES, f"{MESSAGES}/count_tokens", "input_tokens"),
        (GENERATE, "/v1beta/models/sonnet:countTokens", "totalTokens"),
    ):
        answer = await client.post(at, json=BODIES[path])
        assert 1 <= answer.json()[field] < 20
        assert answer.headers["x-estimated"] == "true"
        assert_shape(await client.post(at, json={}), path, 400, "invalid_request")


async def test_what_has_no_effect_is_named_in_a_header(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    _, client = door
    for path, extra, named in (
        (MESSAGES, {"speed": "fast"}, "speed"),
        (GENERATE, {"generationConfig": {"mediaResolution": "x"}}, "generationConfig.mediaResolution"),
        (INTERACTIONS, {"service_tier": "flex"}, "service_tier"),
        (OLLAMA_CHAT, {"options": {"num_ctx": 9}, "keep_alive": "5m"}, "options.num_ctx, keep_alive"),
    ):
        answer = await client.post(path, json={**BODIES[path], **extra})
        assert answer.headers["x-ignored-params"] == named
