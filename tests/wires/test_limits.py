"""What one request may bring, on every wire: refused by its field before anything runs, and read in linear time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cli_session_proxy.domain import limits
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import Naming, read_bytes
from cli_session_proxy.wires.generate import body as generate
from cli_session_proxy.wires.interactions import body as interactions
from cli_session_proxy.wires.messages import body as messages
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.responses import body as responses

Read = Callable[[JSON, Naming], Any]

READ: dict[str, Read] = {
    "chat": chat.read,
    "messages": messages.read,
    "generate": partial(generate.read, model="sonnet"),
    "interactions": interactions.read,
    "responses": responses.read,
    "ollama": ollama.read_chat,
}
SAID: dict[str, Callable[[str], JSON]] = {
    "chat": lambda role: {"role": role, "content": "a"},
    "messages": lambda role: {"role": role, "content": "a"},
    "generate": lambda role: {"role": {"assistant": "model"}.get(role, role), "parts": [{"text": "a"}]},
    "interactions": lambda role: {"type": "model_output" if role == "assistant" else "user_input", "content": "a"},
    "responses": lambda role: {"role": role, "content": "a"},
    "ollama": lambda role: {"role": role, "content": "a"},
}
FIELD = {
    "chat": "messages",
    "messages": "messages",
    "generate": "contents",
    "interactions": "input",
    "responses": "input",
    "ollama": "messages",
}


def body(wire: str, *roles: str, **more: Any) -> JSON:
    told = {"max_tokens": 1} if wire == "messages" else {}
    return {"model": "sonnet", FIELD[wire]: [SAID[wire](role) for role in roles], **told, **more}


def read(wire: str, given: JSON) -> Any:
    return read_bytes(json.dumps(given).encode(), Naming(), READ[wire])


def refused(wire: str, given: JSON) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(wire, given)
    return error.value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wire", READ)
@pytest.mark.parametrize("roles", [("user", "assistant"), ("user",), ("assistant",)])
@pytest.mark.sample(6)
def test_as_many_messages_as_may_be_are_read_in_linear_time_and_one_more_is_refused(
    wire: str, roles: tuple[str, ...]
) -> None:
    many = [*(roles * limits.MESSAGES)[: limits.MESSAGES - 1], "user"]
    read(wire, body(wire, *many))
    error = refused(wire, body(wire, *many, "user"))
    assert (error.param, "20,000 is the most" in error.message) == (FIELD[wire], True)


@pytest.mark.parametrize("wire", READ)
def test_a_body_nests_no_deeper_than_may_be(wire: str) -> None:
    value: Any = 1
    while not limits.is_deeper({"metadata": {"a": value}}):
        value = [value]
    assert "nested deeper than 128 levels" in refused(wire, body(wire, "user", metadata={"a": value})).message


@pytest.mark.parametrize("wire", READ)
def test_a_body_has_no_more_values_than_may_be(wire: str) -> None:
    assert "more than 200,000 JSON values" in refused(wire, body(wire, "user", extra=[0] * limits.VALUES)).message


STOPS: dict[str, Callable[[list[str]], JSON]] = {
    "chat": lambda stops: {"stop": stops},
    "messages": lambda stops: {"stop_sequences": stops},
    "generate": lambda stops: {"generationConfig": {"stopSequences": stops}},
    "interactions": lambda stops: {"generation_config": {"stop_sequences": stops}},
    "ollama": lambda stops: {"options": {"stop": stops}},
}


@pytest.mark.parametrize("wire", STOPS)
def test_stop_texts_are_few_and_short(wire: str) -> None:
    most = [f"{n:0{limits.STOP_LENGTH}d}" for n in range(limits.STOPS)]
    assert read(wire, body(wire, "user", **STOPS[wire](most))).request.options.stop == tuple(most)
    assert "64 is the most" in refused(wire, body(wire, "user", **STOPS[wire]([*most, "x"]))).message
    assert "at most 256 characters" in refused(wire, body(wire, "user", **STOPS[wire](["x" * 257]))).message


def function(number: int, schema: JSON) -> JSON:
    return {"type": "function", "name": f"f{number}", "parameters": schema}


TOOLS: dict[str, Callable[[int, JSON], JSON]] = {
    "chat": lambda n, schema: {"type": "function", "function": {"name": f"f{n}", "parameters": schema}},
    "messages": lambda n, schema: {"name": f"f{n}", "input_schema": schema},
    "generate": lambda n, schema: {"functionDeclarations": [{"name": f"f{n}", "parametersJsonSchema": schema}]},
    "interactions": function,
    "responses": function,
    "ollama": lambda n, schema: {"type": "function", "function": {"name": f"f{n}", "parameters": schema}},
}


@pytest.mark.parametrize("wire", READ)
def test_tools_are_not_too_many_and_their_schemas_not_too_large(wire: str) -> None:
    schema: JSON = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [TOOLS[wire](n, schema) for n in range(limits.TOOLS + 1)]
    read(wire, body(wire, "user", tools=tools[:-1]))
    assert "1,000 is the most" in refused(wire, body(wire, "user", tools=tools)).message
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
    assert "20,000 JSON values" in refused(wire, body(wire, "user", tools=[TOOLS[wire](0, wide)])).message


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_arguments_of_a_call_nest_no_deeper_than_a_body(wire: str) -> None:
    arguments = '{"a":' * 129 + "1" + "}" * 129
    call: dict[str, JSON] = {
        "chat": {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]},
        "responses": {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
    }
    given = body(wire, "user", "user")
    given[FIELD[wire]].insert(1, call[wire])
    assert "nested deeper than 128" in refused(wire, given).message


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_arguments_of_all_calls_hold_no_more_values_than_a_body(wire: str) -> None:
    """They come as text, in which a body's values are not counted."""
    arguments = json.dumps({"a": [[]] * 60_000})
    call: dict[str, Callable[[str], JSON]] = {
        "chat": lambda name: {
            "role": "assistant", "tool_calls": [{"id": name, "function": {"name": "f", "arguments": arguments}}]
        },
        "responses": lambda name: {"type": "function_call", "call_id": name, "name": "f", "arguments": arguments},
    }  # fmt: skip
    given = body(wire, "user", "user")
    given[FIELD[wire]][1:1] = [call[wire](name) for name in "abc"]
    read(wire, given)
    given[FIELD[wire]].insert(1, call[wire]("d"))
    assert "more than 200,000 JSON values" in refused(wire, given).message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.sample(2)
def test_googles_results_find_their_calls_in_linear_time(ids: bool, backwards: bool) -> None:
    count = 22_000
    names = [{"id": f"c{n}", "name": f"f{n}"} if ids else {"name": f"f{n}"} for n in range(count)]
    results = [{"functionResponse": {**name, "response": {}}} for name in (reversed(names) if backwards else names)]
    contents = [
        {"role": "model", "parts": [{"functionCall": name} for name in names]},
        {"role": "user", "parts": results},
    ]
    found = read("generate", {"contents": contents}).request.messages
    called = [block["id"] for block in found[0].content]
    answered = [block["tool_use_id"] for block in found[1].content]
    assert len(set(called)) == count
    assert answered == (called[::-1] if backwards else called)
