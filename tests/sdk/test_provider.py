"""The LiteLLM door over an engine that says what the test scripts: real litellm, no CLI."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy import errors
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.sdk.litellm import call as calls
from cli_session_proxy.settings import Settings
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import Naming

from ..fake_engine import FakeEngine
from ..litellm_offline import exceptions, get_instance_fn, litellm, offline_environment, provider
from ..memory_backend import MemoryBackend

HELLO = [{"role": "user", "content": "hello"}]
SONNET = "claude-cli/sonnet"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(Settings())
    provider.register()
    provider.configure(fake.settings, engine_factory=lambda _: fake)  # type: ignore[arg-type,return-value]
    yield fake
    provider.close()


async def ask(**given: Any) -> Any:
    return await litellm.acompletion(**{"model": SONNET, "messages": HELLO, "agent_id": "ada", **given})


async def chunks_of(**given: Any) -> list[Any]:
    return [chunk async for chunk in await ask(stream=True, **given)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_one_token_is_one_token_streamed_and_not(tmp_path: Path) -> None:
    backend = MemoryBackend()
    provider.register()
    provider.configure(
        Settings(var=tmp_path / "var"), engine_factory=lambda settings: Engine(settings, backend=backend)
    )
    try:
        whole = await ask(max_tokens=1)
        pieces = await chunks_of(max_tokens=1, stream_options={"include_usage": True})
        await ask()
    finally:
        await asyncio.to_thread(provider.close)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("You", "length")
    assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens == 1
    assert text_of(pieces) == "You"
    assert [one.choices[0].finish_reason for one in pieces if one.choices[0].finish_reason] == ["length"]
    shown = [block["text"] for message in backend.seen[-1] for block in message.content]
    assert shown == ["hello", "You", "hello", "You", "hello"]


# --- the answer -------------------------------------------------------------------------------------------


async def test_an_answer_carries_text_usage_cost_and_names(engine: FakeEngine) -> None:
    engine.thinking = ["hm"]
    answer = await ask(agent_id="Ada ä")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hi you", "hm")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == "chatcmpl-turn_1"
    assert answer.usage.prompt_tokens == 2 + 30 + 400
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 437)
    assert answer.usage.prompt_tokens_details.cached_tokens == 30
    assert answer._hidden_params["response_cost"] == 0.25
    names = {"agent_id": "Ada ä", "turn_id": "turn_1", "session_id": "s-1", "continuity": "warm"}
    assert names.items() <= message.provider_specific_fields.items()
    headers = answer._hidden_params["additional_headers"]
    wanted = {"x-agent-id": "Ada%20%C3%A4", "x-turn-id": "turn_1", "x-session-id": "s-1", "x-continuity": "warm"}
    assert {name: headers[f"llm_provider-{name}"] for name in wanted} == wanted


async def test_a_stream_carries_deltas_thinking_names_usage_and_a_finish(engine: FakeEngine) -> None:
    engine.thinking = ["h", "m"]
    chunks = await chunks_of(stream_options={"include_usage": True})
    assert text_of(chunks) == "Hi you"
    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks) == "hm"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-turn_1"}
    named = [chunk.provider_specific_fields for chunk in chunks if chunk.choices[0].delta.content]
    assert named == [{"agent_id": "ada", "turn_id": "turn_1", "session_id": "s-1", "continuity": "warm"}] * 2
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cost) == (432, 5, 0.25)


async def test_usage_and_cost_of_a_stream_are_the_turns_own_without_being_asked_for(engine: FakeEngine) -> None:
    seen = await chunks_of()
    assert seen[-1]._hidden_params["usage"].prompt_tokens == 432
    assert seen[-1]._hidden_params["usage"].cost == 0.25


async def test_a_stream_of_equal_deltas_is_passed_on_whole(engine: FakeEngine) -> None:
    # LiteLLM takes 100 equal chunks for a model that is stuck.
    engine.deltas = ["same "] * 150
    assert text_of(await chunks_of()) == "same " * 150


def test_the_sync_calls_give_the_same(engine: FakeEngine) -> None:
    answer = litellm.completion(model=SONNET, messages=HELLO, agent_id="ada")
    assert answer.choices[0].message.content == "Hi you"
    chunks = list(litellm.completion(model=SONNET, messages=HELLO, agent_id="ada", stream=True))
    assert text_of(chunks) == "Hi you"
    assert all(answer.acknowledged for answer in engine.answers)
    assert len(engine.answers) == 2


async def test_the_sync_calls_work_inside_a_running_loop(engine: FakeEngine) -> None:
    answer = litellm.completion(model=SONNET, messages=HELLO, agent_id="ada")
    assert answer.choices[0].message.content == "Hi you"


# --- what the engine is asked -----------------------------------------------------------------------------


async def test_system_history_effort_and_retry_marks_reach_the_engine(engine: FakeEngine) -> None:
    await ask(
        messages=[{"role": "system", "content": "be brief"}, *HELLO],
        reasoning_effort="high",
        allowed_openai_params=["reasoning_effort"],
        extra_headers={"Idempotency-Key": "k1", "x-stainless-retry-count": "1", "X-Chain": "new"},
    )
    asked = engine.last
    assert (asked.model, asked.agent_id, asked.system, asked.effort) == ("sonnet", "ada", "be brief", "high")
    assert (asked.idempotency_key, asked.is_retry, asked.fresh) == ("k1", True, True)
    assert [message.as_json() for message in asked.messages] == [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    ]


async def test_equal_calls_have_equal_fingerprints_and_others_do_not(engine: FakeEngine) -> None:
    await ask()
    await ask()
    await ask(agent_id="bob")
    await ask(messages=[{"role": "user", "content": "other"}])
    prints = [answer.request.fingerprint for answer in engine.answers]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"agent_id": "a"}, "a"),
        ({"extra_body": {"agent_id": "e"}}, "e"),
        ({"metadata": {"agent_id": "m"}}, "m"),
        ({"litellm_session_id": "s"}, "s"),
        ({"extra_headers": {"X-Agent-Id": "h%C3%A4"}}, "hä"),
        ({"extra_headers": {"X-Agent-Id": "h"}, "agent_id": "a", "metadata": {"agent_id": "m"}}, "h"),
        ({"agent_id": "a", "metadata": {"agent_id": "m"}, "litellm_session_id": "s"}, "a"),
        ({"metadata": {"agent_id": "m"}, "litellm_session_id": "s"}, "m"),
        ({"user": "u"}, None),
        ({"metadata": {"trace_id": "t"}}, None),
        ({}, None),
    ],
)
async def test_an_agent_is_named_by_the_first_place_that_names_one(
    engine: FakeEngine, given: dict[str, Any], named: str | None
) -> None:
    await litellm.acompletion(model=SONNET, messages=HELLO, **given)
    assert engine.last.agent_id == named


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"proxy_server_request": {"headers": {"x-agent-id": "h"}, "body": {"agent_id": "b"}}}, "h"),
        ({"metadata": {"headers": {"X-Agent-Id": "h"}}}, "h"),
        ({"proxy_server_request": {"headers": {}, "body": {"agent_id": "b"}}}, "b"),
        ({"metadata": {"requester_metadata": {"agent_id": "r"}}}, "r"),
        ({"metadata": {"user_api_key_end_user_id": "u"}}, None),
        ({"litellm_session_id": "s", "metadata": {"session_id": "s"}}, "s"),
        ({"litellm_session_id": "s", "metadata": {"session_id": "s", "litellm_session_id_generated": True}}, None),
    ],
)
def test_a_litellm_proxy_names_agents_by_what_its_client_sent(params: dict[str, Any], named: str | None) -> None:
    read = calls.read({"model": "sonnet", "messages": HELLO, "litellm_params": params}, stream=False)
    assert read.headers.get("x-agent-id") == named


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": [{"type": "function", "function": {"name": "", "parameters": {}}}]},
        {"response_format": {"type": "xml"}},
        {"agent_id": "x" * 257},
        {"agent_id": 7},
        {"timeout": "nan"},
        {"timeout": float("inf")},
        {"extra_headers": {"X-Agent-Id": "\ud800"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
    ],
    ids=lambda given: str(given)[:60],
)
async def test_what_would_lie_is_a_bad_request(engine: FakeEngine, given: dict[str, Any]) -> None:
    with pytest.raises(exceptions.BadRequestError) as caught:
        await ask(**given)
    assert "invalid_request" in str(caught.value)
    assert engine.answers == []


async def test_a_request_is_read_beside_the_loop_and_not_without_a_bound(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40,000 texts held up every other call of this process for a second."""
    read, threads = chat.read, []

    def noted(body: JSON, naming: Naming) -> chat.ChatCall:
        threads.append(threading.current_thread().name)
        return read(body, naming)

    monkeypatch.setattr(chat, "read", noted)
    await ask()
    engine.settings = engine.settings.model_copy(update={"max_body": 1000})
    with pytest.raises(exceptions.APIError, match="max_body"):
        await ask(messages=[{"role": "user", "content": "x" * 1001}])
    assert len(threads) == len(engine.answers) == 1
    assert threads[0] != "cli-session-proxy"


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (errors.ContextTooLong("full"), exceptions.ContextWindowExceededError, 400),
        (errors.ClaudeNotLoggedIn("log in"), exceptions.AuthenticationError, 401),
        (errors.NotFound("gone"), exceptions.NotFoundError, 404),
        (errors.SessionBusy("busy"), exceptions.APIError, 409),
        (errors.QueueFull("later", retry_after=7), exceptions.RateLimitError, 429),
        (errors.TurnCancelled("no"), exceptions.APIError, 499),
        (errors.ConfigError("mend"), exceptions.InternalServerError, 500),
        (errors.UpstreamError("cut"), exceptions.BadGatewayError, 502),
        (errors.ClaudeUnavailable("none"), exceptions.ServiceUnavailableError, 503),
        (errors.TurnTimeout("slow"), exceptions.Timeout, 504),
        (errors.Overloaded("busy"), exceptions.APIError, 529),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_is_litellms_own_of_the_same_status(
    engine: FakeEngine, error: errors.ProxyError, raised: type[Exception], status: int, stream: bool
) -> None:
    engine.error = error
    with pytest.raises(Exception, match=error.code) as caught:
        await (chunks_of() if stream else ask())
    # a failed stream's error comes in LiteLLM's wrapping
    met: Any = getattr(caught.value, "original_exception", None) or caught.value
    assert (type(met), met.status_code) == (raised, status)


