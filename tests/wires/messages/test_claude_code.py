"""What Claude Code sends as it comes: its header, documents, tools that Anthropic runs, and what it asks of lists."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import Naming, WireCall
from cli_session_proxy.wires.messages import body as messages

USER = {"role": "user", "content": "hello"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="}}
TOOL = {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object"}, "defer_loading": True}


def read(*said: Any, **more: Any) -> WireCall:
    return messages.read({"max_tokens": 100, "messages": list(said) or [USER], **more}, Naming())


def test_its_billing_header_is_no_part_of_the_system_prompt() -> None:
    said = ("x-anthropic-billing-header: cc_version=2", "You are.", "More.")
    system = [{"type": "text", "text": text} for text in said]
    assert read(system=system).request.system == "You are.\n\nMore."


def test_tools_that_anthropic_runs_are_named_and_not_offered() -> None:
    call = read(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}, {"type": "Odd Kind", "name": "x"}])
    assert [tool.name for tool in call.request.options.tools] == ["Read"]
    assert call.ignored == ("tools.web_search_20250305", "tools[2]")


def test_documents_and_what_anthropic_ran_are_read() -> None:
    searched = [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
        {"type": "text", "text": "Found."},
        {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}},
    ]
    found = [{"type": "tool_reference", "tool_name": "Read"}, PDF]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    asked = {"role": "user", "content": [PDF, {"type": "text", "text": "what is it?"}]}
    call = read(asked, {"role": "assistant", "content": searched}, {"role": "user", "content": [result]})
    first, answer, last = call.request.messages
    assert first.content[0] == PDF
    assert [block["type"] for block in answer.content] == ["text", "tool_use"]
    assert last.content[0]["content"] == [{"type": "text", "text": "[tool: Read]"}, PDF]


@pytest.mark.parametrize("source", [{}, {"type": "file", "file_id": "f"}, {"type": "url", "url": "file:///etc/passwd"}])
def test_a_document_that_cannot_be_had_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read({"role": "user", "content": [{"type": "document", "source": source}]})


def test_tokens_of_tools_and_images_are_counted() -> None:
    def count(**more: Any) -> int:
        return int(messages.count({"messages": [USER], **more}, Naming())["input_tokens"])

    assert count(tools=[TOOL]) > count() + 10


def test_the_list_has_ids_that_it_keeps() -> None:
    listed = messages.model_list([messages.model_info("sonnet", 0)])["data"]
    assert [model["id"] for model in listed] == ["sonnet", "claude-cli/sonnet"]
    assert read(model="claude-cli/sonnet").request.model == "sonnet"


def test_equal_results_in_a_row_count_once_and_others_are_kept() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]}
    said = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "words"}]}
    other = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "others"}]}
    once = read(USER, call, said, said, said)
    assert len(once.request.messages) == 3
    assert len(read(USER, call, said, other).request.messages) == 4
    assert len(read(USER, call, said, call, said).request.messages) == 5  # the same id, called again
