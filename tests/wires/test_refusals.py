"""A refusal in each wire's own words, whole and streamed: an answer with a reason, which no client tries again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.backends.base import Refused
from cli_session_proxy.domain.models import Block, Message, Usage
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings

from ..memory_backend import MemoryBackend, echo
from ..serving import serving

WHY = "The model refused to answer this (cyber). It is about exploits."
SAID = [{"role": "user", "content": "bad"}]
Read = Callable[[Any], tuple[object, object]]

# The body, the whole answer and the last thing of a stream: (why it ended, what the provider said) of each.
WIRES: dict[str, tuple[str, dict[str, Any], Read]] = {
    "chat": (
        "/v1/chat/completions", {"messages": SAID},
        lambda a: (a["choices"][0]["finish_reason"], a["choices"][0]["message"]["refusal"]),
    ),
    "messages": (
        "/v1/messages", {"messages": SAID, "max_tokens": 9},
        lambda a: ((a["stop_reason"], a["stop_details"]["category"]), a["stop_details"]["explanation"]),
    ),
    "responses": (
        "/v1/responses", {"input": "bad"},
        lambda a: ((a["status"], a["incomplete_details"]["reason"]), a["incomplete_details"]["message"]),
    ),
    "interactions": (
        "/v1beta/interactions", {"input": "bad"}, lambda a: (a["status"], a["errors"][0]["message"]),
    ),
    "generate": (
        "/v1beta/models/sonnet:generateContent", {"contents": [{"parts": [{"text": "bad"}]}]},
        lambda a: (a["candidates"][0]["finishReason"], a["candidates"][0]["finishMessage"]),
    ),
    "ollama chat": ("/api/chat", {"messages": SAID, "stream": False}, lambda a: (a["done_reason"], a["refusal"])),
    "ollama generate": (
        "/api/generate", {"prompt": "bad", "stream": False}, lambda a: (a["done_reason"], a["refusal"]),
    ),
}  # fmt: skip
REASONS: dict[str, object] = {
    "chat": "content_filter", "messages": ("refusal", "cyber"), "responses": ("incomplete", "content_filter"),
    "interactions": "incomplete", "generate": "SAFETY", "ollama chat": "content_filter",
    "ollama generate": "content_filter",
}  # fmt: skip


async def _refuses(path: Sequence[Message]) -> Sequence[Block] | Refused:
    if any(block.get("text") == "bad" for message in path for block in message.content):
        return Refused("cyber", "It is about exploits.", Usage(3, 1))
    return await echo(path)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", port=0)
    engine = Engine(settings, backend=MemoryBackend(_refuses))
    await engine.start()
    try:
        async with (
            serving(engine, settings) as url,
            httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as found,
        ):
            yield found
    finally:
        await engine.stop()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.sample(3)
async def test_a_refusal_is_an_answer_that_says_why(client: httpx.AsyncClient, wire: str) -> None:
    path, body, read = WIRES[wire]
    answer = await client.post(path, json={"model": "sonnet", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert read(answer.json()) == (REASONS[wire], WHY)
    assert WHY in json.dumps(answer.json(), ensure_ascii=False).replace(json.dumps(WHY)[1:-1], WHY)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.sample(3)
async def test_a_stream_that_is_refused_ends_as_an_answer_that_says_why(client: httpx.AsyncClient, wire: str) -> None:
    path, body, _ = WIRES[wire]
    if wire == "generate":
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        body = {**body}
    else:
        body = {**body, "stream": True}
    answer = await client.post(path, json={"model": "sonnet", **body})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    named = REASONS[wire]
    for word in named if isinstance(named, tuple) else (named,):
        assert any(json.dumps(word) in json.dumps(event) for event in events[-4:]), events
    assert WHY in json.dumps(events)
    assert not any(event.get("type") in ("error", "response.failed") for event in events)


async def test_the_openai_client_that_sends_it_back_is_not_refused_again(client: httpx.AsyncClient) -> None:
    body = {"model": "sonnet", "messages": SAID}
    refused = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    body["messages"] = [*SAID, refused, {"role": "user", "content": "good"}]
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "You said: good (1)"


async def test_a_response_may_follow_one_that_was_refused(client: httpx.AsyncClient) -> None:
    refused = (await client.post("/v1/responses", json={"model": "sonnet", "input": "bad"})).json()
    body = {"model": "sonnet", "input": "good", "previous_response_id": refused["id"]}
    answer = (await client.post("/v1/responses", json=body)).json()
    assert answer["output"][0]["content"][0]["text"] == "You said: good (1)"
    kept = (await client.get(f"/v1/responses/{refused['id']}")).json()
    assert kept["incomplete_details"]["reason"] == "content_filter"
