"""The google-genai client over a real server: `cli_proxy` has the real CLI behind it, `proxy` none."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.genai import errors, types
from google.genai.client import AsyncClient

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import ALIASES
from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...every_wire import chains, five_turns, google_client, proxied, the_one_chain
from ...matrix import rest_in_full
from ...without_cli import proxied_without_cli

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
async def proxy(make_settings: MakeSettings, upstream: Upstream) -> AsyncIterator[tuple[Engine, AsyncClient]]:
    async with proxied_without_cli(make_settings(), upstream) as (engine, root), google_client(root) as client:
        yield engine, client


@pytest.fixture
async def cli_proxy(make_settings: MakeSettings, claude_2: Path) -> AsyncIterator[tuple[Engine, AsyncClient]]:
    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root), google_client(root) as client:
        yield engine, client


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_a_chat_of_five_turns_is_one_chain(
    cli_proxy: tuple[Engine, AsyncClient], upstream: Upstream, stream: bool
) -> None:
    engine, client = cli_proxy
    chat = client.chats.create(model="sonnet")

    async def say(text: str) -> str:
        if not stream:
            answer = await chat.send_message(text)
            assert answer.usage_metadata is not None
            return answer.text or ""
        chunks = [chunk async for chunk in await chat.send_message_stream(text)]
        assert len(chunks) > 1
        assert chunks[-1].usage_metadata is not None
        assert (chunks[-1].candidates or [])[0].finish_reason == types.FinishReason.STOP
        return "".join(chunk.text or "" for chunk in chunks)

    await five_turns(say, upstream)
    turns = await the_one_chain(engine)
    assert [turn.origin for turn in turns] == ["generate"] * 5


async def test_a_streamed_answer_of_two_texts_is_recognised(
    proxy: tuple[Engine, AsyncClient], upstream: Upstream
) -> None:
    engine, client = proxy
    upstream.next(Reply([{"type": "text", "text": "One. "}, {"type": "text", "text": " Two."}]))
    chat = client.chats.create(model="sonnet")
    said = "".join([chunk.text or "" async for chunk in await chat.send_message_stream("hello")])
    assert said == "One.\n\nTwo."
    assert (await chat.send_message("list")).text == "1. hello\n2. list"
    await the_one_chain(engine, 2)


async def test_thoughts_are_shown_to_those_who_ask(proxy: tuple[Engine, AsyncClient], upstream: Upstream) -> None:
    engine, client = proxy
    upstream.when("hello", Reply("Hi.", thinking="They greet me."), times=None)
    config = types.GenerateContentConfig(
        thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_level=types.ThinkingLevel.LOW),
        system_instruction="Be brief.", temperature=0.5, max_output_tokens=10,
    )  # fmt: skip
    answer = await client.models.generate_content(model="models/sonnet", contents="hello", config=config)
    assert [(part.text, part.thought) for part in answer.parts or []] == [("They greet me.", True), ("Hi.", None)]
    chunks = [
        chunk async for chunk in await client.models.generate_content_stream(
            model="sonnet", contents="hello", config=config
        )
    ]  # fmt: skip
    parts = [part for chunk in chunks for part in chunk.parts or []]
    assert "".join(part.text or "" for part in parts if part.thought) == "They greet me."
    assert "".join(part.text or "" for part in parts if not part.thought) == "Hi."
    plain = await client.models.generate_content(model="sonnet", contents="hello")
    assert [part.text for part in plain.parts or []] == ["Hi."]
    turns = [turn for row in await chains(engine) async for turn in engine.store.turns(row.agent.key)]
    assert {(turn.system, turn.effort) for turn in turns} == {("Be brief.", "low"), (None, None)}
    headers = (answer.sdk_http_response or types.HttpResponse()).headers or {}
    assert headers["x-ignored-params"] == "generationConfig.temperature"


async def test_images_and_json_go_through(proxy: tuple[Engine, AsyncClient], upstream: Upstream) -> None:
    _, client = proxy
    upstream.next(Reply('{"shade": "teal"}'))
    config = types.GenerateContentConfig(
        response_mime_type="application/json",
        response_schema=types.Schema(
            type=types.Type.OBJECT, properties={"shade": types.Schema(type=types.Type.STRING, nullable=True)},
            required=["shade"],
        ),
    )  # fmt: skip
    contents: Any = [types.Part.from_bytes(data=PNG, mime_type="image/png"), "which shade?"]
    answer = await client.models.generate_content(model="sonnet", contents=contents, config=config)
    assert answer.text == '{"shade": "teal"}'
    assert upstream.requests[-1].texts()[0] == ("user", "[image]")


async def test_counting_models_and_errors_speak_google(proxy: tuple[Engine, AsyncClient]) -> None:
    _, client = proxy
    count = await client.models.count_tokens(model="sonnet", contents="hello")
    assert count.total_tokens is not None
    assert 1 <= count.total_tokens < 20
    listed = [model async for model in await client.models.list()]
    assert [model.name for model in listed] == [
        f"models/{name}" for name in ("sonnet", "opus", "haiku", "default", *ALIASES)
    ]
    assert (await client.models.get(model="opus")).name == "models/opus"
    with pytest.raises(errors.ClientError) as caught:
        await client.models.generate_content(
            model="sonnet", contents="hello", config=types.GenerateContentConfig(candidate_count=2)
        )
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    detail = caught.value.details["error"]["details"][0]
    assert (detail["reason"], detail["metadata"]["field"]) == ("invalid_request", "generationConfig.candidateCount")