async def test_when_to_come_again_is_kept(engine: FakeEngine) -> None:
    engine.error = errors.RateLimited("limit", retry_after=61.2)
    with pytest.raises(exceptions.RateLimitError) as caught:
        await ask()
    assert caught.value.response.headers["retry-after"] == "62"


async def test_a_stream_that_fails_late_raises_after_its_text_and_is_not_acknowledged(engine: FakeEngine) -> None:
    engine.late_error = errors.UpstreamError("cut off")
    seen = []
    with pytest.raises(Exception, match="cut off"):  # noqa: PT012  # what came before is part of the behaviour
        async for chunk in await ask(stream=True):
            seen.append(chunk)
    assert text_of(seen) == "Hi you"
    assert not engine.answers[0].acknowledged
    assert engine.answers[0].left.is_set()


# --- time and leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeout_is_enforced_and_the_turn_left(engine: FakeEngine, stream: bool) -> None:
    engine.gate = asyncio.Event()
    with pytest.raises(Exception, match="turn_timeout") as caught:
        await (chunks_of(timeout=0.2) if stream else ask(timeout=0.2))
    met = getattr(caught.value, "original_exception", caught.value)
    assert isinstance(met, exceptions.Timeout)
    assert engine.last.timeout == 0.2
    assert engine.answers[0].left.is_set()
    assert not engine.answers[0].acknowledged


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeout_holds_for_the_acceptance_too(engine: FakeEngine, stream: bool) -> None:
    engine.accepting = asyncio.Event()
    with pytest.raises(Exception, match="turn_timeout"):
        await asyncio.wait_for(chunks_of(timeout=0.2) if stream else ask(timeout=0.2), 60)


