"""OpenAI Responses: read a body, write a Response. Pure, no I/O.

    POST /v1/responses ─ read() ─▶ ResponsesCall ─ dialogues ─▶ the engine ─▶ response() or ResponsesWriter

A response is a turn, with the turn's id: `turn_abc` is `resp_abc`. Data that the chain does not have (metadata,
`store`, echoed parameters) is in the turn's `call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...domain.models import JSON, Status, Turn, TurnOptions, Usage
from ...domain.structured import read_format
from ...errors import InvalidRequest
from .. import common
from ..common import KeptCall, Naming
from ..fields import (
    NUMBER,
    Fields,
    Names,
    check_types,
    model_name,
    one_of,
    optional,
    read_parameters,
    required,
    wrong_type,
)
from ..openai import EFFORTS, read_choice
from . import items as responses_items
from . import tools as responses_tools
from .tools import ParsedTools

WIRE = "responses"

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
IGNORED = (
    "max_tool_calls", "truncation", "service_tier", "top_logprobs", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier",
)  # fmt: skip
# By our name of a parameter, the field that has it.
PARAMETERS: Names = {
    "max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p", "thinking": "reasoning.effort",
    "tool_choice": "tool_choice",
}  # fmt: skip
_TYPES = {
    NUMBER: ("temperature", "top_p", "max_output_tokens", "max_tool_calls", "top_logprobs"),
    str: (
        "instructions", "previous_response_id", "truncation", "service_tier", "prompt_cache_key", "safety_identifier",
        "user",
    ),
    bool: ("stream", "background", "store", "parallel_tool_calls"), dict: ("stream_options",),
}  # fmt: skip

# Values in a Response for parameters that were not sent or have no effect: OpenAI's defaults. Strict clients need every
# field.
DEFAULTS: JSON = {
    "temperature": 1.0, "top_p": 1.0, "max_output_tokens": None, "max_tool_calls": None, "parallel_tool_calls": True,
    "tool_choice": "auto", "truncation": "disabled", "service_tier": "default", "top_logprobs": 0,
    "prompt_cache_key": None, "safety_identifier": None, "user": None, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "instructions": None, "metadata": {},
}  # fmt: skip
# The body's fields that the Response repeats as they were sent; those for the model only if it used them.
_SAMPLED = ("temperature", "top_p", "max_output_tokens")
_ECHOED = (
    *_SAMPLED, "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user", "instructions", "metadata",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"

METADATA_PAIRS = 16
# The `text.verbosity` that every Response reports: others have no effect.
VERBOSITY = "medium"
_STATUSES: dict[Status, str] = {
    "queued": "queued", "running": "in_progress", "completed": "completed", "requires_action": "completed",
    "refused": "incomplete", "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
_INCOMPLETE = {
    "max_tokens": "max_output_tokens", "model_context_window_exceeded": "max_output_tokens",
    "refusal": "content_filter",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(KeptCall):
    """A parsed body. `composing` completes its request with the conversation's items.

    `system`: system texts in its input. `conversation`: a conversation's id. `client`: the client program.
    """

    system: tuple[str, ...]
    instructions: str | None
    conversation: str | None
    client: str


def read(body: JSON, naming: Naming) -> ResponsesCall:
    """Parse a body. Raises `InvalidRequest`, which names the field."""
    body = fields = Fields(body)
    if body.get("prompt") is not None:
        raise InvalidRequest("prompt: templates are not kept here; send instructions and input", param="prompt")
    check_types(body, _TYPES)
    if _LOGPROBS in (optional(body, "include", list) or []):
        raise InvalidRequest(f"include: {_LOGPROBS}: the Claude CLI gives none; leave it out", param="include")
    checked_metadata(body.get("metadata"))
    if body.get("background") and body.get("store") is False:
        raise InvalidRequest("background needs store: a response that is not kept cannot be asked for", param="store")
    previous, conversation = body.get("previous_response_id"), body.get("conversation")
    if isinstance(conversation, dict):
        conversation = required(conversation, "id", str, "conversation")
    elif not (conversation is None or isinstance(conversation, str)):
        raise wrong_type("conversation", "an id or an object with an id")
    if previous is not None and conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation are mutually exclusive: send one of them",
            param="previous_response_id",
        )
    given = body.get("input")
    parsed = responses_items.Input((), ()) if given is None else responses_items.read(given, references=True)
    offered = responses_tools.read(body, responses_items.tools_in(given))
    text = Fields(optional(body, "text", dict) or {})
    reasoning = Fields(optional(body, "reasoning", dict) or {})
    text_format: JSON = optional(text, "format", dict, "text") or {"type": "text"}
    effort = one_of(reasoning, "effort", EFFORTS, "reasoning")
    summary = optional(reasoning, "summary", str, "reasoning")
    if summary not in (None, "auto", "concise", "detailed", "none"):
        raise InvalidRequest("reasoning.summary must be auto, concise, detailed or none", param="reasoning.summary")
    request = naming.request(
        WIRE,
        body,
        model_name(body.get("model")),
        parsed.messages,
        keep_system=False,
        effort=None if effort is None else EFFORTS[effort],
        options=TurnOptions(
            format=read_format(text_format, "text.format"),
            tools=offered.tools,
            tool_choice=read_choice(responses_tools.choice(body), offered.tools),
            parameters=read_parameters(body, PARAMETERS, thinking=None if effort is None else effort != "none"),
        ),
        call=_call(body, text_format, reasoning, parsed.system, conversation, offered),
    )
    return ResponsesCall(
        request=request,
        parameters=PARAMETERS,
        system=parsed.system,
        instructions=body.get("instructions"),
        previous=previous,
        conversation=conversation,
        stream=bool(body.get("stream")),
        client=naming.client,
        ignored=(
            *offered.ignored,
            *fields.given(IGNORED),
            *(("include",) if body.get("include") else ()),
            *(("text.verbosity",) if text.get("verbosity") not in (None, VERBOSITY) else ()),
            *text.unread("text"),
            *reasoning.unread("reasoning"),
            *fields.unread(),
        ),
    )


def _call(
    body: JSON,
    format: JSON,
    reasoning: JSON,
    system: tuple[str, ...],
    conversation: str | None,
    offered: ParsedTools,
) -> JSON:
    """The data that is stored with the turn. Names of our own: `wire`, `store`, `background`, `system_sent`,
    `shapes`."""
    echo = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    if isinstance(body.get("tool_choice"), str | dict):
        echo["tool_choice"] = body["tool_choice"]
    return {
        "wire": WIRE,
        "store": body.get("store") is not False,
        "background": bool(body.get("background")),
        "previous_response_id": body.get("previous_response_id"),
        "conversation": conversation,
        "system_sent": list(system),
        "echo": echo,
        **offered.kept,
        "format": format,
        "reasoning": {
            "effort": reasoning.get("effort"),
            # the Response's type has no "none"
            "summary": None if reasoning.get("summary") == "none" else reasoning.get("summary"),
        },
    }


def checked_metadata(value: object) -> JSON:
    """Valid metadata: up to 16 pairs of texts. Raises `InvalidRequest`."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise wrong_type("metadata", "an object of strings")
    if len(value) > METADATA_PAIRS:
        raise InvalidRequest(f"metadata takes at most {METADATA_PAIRS} pairs", param="metadata")
    return value


