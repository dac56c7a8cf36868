"""OpenAI Chat Completions: read a body, write a completion. Pure, no I/O.

    POST /v1/chat/completions  ─ read() ─▶ ChatCall ─▶ the engine ─▶ completion() or ChunkWriter

Parameters that the CLI cannot honour are accepted and reported (`ChatCall.ignored`), except those without which the
answer would be wrong: they are refused. Unknown fields are reported too, because OpenAI's clients often add new ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...domain.lineage import answer_text
from ...domain.models import (
    JSON,
    Block,
    BlockDelta,
    BlockStart,
    Finished,
    Message,
    Started,
    ToolChoice,
    Turn,
    TurnEvent,
    TurnOptions,
    Usage,
)
from ...domain.structured import read_format
from ...errors import InvalidRequest, ProxyError
from ..blocks import effort_of_budget, image_block
from ..common import Naming, WireCall, calls_for_client, refusal_message
from ..conversation import (
    Instructions,
    Reader,
    by_role,
    checked_conversation,
    read_content,
    read_text,
    tool_result,
    without_blank_texts,
)
from ..fields import (
    NUMBER,
    Fields,
    Names,
    Part,
    arguments,
    check_types,
    checked_arguments,
    model_name,
    objects,
    one_of,
    optional,
    read_parameters,
    refuse,
    required,
    stop_texts,
)
from ..openai import EFFORTS, OfferedTools, openai_error, read_choice, read_file, read_tools, refuse_logprobs
from ..streams import SSE_DONE, EventStream, SentTexts, sse

ID_PREFIX = "chatcmpl-"
WIRE = "chat"

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
IGNORED = (
    "frequency_penalty", "presence_penalty", "logit_bias", "service_tier", "verbosity", "prediction",
    "web_search_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip

# The fields in which clients of different vendors say how much to think.
THINKING = ("reasoning_effort", "reasoning", "thinking")

PARAMETERS: Names = {
    "max_tokens": "max_completion_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "thinking": "reasoning_effort", "tool_choice": "tool_choice", "seed": "seed",
}  # fmt: skip
# With OpenAI's older name, which counts only without the newer one.
OLDER: Names = {**PARAMETERS, "max_tokens": "max_tokens"}

# The fields that `_check` checks. Most bodies have none of them.
CHECKED = (
    "n", "logprobs", "top_logprobs", "functions", "function_call", "modalities", "audio", "max_tokens",
    "frequency_penalty", "presence_penalty", "metadata", "logit_bias", "user", "service_tier", "verbosity",
)  # fmt: skip

_TYPES = {
    NUMBER: ("max_tokens", "frequency_penalty", "presence_penalty"), dict: ("metadata", "logit_bias"),
    str: ("user", "service_tier", "verbosity"),
}  # fmt: skip
_OLDER_TOOLS = " is OpenAI's older way to say tools: send tools instead"
_REFUSED = {
    "functions": _OLDER_TOOLS, "function_call": _OLDER_TOOLS,
    "audio": ": the Claude CLI speaks in text only; leave it out",
}  # fmt: skip

_FINISH_REASONS = {"max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "content_filter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(WireCall):
    include_usage: bool


def read(body: JSON, naming: Naming) -> ChatCall:
    """Read a body. Raises `InvalidRequest`, which names the field."""
    body = fields = Fields(body)
    if fields.given(CHECKED):
        _check(body)
    system, messages = read_messages(body.get("messages"))
    offered = read_tools(body) if body.get("tools") is not None else OfferedTools()
    chooses = fields.given(("tool_choice", "parallel_tool_calls"))
    effort, thinks, unread = _thinking(body) if fields.given(THINKING) else (None, None, ())
    names = OLDER if body.get("max_completion_tokens") is None else PARAMETERS
    stop = body.get("stop")
    response_format = optional(body, "response_format", dict)
    # A field of ours: the id of an earlier answer (`chatcmpl-…`) to continue, for hosts that bridge a stateful wire to
    # this one.
    previous = optional(body, "previous_response_id", str)
    request = naming.request(
        WIRE,
        body,
        model_name(body.get("model")),
        messages,
        system=system,
        effort=effort,
        options=TurnOptions(
            tools=offered.tools,
            tool_choice=read_choice(body, offered.tools) if chooses else ToolChoice(),
            stop=() if stop is None else stop_texts([stop] if isinstance(stop, str) else stop, "stop"),
            parameters=read_parameters(body, names, thinking=thinks),
            format=read_format(response_format, "response_format") if response_format else None,
        ),
        continues=None if previous is None else previous.removeprefix(ID_PREFIX),
        call={"custom": list(offered.custom)} if offered.custom else None,
    )
    options = optional(body, "stream_options", dict) or {}
    return ChatCall(
        request=request,
        stream=bool(optional(body, "stream", bool)),
        include_usage=bool(optional(options, "include_usage", bool, "stream_options")),
        parameters=PARAMETERS,
        ignored=(
            *offered.hosted,
            *fields.given(IGNORED),
            *(("store",) if optional(body, "store", bool) else ()),
            *(
                ("messages.name",)
                if any("name" in one and one["role"] == "assistant" for one in body["messages"])
                else ()
            ),
            *unread,
            *fields.unread(),
        ),
    )


def _thinking(body: Mapping[str, Any]) -> tuple[str | None, bool | None, tuple[str, ...]]:
    """(effort of the CLI, whether to think, fields without effect), from OpenAI's field, OpenRouter's `reasoning` or
    Anthropic's `thinking`."""
    reasoning, thinking = (Fields(optional(body, name, dict) or {}) for name in THINKING[1:])
    effort = one_of(body, THINKING[0], EFFORTS)
    if effort is None:
        effort = one_of(reasoning, "effort", EFFORTS, "reasoning")
    enabled = optional(reasoning, "enabled", bool, "reasoning")
    kind = optional(thinking, "type", str, "thinking")
    budget = optional(reasoning, "max_tokens", int, "reasoning")
    if budget is None:
        budget = optional(thinking, "budget_tokens", int, "thinking")
    unread = (*reasoning.unread("reasoning"), *thinking.unread("thinking"))
    if effort is not None:
        return EFFORTS[effort], effort != "none", unread
    if enabled is False or kind == "disabled":
        return None, False, unread
    asked = enabled or budget is not None or kind is not None
    return None if budget is None else effort_of_budget(budget), True if asked else None, unread


