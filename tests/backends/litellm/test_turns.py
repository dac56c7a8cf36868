"""One model of another provider by itself: what it is sent, what comes back, and what happens when it fails."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cli_session_proxy.backends.litellm import messages, stream
from cli_session_proxy.backends.litellm.messages import Rendering
from cli_session_proxy.domain.client_tools import UNPARSED, CallIds, short_name
from cli_session_proxy.domain.models import BlockDelta, Message, Tool, ToolChoice
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    ProxyError,
    RateLimited,
    TurnCancelled,
    UpstreamError,
)
from cli_session_proxy.settings import ModelSettings, Settings

from ...media import paper
from ...talking import ask, request, running, text
from ...until import until
from .mixed import SCHEMA, WEATHER, picture
from .servers import Provider, Reply, texts

PDF = base64.b64encode(paper()).decode()


def result(call: str, content: Any, **more: Any) -> Message:
    return Message("user", ({"type": "tool_result", "tool_use_id": call, "content": content, **more},))


async def test_a_chain_goes_on_from_turn_to_turn(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply("Hello Ada.", usage=(40, 4, 30)), Reply("Blue."))
        first = await ask(engine, "I am Ada.", model="gpt")
        second = await ask(engine, "Which colour?", model="gpt")
    assert (text(first), text(second)) == ("Hello Ada.", "Blue.")
    assert (first.backend, first.answered_by, first.usage.input_tokens, first.usage.cache_read_tokens) == (
        "litellm", "gpt-scripted", 10, 30,
    )  # fmt: skip
    assert texts(provider.openai[-1])[1:] == [
        ("user", "I am Ada."), ("assistant", "Hello Ada."), ("user", "Which colour?"),
    ]  # fmt: skip
    assert provider.openai[1]["messages"][: len(provider.openai[0]["messages"])] == provider.openai[0]["messages"]
    assert provider.refused == []
    assert provider.keys == ["sk-openai-test"] * 2


@pytest.mark.parametrize("model", ["gpt", "gemini"])
async def test_words_come_as_they_are_said(
    with_models: Callable[..., Settings], provider: Provider, model: str
) -> None:
    async with running(with_models()) as engine:
        hold = asyncio.Event()
        provider.next(Reply("one two three", hold=hold))
        answer = await engine.submit(request("count", model=model))
        said: list[str] = []
        async for event in answer.events():
            if isinstance(event, BlockDelta):
                said.append(event.delta["text"])
                hold.set()  # only when something has come
        answer.acknowledge()
    assert "".join(said) == "one two three"
    assert len(said) > 1


@pytest.mark.parametrize("model", ["gpt", "gemini"])
async def test_calls_come_out_and_their_results_go_back(
    with_models: Callable[..., Settings], provider: Provider, model: str
) -> None:
    odd = Tool("wetter.für/heute", "Das Wetter", SCHEMA)
    name = short_name(odd.name)
    async with running(with_models()) as engine:
        provider.next(
            Reply("Let me look.", calls=[("call_0", name, {"city": "Rome"}), ("call_1", name, {"city": "Bonn"})])
        )
        called = await ask(engine, "weather?", model=model, tools=(odd, WEATHER))
        rome, bonn = [block for block in called.output if block["type"] == "tool_use"]
        assert (called.status, rome["name"], rome["input"], bonn["input"]) == (
            "requires_action", "wetter.für/heute", {"city": "Rome"}, {"city": "Bonn"},
        )  # fmt: skip
        shown = [{"type": "text", "text": "sunny"}, picture(1)]
        back = Message("user", (
            {"type": "tool_result", "tool_use_id": bonn["id"], "content": "no network", "is_error": True},
            {"type": "tool_result", "tool_use_id": rome["id"], "content": shown},
        ))  # fmt: skip
        provider.next(Reply("Sunny."))
        assert text(await ask(engine, back, model=model, tools=(odd, WEATHER))) == "Sunny."
    assert provider.refused == []
    told = texts((provider.openai or provider.gemini)[-1])
    assert [role for role, _ in told if role != "system"] == [
        "user", "assistant", "call", "call", "tool", "tool", "user", "user",
    ]  # fmt: skip
    assert "The call failed" in "".join(said for role, said in told if role == "tool")
    assert ("user", "<image_url>") in told


async def test_an_id_is_used_once_in_a_conversation(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        seen = []
        said: str | Message = "weather?"
        for _ in range(3):
            provider.next(Reply(calls=[("call_0", "get_weather", {"city": "Rome"})]))
            turn = await ask(engine, said, model="gpt", tools=(WEATHER,))
            seen.append(turn.output[0]["id"])
            said = result(seen[-1], "sunny")
    assert len(set(seen)) == 3
    assert provider.refused == []


async def test_calls_that_are_never_answered_are_told_as_such(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply(calls=[("call_a", "get_weather", {"city": "Rome"})]))
        await ask(engine, "weather?", model="gpt", tools=(WEATHER,))
        await ask(engine, "never mind", model="gpt", tools=(WEATHER,))
    assert [role for role, _ in texts(provider.openai[-1])[1:]] == ["user", "call", "tool", "user"]
    assert provider.refused == []


async def test_strict_arguments_and_choices_are_held_and_asked_for_once_more(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    strict = Tool("get_weather", "", SCHEMA, strict=True)
    async with running(with_models()) as engine:
        provider.next(
            Reply(calls=[("a", "get_weather", {"city": 7})]), Reply(calls=[("b", "get_weather", {"city": "Rome"})])
        )
        turn = await ask(engine, "weather?", model="gpt", tools=(strict,), tool_choice=ToolChoice("required"))
        assert turn.output[0]["input"] == {"city": "Rome"}
        provider.next(*[Reply(calls=[("c", "no_such_tool", {})])] * 2)
        with pytest.raises(UpstreamError, match="no_such_tool"):
            await ask(engine, result(turn.output[0]["id"], "sunny"), model="gpt", tools=(strict,))
    assert provider.openai[0]["tool_choice"] == "required"
    assert provider.refused == []


async def test_parameters_reach_the_provider_and_the_rest_is_named(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    wanted = Parameters(max_tokens=77, temperature=0.3, top_p=0.9, top_k=5, seed=11)
    settings = with_models(of_models={"gpt": {"params": {"temperature": 1.1, "seed": 1}}})
    async with running(settings) as engine:
        turn = await ask(engine, "hello", model="gpt", parameters=wanted)
        assert turn.evidence.unmet == ("top_k",)
        await ask(engine, "hello", model="gemini", parameters=wanted)
        await ask(engine, "again", model="gpt")
    asked = provider.openai[0]
    assert [asked[name] for name in ("max_tokens", "temperature", "top_p", "seed")] == [77, 0.3, 0.9, 11]
    config = provider.gemini[0]["generationConfig"]
    assert (config["max_output_tokens"], config["temperature"], config["seed"]) == (77, 0.3, 11)
    assert (provider.openai[1]["temperature"], provider.openai[1]["seed"]) == (1.1, 1)


async def test_an_answer_ends_before_a_stop_sequence_and_the_request_is_ended(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models()) as engine:
        hold = asyncio.Event()
        provider.next(Reply("one END two", hold=hold))
        asking = asyncio.create_task(ask(engine, "count", model="gpt", stop=("one ",)))
        turn = await asking
        assert (text(turn), turn.stop_reason, turn.stop_sequence) == ("", "stop_sequence", "one ")
        await asyncio.wait_for(provider.left.wait(), 60)
        assert turn.usage.prompt_tokens > 0  # estimated: an answer that we end comes without a count
        hold.set()
        await ask(engine, "next", model="gpt")
    assert provider.refused == []


async def test_an_answer_that_is_too_long_is_cut_and_says_so(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply("one two", finish="length"))
        assert (await ask(engine, "count", model="gpt")).stop_reason == "max_tokens"


async def test_a_structured_answer_is_checked_and_asked_for_once_more(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    async with running(with_models()) as engine:
        provider.next(Reply("no JSON at all"), Reply('```json\n{"city": "Rome"}\n```'))
        turn = await ask(engine, "where", model="gpt", format={"schema": schema})
        assert json.loads(text(turn)) == {"city": "Rome"}
        await ask(engine, "and now", model="gpt")
    told = texts(provider.openai[-1])[1:]
    assert [role for role, _ in told] == ["user", "assistant", "user"]
    assert told[0] == ("user", "where")  # what was asked for beside it was this turn's alone


async def test_a_client_that_leaves_ends_the_request(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply("one two three", hold=asyncio.Event()))
        answer = await engine.submit(request("count", model="gpt"))
        await provider.reached.wait()
        answer.cancel()
        with pytest.raises(TurnCancelled):
            await answer.turn()
        answer.leave()
        await asyncio.wait_for(provider.left.wait(), 60)
        await ask(engine, "hello", model="gpt")
    assert texts(provider.openai[-1])[1:] == [("user", "hello")]


@pytest.mark.parametrize(
    ("reply", "kind", "retry_after"),
    [
        (Reply(status=429, headers={"retry-after": "30"}), RateLimited, 30.0),
        (Reply(status=401, error="wrong key sk-openai-test"), UpstreamError, None),
        (Reply(status=404), InvalidRequest, None),
        (Reply(status=400, error="This model's maximum context length is 8 tokens"), ContextTooLong, None),
        (Reply(status=400, error="bad"), InvalidRequest, None),
        (Reply(status=500), UpstreamError, None),
        (Reply(status=503), Overloaded, None),
    ],
)
async def test_a_failure_is_an_error_of_the_contract(
    with_models: Callable[..., Settings], provider: Provider, reply: Reply, kind: type[ProxyError],
    retry_after: float | None,
) -> None:  # fmt: skip
    async with running(with_models(cli_retries=0)) as engine:
        provider.next(reply)
        with pytest.raises(kind) as caught:
            await ask(engine, "hello", model="gpt")
        assert type(caught.value) is kind
        assert (caught.value.retry_after, "sk-openai-test" in caught.value.message) == (retry_after, False)
        assert caught.value.message.startswith("gpt: ")
        assert text(await ask(engine, "hello again", model="gpt"))
    assert texts(provider.openai[-1])[1:] == [("user", "hello again")]


async def test_an_overloaded_provider_is_asked_again(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply(status=503), Reply("there"))
        turn = await ask(engine, "hello", model="gpt")
    assert text(turn) == "there"
    assert [one["error_status"] for one in turn.evidence.retries] == [503]


async def test_a_stream_that_breaks_off_is_no_answer(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models(cli_retries=0)) as engine:
        provider.next(Reply("one two three", cut=True))
        with pytest.raises(UpstreamError):
            await ask(engine, "count", model="gpt")
        await ask(engine, "hello", model="gpt")
    assert texts(provider.openai[-1])[1:] == [("user", "hello")]


async def test_what_the_provider_guards_against_is_a_refusal(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models()) as engine:
        provider.next(Reply("I", finish="content_filter"))
        turn = await ask(engine, "hello", model="gpt")
        assert (turn.status, turn.stop_reason, turn.backend) == ("refused", "refusal", "litellm")


async def test_a_model_without_images_is_told_where_one_stood(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models(of_models={"gpt": {"images": False, "documents": False}})
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
    async with running(settings) as engine:
        said = Message("user", ({"type": "text", "text": "look"}, picture(1), document))
        turn = await ask(engine, said, model="gpt")
        await ask(engine, said, model="gemini", agent="b")
    assert {note.code: note.count for note in turn.evidence.notes} == {
        "model_takes_no_images": 1, "model_takes_no_documents": 1,
    }  # fmt: skip
    assert "An image stood here" in texts(provider.openai[-1])[1][1]
    kinds = [
        part["inline_data"]["mime_type"]
        for part in provider.gemini[-1]["contents"][0]["parts"]
        if "inline_data" in part
    ]
    assert kinds == ["image/png", "application/pdf"]
    assert provider.refused == []


async def test_foreign_thinking_is_shown_as_text_only_where_the_settings_say_so(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models(of_models={"gemini": {"thinking_as_text": True}})
    async with running(settings) as engine:
        provider.next(Reply("Four.", thinking="two and two"))
        first = await ask(engine, "2+2", model="gpt")
        assert first.output[0] == {"type": "thinking", "thinking": "two and two", "signature": ""}
        await ask(engine, "sure?", model="gpt")
        await ask(engine, "really?", model="gemini")
    assert "two and two" not in json.dumps(provider.openai[-1])
    assert ("assistant", "<thinking>\ntwo and two\n</thinking>\nFour.") in texts(provider.gemini[-1])
    assert provider.refused == []


async def test_a_price_that_litellm_knows_is_the_cost(with_models: Callable[..., Settings], provider: Provider) -> None:
    settings = with_models(of_models={"gpt": {"litellm": "openai/gpt-4o-mini"}})
    async with running(settings) as engine:
        provider.next(Reply("hello", usage=(1000, 100, 0)))
        priced = await ask(engine, "hello", model="gpt")
        unpriced = await ask(engine, "hello", model="gemini")
    assert priced.cost_usd == pytest.approx(1000 * 0.15e-6 + 100 * 0.6e-6)
    assert unpriced.cost_usd is None


async def test_a_silent_provider_is_given_up(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        await ask(engine, "hello", model="gpt")  # the first request of a process takes its time
        engine.settings.idle_timeout = 0.5
        provider.next(Reply("one two", hold=asyncio.Event()))
        with pytest.raises(ProxyError, match="nothing came from the model"):
            await ask(engine, "count", model="gpt")
        await asyncio.wait_for(provider.left.wait(), 60)


def test_a_key_that_is_not_there_is_named_at_start(make_settings: Callable[..., Settings]) -> None:
    model = ModelSettings(litellm="openai/x", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        Engine(make_settings(models={"gpt": model}))


def test_a_server_of_ones_own_is_never_sent_a_providers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    settings = Settings(models={"local": ModelSettings(litellm="openai/x", api_base="http://127.0.0.1:1/v1")})
    assert settings.key_of("local") == "none"


def test_ids_that_no_provider_takes_come_to_the_same_one_for_ever() -> None:
    assert messages.call_id("toolu_01") == "toolu_01"
    assert messages.call_id("x" * 41) == messages.call_id("x" * 41) != messages.call_id("x" * 42)
    assert len(messages.call_id("a b")) <= 40


def test_a_longer_path_begins_with_the_messages_of_a_shorter_one() -> None:
    one = ((Message.user("one"),), ({"type": "text", "text": "1"},))
    short = Rendering().messages([one], [Message.user("two")], ())
    two = ((Message.user("two"),), ({"type": "text", "text": "2"},))
    long = Rendering().messages([one, two], [Message.user("three")], ())
    assert long[: len(short)] == short


async def test_two_proxies_see_the_same_chain(with_models: Callable[..., Settings], provider: Provider) -> None:
    settings = with_models()
    async with running(settings) as first, running(settings) as second:
        await ask(first, "one", model="gpt")
        await ask(second, "two", model="gemini")
        await ask(first, "three", model="gpt")
        await until(lambda: len(provider.openai) == 2)
    assert [said for role, said in texts(provider.openai[-1])[1:] if role == "user"] == ["one", "two", "three"]


async def test_an_image_of_a_client_is_not_fetched_from_this_machine(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    """LiteLLM fetches it for a provider that takes no addresses; none of this machine or of private networks."""
    asked = 0

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, running(with_models()) as engine:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0x7f.1"):
            url = f"http://{host}:{server.sockets[0].getsockname()[1]}/x.png"
            shown = Message("user", ({"type": "image", "source": {"type": "url", "url": url}},))
            with pytest.raises(ProxyError):
                await ask(engine, shown, model="gemini")
    assert asked == 0
    assert provider.gemini == []


def test_an_answer_in_many_pieces_takes_no_longer_than_its_length_is_worth_and_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two megabytes in 20,000 pieces took 30 s of the event loop, and a server that went on filled the memory."""
    answer = stream.ModelAnswer({}, CallIds())
    delta = SimpleNamespace(content="x" * 100)
    chunk = SimpleNamespace(choices=[SimpleNamespace(finish_reason=None, delta=delta)])
    began = time.process_time()
    for _ in range(100_000):
        assert list(answer.feed(chunk))
    assert len(list(answer.close())) == 1
    assert time.process_time() - began < 10.0
    assert answer.blocks == [{"type": "text", "text": "x" * 10_000_000}]
    monkeypatch.setattr(answer, "_left", 1000)
    with pytest.raises(UpstreamError, match="more than"):
        assert not [list(answer.feed(chunk)) for _ in range(10)]
    used = stream.usage(SimpleNamespace(prompt_tokens=10**30, completion_tokens=-5))
    assert (used.prompt_tokens, used.output_tokens) == (0, 0)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_that_only_python_takes_for_json_are_kept_as_a_text(number: str) -> None:
    """No CLI could load the record of such a call, and no import takes it."""
    said = f'{{"lives": {number}}}'
    assert stream._arguments(said) == {UNPARSED: said}
