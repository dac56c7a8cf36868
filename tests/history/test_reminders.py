"""System and developer messages in mid-conversation: told where they stand, in the session that is there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..every_wire import proxied
from ..matrix import rest_in_full

JSON = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {}}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    RESPONSES: [{"type": "function", "name": "look", "parameters": SCHEMA}],
    MESSAGES: [{"name": "look", "input_schema": SCHEMA}],
}


def told(upstream: Upstream) -> list[str]:
    """The texts of the user and the results in the last request, in order, reminders among them."""
    found: list[str] = []
    for message in upstream.requests[-1].messages:
        if message["role"] == "user":
            found += json.dumps(message["content"]).replace("\\\\n", " ").split('"')
    wanted = ("one", "two", "Be short.", "Be kind.", "a tree", "three")
    return [word for text in found for word in wanted if word in text]


def call_of(path: str, body: JSON) -> tuple[list[JSON], JSON]:
    """The assistant's own items or messages, and the result of its one call."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        return [message], {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a tree"}
    if path == RESPONSES:
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        return body["output"], {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "a tree"}
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "a tree"}
    return [{"role": "assistant", "content": body["content"]}], {"role": "user", "content": [result]}


def said_by(path: str, body: JSON) -> list[JSON]:
    if path == CHAT:
        return [body["choices"][0]["message"]]
    return body["output"] if path == RESPONSES else [{"role": "assistant", "content": body["content"]}]


@pytest.mark.parametrize("path", rest_in_full(CHAT, RESPONSES, MESSAGES))
async def test_a_later_system_message_stays_where_it_is_and_the_session_warm(
    path: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    role = "system" if path == MESSAGES else "developer"
    field = "input" if path == RESPONSES else "messages"
    history: list[JSON] = [] if path == MESSAGES else [{"role": "system", "content": "You are Ada."}]
    more: JSON = {"model": "sonnet", "tools": TOOLS[path]} | ({"max_tokens": 64000} if path == MESSAGES else {})
    async with (
        proxied(make_settings(claude_bin=claude_2)) as (_, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=30) as client,
    ):

        async def say(*new: JSON) -> httpx.Response:
            history.extend(new)
            answer = await client.post(path, json={**more, field: history})
            assert answer.status_code == 200, answer.text
            return answer

        history += said_by(path, (await say({"role": "user", "content": "one"})).json())
        upstream.next(ToolUse([("mcp__client__look", {})]))
        called = await say({"role": role, "content": "Be short."}, {"role": "user", "content": "two"})
        mine, result = call_of(path, called.json())
        history += mine
        done = await say(result, {"role": role, "content": "Be kind."})
        history += said_by(path, done.json())
        last = await say({"role": "user", "content": "three"})
    assert [one.headers["X-Continuity"] for one in (called, done, last)] == ["warm"] * 3
    assert told(upstream) == ["one", "Be short.", "two", "a tree", "Be kind.", "three"]
    kept = [now.prefix_kept(before) for before, now in itertools.pairwise(upstream.requests)]
    assert kept == [1.0] * 3


@pytest.mark.parametrize("path", rest_in_full(CHAT, RESPONSES, MESSAGES))
async def test_system_messages_alone_are_answered(
    path: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    field = "input" if path == RESPONSES else "messages"
    said = [{"role": "system", "content": "You are Ada."}, {"role": "system", "content": "Be kind."}]
    body = {"model": "sonnet", "max_tokens": 64000, field: said}
    async with (
        proxied(make_settings(claude_bin=claude_2)) as (_, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=30) as client,
    ):
        assert (await client.post(path, json=body)).status_code == 200
    assert "You are Ada." in str(upstream.requests[-1].body["system"])
    assert told(upstream) == ["Be kind."]


async def test_a_new_system_item_of_a_delta_is_a_reminder_and_a_known_one_is_not_told_again(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    first, new = ({"role": "developer", "content": text} for text in ("You are Ada.", "Be short."))
    async with (
        proxied(make_settings(claude_bin=claude_2)) as (_, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=30) as client,
    ):
        one = await client.post(
            RESPONSES, json={"model": "sonnet", "input": [first, {"role": "user", "content": "one"}]}
        )
        said = [first, new, {"role": "user", "content": "two"}]
        previous = {"previous_response_id": one.json()["id"]}
        two = await client.post(RESPONSES, json={"model": "sonnet", "input": said, **previous})
        items = (await client.get(f"{RESPONSES}/{two.json()['id']}/input_items?order=asc")).json()["data"]
    assert two.headers["X-Continuity"] == "warm"
    assert told(upstream) == ["one", "Be short.", "two"]
    assert [(item["role"], item["content"][0]["text"]) for item in items] == [
        ("system", "You are Ada."), ("system", "Be short."), ("user", "two"),
    ]  # fmt: skip
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
