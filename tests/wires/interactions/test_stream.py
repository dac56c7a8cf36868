"""The events of a streamed interaction against the types of google-genai; places hold however the answer is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from google.genai._gaos.types.interactions import Interaction
from google.genai._gaos.types.interactions.interactionsseevent import InteractionSSEEvent
from pydantic import TypeAdapter

from cli_session_proxy.domain.models import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Finished,
    Turn,
    TurnEvent,
)
from cli_session_proxy.engine.live import answer_events, cancelled
from cli_session_proxy.errors import UpstreamError
from cli_session_proxy.wires.interactions import body as interactions
from cli_session_proxy.wires.interactions.stream import InteractionsWriter

from ...fakes import TURN, started

EVENT: TypeAdapter[Any] = TypeAdapter(InteractionSSEEvent)
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
ASKED = {"wire": "interactions", "store": True, "background": False, "summaries": True}
DONE = replace(
    TURN, call=ASKED,
    output=({"type": "thinking", "thinking": "Hmm, 猫.", "signature": "sig"}, {"type": "text", "text": "Hello there."}),
)  # fmt: skip
# the same answer as it came: a delta a character, and a call of the CLI's own tool in between
LIVE: list[TurnEvent] = [
    started(),
    BlockStart(0, {"type": "thinking", "thinking": "", "signature": ""}),
    *(BlockDelta(0, {"type": "thinking_delta", "thinking": letter}) for letter in "Hmm, 猫."),
    BlockDelta(0, {"type": "signature_delta", "signature": "sig"}),
    BlockStop(0),
    BlockStart(1, CALL), BlockDelta(1, {"type": "input_json_delta", "partial_json": "{}"}), BlockStop(1),
    BlockStart(2, {"type": "text", "text": ""}),
    *(BlockDelta(2, {"type": "text_delta", "text": letter}) for letter in "Hello there."),
    BlockStop(2),
    Finished(DONE),
]  # fmt: skip


def events_of(raw: list[bytes]) -> list[dict[str, Any]]:
    frames = b"".join(raw).decode().strip().split("\n\n")
    assert frames.pop() == "data: [DONE]"
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['event_type']}"
        assert not getattr(EVENT.validate_python(event), "is_unknown", False)
        events.append(event)
    return events


def live(after: int = 0) -> list[dict[str, Any]]:
    writer = InteractionsWriter(replace(DONE, output=()), after=after)
    return events_of([piece for event in LIVE for piece in writer.feed(event)])


def told(events: list[dict[str, Any]]) -> list[str]:
    deltas = [event["delta"] for event in events if event["event_type"] == "step.delta"]
    thoughts = "".join(delta["content"]["text"] for delta in deltas if delta["type"] == "thought_summary")
    return [thoughts, "".join(delta["text"] for delta in deltas if delta["type"] == "text")]


def test_the_order_of_events_is_the_wires() -> None:
    events = live()
    kinds = [event["event_type"] for event in events]
    assert kinds[:3] == ["interaction.created", "interaction.status_update", "step.start"]
    assert kinds[-2:] == ["step.stop", "interaction.completed"]
    starts = [(event["index"], event["step"]["type"]) for event in events if event["event_type"] == "step.start"]
    assert starts == [(0, "thought"), (1, "model_output")]
    assert told(events) == ["Hmm, 猫.", "Hello there."]
    assert [int(event["event_id"]) for event in events] == sorted({int(event["event_id"]) for event in events})
    assert events[-1]["interaction"]["steps"][1]["content"] == [{"type": "text", "text": "Hello there."}]


def test_a_place_is_the_same_live_and_later() -> None:
    events = live()
    for event in events:
        place = int(event["event_id"])
        before = told([one for one in events if int(one["event_id"]) <= place])
        for rest in (live(place), events_of(InteractionsWriter(DONE, after=place).whole(DONE))):
            assert [one + two for one, two in zip(before, told(rest), strict=True)] == ["Hmm, 猫.", "Hello there."]
            assert all(int(one["event_id"]) > place for one in rest)


def test_thoughts_are_only_signed_for_those_who_did_not_ask() -> None:
    quiet = replace(DONE, call={**ASKED, "summaries": False})
    events = events_of(InteractionsWriter(quiet).whole(quiet))
    assert told(events) == ["", "Hello there."]
    shown = interactions.interaction(quiet)
    assert [step["type"] for step in shown["steps"]] == ["thought", "model_output"]
    assert "summary" not in shown["steps"][0]


def test_calls_are_handed_over_when_the_turn_waits_for_them() -> None:
    waiting = replace(DONE, status="requires_action", output=(*DONE.output, CALL))
    events = events_of(InteractionsWriter(waiting).whole(waiting))
    [call] = [event["step"] for event in events if event.get("step", {}).get("type") == "function_call"]
    assert (call["id"], call["name"], call["arguments"]) == ("toolu_1", "look", {"at": 1})
    assert events[-1]["interaction"]["status"] == "requires_action"


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [
        (UpstreamError("it broke"), "failed", "error"),
        (cancelled("client"), "cancelled", "interaction.status_update"),
    ],
)
def test_a_failure_is_told_live_and_later(error: Any, status: str, last: str) -> None:
    failed: Turn = replace(DONE, status=status, output=(), error=error.as_dict())  # type: ignore[arg-type]
    writer = InteractionsWriter(replace(DONE, output=()))
    begun = [piece for event in LIVE[:4] for piece in writer.feed(event)]
    for events in (events_of([*begun, *writer.error(error)]), events_of(InteractionsWriter(failed).whole(failed))):
        assert events[-1]["event_type"] == last
        assert any(event.get("status") == status for event in events)
    shown = interactions.interaction(failed)
    assert shown["status"] == status
    assert shown.get("errors") == ([{"code": "upstream_error", "message": "it broke"}] if status == "failed" else None)


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"status": "queued"}, "queued"), ({"status": "running"}, "in_progress"), ({}, "completed"),
     ({"stop_reason": "max_tokens"}, "incomplete"), ({"status": "requires_action"}, "requires_action"),
     ({"status": "cancelled", "error": {"code": "interrupted", "message": "stopped"}}, "failed")],
)  # fmt: skip
def test_every_status_has_the_wires_word(fields: dict[str, Any], status: str) -> None:
    shown = interactions.interaction(replace(DONE, **fields), include_input=True)
    assert Interaction.model_validate(shown).status == status
    assert shown["input"] == [{"type": "user_input", "content": [{"type": "text", "text": "hello"}]}]


def test_a_whole_answer_is_told_by_a_replay_too() -> None:
    writer = InteractionsWriter(replace(DONE, output=()))
    events = events_of([p for e in [started(), *answer_events(DONE.output), Finished(DONE)] for p in writer.feed(e)])
    assert told(events) == ["Hmm, 猫.", "Hello there."]
