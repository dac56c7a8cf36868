"""The schemas of the bodies that `/openapi.json` shows: the fields that the wires read. Shapes of JSON only."""

from __future__ import annotations

from collections.abc import Mapping

from ..domain.models import JSON

# Every optional field may be null, as clients send what was left out.
TEXT: JSON = {"type": ["string", "null"]}
FLAG: JSON = {"type": ["boolean", "null"]}
NUMBER: JSON = {"type": ["number", "null"]}
OBJECT: JSON = {"type": ["object", "null"]}
OBJECTS: JSON = {"type": ["array", "null"], "items": {"type": "object"}}
TEXTS: JSON = {"type": ["array", "null"], "items": {"type": "string"}}
TEXT_OR_TEXTS: JSON = {"type": ["string", "array", "null"], "items": {"type": "string"}}
TEXT_OR_OBJECTS: JSON = {"type": ["string", "array", "null"], "items": {"type": "object"}}
TEXT_OR_OBJECT: JSON = {"type": ["string", "object", "null"]}


def _body(required: Mapping[str, JSON], **optional: JSON) -> JSON:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _message(part: str, *roles: str) -> JSON:
    """`part` is the type of a part that is text; the others are the vendor's."""
    text = _body({"type": {"const": part}, "text": {"type": "string"}})
    parts = {"type": "array", "items": {"anyOf": [text, {"type": "object", "required": ["type"]}]}}
    return _body({"role": {"enum": list(roles)}, "content": {"anyOf": [{"type": "string"}, parts]}})


def _messages(*roles: str) -> JSON:
    return {"type": "array", "minItems": 1, "items": _message("text", *roles)}


# As the CLI takes it: no flag, no space.
MODEL: JSON = {"type": ["string", "null"], "pattern": r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}$"}
EFFORT: JSON = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]}
CHOICE: JSON = {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object", "required": ["type"]}]}
THINKING: JSON = {"type": ["object", "null"], "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}}
NAME: JSON = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_FUNCTION = _body({"type": {"const": "function"}, "function": _body({"name": NAME}, parameters=OBJECT)})
FUNCTIONS: JSON = {"type": ["array", "null"], "items": _FUNCTION}
FORMAT: JSON = {"type": ["object", "null"], "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}}

_CONTENT = _body({"parts": {"type": "array", "items": _body({}, text={"type": "string"})}}, role=TEXT)
_METADATA: JSON = {"type": ["object", "null"], "additionalProperties": {"type": "string"}, "maxProperties": 16}
_SAID = _message("input_text", "user", "assistant", "system", "developer")
_ITEMS: JSON = {"type": "array", "maxItems": 20, "items": _SAID}
_ASKED: JSON = {"anyOf": [{"type": "string"}, {"type": "array", "items": _SAID}]}

_CHAT = _body(
    {"messages": _messages("system", "developer", "user", "assistant")},
    model=MODEL, stream=FLAG, stream_options=OBJECT, agent_id=TEXT, metadata=OBJECT, reasoning_effort=EFFORT,
    stop=TEXT_OR_TEXTS, response_format=FORMAT, tools=FUNCTIONS, tool_choice=CHOICE, n={"enum": [1, None]}, user=TEXT,
    temperature=NUMBER, max_tokens=NUMBER,
)  # fmt: skip
_MESSAGES = _body(
    {"messages": _messages("user", "assistant"), "max_tokens": {"type": "integer"}},
    model=MODEL, system=TEXT_OR_OBJECTS, stream=FLAG, metadata=OBJECT, thinking=THINKING, output_config=OBJECT,
    stop_sequences=TEXTS, tools=OBJECTS, tool_choice=OBJECT, temperature=NUMBER, thread=OBJECT,
)  # fmt: skip
_RESPONSES = _body(
    {"input": _ASKED},
    model=MODEL, instructions=TEXT, previous_response_id=TEXT, conversation=TEXT_OR_OBJECT, store=FLAG, stream=FLAG,
    background=FLAG, metadata=_METADATA, reasoning=OBJECT, text=OBJECT, tools=OBJECTS, tool_choice=CHOICE,
    agent_id=TEXT, temperature=NUMBER, max_output_tokens=NUMBER,
)  # fmt: skip
_INTERACTION = _body(
    {
        "model": {**MODEL, "type": "string"},
        "input": {"type": ["string", "array", "object"], "items": {"type": "object"}},
    },
    previous_interaction_id=TEXT, system_instruction=TEXT, store=FLAG, stream=FLAG, background=FLAG,
    generation_config=OBJECT, tools=OBJECTS, response_modalities={"enum": [["text"], None]},
)  # fmt: skip
_GENERATE = _body(
    {"contents": {"type": ["array"], "minItems": 1, "items": _CONTENT}},
    systemInstruction={"anyOf": [_CONTENT, {"type": "null"}]}, generationConfig=OBJECT, tools=OBJECTS,
    toolConfig=OBJECT,
)  # fmt: skip

BODIES: Mapping[str, JSON] = {
    "/v1/chat/completions": _CHAT,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _body(
        {"messages": _messages("user", "assistant")}, model=MODEL, system=TEXT_OR_OBJECTS, tools=OBJECTS
    ),
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/conversations": _body({}, items={**_ITEMS, "type": ["array", "null"]}, metadata=_METADATA),
    "/v1/conversations/{conversation_id}": _body({"metadata": _METADATA}),
    "/v1/conversations/{conversation_id}/items": _body({"items": _ITEMS}),
    "/v1/interactions": _INTERACTION,
    "/v1/models/{model}:generateContent": _GENERATE,
    "/v1/models/{model}:streamGenerateContent": _GENERATE,
    "/v1/models/{model}:countTokens": _body({}, contents=OBJECTS, generateContentRequest=OBJECT),
}
