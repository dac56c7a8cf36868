"""Tools that a vendor publishes and the client runs: offered by their schemas, called and answered in their own shapes.

With the vendors' own clients; what the model was offered and shown is looked at behind the real CLI.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..every_wire import proxied
from ..matrix import rest_in_full

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
OPENAI: list[Any] = [
    {"type": "shell", "environment": {"type": "local"}}, {"type": "local_shell"}, {"type": "apply_patch"},
    {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"},
    {"type": "web_search"},
]  # fmt: skip
# What the model calls, the item's type and its field, and how the client answers it.
CALLS: list[tuple[str, Any, str, str, dict[str, Any]]] = [
    ("shell", {"commands": ["ls"], "timeout_ms": 5}, "shell_call", "action",
     {"output": [{"stdout": "a file", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]}),
    ("local_shell", {"command": ["ls"]}, "local_shell_call", "action", {"output": "a file"}),
    ("apply_patch", {"type": "delete_file", "path": "a", "diff": ""}, "apply_patch_call", "operation",
     {"status": "completed", "output": "a file"}),
    ("computer", {"type": "click", "x": 1, "y": 2}, "computer_call", "action",
     {"output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PNG}"}}),
]  # fmt: skip
ANTHROPIC: list[Any] = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 900},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    {"type": "web_search_20250305", "name": "web_search"},
]


@pytest.fixture
async def root(make_settings: MakeSettings, upstream: Upstream, claude_2: Path) -> AsyncIterator[str]:
    async with proxied(make_settings(claude_bin=claude_2)) as (_, root):
        yield root


def offered(upstream: Upstream) -> dict[str, Any]:
    """The schemas that the model was offered of the client's tools, by their names there."""
    tools = upstream.requests[-1].body["tools"]
    return {tool["name"].removeprefix("mcp__client__"): tool["input_schema"] for tool in tools}