def _check(body: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for parameters that cannot be ignored, and for wrong types of those that are ignored."""
    n = optional(body, "n", int)
    if n is not None and n != 1:
        raise InvalidRequest("n must be 1: the Claude CLI gives one answer a turn; send the request again", param="n")
    refuse_logprobs(body)
    refuse(body, _REFUSED)
    if body.get("modalities") not in (None, ["text"]):
        raise InvalidRequest('modalities: only ["text"] is supported', param="modalities")
    check_types(body, _TYPES)


# --- messages, in the blocks of the Messages API ------------------------------------------------------------


def read_messages(messages: object) -> tuple[str | None, tuple[Message, ...]]:
    """(system, conversation). System and developer messages in front are the system prompt, joined in order; later
    ones stay where they are.

    Messages of one role in a row are not joined. An empty assistant message is kept, without blocks.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    instructions = Instructions()
    conversation: list[tuple[str, Message]] = []
    for where, role, message in by_role(messages):
        if role in ("system", "developer"):
            parts = _by_name(message, where, read_content(message, where, {"text": read_text}))
            instructions.place("".join(block["text"] for block in parts), where, conversation)
        elif role == "user":
            parts = without_blank_texts(read_content(message, where, _PARTS))
            conversation.append((where, Message("user", _by_name(message, where, parts))))
        elif role == "assistant":
            conversation.append((where, _assistant(message, where)))
        elif role == "tool":
            call_id = required(message, "tool_call_id", str, where)
            content = message.get("content")
            result = content if isinstance(content, str) else list(read_content(message, where, _PARTS))
            conversation.append((where, Message("user", (tool_result(call_id, result),))))
        else:
            raise InvalidRequest(
                f"{where}.role must be system, developer, user, assistant or tool", param=f"{where}.role"
            )
    instructions.use_as_prompt(conversation)
    checked = checked_conversation(conversation)
    checked_arguments(checked, "messages")
    return "\n\n".join(instructions.system) or None, checked


def _by_name(message: Part, where: str, parts: tuple[Block, ...]) -> tuple[Block, ...]:
    """The parts, preceded by the participant's name as text. A name equal to the role is left out.

    Not for assistant messages: their history would no longer match the stored answer.
    """
    name = optional(message, "name", str, where)
    if not name or name.casefold() == message["role"] or not parts:
        return parts
    first = parts[0]
    if first["type"] == "text":
        return ({"type": "text", "text": f"{name}: {first['text']}"}, *parts[1:])
    return ({"type": "text", "text": f"{name}:"}, *parts)


def _assistant(message: Part, where: str) -> Message:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise InvalidRequest(f"{where}.{name} is not supported; leave it out", param=f"{where}.{name}")
    blocks: tuple[Block, ...] = ()
    if message.get("content") is not None:
        blocks = read_content(message, where, {"text": read_text, "refusal": partial(read_text, name="refusal")})
    calls = optional(message, "tool_calls", list, where) or []
    uses = tuple(_tool_use(call, here) for here, call in objects(calls, f"{where}.tool_calls"))
    return Message("assistant", blocks + uses)


def _image_or_file(part: Part, where: str) -> Block:
    if part["type"] == "file":
        return read_file(required(part, "file", dict, where), f"{where}.file")
    image, here = required(part, "image_url", dict, where), f"{where}.image_url"
    return image_block(required(image, "url", str, here), f"{here}.url")


_PARTS: Mapping[str, Reader] = {"text": read_text, "image_url": _image_or_file, "file": _image_or_file}


def _tool_use(call: Part, where: str) -> Block:
    kind = call.get("type", "function")
    if kind not in ("function", "custom"):
        raise InvalidRequest(f"{where}.type must be function or custom", param=f"{where}.type")
    fields, here = required(call, kind, dict, where), f"{where}.{kind}"
    block: Block = {
        "type": "tool_use", "id": required(call, "id", str, where), "name": required(fields, "name", str, here),
    }  # fmt: skip
    if kind == "custom":
        return {**block, "input": {"input": optional(fields, "input", str, here) or ""}}
    return {**block, "input": arguments(optional(fields, "arguments", str, here), f"{here}.arguments")}


# --- answers ----------------------------------------------------------------------------------------------


def finish_reason(turn: Turn) -> str:
    if turn.status == "requires_action":
        return "tool_calls"
    return _FINISH_REASONS.get(turn.stop_reason or "", "stop")


def usage(turn: Turn) -> JSON:
    """OpenAI's usage: the prompt counts all tokens that the model read. `cost` (US dollars, or null) is ours."""
    used: Usage = turn.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.prompt_tokens + used.output_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cache_read_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": used.thinking_tokens, "audio_tokens": 0},
        "cost": turn.cost_usd,
    }


