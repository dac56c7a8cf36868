"""Answers of Ollama's chat and generate, whole and line by line, against the types of its own client."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from ollama import ChatResponse, GenerateResponse

from cli_session_proxy.domain.models import Finished, Turn, TurnEvent, Usage
from cli_session_proxy.engine.live import answer_events
from cli_session_proxy.errors import QueueFull
from cli_session_proxy.wires.ollama import body as ollama
from cli_session_proxy.wires.ollama.body import Endpoint, OllamaCall

from ...fakes import TURN, started
from .test_read import chat, generate

THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
DONE = replace(
    TURN, output=(THINKING, {"type": "text", "text": "One. "}, {"type": "text", "text": " Two."}),
    usage=Usage(input_tokens=3, output_tokens=5, cache_read_tokens=30, cache_write_tokens=400, thinking_tokens=1),
    timings={"queued": 1.0, "session_ready": 100.0, "first_block": 600.0}, finished_at=TURN.created_at + 2.0,
)  # fmt: skip
CALLS: dict[Endpoint, OllamaCall] = {"chat": chat(model="sonnet:latest"), "generate": generate(model="here")}


def lines(turn: Turn, events: list[TurnEvent], call: OllamaCall) -> list[ChatResponse | GenerateResponse]:
    writer = ollama.LineWriter(call)
    raw = b"".join(piece for event in [started(), *events, Finished(turn)] for piece in writer.feed(event)).decode()
    kind = ChatResponse if call.endpoint == "chat" else GenerateResponse
    return [kind.model_validate(json.loads(line)) for line in raw.splitlines()]


def words(one: ChatResponse | GenerateResponse, kind: str = "text") -> str:
    where = one.message if isinstance(one, ChatResponse) else one
    name = "thinking" if kind == "thinking" else "content" if isinstance(one, ChatResponse) else "response"
    return getattr(where, name) or ""


@pytest.mark.parametrize("endpoint", CALLS)
def test_a_stream_tells_the_same_as_the_whole(endpoint: Endpoint) -> None:
    for thoughts in (True, False):
        call = replace(CALLS[endpoint], thoughts=thoughts)
        kind = ChatResponse if endpoint == "chat" else GenerateResponse
        whole = kind.model_validate(ollama.answer(DONE, call))
        assert words(whole) == "One.\n\nTwo."
        assert words(whole, "thinking") == ("Hm." if thoughts else "")
        for events in ([], list(answer_events(DONE.output))):  # a CLI without partial messages, and one with
            told = lines(DONE, events, call)
            assert "".join(map(words, told)) == words(whole)
            assert "".join(words(one, "thinking") for one in told) == words(whole, "thinking")
            assert [one.done for one in told] == [False] * (len(told) - 1) + [True]
            assert all(one.model == call.model for one in told)
            counted = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
                       "eval_duration", "done_reason", "created_at"}  # fmt: skip
            assert told[-1].model_dump(include=counted) == whole.model_dump(include=counted)


def test_the_last_line_counts_tokens_and_nanoseconds() -> None:
    last = lines(DONE, [], CALLS["chat"])[-1]
    assert (last.prompt_eval_count, last.eval_count) == (433, 5)
    assert (last.total_duration, last.load_duration, last.prompt_eval_duration, last.eval_duration) == (
        2_000_000_000, 100_000_000, 500_000_000, 1_400_000_000,
    )  # fmt: skip
    assert last.done_reason == "stop"
    assert lines(replace(DONE, stop_reason="max_tokens"), [], CALLS["chat"])[-1].done_reason == "length"


def test_calls_of_the_clients_tools_come_out_once_and_whole() -> None:
    turn = replace(DONE, output=({"type": "text", "text": "Look."}, CALL), status="requires_action")
    shown = {"id": "toolu_1", "function": {"index": 0, "name": "look", "arguments": {"at": 1}}}
    assert ollama.answer(turn, CALLS["chat"])["message"]["tool_calls"] == [shown]
    told = lines(turn, list(answer_events(turn.output)), CALLS["chat"])
    made = [call for one in told if isinstance(one, ChatResponse) for call in one.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in made] == [("look", {"at": 1})]
    # The CLI's own tools are not the client's business.
    assert "tool_calls" not in ollama.answer(replace(turn, status="completed"), CALLS["chat"])["message"]


def test_a_context_comes_back_from_a_generate_only() -> None:
    assert ollama.answer(DONE, CALLS["generate"])["context"] == list(b"turn_1")
    assert "context" not in ollama.answer(DONE, CALLS["chat"])


@pytest.mark.parametrize("endpoint", CALLS)
def test_a_keep_alive_is_a_line_without_words(endpoint: Endpoint) -> None:
    writer = ollama.LineWriter(CALLS[endpoint])
    kept = writer.keep_alive()
    assert kept.endswith(b"\n")
    kind = ChatResponse if endpoint == "chat" else GenerateResponse
    one = kind.model_validate(json.loads(kept))
    assert (words(one), one.done) == ("", False)


def test_an_error_is_a_text_with_our_code_beside_it() -> None:
    [line] = ollama.LineWriter(CALLS["chat"]).error(QueueFull("too many", retry_after=3))
    assert json.loads(line) == {"error": "too many", "code": "queue_full"}