# --- ids --------------------------------------------------------------------------------------------------


def response_id(turn_id: str) -> str:
    return f"resp_{responses_items.hex_of(turn_id)}"


turn_id_of = partial(common.turn_id_in, prefix="resp_")


# --- answers ----------------------------------------------------------------------------------------------


status_of = partial(common.status_of, names=_STATUSES)


def response(turn: Turn, status: str | None = None) -> JSON:
    """The Response of a turn in its present state, with all fields. `status`: show an earlier status."""
    call = turn.call or {}
    status = status or status_of(turn)
    ended = status in ("completed", "incomplete")
    echo = {**DEFAULTS, **call.get("echo", {})}
    for name in common.own_names(PARAMETERS, turn.evidence.unmet):
        if name in _SAMPLED:
            echo[name] = DEFAULTS[name]
    reason = _INCOMPLETE.get(turn.stop_reason or "") if status == "incomplete" else None
    incomplete = None if reason is None else {"reason": reason}
    if incomplete is not None and (words := common.refusal_message(turn)) is not None:
        incomplete["message"] = words  # our own field: the provider's message
    text_format = call.get("format", {"type": "text"})
    if text_format.get("type") == "json_schema":
        inner = text_format if "schema" in text_format else text_format.get("json_schema", {})
        text_format = {
            "type": "json_schema", "name": inner.get("name") or "output", "schema": inner.get("schema"),
            "strict": inner.get("strict"), "description": inner.get("description"),
        }  # fmt: skip
    else:
        text_format = {"type": text_format.get("type", "text")}
    conversation = call.get("conversation")
    return {
        "id": response_id(turn.id),
        "object": "response",
        "created_at": int(turn.created_at),
        "completed_at": int(turn.finished_at) if status == "completed" and turn.finished_at else None,
        "status": status,
        "background": turn.in_background,
        # With our own code, as on every wire: OpenAI's clients accept any, although their types have a fixed list.
        "error": common.failure(turn) if status == "failed" else None,
        "incomplete_details": incomplete,
        "model": turn.reported_model,
        "output": [entry.item for entry in responses_items.output_entries(turn)] if ended else [],
        "previous_response_id": call.get("previous_response_id"),
        "conversation": None if conversation is None else {"id": conversation},
        "reasoning": call.get("reasoning", {"effort": None, "summary": None}),
        "store": call.get("store", True),
        "text": {"format": text_format, "verbosity": VERBOSITY},
        "tools": call.get("tools", []),
        "usage": usage(turn.usage) if ended else None,
        **echo,
    }


def usage(used: Usage) -> JSON:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": used.cache_read_tokens, "cache_write_tokens": used.cache_write_tokens,
        },
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"reasoning_tokens": used.thinking_tokens},
        "total_tokens": used.prompt_tokens + used.output_tokens,
    }  # fmt: skip


def deleted(response: str) -> JSON:
    return {"id": response, "object": "response", "deleted": True}
