"""What Codex sends as it comes: tools in namespaces and with free text, tools that others run, its items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import ContextTooLong, InvalidRequest
from cli_session_proxy.stores.sql import reading
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.responses import body as responses
from cli_session_proxy.wires.responses import compaction
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from .conftest import Door

JSON = dict[str, Any]
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}  # fmt: skip
SPACE = {
    "type": "namespace", "name": "mcp__files", "description": "Files.",
    "tools": [
        {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "patch"},
    ],
}  # fmt: skip
TOOLS: list[Any] = [PATCH, SPACE, {"type": "web_search"}, {"type": "local_shell"}]
USER = {"role": "user", "content": "go on"}


def read(*items: JSON, **more: Any) -> responses.ResponsesCall:
    return responses.read({"input": [*items, USER], **more}, Naming())


def test_tools_of_every_kind_are_offered_or_named() -> None:
    call = read(tools=TOOLS)
    patch, file, inner, shell = call.request.options.tools
    assert (inner.name, inner.schema) == ("mcp__files__patch", patch.schema)
    assert (patch.name, patch.strict, patch.schema["required"]) == ("apply_patch", True, ["input"])
    assert "lark" in patch.description
    assert "*** Begin Patch" in patch.description
    assert file.name == "mcp__files__read"
    assert (shell.name, shell.schema["required"]) == ("local_shell", ["command"])
    assert call.ignored == ("tools.web_search",)
    assert (call.request.call or {})["shapes"] == {
        "apply_patch": ["custom_tool", "", "apply_patch"],
        "mcp__files__read": ["function", "mcp__files", "read"],
        "mcp__files__patch": ["custom_tool", "mcp__files", "patch"],
        "local_shell": ["local_shell", "", "local_shell"],
    }


def test_no_summary_of_its_reasoning_is_a_summary_of_none() -> None:
    asked = read(reasoning={"effort": "low", "summary": "none"})
    assert (asked.request.call or {})["reasoning"] == {
        "effort": "low",
        "summary": None,
    }  # a Response's own type has no "none"
    with pytest.raises(InvalidRequest, match=r"reasoning\.summary must be"):
        read(reasoning={"summary": "nothing"})


def test_tools_that_an_item_brings_are_offered_too() -> None:
    tool = {"type": "function", "name": "late", "parameters": {"type": "object", "properties": {}}}
    assert [one.name for one in read({"type": "additional_tools", "tools": [tool]}).request.options.tools] == ["late"]


async def test_tools_that_an_item_brought_hold_on_as_items_do(door: Door, upstream: Upstream) -> None:
    late = {"type": "custom", "name": "late", "description": "Says it late."}
    brings = {"type": "additional_tools", "tools": [late, SPACE]}
    said = [brings, {"role": "user", "content": "begin"}]
    first = (await door.http.post("/v1/responses", json={"model": "sonnet", "input": said})).json()
    upstream.next(ToolUse([("mcp__client__late", {"input": "now"})]))
    body = {"model": "sonnet", "input": "go on", "previous_response_id": first["id"]}
    second = (await door.http.post("/v1/responses", json=body)).json()
    [call] = second["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "late", "now")
    assert [tool["name"] for tool in second["tools"]] == ["late", "mcp__files"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    body |= {"input": [result], "previous_response_id": second["id"], "tools": [{**late, "description": "Another."}]}
    third = await door.http.post("/v1/responses", json=body)
    assert third.status_code == 200, third.text
    offered = [[tool["name"] for tool in one.body["tools"]] for one in upstream.requests]
    assert [len(names) for names in offered] == [3, 3, 3]
    assert upstream.requests[1].prefix_kept(upstream.requests[0]) == 1.0


@pytest.mark.parametrize("tools", [[1], [{"type": "namespace", "name": "a"}], [{"type": "custom"}], [PATCH, PATCH]])
def test_broken_tools_are_refused(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        read(tools=tools)


def test_a_choice_of_another_kind_of_tool_is_read() -> None:
    chosen = read(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert chosen.request.options.tool_choice.allowed == ("apply_patch",)
    chosen = read(tools=TOOLS, tool_choice={"type": "local_shell"})
    assert chosen.request.options.tool_choice.allowed == ("local_shell",)
    with pytest.raises(InvalidRequest, match="OpenAI runs itself"):
        read(tools=TOOLS, tool_choice={"type": "web_search"})
    listed = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "apply_patch"}]
    some = read(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": listed})
    assert some.request.options.tool_choice.allowed == ("local_shell", "apply_patch")


def test_items_of_codex_are_read() -> None:
    call = read(
        {"type": "reasoning", "summary": [], "encrypted_content": "sealed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__files", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "words"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c3", "output": "a file"},
        {"type": "function_call", "call_id": "4", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": 4, "output": "more"},
        {"type": "compaction", "encrypted_content": "of another service"},
    )
    calls = [block for message in call.request.messages for block in message.content if block["type"] == "tool_use"]
    assert [(block["id"], block["name"], block["input"]) for block in calls] == [
        ("c1", "apply_patch", {"input": "*** Begin Patch"}),
        ("c2", "mcp__files__read", {}),
        ("c3", "local_shell", {"command": ["ls"]}),
        ("4", "read", {}),
    ]
    results = [
        block for message in call.request.messages for block in message.content if block["type"] == "tool_result"
    ]
    assert [(block["tool_use_id"], block["content"]) for block in results] == [
        ("c1", "done"), ("c2", "words"), ("c3", "a file"), ("4", "more"),
    ]  # fmt: skip
    assert "cannot be read here" in str(call.request.messages[-2])
    assert call.request.messages[-1] == Message.user("go on")


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_go_back_as_their_client_knows_them_and_the_history_continues_the_chain(
    stream: bool, door: Door, upstream: Upstream
) -> None:
    upstream.next(
        ToolUse([("mcp__client__apply_patch", {"input": "*** Begin"}), ("mcp__client__mcp__files__read", {})])
    )
    body: JSON = {"model": "gpt-5.5-codex", "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    body |= {"reasoning": {"effort": "medium", "summary": "none"}, "input": [{"role": "user", "content": "begin"}]}
    first = await door.http.post("/v1/responses", json={**body, "stream": stream})
    assert first.status_code == 200, first.text
    assert first.headers["x-ignored-params"] == "tools.web_search, include"
    if stream:
        assert first.text.rstrip().endswith("data: [DONE]")
        events = [json.loads(line[6:]) for line in first.text.splitlines() if line.startswith("data: {")]
        output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        said = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        assert said == ["*** Begin"]
    else:
        output = first.json()["output"]
    patch, file = output
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert (file["type"], file["namespace"], file["name"]) == ("function_call", "mcp__files", "read")
    results = [
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
        {"type": "function_call_output", "call_id": file["call_id"], "output": "words"},
    ]
    second = await door.http.post("/v1/responses", json={**body, "input": [*body["input"], *output, *results]})
    assert second.status_code == 200, second.text
    assert second.headers["x-continuity"] == "warm"
    assert upstream.requests[-1].body["model"] == "sonnet"


async def test_a_conversation_becomes_one_item_that_stands_for_it(door: Door, upstream: Upstream) -> None:
    body: JSON = {"model": "sonnet", "input": [{"role": "user", "content": "Remember: the colour is teal"}]}
    first = (await door.http.post("/v1/responses", json=body)).json()
    history = [*body["input"], *first["output"]]
    made = (await door.http.post("/v1/responses/compact", json={"model": "sonnet", "input": history})).json()
    assert made["object"] == "response.compaction"
    [item] = made["output"]
    assert "created_by" not in item  # OpenAI's own has the key only where it says something
    again = await door.http.post("/v1/responses", json={"model": "sonnet", "input": [item, USER]})
    assert again.status_code == 200, again.text
    assert "the colour is teal" in json.dumps(upstream.requests[-1].messages)
    by_id = await door.http.post("/v1/responses/compact", json={"model": "sonnet", "previous_response_id": first["id"]})
    assert by_id.json()["output"][0]["type"] == "compaction"


async def test_a_conversation_is_refused_before_it_is_read_for_one_item(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 MiB were read before an item of 32 MiB was refused."""
    body: JSON = {"model": "sonnet", "input": "hello"}
    first = (await door.http.post("/v1/responses", json=body)).json()
    monkeypatch.setattr(compaction, "MOST_READ", 10)
    monkeypatch.setattr(reading, "_on_path", None)
    made = await door.http.post("/v1/responses/compact", json={**body, "previous_response_id": first["id"]})
    assert (made.status_code, made.json()["error"]["code"]) == (400, "context_too_long")


def test_a_conversation_that_one_item_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 MiB the newest eight were not read again."""
    monkeypatch.setattr(compaction, "LARGEST", 1000)
    sealed = compaction.sealed([Message.user("x" * 400)] * 2)
    assert "x" * 400 in str(compaction.read_compaction({"encrypted_content": sealed}, "input[0]").content)
    with pytest.raises(ContextTooLong, match="more than 1,000 bytes"):
        compaction.sealed([Message.user("x" * 400)] * 3)
