"""`max_tokens` and its like by the names of every wire: read, refused, honoured, and named where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.generate import body as generate
from cli_session_proxy.wires.interactions import body as interactions
from cli_session_proxy.wires.messages import body as messages
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.responses import body as responses
from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..every_wire import proxied
from ..matrix import rest_in_full
from ..without_cli import proxied_without_cli

JSON = dict[str, Any]
SAID = [{"role": "user", "content": "short"}]


def of_chat(**fields: Any) -> Parameters:
    return chat.read({"messages": SAID, **fields}, Naming()).request.options.parameters


def of_responses(**fields: Any) -> Parameters:
    return responses.read({"input": "short", **fields}, Naming()).request.options.parameters


def of_messages(**fields: Any) -> Parameters:
    return messages.read({"messages": SAID, "max_tokens": 7, **fields}, Naming()).request.options.parameters


def of_generate(**config: Any) -> Parameters:
    body = {"contents": [{"parts": [{"text": "short"}]}], "generationConfig": config}
    return generate.read(body, Naming(), "sonnet").request.options.parameters


def of_interactions(**config: Any) -> Parameters:
    body = {"model": "sonnet", "input": "short", "generation_config": config}
    return interactions.read(body, Naming()).request.options.parameters


def of_ollama(**fields: Any) -> Parameters:
    call = ollama.read_chat({"model": "sonnet", "messages": SAID, **fields}, Naming())
    assert isinstance(call, ollama.OllamaCall)
    return call.request.options.parameters


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (of_chat, Parameters()),
        (lambda: of_chat(max_tokens=5), Parameters(max_tokens=5)),
        (lambda: of_chat(max_tokens=5, max_completion_tokens=6), Parameters(max_tokens=6)),
        (lambda: of_chat(temperature=0.5, top_p=0.25, top_k=3), Parameters(None, 0.5, 0.25, 3)),
        (lambda: of_chat(reasoning_effort="none"), Parameters(thinking=False)),
        (lambda: of_chat(reasoning_effort="low"), Parameters(thinking=True)),
        (lambda: of_responses(max_output_tokens=5, top_p=1), Parameters(5, None, 1)),
        (lambda: of_responses(reasoning={"effort": "none"}), Parameters(thinking=False)),
        (lambda: of_responses(reasoning={"effort": None}), Parameters()),
        (lambda: of_messages(top_k=3), Parameters(7, top_k=3)),
        (lambda: of_messages(thinking={"type": "disabled"}), Parameters(7, thinking=False)),
        (lambda: of_messages(thinking={"type": "enabled", "budget_tokens": 5}), Parameters(7, thinking=True)),
        (lambda: of_messages(output_config={"effort": "high"}), Parameters(7, thinking=True)),
        (lambda: of_generate(maxOutputTokens=5, topP=0.5, top_k=2), Parameters(5, None, 0.5, 2)),
        (lambda: of_generate(thinkingConfig={"thinkingBudget": 0}), Parameters(thinking=False)),
        (lambda: of_generate(thinkingConfig={"thinkingBudget": -1}), Parameters()),
        (lambda: of_interactions(max_output_tokens=5, temperature=0), Parameters(5, 0)),
        (lambda: of_interactions(thinking_level="high"), Parameters(thinking=True)),
        (lambda: of_ollama(options={"num_predict": 5}, think=False), Parameters(5, thinking=False)),
        (lambda: of_ollama(options={"num_predict": -1}, think="low"), Parameters(thinking=True)),
    ],
)
def test_each_wire_has_its_own_names(read: Callable[[], Parameters], expected: Parameters) -> None:
    assert read() == expected


@pytest.mark.parametrize(
    ("read", "param"),
    [
        (lambda: of_chat(max_tokens=0), "max_tokens"),
        (lambda: of_chat(max_completion_tokens=1.5), "max_completion_tokens"),
        (lambda: of_chat(temperature=-1), "temperature"),
        (lambda: of_chat(temperature=2.5), "temperature"),
        (lambda: of_chat(top_p="a lot"), "top_p"),
        (lambda: of_chat(top_k=True), "top_k"),
        (lambda: of_responses(max_output_tokens=-1), "max_output_tokens"),
        (lambda: of_messages(max_tokens=0), "max_tokens"),
        (lambda: of_messages(top_p=1.5), "top_p"),
        (lambda: of_generate(topK=-1), "generationConfig.topK"),
        (lambda: of_interactions(max_output_tokens="many"), "generation_config.max_output_tokens"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_its_name(read: Callable[[], Parameters], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read()
    assert refused.value.param == param


# --- through the proxy: path, body (max_tokens 1), body (a cool turn), what it calls them, how an answer reads --------


def of_google(body: JSON) -> list[Any]:
    [candidate] = body["candidates"]
    return [
        candidate["content"]["parts"][0]["text"],
        candidate["finishReason"],
        body["usageMetadata"]["candidatesTokenCount"],
    ]


def of_openai(body: JSON) -> list[Any]:
    [choice] = body["choices"]
    return [choice["message"]["content"], choice["finish_reason"], body["usage"]["completion_tokens"]]


def of_response(body: JSON) -> list[Any]:
    text = body["output"][0]["content"][0]["text"]
    return [text, body["incomplete_details"]["reason"], body["usage"]["output_tokens"]]


def of_lines(body: JSON) -> list[Any]:
    return [body["message"]["content"], body["done_reason"], body["eval_count"]]


CONTENTS: JSON = {"contents": [{"role": "user", "parts": [{"text": "short"}]}]}
WIRES: dict[str, tuple[str, JSON, JSON, list[str], Callable[[JSON], list[Any]], list[Any]]] = {
    "chat": (
        "/v1/chat/completions", {"model": "sonnet", "messages": SAID, "max_tokens": 1},
        {"temperature": 0.5, "reasoning_effort": "none"}, ["temperature"],
        of_openai, ["One", "length", 1],
    ),
    "responses": (
        "/v1/responses", {"model": "sonnet", "input": "short", "max_output_tokens": 1},
        {"temperature": 0.5, "reasoning": {"effort": "none"}}, ["temperature"],
        of_response, ["One", "max_output_tokens", 1],
    ),
    "messages": (
        "/v1/messages", {"model": "sonnet", "messages": SAID, "max_tokens": 1},
        {"top_k": 5, "thinking": {"type": "disabled"}}, ["top_k"],
        lambda b: [b["content"][0]["text"], b["stop_reason"], b["usage"]["output_tokens"]],
        ["One", "max_tokens", 1],
    ),
    "generate": (
        "/v1beta/models/sonnet:generateContent", {**CONTENTS, "generationConfig": {"maxOutputTokens": 1}},
        {"generationConfig": {"topP": 0.5}}, ["generationConfig.topP"],
        of_google, ["One", "MAX_TOKENS", 1],
    ),
    "ollama": (
        "/api/chat", {"model": "sonnet", "messages": SAID, "options": {"num_predict": 1}, "stream": False},
        {"options": {"temperature": 0.5}, "think": False}, ["options.temperature"],
        of_lines, ["One", "length", 1],
    ),
    "ollama generate": (
        "/api/generate", {"model": "sonnet", "prompt": "short", "options": {"num_predict": 1}, "stream": False},
        {"options": {"temperature": 0.5}, "think": False}, ["options.temperature"],
        lambda b: [b["response"], b["done_reason"], b["eval_count"]],
        ["One", "length", 1],
    ),
    "interactions": (
        "/v1beta/interactions",
        {"model": "sonnet", "input": "short", "generation_config": {"max_output_tokens": 1}},
        {"generation_config": {"temperature": 0.5}}, ["generation_config.temperature"],
        lambda b: [b["steps"][-1]["content"][0]["text"], b["status"], b["usage"]["total_output_tokens"]],
        ["One", "incomplete", 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("wire", rest_in_full(*WIRES))
async def test_one_token_is_one_token_for_the_real_cli_streamed_and_not(
    wire: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with proxied(make_settings(claude_bin=claude_2)) as (_, root):
        await one_token_is_one_token(wire, root, upstream)
    seen = upstream.requests[-1]  # of the last turn: of those that were cut it holds the text, and nothing else
    assert not any(
        words in json.dumps(seen.messages) for words in ("limit hit", "interrupted", "Resume", "No response")
    )


@pytest.mark.parametrize("wire", WIRES)
async def test_one_token_is_one_token_on_every_wire_streamed_and_not(
    wire: str, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with proxied_without_cli(make_settings(), upstream) as (_, root):
        await one_token_is_one_token(wire, root, upstream)


async def one_token_is_one_token(wire: str, root: str, upstream: Upstream) -> None:
    path, body, cool, names, read, expected = WIRES[wire]
    upstream.when("short", Reply("One", stop_reason="max_tokens", usage={"output_tokens": 1}), times=None)
    headers = {"X-Agent-Id": "ada"}
    async with httpx.AsyncClient(base_url=root, trust_env=False, timeout=30, headers=headers) as client:
        plain = {name: value for name, value in body.items() if "max" not in name}
        for field in ("generationConfig", "generation_config", "options"):
            plain.pop(field, None)
        if wire == "messages":
            plain["max_tokens"] = 64000
        begun = json.loads(json.dumps(plain).replace("short", "begin"))
        assert (await client.post(path, json=begun)).status_code == 200
        whole = await client.post(path, json=body)
        assert read(whole.json()) == expected
        assert "X-Ignored-Params" not in whole.headers
        assert whole.headers["X-Continuity"] == "warm"
        said = json.loads(json.dumps(begun).replace("begin", "again"))
        assert (await client.post(path, json=said)).status_code == 200
        streamed = await client.post(
            path.replace("generateContent", "streamGenerateContent?alt=sse"),
            json=body if wire == "generate" else {**body, "stream": True},
        )
        assert streamed.headers["X-Continuity"] == "warm"
        assert str(expected[1]) in streamed.text
        pieces = re.findall(r'"text":"(\w+)"', streamed.text)  # Google's wire keeps the last letter for the end
        assert '"One"' in streamed.text or pieces == ["On", "e"]
        assert "limit hit" not in streamed.text
        unmet = await client.post(path, json=said | cool | ({"max_tokens": 64000} if wire == "messages" else {}))
        assert unmet.headers["X-Ignored-Params"].split(", ") == names
    cut = [one for one in upstream.requests if one.prompt == "short"]
    assert {one.body["max_tokens"] for one in cut} == {1}
    # The CLI asks for more by itself until it is interrupted: on a busy machine such a request arrives as well.
    assert len([one for one in cut if "limit hit" not in json.dumps(one.messages[-1])]) == 2
    seen = upstream.requests[-1]
    assert seen.user_texts() == ["begin", "short", "again", "short", "again"]
    assert [text for role, text in seen.texts() if role == "assistant"][1::2] == ["One", "One"]
