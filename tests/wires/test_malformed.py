"""Whatever a body holds, it is answered or refused by its wire: no unforeseen error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_session_proxy.domain.models import JSON
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.wires.chat import body as chat
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.generate import body as generate
from cli_session_proxy.wires.interactions import body as interactions
from cli_session_proxy.wires.messages import body as messages
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.responses import body as responses

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
BODIES: dict[str, tuple[Callable[[JSON, Naming], Any], JSON]] = {
    "chat": (chat.read, {
        "model": "sonnet", "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"], "user": "u",
        "metadata": {"agent_id": "a"}, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]},
            {"role": "assistant", "content": "a",
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    }),
    "responses": (responses.read, {
        "model": "sonnet", "instructions": "s", "stream": True, "store": False, "metadata": {"agent_id": "a"},
        "reasoning": {"effort": "low", "summary": "none"}, "max_output_tokens": 9, "previous_response_id": "resp_1",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tool_choice": {"type": "custom", "name": "patch"},
        "tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "web_search"},
        ],
        "input": [
            {"type": "additional_tools", "tools": [{"type": "custom", "name": "late"}]},
            {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "namespace": "n", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "local_shell_call", "call_id": "d", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "d", "output": "r"},
            {"type": "compaction", "encrypted_content": "csp1:eJw="},
            {"type": "function_call", "call_id": "e", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "e", "output": "r"},
        ],
    }),
    "messages": (messages.read, {
        "model": "sonnet", "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 8}, "stop_sequences": ["x"], "thread": {"type": "create"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "messages": [
            {"role": "user", "content": [IMAGE, {"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]},
        ],
    }),
    "messages count": (messages.count, {"model": "sonnet", "messages": [{"role": "user", "content": [IMAGE]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    "generate": (lambda body, naming: generate.read(body, naming, "sonnet"), {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "generationConfig": {
            "thinkingConfig": {"thinkingBudget": 1024, "includeThoughts": True}, "stopSequences": ["x"],
            "responseMimeType": "application/json", "candidateCount": 1, "responseModalities": ["TEXT"],
            "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING"}}}},
        },
        "contents": [
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": 1}}}]},
        ],
    }),
    "interactions": (interactions.read, {
        "model": "sonnet", "generation_config": {"thinking_level": "low", "seed": 1}, "store": True,
        "response_format": [{"type": "text", "mime_type": "application/json", "schema": {"type": "object"}}],
        "system_instruction": "s", "previous_interaction_id": "interaction_1", "response_modalities": ["text"],
        "input": [
            {"type": "user_input", "content": [{"type": "image", "mime_type": "image/png", "data": "iVBORw0KGgo="}]},
            {"type": "model_output", "content": [{"type": "text", "text": "a"}]},
            {"type": "function_call", "id": "c", "name": "f", "arguments": {}},
            {"type": "function_result", "call_id": "c", "result": [{"type": "text", "text": "r"}]},
        ],
    }),
    "ollama": (ollama.read_chat, {
        "model": "sonnet:latest", "stream": True, "format": {"type": "object"}, "think": "low", "keep_alive": "5m",
        "options": {"temperature": 0.5, "num_ctx": 8192, "use_mmap": True, "stop": ["x"]},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u", "images": ["iVBORw0KGgo="]},
            {"role": "assistant", "content": "",
             "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "r"},
        ],
    }),
    "ollama generate": (ollama.read_generate, {
        "model": "sonnet", "prompt": "u", "system": "s", "images": ["iVBORw0KGgo="],
        "context": [116, 117, 114, 110, 95],
        "format": "json", "think": False, "raw": False, "stream": False,
    }),
}  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8),
    st.sampled_from(["\ud800", "{", "data:image/png;base64,é", "-1", [], {}, [[]], [{}], {"type": []}, {"type": {}}]),
    st.recursive(st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=4),
)  # fmt: skip


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body, as the keys that lead to it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.parametrize("wire", BODIES)
def test_the_body_that_is_changed_is_a_good_one(wire: str) -> None:
    read, body = BODIES[wire]
    read(body, Naming())


@pytest.mark.parametrize("wire", BODIES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.sample(3)
def test_a_body_with_an_odd_value_anywhere_is_read_or_refused(wire: str, data: st.DataObject) -> None:
    read, good = BODIES[wire]
    body: Any = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 3))):
        *above, key = data.draw(st.sampled_from([place for place in places(body) if place]))
        inner = body
        for step in above:
            inner = inner[step]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            del inner[key]
        else:
            inner[key] = copy.deepcopy(data.draw(ODD))
        if not body:
            break
    refused = None
    try:
        read(body, Naming())
    except ProxyError as error:
        refused = error
    assert refused is None or (400 <= refused.status < 500 and refused.message)
