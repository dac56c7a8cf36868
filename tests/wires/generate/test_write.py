"""Answers of generateContent, whole and streamed, against the types of google-genai."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from google.genai.types import FinishReason, GenerateContentResponse

from cli_session_proxy.domain.models import Finished, Turn, TurnEvent, Usage
from cli_session_proxy.engine.live import answer_events
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.wires.generate import body as generate

from ...fakes import TURN, started

THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
DONE = replace(
    TURN, output=(THINKING, {"type": "text", "text": "One. "}, {"type": "text", "text": " Two."}),
    usage=Usage(input_tokens=3, output_tokens=5, cache_read_tokens=30, cache_write_tokens=400, thinking_tokens=1),
)  # fmt: skip


def told(turn: Turn, events: list[TurnEvent], *, thoughts: bool = False) -> list[GenerateContentResponse]:
    writer = generate.GenerateWriter("turn_1", "sonnet", "req_1", thoughts=thoughts)
    raw = b"".join(piece for event in [started(), *events, Finished(turn)] for piece in writer.feed(event)).decode()
    frames = raw.strip().split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    return [GenerateContentResponse.model_validate(json.loads(frame[6:])) for frame in frames]


def text(chunks: list[GenerateContentResponse], *, thought: bool | None = None) -> str:
    parts = [part for chunk in chunks for part in chunk.parts or [] if part.thought is thought]
    return "".join(part.text or "" for part in parts)


def test_a_stream_tells_the_same_as_the_whole() -> None:
    whole = GenerateContentResponse.model_validate(generate.answer(DONE, thoughts=True))
    assert whole.text == "One.\n\nTwo."
    for events in ([], list(answer_events(DONE.output))):  # a CLI without partial messages, and one with
        for thoughts in (True, False):
            chunks = told(DONE, events, thoughts=thoughts)
            assert text(chunks) == whole.text
            assert text(chunks, thought=True) == ("Hm." if thoughts and events else "")
            assert chunks[-1].candidates is not None
            assert chunks[-1].candidates[0].finish_reason == FinishReason.STOP
            assert chunks[-1].usage_metadata == whole.usage_metadata
            assert all(chunk.candidates and chunk.candidates[0].finish_reason is None for chunk in chunks[:-1])


def test_usage_counts_thoughts_and_the_cache_apart() -> None:
    usage: Any = generate.usage(DONE)
    assert usage == {
        "promptTokenCount": 433, "cachedContentTokenCount": 30, "candidatesTokenCount": 4, "thoughtsTokenCount": 1,
        "totalTokenCount": 438, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 433}],
        "candidatesTokensDetails": [{"modality": "TEXT", "tokenCount": 4}],
    }  # fmt: skip


def test_calls_are_handed_over_when_the_turn_waits_for_them() -> None:
    waiting = replace(TURN, status="requires_action", output=({"type": "text", "text": "I look."}, CALL))
    for response in (generate.answer(waiting, thoughts=False), told(waiting, [])[-1].model_dump()):
        [call] = GenerateContentResponse.model_validate(response).function_calls or []
        assert (call.id, call.name, call.args) == ("toolu_1", "look", {"at": 1})
    done = generate.answer(replace(waiting, status="completed"), thoughts=False)
    assert GenerateContentResponse.model_validate(done).function_calls is None


def test_why_it_stopped_is_told_in_the_wires_words() -> None:
    for reason, shown in (("max_tokens", "MAX_TOKENS"), ("refusal", "SAFETY"), ("end_turn", "STOP"), (None, "STOP")):
        answer = generate.answer(replace(TURN, stop_reason=reason), thoughts=False)
        assert answer["candidates"][0]["finishReason"] == shown


def test_an_error_ends_a_stream_as_the_client_knows_it() -> None:
    [raw] = generate.GenerateWriter("turn_1", "sonnet", "req_1", thoughts=False).error(QueueFull("full: wait"))
    assert raw.startswith(b'data: {"error":')  # google-genai 3.4 looks for just this start
    error = json.loads(raw[6:])["error"]
    assert (error["code"], error["status"], error["message"]) == (429, "RESOURCE_EXHAUSTED", "full: wait")
    assert error["details"][0]["reason"] == "queue_full"
