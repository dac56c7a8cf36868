"""Bodies of Chat Completions: what they mean, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.domain.client_tools import UNPARSED
from cli_session_proxy.domain.models import Message
from cli_session_proxy.domain.system_prompts import reminder
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.fields import parse_body

HELLO = [{"role": "user", "content": "hello"}]
PIXEL = "iVBORw0KGgo="


def read(messages: object = HELLO, **fields: Any) -> chat.ChatCall:
    return chat.read({"model": "sonnet", "messages": messages, **fields}, Naming())


def refused(messages: object = HELLO, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        read(messages, **fields)
    return caught.value.param


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_all_that_is_checked_is_named_so_that_a_body_without_any_of_it_is_not_looked_through() -> None:
    looked: set[str] = set()

    class Noted(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            looked.add(name)
            return super().get(name, default)

    chat._check(Noted())
    assert looked == set(chat.CHECKED)


def test_a_plain_request_is_one_user_message() -> None:
    call = read()
    assert call.request.messages == (Message.user("hello"),)
    assert (call.request.system, call.request.effort, call.request.agent_id) == (None, None, None)
    assert (call.stream, call.include_usage, call.ignored) == (False, False, ())


def test_system_and_developer_messages_in_mid_conversation_stay_where_they_are() -> None:
    call = read(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "one"},
            {"role": "developer", "content": [text("Be "), text("short.")]},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two"},
            {"role": "system", "content": "  "},
        ]
    )
    assert call.request.system == "Be kind."
    assert call.request.messages == (
        Message.user("one"), reminder("Be short."), Message.assistant("1"), Message.user("two"),
    )  # fmt: skip


def test_a_request_of_system_messages_alone_asks_with_the_last() -> None:
    call = read([{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Say hello."}])
    assert (call.request.system, call.request.messages) == ("Be kind.", (reminder("Say hello."),))


def test_messages_of_one_role_in_a_row_stay_apart() -> None:
    call = read([{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), text("c")]}])
    assert call.request.messages == (Message.user("a"), Message("user", (text("b"), text("c"))))


def test_images_come_as_data_or_as_urls() -> None:
    def image(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    parts = [text("what is this?"), image(f"data:image/png;base64,{PIXEL}"), image("https://example.org/cat.png")]
    (message,) = read([{"role": "user", "content": parts}]).request.messages
    assert message.content == (
        text("what is this?"),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}},
    )
    alone = read([{"role": "user", "content": [text(" "), image(f"data:image/png;base64,{PIXEL}")]}])
    assert [block["type"] for block in alone.request.messages[0].content] == ["image"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "data:image/png,xx",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png;base64,!!",
        "",
        "data:image/png;base64,",
    ],
)
def test_what_is_no_image_is_refused(url: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    assert refused([{"role": "user", "content": parts}]) == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("part", [{"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}])
def test_files_and_audio_are_refused_by_name(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=part["type"]) as caught:
        read([{"role": "user", "content": [part]}])
    assert str(caught.value.param).startswith("messages[0].content[0]")


def test_tool_calls_and_results_in_history_become_blocks() -> None:
    arguments = {"city": "Ulm"}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    got = read(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
    ).request.messages
    assert got[1] == Message("assistant", ({"type": "tool_use", "id": "c1", "name": "weather", "input": arguments},))
    assert got[2] == Message("user", ({"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},))


def test_an_empty_assistant_message_keeps_its_place() -> None:
    got = read([*HELLO, {"role": "assistant", "content": ""}, *HELLO]).request.messages
    assert got == (Message.user("hello"), Message("assistant", ()), Message.user("hello"))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
        ([{"role": "system", "content": " "}], "messages"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": " \n\t"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*HELLO, {"role": "assistant", "content": "x"}], "messages[1].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}, *HELLO], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "function_call": {}}, *HELLO], "messages[0].function_call"),
    ],
)
def test_broken_messages_are_refused_by_field(messages: object, param: str) -> None:
    assert refused(messages) == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", "1"), ("logprobs", True), ("top_logprobs", 3), ("tools", "x"),
        ("tool_choice", "sometimes"), ("tool_choice", "required"), ("functions", [{}]), ("response_format", "json"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}), ("stream", "yes"), ("stream", 1), ("stream_options", []), ("temperature", "hot"),
        ("temperature", True), ("max_tokens", "many"), ("stop", 7), ("stop", [7]), ("metadata", "x"), ("user", 7),
        ("reasoning_effort", "enormous"), ("reasoning_effort", 3), ("model", 7), ("model", ""), ("model", "--help"),
        ("model", "claude-cli/"), ("model", "a b"),
    ],
)  # fmt: skip
def test_what_would_lie_or_is_of_a_wrong_type_is_refused_by_field(field: str, value: object) -> None:
    assert refused(**{field: value}) == field


def test_a_response_format_that_asks_for_json_is_passed_on_and_a_broken_one_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert read(response_format=asked).request.options.format == {"schema": schema}
    assert read(response_format={"type": "json_object"}).request.options.format == {"schema": None}
    assert read(response_format={"type": "text"}).request.options.format is None
    assert refused(response_format={"type": "xml"}) == "response_format.type"
    place = "response_format.json_schema.schema"
    assert refused(response_format={"type": "json_schema", "json_schema": {}}) == place
    assert refused(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}) == place


def test_nulls_and_harmless_values_are_no_error() -> None:
    nothing = dict.fromkeys(
        ("n", "logprobs", "tools", "response_format", "modalities", "stream", "temperature", "stop")
    )
    assert read(**nothing).ignored == ()
    call = read(n=1, logprobs=False, tools=[], response_format={"type": "text"}, modalities=["text"], top_logprobs=0)
    assert call.ignored == ()


def test_what_the_cli_cannot_honour_is_named() -> None:
    call = read(
        temperature=0,
        top_p=1,
        max_tokens=5,
        seed=4,
        logit_bias={},
        stop=["x"],
        verbosity=None,
        user="u",
        metadata={},
        store=True,
        future=1,
    )
    assert call.ignored == ("logit_bias", "store", "future")
    assert call.request.options.parameters.seed == 4  # for models that take one
    assert call.request.options.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({"reasoning": {"effort": "high"}}, "high", True),
        ({"reasoning": {"effort": "none"}}, None, False),
        ({"reasoning": {"enabled": False}}, None, False),
        ({"reasoning": {"max_tokens": 32000}}, "high", True),
        ({"reasoning": {}}, None, None),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", True),
        ({"thinking": {"type": "adaptive"}}, None, True),
        ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "low", True),
    ],
)
def test_how_other_vendors_ask_for_thinking_is_heard(
    fields: dict[str, Any], effort: str | None, thinks: bool | None
) -> None:
    call = read(**fields)
    assert (call.request.effort, call.request.options.parameters.thinking, call.ignored) == (effort, thinks, ())


def test_a_participants_name_reaches_the_model() -> None:
    call = read(
        messages=[
            {"role": "system", "name": "example_user", "content": "Short."},
            {"role": "user", "name": "ada", "content": "hello"},
            {"role": "assistant", "name": "bob", "content": "Hi."},
            {
                "role": "user",
                "name": "eve",
                "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
            },
            {"role": "user", "name": "User", "content": "hello"},
        ]
    )
    assert call.request.system == "example_user: Short."
    assert [[block.get("text") for block in message.content] for message in call.request.messages] == [
        ["ada: hello"], ["Hi."], ["eve:", None], ["hello"],
    ]  # fmt: skip
    assert call.ignored == ("messages.name",)


@pytest.mark.parametrize(
    ("given_effort", "effort"),
    [("none", None), ("minimal", "low"), ("medium", "medium"), ("max", "max"), (None, None)],
)
def test_reasoning_effort_becomes_the_clis(given_effort: str | None, effort: str | None) -> None:
    assert read(reasoning_effort=given_effort).request.effort == effort


@pytest.mark.parametrize(
    ("given_model", "model"),
    [
        ("claude-cli/opus", "opus"),
        ("openai/claude-cli/x", "claude-cli/x"),
        ("sonnet[1m]", "sonnet[1m]"),
        (None, "default"),
    ],
)
def test_a_models_prefix_is_taken_off(given_model: str | None, model: str) -> None:
    assert read(model=given_model).request.model == model


def test_stream_options_are_read() -> None:
    call = read(stream=True, stream_options={"include_usage": True})
    assert (call.stream, call.include_usage) == (True, True)


def test_equal_requests_have_equal_fingerprints_and_others_do_not() -> None:
    def mark(body: dict[str, Any], naming: Naming = Naming()) -> str:  # noqa: B008 - immutable
        return chat.read(body, naming).request.fingerprint

    body = {"model": "sonnet", "messages": HELLO, "temperature": 1}
    assert mark(body) == mark(dict(reversed(body.items())))
    others = [
        mark({**body, "temperature": 0}),
        mark(body, Naming(agent="a")),
        mark(body, Naming(agent="b")),
        mark(body, Naming(owner="somebody")),
        mark(body, Naming(fresh=True)),
    ]
    assert len({mark(body), *others}) == 6


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'"x"', b"null", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff\xfe{", b"\x1f\x8b\x08",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a": ' + b"1" * 5000 + b"}", b'{"a": 1,}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw)


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"messages":[{"role":"user","content":"\ud800"}]}',
        b'{"seed": 1e999, "messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_json_that_no_text_can_carry_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        chat.read(parse_body(raw), Naming())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    ["model", "messages", "stream", "stream_options", "tools", "n", "stop", "metadata", "reasoning_effort", "audio"]
)


@given(st.dictionaries(FIELDS, JSON_VALUES), JSON_VALUES)
def test_no_body_can_do_more_than_be_refused(fields: dict[str, Any], content: object) -> None:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    with contextlib.suppress(InvalidRequest):
        assert chat.read(body, Naming()).request.messages[-1].role == "user"


@pytest.mark.parametrize("cut", ['{"city": "Be', "[1]", "no JSON", '"text"', '{"a": [NaN]}', '{"a": [1e999]}'])
def test_arguments_that_are_no_object_are_kept_as_text(cut: str) -> None:
    """A call that was cut off stays in its client's history: refused, every later request would be."""
    calls = [{"id": "c", "function": {"name": "f", "arguments": cut}}]
    said = [*HELLO, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    (call,) = read(said).request.messages[1].content
    assert call["input"] == {UNPARSED: cut}
