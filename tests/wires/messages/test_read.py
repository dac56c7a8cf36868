"""Bodies of the Messages API: what they mean, and what is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.domain.system_prompts import reminder
from cli_session_proxy.errors import InvalidRequest, NotFound
from cli_session_proxy.wires.common import Naming, WireCall
from cli_session_proxy.wires.messages import body as messages

PIXEL = "iVBORw0KGgo="
HELLO: dict[str, Any] = {"model": "sonnet", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}


def read(**fields: Any) -> WireCall:
    return messages.read({**HELLO, **fields}, Naming())


def said(*content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(content)}]


def test_every_kind_of_block_is_read() -> None:
    call = read(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "I call.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}, "caller": {"type": "direct"}},
            ]},
            {"role": "system", "content": "Now in French."},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
                 "content": [{"type": "text", "text": "no"}]},
            ]},
        ],
    )  # fmt: skip
    assert call.request.system == "Be brief."
    assert call.request.messages == (
        Message("user", (
            {"type": "text", "text": "look"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        )),
        Message("assistant", (
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "I call."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
        )),
        reminder("Now in French."),
        Message("user", (
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "no"}],
             "is_error": True},
        )),
    )  # fmt: skip


def test_the_agent_is_named_as_everywhere_but_never_by_its_user() -> None:
    assert read(metadata={"user_id": "u"}).request.agent_id is None
    assert read(metadata={"user_id": "u", "agent_id": "a"}).request.agent_id == "a"
    assert read(agent_id="b").request.agent_id == "b"
    assert messages.read(HELLO, Naming(agent="c")).request.agent_id == "c"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}, "output_config": {"effort": "low"}}, "low"),
    ],
)
def test_effort_is_what_was_asked_or_the_thinking_budgets(fields: dict[str, Any], effort: str | None) -> None:
    assert read(**fields, max_tokens=64000).request.effort == effort


def test_a_budget_that_leaves_no_room_for_the_answer_is_refused() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    with pytest.raises(InvalidRequest, match="max_tokens must be greater"):
        read(thinking=thinking, max_tokens=2000)
    # between calls of tools the model may think more than once
    tool = {"name": "look", "input_schema": {"type": "object"}}
    assert read(thinking=thinking, max_tokens=2000, tools=[tool]).request.effort == "low"


def test_a_search_result_is_told_with_its_title_and_source() -> None:
    found = {
        "type": "search_result",
        "title": "Teal",
        "source": "a.example",
        "content": [{"type": "text", "text": "x"}],
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "which?"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, found]},
    ]  # fmt: skip
    told = {"type": "text", "text": "Teal\na.example\n\nx"}
    assert read(messages=messages).request.messages[-1].content == (
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [told]}, told,
    )  # fmt: skip


def test_what_has_no_effect_is_named() -> None:
    assert read(temperature=1, speed="fast", container=None).ignored == ("speed",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": 1}, "model"),
        ({"model": "--help"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": said("hello")}, "messages[0].content[0]"),
        ({"messages": said({"type": "video"})}, "messages[0].content[0]"),
        ({"messages": said({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": said({"type": "text", "text": " "})}, "messages[0].content"),
        ({"messages": said({"type": "image", "source": {"type": "file", "file_id": "f"}})},
         "messages[0].content[0].source.type"),
        ({"messages": said({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "é"}})},
         "messages[0].content[0].source.data"),
        ({"messages": said({"type": "tool_use", "id": "a", "name": "b", "input": {}})}, "messages[0].content[0]"),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": "Well,"}]}, "messages[1].role"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"metadata": []}, "metadata"),
        ({"agent_id": ""}, "agent_id"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": 5, "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"effort": "utmost"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_a_thread_is_created_but_not_continued() -> None:
    assert read(thread={"type": "create"}).request.messages == (Message.user("hello"),)
    with pytest.raises(NotFound) as caught:
        read(thread={"type": "continue", "previous_message_id": "msg_1"})
    assert caught.value.detail == {"error_code": "thread_not_found"}


def test_json_is_asked_for_by_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"type": "json_schema", "schema": schema}
    assert read(output_config={"format": wanted}).request.options.format == {"schema": schema}
    assert read(output_format=wanted).request.options.format == {"schema": schema}
    assert read().request.options.format is None


def test_counting_takes_what_creating_takes_but_no_bound() -> None:
    body = {"model": "sonnet", "messages": said({"type": "text", "text": "x" * 350})}
    assert messages.count(body, Naming()) == {"input_tokens": 104}
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert messages.count({**body, "messages": said(image)}, Naming()) == {"input_tokens": 1604}
    answered = [*body["messages"], *said({"type": "text", "text": "I"}, role="assistant")]
    assert messages.count({**body, "messages": answered}, Naming())["input_tokens"] > 104
