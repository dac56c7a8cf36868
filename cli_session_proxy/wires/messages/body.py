"""Anthropic's Messages API: read a body, write a message. Pure, no I/O.

    POST /v1/messages               ─ read() ─▶ WireCall ─▶ the engine ─▶ message() or MessagesWriter
    POST /v1/messages/count_tokens  ─ count()

Message threads (beta `message-threads-2026-08-12`) are not supported: a chain is found by its history. A request that
continues a thread gets the error after which Anthropic's own client sends the whole conversation again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import redact
from ...domain import times
from ...domain.blocks import as_stream
from ...domain.models import (
    JSON,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Finished,
    Started,
    Turn,
    TurnEvent,
    TurnOptions,
    Usage,
)
from ...domain.structured import read_format
from ...errors import InvalidRequest, NotFound, ProxyError
from ..base import ErrorShape
from ..blocks import effort_of_budget, estimated_tokens
from ..common import Naming, WireCall, calls_for_client, refusal_message
from ..fields import (
    MODEL_PREFIXES,
    Fields,
    Names,
    model_name,
    one_of,
    optional,
    read_parameters,
    required,
    stop_texts,
    wrong_type,
)
from ..schemas import TEXT, error_schema
from ..streams import EventStream, sse_event
from . import content as messages_content
from .tools import read_choice, read_tools

WIRE = "messages"

# anthropic 2.11: output_config.effort; the same names as the CLI's (`--effort`, --help of 2.1.329).
EFFORTS = ("low", "medium", "high", "xhigh", "max")

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
IGNORED = ("service_tier", "inference_geo", "container", "context_management", "speed", "diagnostics")

PARAMETERS: Names = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "thinking": "thinking", "tool_choice": "tool_choice",
}  # fmt: skip
_STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "pause_turn", "refusal", "model_context_window_exceeded")
# Blocks for the client. Calls of the CLI's own tools are not among them.
_ANSWER_KINDS = ("text", "thinking", "redacted_thinking")


def read(body: JSON, naming: Naming) -> WireCall:
    """Read a body. Raises `InvalidRequest`, which names the field; `NotFound` for a thread."""
    body = fields = Fields(body)
    max_tokens = required(body, "max_tokens", int)
    # Only the types of these two are checked: the CLI uses the cache by itself.
    optional(body, "metadata", dict)
    optional(body, "cache_control", dict)
    if (optional(body, "thread", dict) or {}).get("type") == "continue":
        raise NotFound(
            "message threads are not kept here: send the whole conversation, its history is recognised",
            param="thread.previous_message_id",
            detail={"error_code": "thread_not_found"},
        )
    if optional(body, "mcp_servers", list):
        raise InvalidRequest(
            "mcp_servers: give the agent servers by a profile in the settings instead", param="mcp_servers"
        )
    unread: list[str] = []
    system, messages = messages_content.read(body, ignored=unread)
    tools, hosted = read_tools(body)
    thinking = optional(body, "thinking", dict) or {}
    kind, budget = optional(thinking, "type", str, "thinking"), optional(thinking, "budget_tokens", int, "thinking")
    if budget is not None and budget >= max_tokens and not tools:  # with tools a budget may be for several answers
        raise InvalidRequest(
            "max_tokens must be greater than thinking.budget_tokens: the budget is a part of it",
            param="thinking.budget_tokens",
        )
    effort = one_of(optional(body, "output_config", dict) or {}, "effort", EFFORTS, "output_config")
    thinks = None if kind is None and effort is None else kind not in ("disabled", "between_tools")
    if effort is None and budget is not None:
        effort = effort_of_budget(budget)
    request = naming.request(
        WIRE,
        body,
        model_name(body.get("model")),
        messages,
        system=system,
        effort=effort,
        options=TurnOptions(
            format=_format(body),
            tools=tools,
            tool_choice=read_choice(body, tools),
            stop=stop_texts(body.get("stop_sequences") or [], "stop_sequences"),
            parameters=read_parameters(body, PARAMETERS, thinking=thinks),
        ),
    )
    return WireCall(
        request=request,
        parameters=PARAMETERS,
        stream=bool(optional(body, "stream", bool)),
        ignored=(*hosted, *fields.given(IGNORED), *dict.fromkeys(unread), *fields.unread()),
    )


def count(body: JSON, naming: Naming) -> JSON:  # noqa: ARG001 - every `read` of a body takes both
    """The answer of count_tokens: an estimate (`blocks.estimated_tokens`)."""
    tools, _ = read_tools(body)
    model_name(body.get("model"))  # raises for an invalid name
    return {"input_tokens": estimated_tokens(*messages_content.read(body, answered=False), tools)}


def _format(body: Mapping[str, Any]) -> JSON | None:
    """The format in `output_config.format`, else in the beta's `output_format`; None without one."""
    config = optional(body, "output_config", dict) or {}
    for where, wanted in (("output_config.format", config.get("format")), ("output_format", body.get("output_format"))):
        if wanted is not None and not isinstance(wanted, dict):
            raise wrong_type(where, "an object")
        if wanted is not None:
            return read_format(wanted, where)
    return None