def completion(turn: Turn) -> JSON:
    """The `chat.completion` object of a committed turn."""
    text, thinking, calls = answer_text(turn.output), answer_text(turn.output, "thinking"), _tool_calls(turn)
    message: JSON = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": refusal_message(turn),
    }
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(turn)}
    return {
        "id": f"{ID_PREFIX}{turn.id}",
        "object": "chat.completion",
        "created": int(turn.created_at),
        "model": turn.reported_model,
        "choices": [choice],
        "usage": usage(turn),
    }


def model_info(name: str, since: int, by: str = "anthropic") -> JSON:
    """One entry of the models list. `since`: our start, because the CLI may map a name to any model."""
    return {"id": name, "object": "model", "created": since, "owned_by": by}


def model_list(models: list[JSON]) -> JSON:
    return {"object": "list", "data": models}


def _tool_calls(turn: Turn) -> list[JSON]:
    custom = (turn.call or {}).get("custom", ())
    calls: list[JSON] = []
    for block in calls_for_client(turn):
        name, given = block["name"], block["input"]
        call: JSON = {"id": block["id"], "type": "custom" if name in custom else "function"}
        if name in custom:
            call["custom"] = {"name": name, "input": str(given.get("input", ""))}
        else:
            call["function"] = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append(call)
    return calls


