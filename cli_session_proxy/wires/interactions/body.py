"""Google's Interactions: read a body, write an interaction. Pure, no I/O.

    POST /{v1|v1beta}/interactions ─ read() ─▶ KeptCall ─▶ the engine ─▶ interaction() or InteractionsWriter

An interaction is a turn, with the turn's id: `turn_abc` is `interaction_abc`. Data that the chain does not have
(`store`, `background`, whether to show thinking) is in the turn's `call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ... import redact
from ...domain import times
from ...domain.models import JSON, Status, Tool, ToolChoice, Turn, TurnOptions, Usage
from ...domain.structured import checked_schema
from ...errors import InvalidRequest, ProxyError
from .. import common
from ..common import KeptCall, Naming
from ..fields import (
    Fields,
    Names,
    check_types,
    one_of,
    optional,
    read_parameters,
    refuse,
    required,
    stop_texts,
    wrong_type,
)
from ..google import checked_mode, checked_model
from ..openai import read_tools
from . import steps as interactions_steps

WIRE = "interactions"

# google-genai 3.4, ThinkingLevel → the CLI's efforts.
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh"}

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
IGNORED = ("safety_settings", "service_tier", "labels", "webhook_config")

PARAMETERS: Names = {
    "max_tokens": "generation_config.max_output_tokens", "temperature": "generation_config.temperature",
    "top_p": "generation_config.top_p", "thinking": "generation_config.thinking_level",
    "tool_choice": "generation_config.tool_choice", "seed": "generation_config.seed",
}  # fmt: skip
_TYPES = {
    str: ("system_instruction", "previous_interaction_id", "response_mime_type"),
    bool: ("stream", "background", "store"), dict: ("generation_config",),
}  # fmt: skip
_REFUSED = dict.fromkeys(("cached_content", "continuation_token", "environment"), ": there is none here; leave it out")
_STATUSES: dict[Status, str] = {
    "queued": "queued", "running": "in_progress", "completed": "completed", "requires_action": "requires_action",
    "refused": "incomplete", "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip


def read(body: JSON, naming: Naming) -> KeptCall:
    """Read a body. Raises `InvalidRequest`, which names the field."""
    body = fields = Fields(body)
    check_types(body, _TYPES)
    if body.get("background") and body.get("store") is False:
        raise InvalidRequest(
            "background needs store: an interaction that is not kept cannot be asked for", param="store"
        )
    if body.get("agent") is not None and body.get("model") is None:
        raise InvalidRequest("agent: Google's agents are not here; name a model of the CLI in `model`", param="agent")
    refuse(body, _REFUSED)
    modalities = optional(body, "response_modalities", list)
    if modalities and [str(one).lower() for one in modalities] != ["text"]:
        raise InvalidRequest('response_modalities: only ["text"] is supported', param="response_modalities")
    config = Fields(optional(body, "generation_config", dict) or {})
    previous = body.get("previous_interaction_id")
    system = body.get("system_instruction") or None
    offered = read_tools(body)
    request = naming.request(
        WIRE,
        body,
        checked_model(required(body, "model", str)),
        interactions_steps.read(body.get("input")),
        system=system if system and system.strip() else None,
        # By Google's documentation each interaction has its own instruction: an id keeps only the conversation.
        keep_system=previous is None,
        effort=EFFORTS.get(one_of(config, "thinking_level", EFFORTS, "generation_config") or ""),
        options=TurnOptions(
            format=_format(body),
            tools=offered.tools,
            tool_choice=_read_choice(config, offered.tools),
            stop=stop_texts(config.get("stop_sequences") or [], "generation_config.stop_sequences"),
            parameters=read_parameters(config, PARAMETERS, thinking=True if config.get("thinking_level") else None),
        ),
        # Stored with the turn. `wire`, `store` and `background` are named as on the wire `responses`.
        call={
            "wire": WIRE,
            "store": body.get("store") is not False,
            "background": bool(body.get("background")),
            "previous_interaction_id": previous,
            "system_instruction": body.get("system_instruction"),
            "summaries": config.get("thinking_summaries") == "auto",
        },
    )
    return KeptCall(
        request=request,
        parameters=PARAMETERS,
        previous=previous,
        stream=bool(body.get("stream")),
        ignored=(
            *offered.hosted,
            *fields.given(IGNORED),
            *config.unread("generation_config"),
            *fields.unread(),
        ),
    )


def _format(body: JSON) -> JSON | None:
    """`response_format`: one or several formats or, as in the API's first version, a JSON Schema."""
    wanted = body.get("response_format")
    if wanted is None:
        return {"schema": None} if body.get("response_mime_type") == "application/json" else None
    one = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
    if not isinstance(one, dict):
        raise InvalidRequest("response_format must be one format", param="response_format")
    if one.get("type") in ("audio", "image", "video"):
        raise InvalidRequest("response_format: the Claude CLI answers in text only", param="response_format.type")
    if one.get("type") != "text":
        return {"schema": checked_schema(one, "response_format")}
    if one.get("mime_type") in (None, "text/plain"):
        return None
    schema = one.get("schema")
    return {"schema": None if schema is None else checked_schema(schema, "response_format.schema")}