async def test_a_cancelled_call_leaves_its_turn(engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    task = asyncio.create_task(ask())
    assert await asyncio.to_thread(engine.waiting.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.all_left.wait, 60)
    assert not engine.answers[0].acknowledged


async def test_a_stream_closed_half_way_leaves_its_turn(engine: FakeEngine) -> None:
    engine.deltas = ["a", "b", "c"]
    stream = await ask(stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.aclose()
    assert await asyncio.to_thread(engine.all_left.wait, 60)
    assert not engine.answers[0].acknowledged


def test_a_sync_stream_that_is_dropped_leaves_its_turn(engine: FakeEngine) -> None:
    stream = provider.handler.streaming(model="sonnet", messages=HELLO)
    assert next(stream).choices[0].delta.role == "assistant"
    stream.close()
    assert engine.all_left.wait(60)
    assert not engine.answers[0].acknowledged


async def test_a_whole_answer_is_acknowledged(engine: FakeEngine) -> None:
    await ask()
    await chunks_of()
    assert [answer.acknowledged for answer in engine.answers] == [True, True]


async def test_an_answer_is_not_acknowledged_before_its_last_chunk_was_taken(engine: FakeEngine) -> None:
    stream = provider.handler.astreaming(model="sonnet", messages=HELLO)
    async for chunk in stream:
        if chunk.choices[0].finish_reason:
            break
    assert not engine.answers[0].acknowledged
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert engine.answers[0].acknowledged


# --- one engine -------------------------------------------------------------------------------------------


def test_calls_from_many_threads_and_loops_share_one_engine(engine: FakeEngine) -> None:
    def work(number: int) -> Any:
        if number % 2:
            return asyncio.run(ask())
        return litellm.completion(model=SONNET, messages=HELLO, agent_id="ada")

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(work, range(6), timeout=60))
    assert [answer.choices[0].message.content for answer in answers] == ["Hi you"] * 6
    assert (engine.starts, len(engine.answers), engine.threads) == (1, 6, {"cli-session-proxy"})


async def test_an_engine_that_could_not_start_is_tried_again() -> None:
    tries: list[FakeEngine] = []

    class Starts(FakeEngine):
        async def start(self) -> None:
            if len(tries) == 1:
                raise errors.ConfigError("var/ is read-only: choose another --var")

    def make(settings: Settings) -> Any:
        tries.append(Starts(settings))
        return tries[-1]

    provider.register()
    provider.configure(Settings(), engine_factory=make)
    try:
        with pytest.raises(exceptions.InternalServerError, match="read-only"):
            await ask()
        assert (await ask()).choices[0].message.content == "Hi you"
    finally:
        provider.close()


async def test_closing_stops_the_engine_and_fails_what_is_open(engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    task = asyncio.create_task(ask())
    assert await asyncio.to_thread(engine.waiting.wait, 60)
    await asyncio.to_thread(provider.close)
    with pytest.raises(exceptions.ServiceUnavailableError, match="closed"):
        await task
    assert engine.stops == 1
    provider.close()
    assert engine.stops == 1


def test_registering_twice_registers_once() -> None:
    provider.register()
    provider.register()
    mine = [item for item in litellm.custom_provider_map if item["provider"] == "claude-cli"]
    assert [item["custom_handler"] for item in mine] == [provider.handler]


async def test_a_copy_that_litellm_makes_of_the_handlers_file_uses_the_same_engine(engine: FakeEngine) -> None:
    # It does so where the file lies beside the config.yaml, as in a checkout.
    beside = str(Path(provider.__file__).parents[1] / "config.yaml")
    copied = get_instance_fn("cli_session_proxy.provider.handler", beside)
    assert copied is not provider.handler
    answer = await copied.acompletion(model="sonnet", messages=HELLO)
    assert answer.choices[0].message.content == "Hi you"
    assert len(engine.answers) == 1


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=offline_environment(), check=False)


def test_the_engine_is_stopped_at_the_interpreters_exit() -> None:
    done = _python("""
        import asyncio, litellm
        from cli_session_proxy import errors, provider
        from cli_session_proxy.settings import Settings
        class Engine:
            def __init__(self, settings): self.settings = settings
            async def start(self): pass
            async def submit(self, request): raise errors.QueueFull("full", retry_after=1)
            async def stop(self):
                await asyncio.to_thread(print, "stopped", flush=True)  # executors must still work here
        provider.register()
        provider.configure(Settings(), engine_factory=Engine)
        try:
            litellm.completion(model="claude-cli/sonnet", messages=[{"role": "user", "content": "x"}])
        except litellm.RateLimitError:
            print("asked", flush=True)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["asked", "stopped"]


def test_only_the_provider_imports_litellm() -> None:
    done = _python("""
        import sys
        import cli_session_proxy, cli_session_proxy.wires.chat.body, cli_session_proxy.sdk.runtime
        assert not [name for name in sys.modules if name.split(".")[0] == "litellm"]
    """)
    assert done.returncode == 0, done.stderr