def writer(call: ChatCall, turn_id: str) -> ChunkWriter:
    """The stream of the answer to this call."""
    custom = (call.request.call or {}).get("custom", ())
    return ChunkWriter(turn_id, call.request.model, include_usage=call.include_usage, custom=custom)


class ChunkWriter(EventStream):
    """Converts a turn's events to server-sent `chat.completion.chunk`s. One for each stream.

    The bytes around a delta's text are made once, so that a chunk costs one `json.dumps` of its text.
    """

    def __init__(self, turn_id: str, model: str, *, include_usage: bool, custom: Collection[str] = ()) -> None:
        self._include_usage = include_usage
        self._custom = custom  # names of tools whose calls are sent in one piece at the end
        self._base: JSON = {
            "id": f"{ID_PREFIX}{turn_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._prefix = self._framed()
        no_usage = b',"usage":null' if include_usage else b""
        self._suffix = b'},"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        self._texts = SentTexts()
        self._begun = False
        self._calls: dict[int, int] = {}  # block -> call
        self._sent_calls: set[str] = set()  # their ids

    def _framed(self) -> dict[str, bytes]:
        """The bytes before a delta's text, by its kind."""
        head = b"data: " + json.dumps(self._base, separators=(",", ":")).encode()[:-1]
        return {
            kind: head + b',"choices":[{"index":0,"delta":{"' + name + b'":'
            for kind, name in (("text", b"content"), ("thinking", b"reasoning_content"))
        }

    def feed(self, event: TurnEvent) -> list[bytes]:
        """The bytes of this event; none for events without a form on this wire."""
        if isinstance(event, Started) and event.model not in (None, self._base["model"]):
            self._base["model"] = event.model  # another model answers instead
            self._prefix = self._framed()
        if isinstance(event, BlockDelta) and event.index in self._calls:
            arguments = {"arguments": event.delta.get("partial_json", "")}
            return [self._chunk({"tool_calls": [{"index": self._calls[event.index], "function": arguments}]})]
        if isinstance(event, BlockStart) and event.block.get("type") == "tool_use":
            if event.block["name"] in self._custom:
                return []
            number = self._calls[event.index] = len(self._calls)
            self._sent_calls.add(event.block["id"])
            function = {"name": event.block["name"], "arguments": ""}
            call = {"index": number, "id": event.block["id"], "type": "function", "function": function}
            return [*self._begin(), self._chunk({"tool_calls": [call]})]
        if isinstance(event, Finished):
            return self._end(event.turn)
        return self._text_chunk(*self._texts.piece(event))

    def error(self, error: ProxyError) -> list[bytes]:
        """The end of a failed stream: OpenAI's clients raise on it. No [DONE] follows."""
        return [sse(openai_error(error))]

    def _text_chunk(self, kind: str, text: str) -> list[bytes]:
        if not text:
            return []
        piece = self._prefix[kind] + json.dumps(text).encode() + self._suffix
        if self._begun:
            return [piece]
        return [*self._begin(), piece]

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return [self._chunk({"role": "assistant", "content": "", "refusal": None})]

    def _end(self, turn: Turn) -> list[bytes]:
        chunks = self._begin()
        for kind in ("thinking", "text"):
            chunks += self._text_chunk(kind, self._texts.rest(turn, kind))
        unsent = [call for call in _tool_calls(turn) if call["id"] not in self._sent_calls]
        calls = [{"index": at, **call} for at, call in enumerate(unsent, len(self._sent_calls))]
        if calls:
            chunks.append(self._chunk({"tool_calls": calls}))
        if (refusal := refusal_message(turn)) is not None:
            chunks.append(self._chunk({"refusal": refusal}))
        chunks.append(self._chunk({}, finish_reason(turn)))
        if self._include_usage:
            chunks.append(sse({**self._base, "choices": [], "usage": usage(turn)}))
        return [*chunks, SSE_DONE]

    def _chunk(self, delta: JSON, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        extra: JSON = {"usage": None} if self._include_usage else {}
        return sse({**self._base, "choices": [choice], **extra})