def shown_result(upstream: Upstream) -> Any:
    """The last result that the model was shown."""
    blocks = [block for message in upstream.requests[-1].messages for block in message["content"]]
    return [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"][-1]["content"]


@pytest.mark.parametrize("by_id", rest_in_full(True, False))
async def test_openais_own(root: str, upstream: Upstream, by_id: bool) -> None:
    history: list[Any] = []
    previous: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client:

        async def say(*items: Any) -> Any:
            history.extend(items)
            given = items if by_id else history
            raw = await client.responses.with_raw_response.create(
                model="sonnet", input=list(given), tools=OPENAI, **previous
            )
            assert raw.headers["x-ignored-params"] == "tools.web_search"
            response = raw.parse()
            history.extend(item.model_dump() for item in response.output)
            if by_id:
                previous["previous_response_id"] = response.id
            return response.output

        for name, arguments, kind, key, answer in CALLS:
            upstream.when(f"use {name}", ToolUse([(f"mcp__client__{name}", arguments)]))
            (call,) = await say({"role": "user", "content": f"use {name}"})
            assert call.type == kind
            told = {field: value for field, value in getattr(call, key).model_dump().items() if value is not None}
            if kind == "local_shell_call":
                assert (told.pop("type"), told.pop("env")) == ("exec", {})
            wanted = {field: value for field, value in arguments.items() if value != ""}
            assert told == wanted
            id_of = {"id": call.call_id} if kind == "local_shell_call" else {"call_id": call.call_id}
            await say({"type": f"{kind}_output", **id_of, **answer})
            assert ("a file" in str(shown_result(upstream))) == (name != "computer")
    assert set(offered(upstream)) == {"shell", "local_shell", "apply_patch", "computer"}
    assert offered(upstream)["shell"]["required"] == ["commands"]
    first, *rest = upstream.requests
    assert all(one.prefix_kept(first) == 1.0 for one in rest)


async def test_a_streamed_call_of_a_shell(root: str, upstream: Upstream) -> None:
    upstream.next(ToolUse([("mcp__client__shell", {"commands": ["ls"]})]))
    async with (
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client,
        client.responses.stream(model="sonnet", input="go", tools=[{"type": "shell"}]) as stream,
    ):
        done = [event.item async for event in stream if event.type == "response.output_item.done"]
        final = await stream.get_final_response()
    assert [item.type for item in done] == ["shell_call"]
    assert final.output[0].type == "shell_call"
    assert final.output[0].action.commands == ["ls"]


async def test_a_shell_in_a_container_of_openais_is_named(root: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client:
        tools: Any = [{"type": "shell", "environment": {"type": "container_auto"}}]
        raw = await client.responses.with_raw_response.create(model="sonnet", input="go", tools=tools)
        assert raw.headers["x-ignored-params"] == "tools.shell"


async def test_anthropics_own(root: str, upstream: Upstream) -> None:
    messages: list[Any] = []
    async with anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
        for name, arguments in (
            ("bash", {"command": "ls"}),
            ("str_replace_based_edit_tool", {"command": "view", "path": "/a", "view_range": [1, -1]}),
            ("memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
            ("computer", {"action": "left_click", "coordinate": [1, 2]}),
        ):
            upstream.when(f"use {name}", ToolUse([(f"mcp__client__{name}", arguments)]))
            messages.append({"role": "user", "content": f"use {name}"})
            for result in (False, True):
                raw = await client.messages.with_raw_response.create(
                    model="sonnet", max_tokens=999, messages=messages, tools=ANTHROPIC
                )
                assert raw.headers["x-ignored-params"] == "tools.web_search_20250305"
                answer = await raw.parse()
                messages.append({"role": "assistant", "content": answer.content})
                if not result:
                    block = answer.content[0]
                    assert isinstance(block, anthropic.types.ToolUseBlock)
                    assert (block.name, block.input) == (name, arguments)
                    done = {"type": "tool_result", "tool_use_id": block.id, "content": "a file"}
                    messages.append({"role": "user", "content": [done]})
            assert "a file" in str(shown_result(upstream))
    schemas = offered(upstream)
    assert set(schemas) == {"bash", "str_replace_based_edit_tool", "memory", "computer"}
    assert "undo_edit" not in schemas["str_replace_based_edit_tool"]["properties"]["command"]["enum"]
    assert "zoom" not in schemas["computer"]["properties"]["action"]["enum"]
    first, *rest = upstream.requests
    assert all(one.prefix_kept(first) == 1.0 for one in rest)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_on_chat(root: str, upstream: Upstream, stream: bool) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    tools: Any = [
        {"type": "custom", "custom": {"name": "patch", "description": "Patch.", "format": grammar}},
        {"type": "web_search"},
    ]
    upstream.when("go on", ToolUse([("mcp__client__patch", {"input": "aaa"})]))
    messages: list[Any] = [{"role": "user", "content": "go on"}]
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0) as client:
        create: Any = client.chat.completions.create
        if stream:
            chunks = [
                chunk async for chunk in await create(model="sonnet", messages=messages, tools=tools, stream=True)
            ]
            (told,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            call = {"id": told.id, "type": told.type, "custom": told.custom}
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            raw = await client.chat.completions.with_raw_response.create(model="sonnet", messages=messages, tools=tools)
            assert raw.headers["x-ignored-params"] == "tools.web_search"
            (made,) = raw.parse().choices[0].message.tool_calls or []
            assert made.type == "custom"
            call = made.model_dump()
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "aaa"})
        messages += [{"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a file"}]
        answer = await create(model="sonnet", messages=messages, tools=tools)
        assert "a file" in answer.choices[0].message.content
        chosen: Any = {"type": "custom", "custom": {"name": "patch"}}
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        await create(model="sonnet", messages=messages, tools=tools, tool_choice=chosen)
    first, *rest = upstream.requests
    assert all(one.prefix_kept(first) == 1.0 for one in rest[:1])
    assert "regex grammar" in str(upstream.requests[0].body["tools"])
