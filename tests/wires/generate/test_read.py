"""Bodies of generateContent: what they mean, and what is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from cli_session_proxy.domain.lineage import endings
from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.wires.common import Naming
from cli_session_proxy.wires.generate import body as generate
from cli_session_proxy.wires.google import json_schema

HELLO: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
# URL-safe, without padding, as google-genai sends bytes: \xfb\xff\xfe\xfd
URL_SAFE = "-__-_Q"


def read(model: str = "sonnet", **fields: Any) -> generate.GenerateCall:
    return generate.read({**HELLO, **fields}, Naming(), model)


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def test_every_kind_of_part_is_read_in_either_spelling() -> None:
    call = read(
        "models/opus",
        system_instruction={"parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
        contents=[
            {"parts": [
                {"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": URL_SAFE}},
                {"inline_data": {"mime_type": "image/png", "data": "+//+/Q=="}},
                {"fileData": {"fileUri": "https://example.org/a.png", "mimeType": "image/png"}},
            ]},
            {"role": "model", "parts": [
                {"text": "hm", "thought": True}, {"text": "I ", "thoughtSignature": "c2ln"}, {"text": "call."},
                {"functionCall": {"name": "look", "args": {"at": 1}}}, {"functionCall": {"name": "see", "id": "c9"}},
            ]},
            {"role": "function", "parts": [
                {"function_response": {"name": "see", "id": "c9", "response": {"ok": False}}},
                {"functionResponse": {"name": "look", "response": {"ok": True}}},
            ]},
        ],
    )  # fmt: skip
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "+//+/Q=="}}
    assert (call.request.model, call.request.system) == ("opus", "Be brief.\n\nBe kind.")
    assert call.request.messages == (
        Message("user", (
            {"type": "text", "text": "look"}, image, image,
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        )),
        Message("assistant", (
            {"type": "text", "text": "I call."},
            {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "c9", "name": "see", "input": {}},
        )),
        Message("user", (
            {"type": "tool_result", "tool_use_id": "c9", "content": '{"ok": false}'},
            {"type": "tool_result", "tool_use_id": "call_1", "content": '{"ok": true}'},
        )),
    )  # fmt: skip


def test_an_answer_kept_chunk_by_chunk_is_the_answer() -> None:
    """google-genai's chats give back one content for each chunk of a stream."""
    chunks = [{"role": "model", "parts": [{"text": piece}]} for piece in ("Hel", "lo ", "there.")]
    contents = [*HELLO["contents"], *chunks, *HELLO["contents"]]
    given = read(contents=contents).request.messages
    whole = (Message.user("hello"), Message.assistant("Hello there."))
    assert endings(given)[-1].hash == endings(whole)[-1].hash


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [
        ({}, None), ({"thinkingLevel": "MINIMAL"}, "low"), ({"thinking_level": "high"}, "high"),
        ({"thinkingBudget": 0}, None), ({"thinkingBudget": -1}, None), ({"thinking_budget": 32000}, "high"),
    ],
)  # fmt: skip
def test_effort_is_the_level_or_the_budgets(thinking: dict[str, Any], effort: str | None) -> None:
    assert read(**config(thinkingConfig=thinking)).request.effort == effort


def test_what_has_no_effect_is_named() -> None:
    call = read(generation_config={"top_p": 0.5, "seed": 1, "mediaResolution": "x"}, safetySettings=[])
    assert call.ignored == ("generationConfig.mediaResolution", "safetySettings")
    assert call.request.options.parameters.seed == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": {}}, "contents"),
        ({"contents": [1]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": "hello"}]}, "contents[0].parts"),
        ({"contents": [{"parts": ["hello"]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"text": 1}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"text": ""}]}]}, "contents[0].content"),
        ({"contents": [{"role": "model", "parts": [{"text": "I"}]}]}, "contents[0].role"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}]}]},
         "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "gs://a"}}]}]}, "contents[0].parts[0].fileData.fileUri"),
        ({"contents": [{"parts": [{"functionCall": {}}]}]}, "contents[0].parts[0].functionCall.name"),
        ({"systemInstruction": 1}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0]"),
        ({"generationConfig": []}, "generationConfig"),
        (config(temperature="hot"), "generationConfig.temperature"),
        (config(stopSequences="x"), "generationConfig.stopSequences"),
        (config(candidateCount=2), "generationConfig.candidateCount"),
        (config(responseModalities=["AUDIO"]), "generationConfig.responseModalities"),
        (config(responseMimeType="text/html"), "generationConfig.responseMimeType"),
        (config(responseSchema={"type": "DICT"}), "generationConfig.responseSchema"),
        (config(thinkingConfig={"thinkingLevel": "UTMOST"}), "generationConfig.thinkingConfig.thinkingLevel"),
        ({"tools": {}}, "tools"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"agent_id": 1}, "agent_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_a_schema_of_googles_is_json_schema_afterwards() -> None:
    given = {
        "type": "OBJECT", "propertyOrdering": ["a"], "required": ["a"],
        "properties": {"a": {"type": "ARRAY", "min_items": "1", "items": {"type": "STRING", "nullable": True}},
                       "type": {"any_of": [{"type": "INTEGER"}]}},
    }  # fmt: skip
    assert json_schema(given) == {
        "type": "object", "required": ["a"],
        "properties": {"a": {"type": "array", "minItems": 1, "items": {"type": ["string", "null"]}},
                       "type": {"anyOf": [{"type": "integer"}]}},
    }  # fmt: skip
    read_format = read(**config(responseMimeType="application/json", responseSchema=given)).request.options.format
    assert read_format == {"schema": json_schema(given)}
    assert read(**config(responseMimeType="application/json")).request.options.format == {"schema": None}
    assert read(**config(responseJsonSchema={"type": "string"})).request.options.format == {
        "schema": {"type": "string"}
    }


def test_requests_to_two_models_are_two_requests() -> None:
    assert read("sonnet").request.fingerprint != read("opus").request.fingerprint
