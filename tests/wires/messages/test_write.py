"""Answers of the Messages API, whole and streamed, against the types of the anthropic client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Finished, Started, Turn, TurnEvent, Usage
from cli_session_proxy.engine.live import answer_events
from cli_session_proxy.errors import Overloaded
from cli_session_proxy.wires.messages import body as messages

from ...fakes import TURN, started

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": [1]}}
# What Anthropic's types want of a block, beside what a turn keeps.
TOLD_TEXT = {"type": "text"}
TOLD_CALL = {**CALL, "caller": {"type": "direct"}}
USAGE = Usage(input_tokens=3, output_tokens=2, cache_read_tokens=30, cache_write_tokens=400, thinking_tokens=1)


def told(events: list[TurnEvent]) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the client's type and named by its line."""
    writer = messages.MessagesWriter("turn_1", "sonnet", "req_1")
    raw = b"".join(piece for event in events for piece in writer.feed(event)).decode()
    found = []
    for frame in raw.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    return found


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client puts together from the events; every block is opened, filled and closed in turn."""
    blocks: list[dict[str, Any]] = []
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert (open_block, event["index"]) == (None, len(blocks))
            open_block = event["index"]
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            for name, value in event["delta"].items():
                if name == "partial_json":
                    blocks[-1]["input"] = json.loads(value)
                elif name != "type":
                    blocks[-1][name] += value
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None
    return blocks


def turn(**fields: Any) -> Turn:
    return replace(TURN, usage=USAGE, **fields)


def test_a_message_has_what_the_type_wants() -> None:
    whole = messages.message(turn(output=(THINKING, CALL, {"type": "text", "text": "Hi."})))
    Message.model_validate(whole, strict=True)
    assert whole["content"] == [THINKING, {**TOLD_TEXT, "text": "Hi."}]
    assert whole["container"] is None
    assert (whole["id"], whole["stop_reason"], whole["stop_sequence"]) == ("msg_1", "end_turn", None)
    assert whole["stop_details"] is None
    assert whole["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 400, "cache_read_input_tokens": 30, "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 1}, "server_tool_use": None, "service_tier": "standard",
        "inference_geo": None,
        "cache_creation": {"ephemeral_5m_input_tokens": 400, "ephemeral_1h_input_tokens": 0},
    }  # fmt: skip


def test_why_it_stopped_is_told_in_the_wires_words() -> None:
    for reason, shown in (
        ("max_tokens", "max_tokens"),
        ("refusal", "refusal"),
        ("tool_use", "end_turn"),
        (None, "end_turn"),
    ):
        assert messages.message(turn(stop_reason=reason))["stop_reason"] == shown


def test_calls_are_handed_over_when_the_turn_waits_for_them() -> None:
    waiting = turn(status="requires_action", output=({"type": "text", "text": "I look."}, CALL))
    whole = messages.message(waiting)
    Message.model_validate(whole, strict=True)
    assert (whole["content"], whole["stop_reason"]) == ([{**TOLD_TEXT, "text": "I look."}, TOLD_CALL], "tool_use")
    events = told([started(), *answer_events([waiting.output[0]]), Finished(waiting)])
    assert rebuilt(events) == whole["content"]


def test_a_stream_tells_the_same_as_the_whole() -> None:
    done = turn(output=(THINKING, {"type": "text", "text": "Hello there."}))
    live: list[TurnEvent] = [
        started(),
        BlockStart(0, {"type": "thinking", "thinking": "", "signature": ""}),
        BlockDelta(0, {"type": "thinking_delta", "thinking": "Hm."}),
        BlockDelta(0, {"type": "signature_delta", "signature": "sig"}),
        BlockStop(0),
        # the engine keeps calls of the CLI's own tools to itself: the wire's indices have no gap for that
        BlockStart(2, {"type": "text", "text": ""}),
        BlockDelta(2, {"type": "text_delta", "text": "Hello "}),
        BlockDelta(2, {"type": "text_delta", "text": "there."}),
        BlockStop(2),
        Finished(done),
    ]  # fmt: skip
    events = told(live)
    assert rebuilt(events) == messages.message(done)["content"]
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0]["message"]["id"] == "msg_1"
    assert events[-2]["usage"] == messages.usage(done.usage)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}
    assert events[0]["message"]["usage"].keys() == events[-2]["usage"].keys()


def test_an_answer_that_never_came_in_pieces_is_told_whole() -> None:
    done = turn(output=(THINKING, {"type": "text", "text": "A"}, {"type": "text", "text": "B"}))
    texts = [{**TOLD_TEXT, "text": words} for words in ("A", "B")]
    assert rebuilt(told([Started("a", "turn_1", "s", "warm"), Finished(done)])) == [THINKING, *texts]


def test_an_error_ends_a_stream_in_the_wires_shape() -> None:
    [raw] = messages.MessagesWriter("turn_1", "sonnet", "req_1").error(Overloaded("busy: wait"))
    name, data = raw.decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error", "request_id": "req_1",
        "error": {"type": "overloaded_error", "message": "busy: wait", "details": {"error_code": "overloaded"}},
    }  # fmt: skip
