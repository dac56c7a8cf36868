"""Results of tools without ids, as clients of Google and Ollama may send them: whose result is it?"""

from __future__ import annotations

from typing import Any

from cli_session_proxy.domain.models import Message
from cli_session_proxy.wires.generate import content
from cli_session_proxy.wires.ollama import messages

ROME, OSLO = {"city": "Rome"}, {"city": "Oslo"}


def answered(conversation: tuple[Message, ...]) -> dict[str, str]:
    """The result of each call, by its city."""
    blocks = [block for message in conversation for block in message.content]
    cities = {block["id"]: block["input"]["city"] for block in blocks if block["type"] == "tool_use"}
    results = [block for block in blocks if block["type"] == "tool_result"]
    return {cities[block["tool_use_id"]]: str(block["content"]) for block in results}


def google(*steps: tuple[str, Any]) -> tuple[Message, ...]:
    made: dict[str, Any] = {
        "user": lambda text: {"role": "user", "parts": [{"text": text}]},
        "call": lambda args: {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": args}}]},
        "result": lambda said: {
            "role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"is": said}}}],
        },
    }  # fmt: skip
    return content.read({"contents": [made[kind](given) for kind, given in steps]})[1]


def ollama(*steps: tuple[str, Any]) -> tuple[Message, ...]:
    made: dict[str, Any] = {
        "user": lambda text: {"role": "user", "content": text},
        "call": lambda args: {
            "role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": args}}],
        },
        "result": lambda said: {"role": "tool", "tool_name": "weather", "content": said},
    }  # fmt: skip
    return messages.read([made[kind](given) for kind, given in steps])[1]


FAILED: Any = [("user", "how is Rome"), ("call", ROME), ("user", "how is Oslo"), ("call", OSLO), ("result", "rain")]


def test_the_result_after_a_failed_call_is_not_the_failed_calls() -> None:
    assert answered(google(*FAILED)) == {"Oslo": '{"is": "rain"}'}
    assert answered(ollama(*FAILED)) == {"Oslo": "rain"}


def test_results_of_calls_in_a_row_are_told_apart_by_their_order() -> None:
    steps: Any = [("user", "where"), ("call", ROME), ("call", OSLO), ("result", "sun"), ("result", "rain")]
    assert answered(google(*steps)) == {"Rome": '{"is": "sun"}', "Oslo": '{"is": "rain"}'}
    assert answered(ollama(*steps)) == {"Rome": "sun", "Oslo": "rain"}
