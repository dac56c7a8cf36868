"""Bodies of interactions: what they mean, and what is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import KeptCall, Naming
from cli_session_proxy.wires.interactions import body as interactions

PIXEL = "iVBORw0KGgo="


def read(**fields: Any) -> KeptCall:
    return interactions.read({"model": "sonnet", "input": "hello", **fields}, Naming())


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    "given", ["hello", text("hello"), [text("hello")], [{"type": "user_input", "content": [text("hello")]}],
              [{"role": "user", "content": "hello"}]],
)  # fmt: skip
def test_every_form_of_the_input_is_the_same_message(given: Any) -> None:
    assert read(input=given).request.messages == (Message.user("hello"),)


def test_steps_are_a_history() -> None:
    steps = [
        {"type": "user_input", "content": [text("look"), {"type": "image", "mime_type": "image/png", "data": PIXEL},
                                           {"type": "image", "uri": "https://example.org/a.png"}]},
        {"type": "thought", "signature": "c2ln"},
        {"type": "model_output", "content": [text("I call.")]},
        {"type": "function_call", "id": "c1", "name": "look", "arguments": {"at": 1}},
        {"type": "function_result", "call_id": "c1", "result": {"ok": True}, "is_error": True},
    ]  # fmt: skip
    assert read(input=steps).request.messages == (
        Message("user", (
            text("look"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        )),
        Message("assistant", (text("I call."),)),
        Message("assistant", ({"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},)),
        Message("user", (
            {"type": "tool_result", "tool_use_id": "c1", "content": '{"ok": true}', "is_error": True},
        )),
    )  # fmt: skip


def test_what_is_asked_is_kept_for_later() -> None:
    config = {"thinking_level": "high", "thinking_summaries": "auto", "seed": 1}
    call = read(
        background=True, previous_interaction_id="interaction_1", system_instruction="Be brief.",
        generation_config=config, labels={"a": "b"},
    )  # fmt: skip
    assert (call.previous, call.stream) == ("interaction_1", False)
    assert (call.request.system, call.request.keep_system, call.request.effort) == ("Be brief.", False, "high")
    assert (call.ignored, call.request.options.parameters.seed) == (("labels",), 1)
    assert call.request.call == {
        "wire": "interactions", "store": True, "background": True, "previous_interaction_id": "interaction_1",
        "system_instruction": "Be brief.", "summaries": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": [{"type": "text", "mime_type": "application/json"}]}, {"schema": None}),
        ({"response_format": {"type": "text", "mime_type": "application/json", "schema": {"type": "string"}}},
         {"schema": {"type": "string"}}),
        ({"response_format": {"type": "object"}, "response_mime_type": "application/json"},
         {"schema": {"type": "object"}}),
        ({"response_mime_type": "application/json"}, {"schema": None}),
    ],
)  # fmt: skip
def test_json_is_asked_for_in_every_form(fields: dict[str, Any], format: Any) -> None:
    assert read(**fields).request.options.format == format


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": None, "agent": "deep-research"}, "agent"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input.content"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "song"}]}, "input[0].type"),
        ({"input": [{"type": ["text"]}]}, "input[0].type"),
        ({"input": [{"type": "audio", "data": "AAAA"}]}, "input[0]"),
        ({"input": [{"type": "model_output", "content": "I"}]}, "input[0].role"),
        ({"input": [{"type": "user_input", "content": 1}]}, "input[0].content"),
        ({"input": [{"type": "image", "uri": "gs://a"}]}, "input[0].uri"),
        ({"input": [{"type": "function_result", "call_id": "c"}]}, "input[0].result"),
        ({"stream": 1}, "stream"),
        ({"background": True, "store": False}, "store"),
        ({"previous_interaction_id": 1}, "previous_interaction_id"),
        ({"generation_config": {"temperature": "hot"}}, "generation_config.temperature"),
        ({"generation_config": {"thinking_level": "utmost"}}, "generation_config.thinking_level"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"response_modalities": ["audio"]}, "response_modalities"),
        ({"response_format": [{"type": "text"}, {"type": "audio"}]}, "response_format"),
        ({"response_format": {"type": "audio"}}, "response_format.type"),
        ({"continuation_token": "t"}, "continuation_token"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_ids_are_made_of_the_turns() -> None:
    assert interactions.turn_id_of(interactions.interaction_id("turn_ab12")) == "turn_ab12"
    assert [interactions.turn_id_of(name) for name in ("interaction_", "v1_x", "turn_ab12")] == [None, None, None]
