"""A turn as spans, from its stored timings, tools, usage and evidence. Pure.

    invoke_agent ada            the turn, from its acceptance until it is stored
    ├── queue                   until its lane, its lease and a slot were free
    ├── session                 until a process held the path: started, repaired or warm
    ├── chat claude-…           the model, until its answer was whole; `first_block` is an event
    │   └── execute_tool Bash   each call of one of the CLI's own tools
    └── commit                  until it was stored

Names are from OpenTelemetry's semantic conventions for generative AI 1.41.0, the last version that was published
together with the other conventions (`SCHEMA`). Other names are below `cli_session_proxy`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import redact
from ..domain.evidence import tool_calls
from ..domain.models import ANSWERED, JSON, REPAIR_REASONS, Block, Link, Message, Turn
from ..engine.live import Requested
from ..settings import ModelSettings

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
OWN = "cli_session_proxy"
# The most characters of one text, and of all texts of a turn in one direction, with `otel.content`.
LONGEST_TEXT, LONGEST = 8_000, 64_000

# LiteLLM's names of providers, mapped to the names of the conventions if these differ.
_PROVIDERS: Mapping[str, str] = {
    "gemini": "gcp.gemini", "vertex_ai": "gcp.vertex_ai", "azure": "azure.ai.openai", "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock", "mistral": "mistral_ai", "xai": "x_ai", "watsonx": "ibm.watsonx.ai",
}  # fmt: skip

Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are seconds since 1970. `error`: the error code. `events`: names and times."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    kind: Literal["internal", "client"] = "internal"
    error: str | None = None
    events: tuple[tuple[str, float], ...] = ()
    children: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """The data for metrics. `seconds`: the model's time; None if it was not asked."""

    attributes: Mapping[str, Value]
    seconds: float | None
    input_tokens: int
    output_tokens: int
    error: str | None


def of_turn(
    turn: Turn,
    links: Sequence[Link],
    requested: Requested,
    at: float,
    models: Mapping[str, ModelSettings],
    *,
    words: bool,
) -> tuple[Span, Operation]:
    """The turn's spans, as a tree, and its data for metrics.

    `at`: when it was stored. `words`: include the texts of the conversation, without secrets.
    """
    error = None if turn.status in ANSWERED else str((turn.error or {}).get("code") or turn.status)
    provider = "anthropic"  # for the CLI, as the proxy does not know better
    configured = models.get(turn.reported_model)
    if configured is not None and turn.backend in (None, "litellm"):
        provider = _PROVIDERS.get(configured.provider, configured.provider)
    model = _known({
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": turn.model,
        "gen_ai.response.model": turn.answered_by,
    })  # fmt: skip
    common = _known({
        **model,
        "gen_ai.conversation.id": requested.agent_id,
        "gen_ai.response.finish_reasons": [turn.stop_reason] if turn.stop_reason else None,
        "gen_ai.usage.input_tokens": turn.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": turn.usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": turn.usage.cache_write_tokens,
        "error.type": error,
    })  # fmt: skip
    if words:
        common |= _words(turn)
    start, end = requested.accepted_at, max(at, requested.accepted_at)
    reached = {
        step: min(end, start + millis / 1000)
        for step, millis in turn.timings.items()
        if isinstance(millis, int | float) and millis >= 0
    }
    chat: Span | None = None
    if "session_ready" in reached:
        first = reached.get("first_block")
        chat = Span(
            f"chat {turn.model}",
            reached["session_ready"],
            max(reached["session_ready"], reached.get("result", end)),
            {"gen_ai.operation.name": "chat", **common},
            "client",
            None if "result" in reached else error,
            () if first is None else (("first_block", first),),
            tuple(_tools(turn, end)),
        )
    steps: list[Span] = []
    if "queued" in reached:
        steps.append(Span("queue", start, reached["queued"]))
    if "session_ready" in reached and "queued" in reached:
        steps.append(Span("session", reached["queued"], reached["session_ready"], _session(turn, links)))
    if chat is not None:
        steps.append(chat)
    if "committed" in reached:
        steps.append(Span("commit", reached.get("result", reached["committed"]), end))
    if error is not None and steps and chat is None:  # it failed in the next step
        steps.append(Span("session" if "queued" in reached else "queue", steps[-1].end, end, error=error))
    operation = Operation(
        {"gen_ai.operation.name": "chat", **model},
        None if chat is None else chat.end - chat.start,
        turn.usage.prompt_tokens,
        turn.usage.output_tokens,
        error,
    )
    root = Span(
        f"invoke_agent {requested.agent_id}",
        start,
        end,
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": requested.agent_id,
            **common,
            **_of_proxy(turn, links, requested, reached),
        },
        error=error,
        children=tuple(steps),
    )
    return root, operation


