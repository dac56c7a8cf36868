"""Answers of Chat Completions, held against the types of the openai package."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cli_session_proxy.domain.models import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Finished,
    Message,
    Started,
    Turn,
    Usage,
)
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.wires.chat import body as chat

THINKING: Block = {"type": "thinking", "thinking": "hm, teal", "signature": "s"}
ANSWER: Block = {"type": "text", "text": "It is teal."}
TURN = Turn(
    id="turn_1",
    seq=1,
    agent_key=1,
    parent_id=None,
    status="completed",
    model="sonnet",
    input=(Message.user("colour?"),),
    created_at=1_790_000_000.5,
    output=(THINKING, ANSWER),
    stop_reason="end_turn",
    usage=Usage(input_tokens=3, output_tokens=7, cache_read_tokens=20, cache_write_tokens=10, thinking_tokens=4),
    cost_usd=0.0125,
)
STARTED = Started("a", "turn_1", "s1", "warm")


def texts(*pieces: str, index: int = 0) -> list[Any]:
    deltas = [BlockDelta(index, {"type": "text_delta", "text": piece}) for piece in pieces]
    return [BlockStart(index, {"type": "text", "text": ""}), *deltas, BlockStop(index)]


def streamed(events: list[Any], *, include_usage: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well, each valid for the vendor's type."""
    writer = chat.ChunkWriter("turn_1", "sonnet", include_usage=include_usage)
    raw = b"".join(piece for event in events for piece in writer.feed(event))
    lines = raw.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["id"] == "chatcmpl-turn_1"
    return chunks


def joined(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])


def test_a_completion_has_the_vendors_shape() -> None:
    body = json.loads(json.dumps(chat.completion(TURN)))
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.id == "chatcmpl-turn_1"
    assert parsed.created == 1_790_000_000
    assert parsed.choices[0].message.content == "It is teal."
    assert parsed.choices[0].finish_reason == "stop"
    assert body["choices"][0]["message"]["reasoning_content"] == "hm, teal"
    assert body["choices"][0]["message"]["refusal"] is None
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.completion_tokens_details is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (33, 7, 40)
    assert parsed.usage.prompt_tokens_details.cached_tokens == 20
    assert parsed.usage.completion_tokens_details.reasoning_tokens == 4
    assert body["usage"]["cost"] == 0.0125


@pytest.mark.parametrize(
    ("stop_reason", "status", "finish"),
    [
        ("end_turn", "completed", "stop"),
        ("stop_sequence", "completed", "stop"),
        (None, "completed", "stop"),
        ("max_tokens", "completed", "length"),
        ("refusal", "completed", "content_filter"),
        ("tool_use", "requires_action", "tool_calls"),
        ("tool_use", "completed", "stop"),
    ],
)
def test_the_stop_reason_becomes_a_finish_reason(stop_reason: str | None, status: Any, finish: str) -> None:
    turn = replace(TURN, stop_reason=stop_reason, status=status)
    assert chat.completion(turn)["choices"][0]["finish_reason"] == finish
    assert streamed([STARTED, Finished(turn)])[-1]["choices"][0]["finish_reason"] == finish


def test_calls_reach_the_client_only_when_it_has_to_act() -> None:
    use: Block = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}}
    turn = replace(TURN, output=(use,), status="requires_action", stop_reason="tool_use")
    parsed = ChatCompletion.model_validate(chat.completion(turn), strict=True)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("c1", "weather", {"city": "Ulm"})
    assert parsed.choices[0].message.content is None
    assert streamed([Finished(turn)])[1]["choices"][0]["delta"]["tool_calls"][0]["id"] == "c1"
    assert "tool_calls" not in chat.completion(replace(turn, status="completed"))["choices"][0]["message"]


def test_a_stream_says_what_the_completion_says() -> None:
    thinking = [BlockDelta(0, {"type": "thinking_delta", "thinking": piece}) for piece in ("hm, ", "teal")]
    signature = BlockDelta(0, {"type": "signature_delta", "signature": "s"})
    chunks = streamed([STARTED, *thinking, signature, *texts("It is", " teal.", index=1), Finished(TURN)])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert joined(chunks, "content") == "It is teal."
    assert joined(chunks, "reasoning_content") == "hm, teal"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_deltas_are_passed_on_one_by_one_as_they_come() -> None:
    writer = chat.ChunkWriter("turn_1", "sonnet", include_usage=False)
    assert writer.feed(STARTED) == []
    start, first, second, stop = texts("a", "b")
    assert writer.feed(start) == []
    assert len(writer.feed(first)) == 2  # the role comes with the first piece
    assert len(writer.feed(second)) == 1
    assert writer.feed(stop) == []


def test_usage_comes_last_and_only_when_asked_for() -> None:
    chunks = streamed([STARTED, *texts("It is teal."), Finished(TURN)], include_usage=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat.usage(TURN)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_what_never_came_as_a_delta_is_sent_at_the_end() -> None:
    assert joined(streamed([Finished(TURN)]), "content") == "It is teal."
    assert joined(streamed([Finished(TURN)]), "reasoning_content") == "hm, teal"
    assert joined(streamed([*texts("It is"), Finished(TURN)]), "content") == "It is teal."
    assert joined(streamed([BlockStart(1, ANSWER), BlockStop(1), Finished(TURN)]), "content") == "It is teal."


def test_any_text_survives_its_framing() -> None:
    hostile = 'quote " back\\slash \n\n data: [DONE] \r \u2028 猫 \U0001f600 \ud83d'
    turn = replace(TURN, output=({"type": "text", "text": hostile},))
    assert joined(streamed([*texts(*hostile), Finished(turn)]), "content") == hostile


def test_an_error_in_a_stream_is_an_event_that_clients_raise_on() -> None:
    writer = chat.ChunkWriter("turn_1", "sonnet", include_usage=False)
    (line,) = writer.error(QueueFull("the lane is full: try again", retry_after=3))
    assert json.loads(line.decode().removeprefix("data: ")) == {
        "error": {
            "message": "the lane is full: try again",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
    }


def test_a_thousand_chunks_cost_little() -> None:
    events = [BlockDelta(0, {"type": "text_delta", "text": "some words "}) for _ in range(1000)]
    times = []
    for _ in range(5):
        writer = chat.ChunkWriter("turn_1", "sonnet", include_usage=False)
        before = time.process_time()
        for event in events:
            writer.feed(event)
        times.append(time.process_time() - before)
    # 5 ms on two shared cores. The best one: what a virtual machine does not get of its processor counts as used.
    assert min(times) < 0.05


def test_several_texts_are_one_string_streamed_or_not() -> None:
    said = ("  One.\n", "\n\n", "\nTwo ", "three.\n")
    turn = replace(TURN, output=tuple({"type": "text", "text": text} for text in said))
    events = [event for index, text in enumerate(said) for event in texts(*text, index=index)]
    expected = "  One.\n\nTwo\n\nthree.\n"
    assert chat.completion(turn)["choices"][0]["message"]["content"] == expected
    assert joined(streamed([STARTED, *events, Finished(turn)]), "content") == expected
    assert joined(streamed([STARTED, Finished(turn)]), "content") == expected
