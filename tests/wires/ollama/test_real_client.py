"""The ollama client over a real server: `cli_proxy` has the real CLI behind it, `proxy` none."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.seen import parts
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...every_wire import chains, five_turns, ollama_client, proxied, the_one_chain
from ...matrix import rest_in_full
from ...without_cli import proxied_without_cli

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
async def proxy(
    make_settings: MakeSettings, upstream: Upstream
) -> AsyncIterator[tuple[Engine, ollama.AsyncClient, str]]:
    async with proxied_without_cli(make_settings(), upstream) as (engine, root), ollama_client(root) as client:
        yield engine, client, root


@pytest.fixture
async def cli_proxy(
    make_settings: MakeSettings, claude_2: Path
) -> AsyncIterator[tuple[Engine, ollama.AsyncClient, str]]:
    async with proxied(make_settings(claude_bin=claude_2)) as (engine, root), ollama_client(root) as client:
        yield engine, client, root


async def said(client: ollama.AsyncClient, stream: bool, messages: list[Any], **more: Any) -> Any:
    """The message of an answer, put together as the client's own examples do."""
    if not stream:
        answer = await client.chat(model="sonnet", messages=messages, **more)
        assert answer.done
        assert answer.eval_count
        return answer.message
    parts = [part async for part in await client.chat(model="sonnet", messages=messages, stream=True, **more)]
    assert len(parts) > 1
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].total_duration
    assert parts[-1].prompt_eval_count
    calls = [call for part in parts for call in part.message.tool_calls or []]
    text = "".join(part.message.content or "" for part in parts)
    return ollama.Message(role="assistant", content=text, tool_calls=calls or None)


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_a_chat_of_five_turns_is_one_chain(
    cli_proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream, stream: bool
) -> None:
    engine, client, _ = cli_proxy
    messages: list[Any] = []

    async def say(text: str) -> str:
        messages.append({"role": "user", "content": text})
        messages.append(await said(client, stream, messages))
        return str(messages[-1].content)

    await five_turns(say, upstream)
    turns = await the_one_chain(engine)
    assert [turn.origin for turn in turns] == ["ollama"] * 5


@pytest.mark.parametrize("stream", rest_in_full(False, True))
async def test_a_named_agent_sends_only_what_is_new(
    proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream, stream: bool
) -> None:
    engine, _, root = proxy
    async with ollama_client(f"{root}/agents/ada%2Fb") as client:

        async def say(text: str) -> str:
            return str((await said(client, stream, [{"role": "user", "content": text}])).content)

        await five_turns(say, upstream)
    await the_one_chain(engine)
    [row] = await chains(engine)
    assert row.agent.agent_id == "ada/b"


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_prompts_are_remembered_by_their_context(
    proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream, stream: bool
) -> None:
    engine, client, _ = proxy
    context: list[Any] = []

    async def say(text: str) -> str:
        wanted: Any = {"model": "sonnet", "prompt": text, "context": context[-1] if context else None}
        if not stream:
            parts = [await client.generate(**wanted)]
        else:
            parts = [part async for part in await client.generate(**wanted, stream=True)]
        context.append(parts[-1].context)
        return "".join(part.response or "" for part in parts)

    await five_turns(say, upstream)
    await the_one_chain(engine)
    before = await client.generate(model="sonnet", prompt="what now", context=context[1])
    path = await engine.store.path(bytes(before.context or []).decode())
    assert len(path) == 3
    with pytest.raises(ollama.ResponseError, match="context") as refused:
        await client.generate(model="sonnet", prompt="x", context=[1, 2, 3])
    assert refused.value.status_code == 400


@pytest.mark.parametrize("stream", rest_in_full(True, False))
async def test_tools_are_called_and_their_results_reach_the_model(
    cli_proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream, stream: bool
) -> None:
    _, client, _ = cli_proxy
    await calls_and_results(client, upstream, stream=stream, named=True)


@pytest.mark.parametrize(("stream", "named"), [(False, True), (True, False), (False, False)])
async def test_results_find_their_calls_with_and_without_names(
    proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream, stream: bool, named: bool
) -> None:
    _, client, _ = proxy
    await calls_and_results(client, upstream, stream=stream, named=named)