# --- errors -----------------------------------------------------------------------------------------------

# anthropic 2.11, types/shared/error_type.py, which has no type for 405 and 499.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
    499: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: ProxyError, request_id: str) -> JSON:
    """`{"type": "error", "error": {type, message, details}, "request_id"}`."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    details: JSON = {"error_code": error.detail.get("error_code", error.code)}
    if error.param is not None:
        details["param"] = error.param
    body = {"type": kind, "message": redact.text(error.message), "details": details}
    return {"type": "error", "error": body, "request_id": request_id}


ANTHROPIC = ErrorShape(
    "anthropic",
    anthropic_error,
    error_schema(
        {"type": TEXT, "message": TEXT, "details": {"type": "object"}}, type={"const": "error"}, request_id=TEXT
    ),
)


# --- answers ----------------------------------------------------------------------------------------------


def message_id(turn_id: str) -> str:
    return f"msg_{turn_id.removeprefix('turn_')}"


def message(turn: Turn) -> JSON:
    """The `message` object of a committed turn."""
    kinds = (*_ANSWER_KINDS, "tool_use") if turn.status == "requires_action" else _ANSWER_KINDS
    return {
        **_head(turn.id, turn.reported_model),
        "container": None,
        "content": [_whole(block) for block in turn.output if block.get("type") in kinds],
        "stop_reason": stop_reason(turn),
        "stop_sequence": turn.stop_sequence,
        "stop_details": _stop_details(turn),
        "usage": usage(turn.usage),
    }


def stop_reason(turn: Turn) -> str:
    if turn.status == "requires_action":
        return "tool_use"
    return turn.stop_reason if turn.stop_reason in _STOP_REASONS else "end_turn"


def _stop_details(turn: Turn) -> JSON | None:
    """The details of a refusal, in Anthropic's form."""
    words, refusal = refusal_message(turn), turn.evidence.refusal
    if words is None or refusal is None:
        return None
    return {"type": "refusal", "category": refusal.category, "explanation": words}


def usage(used: Usage) -> JSON:
    """Anthropic's usage. As in the chain, `input_tokens` excludes the cache."""
    return {
        "input_tokens": used.input_tokens,
        "cache_creation_input_tokens": used.cache_write_tokens,
        "cache_read_input_tokens": used.cache_read_tokens,
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"thinking_tokens": used.thinking_tokens},
        "cache_creation": {
            "ephemeral_5m_input_tokens": used.cache_write_tokens, "ephemeral_1h_input_tokens": 0,
        },
        "service_tier": "standard",
        "inference_geo": None,
        "server_tool_use": None,
    }  # fmt: skip


def model_info(name: str, since: int, by: str = "anthropic") -> JSON:  # noqa: ARG001 - every wire's entry takes all three
    """One entry of the models list. `since`: our start, because the CLI may map a name to any model."""
    return {
        "id": name, "type": "model", "display_name": name.capitalize(), "created_at": times.utc(since),
        "lifecycle": "active", "max_input_tokens": None, "max_tokens": None, "capabilities": None,
    }  # fmt: skip