def _of_proxy(
    turn: Turn, links: Sequence[Link], requested: Requested, reached: Mapping[str, float]
) -> dict[str, Value]:
    called = [str(block.get("name")) for block in turn.output if block.get("type") == "tool_use"]
    own = {
        "request_id": requested.request_id,
        "key": requested.owner,
        "turn.id": turn.id,
        "turn.parent_id": turn.parent_id,
        "turn.status": turn.status,
        "wire": turn.origin,
        "profile": turn.profile,
        "backend": turn.backend,
        "session.id": turn.session_id,
        "cost_usd": turn.cost_usd,
        "thinking_tokens": turn.usage.thinking_tokens or None,
        "queue_seconds": round(reached["queued"] - requested.accepted_at, 4) if "queued" in reached else None,
        "attempts": sum("frame_uuid" in one for one in turn.attempts),
        "retries": len(turn.evidence.retries),
        "tools": list(dict.fromkeys([*(call.name for call in tool_calls(turn.tools)), *called])) or None,
        "fallback.asked": None if turn.fallback is None else turn.fallback.asked,
        "fallback.why": None if turn.fallback is None else turn.fallback.why,
    }
    return {f"{OWN}.{name}": value for name, value in _known(own).items()} | _session(turn, links)


def _session(turn: Turn, links: Sequence[Link]) -> dict[str, Value]:
    """How a process that holds the path was found or prepared."""
    repaired = [link for link in links if link.reason in REPAIR_REASONS]
    own = {
        "continuity": turn.continuity,
        "repaired": bool(repaired) or turn.evidence.repaired is not None,
        "repair.reason": repaired[-1].reason if repaired else None,
        "repair.found": str(repaired[-1].detail["found"]) if repaired and "found" in repaired[-1].detail else None,
    }
    return {f"{OWN}.{name}": value for name, value in _known(own).items()}


def _tools(turn: Turn, end: float) -> Iterable[Span]:
    for call in tool_calls(turn.tools):
        yield Span(
            f"execute_tool {call.name}",
            min(call.began, end),
            min(end if call.ended is None else call.ended, end),
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": call.name,
                "gen_ai.tool.call.id": call.id,
                "gen_ai.tool.type": "extension",
            },
            error="tool_error" if call.failed else None,
        )


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


# --- texts of the conversation, with `otel.content`


def _words(turn: Turn) -> dict[str, Value]:
    """Messages in the form of the conventions: JSON texts of `{role, parts}`."""
    answer = {**_message(Message("assistant", turn.output)), "finish_reason": turn.stop_reason or "error"}
    attributes = {
        "gen_ai.input.messages": [_message(message) for message in turn.input],
        "gen_ai.output.messages": [answer] if turn.output else None,
        "gen_ai.system_instructions": None if turn.system is None else [_text("text", turn.system)],
    }
    texts = {name: json.dumps(redact.data(value), ensure_ascii=False) for name, value in _known(attributes).items()}
    return {name: text for name, text in texts.items() if len(text) <= LONGEST}


def _message(message: Message) -> JSON:
    return {"role": message.role, "parts": [_part(block) for block in message.content]}


def _part(block: Block) -> JSON:
    match block.get("type"):
        case "text":
            return _text("text", block.get("text"))
        case "thinking":
            return _text("reasoning", block.get("thinking"))
        case "tool_use":
            call = {"type": "tool_call", "id": block.get("id"), "name": block.get("name")}
            return call | {"arguments": block.get("input")}
        case "tool_result":
            response = json.dumps(block.get("content"), ensure_ascii=False)[:LONGEST_TEXT]
            return {"type": "tool_call_response", "id": block.get("tool_use_id"), "response": response}
        case kind:  # images and documents: only their kind
            return {"type": str(kind)}


def _text(kind: str, text: object) -> JSON:
    """A part of this kind, with the text's first `LONGEST_TEXT` characters."""
    return {"type": kind, "content": str(text or "")[:LONGEST_TEXT]}