def _read_choice(config: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """`generation_config.tool_choice`: a mode, or `{"allowed_tools": {mode, tools}}`."""
    where = "generation_config.tool_choice"
    choice = config.get("tool_choice")
    if choice is None or isinstance(choice, str):
        return checked_mode((choice or "auto").upper(), None, tools, where)
    if not isinstance(choice, dict):
        raise wrong_type(where, "a string or an object")
    inner = optional(choice, "allowed_tools", dict, "tool_choice") or {}
    names = optional(inner, "tools", list, "tool_choice.allowed_tools")
    return checked_mode(str(inner.get("mode") or "auto").upper(), names, tools, where)


# --- ids --------------------------------------------------------------------------------------------------


def interaction_id(turn_id: str) -> str:
    return f"interaction_{turn_id.removeprefix('turn_')}"


turn_id_of = partial(common.turn_id_in, prefix="interaction_")


# --- answers ----------------------------------------------------------------------------------------------


status_of = partial(common.status_of, names=_STATUSES)


def interaction(turn: Turn, *, include_input: bool = False) -> JSON:
    """The Interaction of a turn in its present state."""
    call = turn.call or {}
    status = status_of(turn)
    shown: JSON = {
        **head(turn, status),
        "updated": times.utc(turn.finished_at or turn.started_at or turn.created_at),
        "steps": interactions_steps.output_steps(turn, summaries=call.get("summaries", False)),
        "usage": usage(turn.usage),
    }
    for name in ("previous_interaction_id", "system_instruction"):
        if call.get(name) is not None:
            shown[name] = call[name]
    if include_input:
        shown["input"] = interactions_steps.input_steps(turn)
    if (words := common.refusal_message(turn)) is not None:
        shown["errors"] = [{"code": "refused", "message": redact.text(words)}]
    if status == "failed":
        shown["errors"] = [common.failure(turn)]
    return shown


def head(turn: Turn, status: str) -> JSON:
    """The fields that an interaction has from its beginning."""
    return {
        "id": interaction_id(turn.id), "object": "interaction", "status": status, "model": turn.reported_model,
        "created": times.utc(turn.created_at),
    }  # fmt: skip


def usage(used: Usage) -> JSON:
    """Google's usage: the input counts all tokens that the model read; thinking is counted separately."""
    return {
        "total_input_tokens": used.prompt_tokens,
        "total_cached_tokens": used.cache_read_tokens,
        "total_output_tokens": max(0, used.output_tokens - used.thinking_tokens),
        "total_thought_tokens": used.thinking_tokens,
        "total_tool_use_tokens": 0,
        "total_tokens": used.prompt_tokens + used.output_tokens,
    }


def error_body(error: ProxyError) -> JSON:
    """An error in Google's format for interactions. `code`: our stable code, a text."""
    return {"error": {"code": error.code, "message": redact.text(error.message)}}