def model_list(models: list[JSON]) -> JSON:
    """The list. Claude Code only keeps ids with `claude` or `anthropic`: each model is also listed under such an id."""
    unseen = [model for model in models if "claude" not in model["id"]]
    models = [*models, *({**model, "id": f"{MODEL_PREFIXES[0]}{model['id']}"} for model in unseen)]
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}


def _head(turn_id: str, model: str) -> JSON:
    return {
        "id": message_id(turn_id), "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None, "stop_details": None,
    }  # fmt: skip


# Fields that Anthropic's types require and the CLI's blocks may lack: its placeholders for thinking have no signature.
# A text without citations has no `citations`, as in Anthropic's own answers.
_REQUIRED: Mapping[str, JSON] = {
    "thinking": {"signature": ""}, "tool_use": {"caller": {"type": "direct"}},
}  # fmt: skip


def _whole(block: Block) -> Block:
    return {**block, **{name: value for name, value in _REQUIRED.get(block["type"], {}).items() if name not in block}}


def writer(call: WireCall, turn_id: str) -> MessagesWriter:
    """The stream of the answer to this call."""
    return MessagesWriter(turn_id, call.request.model, call.request.request_id or "")


class MessagesWriter(EventStream):
    """Converts a turn's events to server-sent events, in Anthropic's documented order. One for each stream.

    Blocks get new indices, because a turn's indices may have gaps.
    """

    def __init__(self, turn_id: str, model: str, request_id: str) -> None:
        self._turn_id = turn_id
        self._model = model
        self._request_id = request_id
        self._indices: dict[int, int] = {}
        self._begun = False
        self._next = 0
        self._calls: set[str] = set()  # ids of the sent ones

    def feed(self, event: TurnEvent) -> list[bytes]:
        """The bytes of this event; none for events without a form on this wire."""
        if isinstance(event, Started):
            self._model = event.model or self._model
        if isinstance(event, BlockStart) and event.block.get("type") in (*_ANSWER_KINDS, "tool_use"):
            self._calls.add(str(event.block.get("id")))
            index = self._indices[event.index] = self._next
            self._next += 1
            block = _whole(event.block)
            return [*self._begin(), _event("content_block_start", index=index, content_block=block)]
        if isinstance(event, BlockDelta) and event.index in self._indices:
            return [_event("content_block_delta", index=self._indices[event.index], delta=event.delta)]
        if isinstance(event, BlockStop) and event.index in self._indices:
            return [_event("content_block_stop", index=self._indices.pop(event.index))]
        if isinstance(event, Finished):
            return self._end(event.turn)
        return []

    def error(self, error: ProxyError) -> list[bytes]:
        """The end of a failed stream: Anthropic's client raises on it."""
        return [sse_event("error", anthropic_error(error, self._request_id))]

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        # The CLI reports the input tokens only with the result: message_delta has the true numbers.
        return [_event("message_start", message={**_head(self._turn_id, self._model), "usage": usage(Usage())})]

    def _end(self, turn: Turn) -> list[bytes]:
        events = self._begin()
        if self._next == 0:  # a CLI without partial messages
            blocks = (block for block in turn.output if block.get("type") in _ANSWER_KINDS)
            events += [piece for block in blocks for piece in self._block(block)]
        calls = calls_for_client(turn)
        events += [piece for block in calls if block["id"] not in self._calls for piece in self._block(block)]
        delta: JSON = {"stop_reason": stop_reason(turn), "stop_sequence": turn.stop_sequence}
        delta["stop_details"] = _stop_details(turn)
        return [*events, _event("message_delta", delta=delta, usage=usage(turn.usage)), _event("message_stop")]

    def _block(self, block: Block) -> list[bytes]:
        """The events of a complete block."""
        opening, deltas = as_stream(_whole(block))
        index = self._next
        self._next += 1
        return [
            _event("content_block_start", index=index, content_block=opening),
            *(_event("content_block_delta", index=index, delta=delta) for delta in deltas),
            _event("content_block_stop", index=index),
        ]


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event(kind, {"type": kind, **fields})
