"""A turn as spans: what is told of it, and that what was said is told only where the settings ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cli_session_proxy.domain.evidence import Evidence, Repair
from cli_session_proxy.domain.models import Fallback, Link, Message, Turn, Usage
from cli_session_proxy.engine.live import Requested
from cli_session_proxy.settings import ModelSettings
from cli_session_proxy.telemetry.spans import LONGEST_TEXT, Span, of_turn

from ..fakes import TURN

AT = 1_790_000_000.0
ADA = Requested("alice", "ada", AT, "req_1", None)
WHOLE = replace(
    TURN,
    created_at=AT,
    parent_id="turn_0",
    answered_by="claude-sonnet-5-5",
    backend="claude",
    usage=Usage(10, 20, 300, 40, 5),
    cost_usd=0.25,
    timings={"queued": 100, "session_ready": 400, "first_block": 900, "result": 5000, "committed": 5010},
    attempts=({"n": 1, "frame_uuid": "x"},),
    tools=(
        {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "cat secret-plan"}, "at": AT + 1},
        {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True, "at": AT + 3},
        {"type": "tool_use", "id": "c2", "name": "Read", "input": {}, "at": AT + 4},
    ),
)


def spans(turn: Turn, *links: Link, words: bool = False, models: dict[str, ModelSettings] | None = None) -> Span:
    return of_turn(turn, links, ADA, AT + 5.02, models or {}, words=words)[0]


def every(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from every(child)


def test_a_turn_is_one_span_with_its_steps_as_children() -> None:
    root = spans(WHOLE)
    assert [(one.name, one.kind, round(one.start - AT, 3), round(one.end - AT, 3)) for one in every(root)] == [
        ("invoke_agent ada", "internal", 0.0, 5.02),
        ("queue", "internal", 0.0, 0.1),
        ("session", "internal", 0.1, 0.4),
        ("chat sonnet", "client", 0.4, 5.0),
        ("execute_tool Bash", "internal", 1.0, 3.0),
        ("execute_tool Read", "internal", 4.0, 5.02),
        ("commit", "internal", 5.0, 5.02),
    ]
    chat = root.children[2]
    assert chat.events == (("first_block", AT + 0.9),)
    assert [tool.error for tool in chat.children] == ["tool_error", None]


def test_it_tells_agent_conversation_model_tokens_cache_cost_repair_queue_backend_and_tools() -> None:
    repaired = Link("s1", "s1", TURN.id, "rebuilt", {"found": "missing"}, AT)
    told = spans(replace(WHOLE, continuity="rebuilt"), repaired).attributes
    assert told == {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "ada", "gen_ai.conversation.id": "ada",
        "gen_ai.provider.name": "anthropic", "gen_ai.request.model": "sonnet",
        "gen_ai.response.model": "claude-sonnet-5-5", "gen_ai.response.finish_reasons": ["end_turn"],
        "gen_ai.usage.input_tokens": 350, "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 300, "gen_ai.usage.cache_creation.input_tokens": 40,
        "cli_session_proxy.request_id": "req_1", "cli_session_proxy.key": "alice",
        "cli_session_proxy.turn.id": "turn_1", "cli_session_proxy.turn.parent_id": "turn_0",
        "cli_session_proxy.turn.status": "completed", "cli_session_proxy.wire": "chat",
        "cli_session_proxy.backend": "claude", "cli_session_proxy.session.id": TURN.session_id,
        "cli_session_proxy.cost_usd": 0.25, "cli_session_proxy.thinking_tokens": 5,
        "cli_session_proxy.queue_seconds": 0.1, "cli_session_proxy.attempts": 1, "cli_session_proxy.retries": 0,
        "cli_session_proxy.tools": ["Bash", "Read"], "cli_session_proxy.continuity": "rebuilt",
        "cli_session_proxy.repaired": True, "cli_session_proxy.repair.reason": "rebuilt",
        "cli_session_proxy.repair.found": "missing",
    }  # fmt: skip


def test_a_clients_tools_and_a_repair_without_a_link_are_told() -> None:
    calls = ({"type": "tool_use", "id": "t", "name": "search", "input": {}},)
    turn = replace(WHOLE, output=calls, tools=(), evidence=Evidence(repaired=Repair("rewritten")))
    told = spans(turn).attributes
    assert (told["cli_session_proxy.tools"], told["cli_session_proxy.repaired"]) == (["search"], True)


@pytest.mark.parametrize(
    ("litellm", "provider"),
    [("openai/gpt-5.2", "openai"), ("gemini/gemini-2.5-pro", "gcp.gemini"), ("gpt-5.2", "openai"), ("groq/x", "groq")],
)
def test_another_models_provider_is_told(litellm: str, provider: str) -> None:
    fallback = Fallback("sonnet", "other", "rate_limited", AT + 60)
    turn = replace(WHOLE, backend="litellm", fallback=fallback)
    told = spans(turn, models={"other": ModelSettings(litellm=litellm)}).attributes
    assert told["gen_ai.provider.name"] == provider
    assert told["cli_session_proxy.fallback.why"] == "rate_limited"


@pytest.mark.parametrize(
    ("timings", "failed"),
    [
        ({}, ["invoke_agent ada"]),
        ({"queued": 100}, ["invoke_agent ada", "session"]),
        ({"queued": 100, "session_ready": 300}, ["invoke_agent ada", "chat sonnet"]),
    ],
)
def test_a_turn_that_failed_tells_in_which_step(timings: dict[str, Any], failed: list[str]) -> None:
    turn = replace(WHOLE, status="failed", error={"code": "overloaded"}, timings=timings, tools=())
    root = spans(turn)
    assert [one.name for one in every(root) if one.error == "overloaded"] == failed
    assert root.attributes["error.type"] == "overloaded"


SECRET = "sk-ant-api03-abcdefghijklmnop"
SPOKEN = replace(
    WHOLE,
    system="be brief about the launch",
    input=(
        Message(
            "user",
            (
                {"type": "text", "text": f"the launch is at dawn, key {SECRET}"},
                {"type": "image", "source": {"data": "aaaa"}},
                {"type": "tool_result", "tool_use_id": "t", "content": "the launch pad"},
            ),
        ),
    ),
    output=(
        {"type": "thinking", "thinking": "launch?", "signature": "s"},
        {"type": "text", "text": "launch noted " * 2000},
        {"type": "tool_use", "id": "t", "name": "search", "input": {"q": "launch"}},
    ),
)


def test_nothing_that_was_said_is_told_unless_it_is_asked_for() -> None:
    told = json.dumps([dict(one.attributes) for one in every(spans(SPOKEN))])
    assert "launch" not in told
    assert "secret-plan" not in told


def test_what_was_said_is_told_without_known_secrets_and_not_without_end() -> None:
    told = spans(SPOKEN, words=True).attributes
    asked = json.loads(str(told["gen_ai.input.messages"]))
    assert asked == [{
        "role": "user",
        "parts": [
            {"type": "text", "content": "the launch is at dawn, key [redacted]"}, {"type": "image"},
            {"type": "tool_call_response", "id": "t", "response": '"the launch pad"'},
        ],
    }]  # fmt: skip
    (said,) = json.loads(str(told["gen_ai.output.messages"]))
    assert (said["role"], said["finish_reason"]) == ("assistant", "end_turn")
    assert [part["type"] for part in said["parts"]] == ["reasoning", "text", "tool_call"]
    assert len(said["parts"][1]["content"]) == LONGEST_TEXT
    assert json.loads(str(told["gen_ai.system_instructions"])) == [
        {"type": "text", "content": "be brief about the launch"}
    ]
    endless = replace(SPOKEN, input=(Message.user("x" * 9000),) * 100)
    assert "gen_ai.input.messages" not in spans(endless, words=True).attributes