async def calls_and_results(client: ollama.AsyncClient, upstream: Upstream, *, stream: bool, named: bool) -> None:
    """Two calls of a tool and their results, each of which `named` says whose it is; and what the model is shown."""

    def weather(city: str) -> str:
        """The weather of a city.

        Args:
          city: its name
        """
        return f"{city} is sunny"

    cities = ("Rome", "Oslo")
    upstream.when("where", ToolUse([("mcp__client__weather", {"city": city}) for city in cities], text="Let me look."))
    messages: list[Any] = [{"role": "user", "content": "where"}]
    first = await said(client, stream, messages, tools=[weather])
    assert first.content == "Let me look."
    assert [call.function.arguments["city"] for call in first.tool_calls] == list(cities)
    messages.append(first)
    for call in first.tool_calls:
        result = {"role": "tool", "content": weather(**call.function.arguments)}
        messages.append({**result, "tool_name": call.function.name} if named else result)
    second = await said(client, stream, messages, tools=[weather])
    assert second.content == "The tool said: Oslo is sunny"
    last = upstream.requests[-1]
    blocks = [block for message in last.messages for block in message["content"] if isinstance(block, dict)]
    calls = {block["id"]: block["input"]["city"] for block in blocks if block["type"] == "tool_use"}
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert [calls[block["tool_use_id"]] for block in results] == list(cities)
    assert ["Rome" in str(block["content"]) for block in results] == [True, False]
    assert last.prefix_kept(upstream.requests[0]) == 1.0


async def test_images_and_schemas_reach_the_model(
    proxy: tuple[Engine, ollama.AsyncClient, str], upstream: Upstream
) -> None:
    _, client, _ = proxy
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    upstream.next(Reply('{"colour": "teal"}'))
    message = {"role": "user", "content": "which colour?", "images": [PNG]}
    answer = await client.chat(model="sonnet", messages=[message], format=schema)
    assert answer.message.content == '{"colour": "teal"}'
    blocks = [block for message in upstream.requests[-1].messages for block in parts(message["content"])]
    shown = [block for block in blocks if block["type"] == "image"]
    assert [block["source"]["media_type"] for block in shown] == ["image/png"]


async def test_what_clients_ask_before_they_chat(proxy: tuple[Engine, ollama.AsyncClient, str]) -> None:
    engine, client, root = proxy
    names = [model.model for model in (await client.list()).models]
    assert "sonnet:latest" in names
    shown = await client.show("sonnet:latest")
    assert {"completion", "tools", "vision", "thinking"} <= set(shown.capabilities or [])
    assert (shown.modelinfo or {})["claude.context_length"] == 200_000
    assert (await client.ps()).models == []
    loaded = await client.generate(model="sonnet")
    assert (loaded.done, loaded.done_reason) == (True, "load")
    assert [part.done_reason async for part in await client.chat(model="sonnet", stream=True, keep_alive=0)] == [
        "unload"
    ]
    assert await chains(engine) == []
    async with httpx.AsyncClient(base_url=root, trust_env=False) as http:
        assert (await http.head("/")).status_code == 200
        assert (await http.get("/api/version")).json() == {"version": "0.12.10"}
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        await client.embed(model="sonnet", input="x")


async def test_a_foreign_context_is_refused_word_for_word_as_a_made_up_one(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    keys = {name: f"{name}s-secret-0123456789" for name in ("alice", "bob")}
    async with (
        proxied_without_cli(make_settings(keys=keys), upstream) as (_, root),
        ollama_client(root, Authorization=f"Bearer {keys['alice']}") as alice,
        ollama_client(root, Authorization=f"Bearer {keys['bob']}") as bob,
        ollama_client(root) as nobody,
    ):
        context = list((await alice.generate(model="sonnet", prompt="hello")).context or [])
        told = []
        for given in (context, [*context[:-8], *b"00000000"]):
            with pytest.raises(ollama.ResponseError) as refused:
                await bob.generate(model="sonnet", prompt="hello", context=given)
            assert refused.value.status_code == 404
            told.append(refused.value.error.replace(bytes(given).decode(), "turn"))
        assert told[0] == told[1]
        with pytest.raises(ollama.ResponseError) as unknown:
            await nobody.list()
        assert unknown.value.status_code == 401
