"""The LiteLLM door with `api_base`: over a real socket to our own server, and to what pretends to be one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cli_session_proxy import errors
from cli_session_proxy.settings import Settings
from turnfault.ports import free_port

from ..fake_engine import FakeEngine
from ..litellm_offline import exceptions, litellm, provider
from ..serving import serving

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    def none_here(_: Settings) -> Any:
        raise AssertionError("with an api_base no engine is started")

    provider.register()
    provider.configure(engine_factory=none_here)
    fake = FakeEngine(Settings())
    yield fake
    await asyncio.to_thread(provider.close)
    await fake.aside.close()


@pytest.fixture
async def base(engine: FakeEngine) -> AsyncIterator[str]:
    async with serving(engine, Settings(port=0)) as url:
        yield url


async def ask(base: str, **given: Any) -> Any:
    return await litellm.acompletion(
        **{"model": "claude-cli/sonnet", "messages": HELLO, "api_base": base, "agent_id": "Ada ä", **given}
    )


async def chunks_of(base: str, **given: Any) -> list[Any]:
    return [chunk async for chunk in await ask(base, stream=True, **given)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_an_answer_of_serve_is_the_same_as_one_of_the_engine_here(engine: FakeEngine, base: str) -> None:
    answer = await ask(base, extra_headers={"Idempotency-Key": "k", "x-stainless-retry-count": "1", "X-Chain": "new"})
    message = answer.choices[0].message
    assert message.content == "Hi you"
    assert message.provider_specific_fields == {
        "agent_id": "Ada ä", "turn_id": "turn_1", "session_id": "s-1", "continuity": "warm"
    }  # fmt: skip
    assert answer.usage.prompt_tokens == 432
    assert answer._hidden_params["response_cost"] == 0.25
    asked = engine.last
    assert (asked.agent_id, asked.idempotency_key, asked.is_retry, asked.fresh) == ("Ada ä", "k", True, True)
    assert engine.answers[0].acknowledged


async def test_a_stream_of_serve_is_the_same_as_one_of_the_engine_here(engine: FakeEngine, base: str) -> None:
    engine.thinking = ["hm"]
    chunks = await chunks_of(base, stream_options={"include_usage": True})
    assert text_of(chunks) == "Hi you"
    assert chunks[0].provider_specific_fields["turn_id"] == "turn_1"
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.cost) == (432, 0.25)
    assert engine.answers[0].acknowledged


async def test_the_sync_calls_reach_serve_too(engine: FakeEngine, base: str) -> None:
    def work() -> tuple[Any, list[Any]]:
        call: Any = {"model": "claude-cli/sonnet", "messages": HELLO, "api_base": base.removesuffix("/v1")}
        return litellm.completion(**call), list(litellm.completion(**call, stream=True))

    answer, chunks = await asyncio.to_thread(work)
    assert answer.choices[0].message.content == "Hi you"
    assert text_of(chunks) == "Hi you"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.ContextTooLong("full"), exceptions.ContextWindowExceededError),
        (errors.ClaudeNotLoggedIn("log in"), exceptions.AuthenticationError),
        (errors.QueueFull("later", retry_after=7), exceptions.RateLimitError),
        (errors.TurnTimeout("slow"), exceptions.Timeout),
        (errors.ClaudeUnavailable("none"), exceptions.ServiceUnavailableError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_serves_errors_are_raised_as_the_engines_own(
    engine: FakeEngine, base: str, error: errors.ProxyError, raised: type[Exception], stream: bool
) -> None:
    engine.error = error
    with pytest.raises(Exception, match=error.code) as caught:
        await (chunks_of(base) if stream else ask(base))
    met: Any = getattr(caught.value, "original_exception", None) or caught.value
    if error.retry_after:
        assert met.response.headers["retry-after"] == "7"
    assert type(met) is raised


async def test_an_error_inside_the_stream_is_raised_after_the_text(engine: FakeEngine, base: str) -> None:
    engine.late_error = errors.Overloaded("too much")
    seen = []
    with pytest.raises(Exception, match="overloaded"):  # noqa: PT012  # what came before is part of the behaviour
        async for chunk in await ask(base, stream=True):
            seen.append(chunk)
    assert text_of(seen) == "Hi you"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeout_is_enforced_and_serve_sees_the_client_leave(
    engine: FakeEngine, base: str, stream: bool
) -> None:
    engine.gate = asyncio.Event()
    with pytest.raises(Exception, match="turn_timeout") as caught:
        await (chunks_of(base, timeout=1.0) if stream else ask(base, timeout=1.0))
    met = getattr(caught.value, "original_exception", None) or caught.value
    assert isinstance(met, exceptions.Timeout)
    await asyncio.wait_for(engine.answers[0].left.wait(), 60)
    assert not engine.answers[0].acknowledged


async def test_a_cancelled_call_closes_its_connection(engine: FakeEngine, base: str) -> None:
    engine.gate = asyncio.Event()
    task = asyncio.create_task(ask(base))
    assert await asyncio.to_thread(engine.waiting.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(engine.answers[0].left.wait(), 60)


async def test_a_network_proxy_is_not_asked_for_a_serve_on_this_machine(
    engine: FakeEngine, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert (await ask(base)).choices[0].message.content == "Hi you"


async def test_no_server_there_says_what_to_do(engine: FakeEngine) -> None:
    with pytest.raises(exceptions.ServiceUnavailableError, match="start `serve`"):
        await ask(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1/v1", "http://127.0.0.1:x/v1"])
async def test_an_api_base_that_is_no_url_is_a_bad_request(engine: FakeEngine, url: str) -> None:
    with pytest.raises(exceptions.BadRequestError, match="api_base"):
        await ask(url)


PAGE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>"
NO_JSON = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
CUT = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"id":"x","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
)


@pytest.mark.parametrize(("bytes_sent", "stream"), [(PAGE, False), (PAGE, True), (NO_JSON, False), (CUT, True)])
async def test_what_is_no_serve_is_an_upstream_error(engine: FakeEngine, bytes_sent: bytes, stream: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes_sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Exception, match="upstream_error"):
            await (chunks_of(url) if stream else ask(url))
