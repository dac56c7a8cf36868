"""What the CLIs' own failures, as recorded, mean to a client."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.events import ProcessDied, Result
from cli_session_proxy.backends.claude.process.failures import error_for, error_for_death, remedies, seconds_until
from cli_session_proxy.backends.claude.process.turn_reader import TurnReader

from .helpers import DATA, recorded

# What was sent to the CLI -> the code that a client gets, the same for both CLIs.
EXPECTED = {
    "400": "invalid_request",
    "400ctx": "context_too_long",
    "400credit": "upstream_error",
    "401": "claude_not_logged_in",
    "401oauth": "claude_not_logged_in",
    "403": "claude_not_logged_in",
    "404": "invalid_request",
    "413": "request_too_large",
    "429": "rate_limited",
    "429long": "rate_limited",
    "500": "upstream_error",
    "529": "overloaded",
    "nokey": "claude_not_logged_in",
    "nokey-oauth": "claude_not_logged_in",
    "nokey-oauth429": "rate_limited",
}
RECORDED = [json.loads(line) for line in (DATA / "failures.jsonl").read_text().splitlines()]
NOW = datetime(2026, 11, 21, 2, 0, tzinfo=UTC).timestamp()


def read(frame: dict[str, Any]) -> Result:
    found = TurnReader().feed(frame)[-1]
    assert isinstance(found, Result)
    return found


def made(text: str = "", **fields: Any) -> Result:
    return read({"type": "result", "subtype": "success", "is_error": True, "result": text, **fields})


@pytest.mark.parametrize("entry", RECORDED, ids=lambda entry: f"{entry['cli']}-{entry['case']}")
def test_a_recorded_failure_gets_its_code(entry: dict[str, Any]) -> None:
    error = error_for(read(entry["frame"]), now=NOW)
    assert error.code == EXPECTED[entry["case"]], error.message
    assert error.message
    assert "{" not in error.message


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_1.", ("calls",)),
        (
            "messages.7.content.0: unexpected `tool_use_id` found in `advisor_tool_result` blocks: srvtoolu_1.",
            ("calls",),
        ),
        ("due to tool use concurrency issues.", ("calls",)),
        ("orphaned tool_result in conversation history.", ("calls",)),
        ("duplicate tool_use ID in conversation history.", ("calls",)),
        (
            "messages.1.content.0: Input tag 'x' does not match any of the expected tags: 'document', 'image'",
            ("calls",),
        ),
        (
            "messages.1.content.0: Input tag 'image' does not match any of the expected tags: 'text'",
            ("images", "calls"),
        ),
        ("messages.2.content.0.tool_result.content.0.image.source.base64: too large", ("images", "calls")),
        ("tools.17.custom.input_schema: JSON schema is invalid. Learn more about tool use at https://x.test", ()),
        ("tool_choice: no tool_use is possible", ()),
    ],
)
def test_what_another_attempt_may_leave_out_is_what_the_provider_names(said: str, expected: tuple[str, ...]) -> None:
    assert remedies(error_for(made(f"API Error: 400 {said}"), now=NOW)) == expected


def test_both_clis_were_recorded() -> None:
    assert {entry["cli"] for entry in RECORDED} == {"1.0.120", "2.1.329"}


def test_the_reset_of_a_rate_limit_event_is_the_time_to_wait() -> None:
    reader = TurnReader()
    end = [event for frame in recorded("limit_2.1.329") for event in reader.feed(frame)][-1]
    assert isinstance(end, Result)
    reset = end.detail["rate_limit"]["resetsAt"]
    assert error_for(end, now=reset - 120).retry_after == 120


def test_a_retry_delay_stands_in_only_for_a_rate_limit() -> None:
    retries = [{"error_status": 429, "retry_delay_ms": 8034}]
    assert error_for(made("x", api_error_status=429), retries=retries).retry_after == pytest.approx(8.034)
    assert error_for(made("x", api_error_status=429)).retry_after is None
    retries = [{"error_status": 500, "retry_delay_ms": 8034}]
    assert error_for(made("x", api_error_status=429), retries=retries).retry_after is None


@pytest.mark.parametrize("odd", [10**400, 1e308, -1, True, "soon"])
def test_a_time_that_is_none_is_not_waited_for(odd: Any) -> None:
    """An agent's shell can say it in its CLI's place."""
    retries = [{"error_status": 429, "retry_delay_ms": odd}]
    told = replace(made("x", api_error_status=429), detail={"rate_limit": {"resetsAt": odd}})
    assert error_for(told, retries=retries).retry_after is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5-hour limit reached ∙ resets 3:51am (UTC)", 111 * 60),
        ("You've hit your 5-hour limit · resets 1am (UTC)", 23 * 3600),
        ("resets 12am (UTC)", 22 * 3600),
        ("Weekly limit reached · resets Nov 25, 3am (UTC)", 4 * 86400 + 3600),
        ("resets Jan 2 at 2am (UTC)", 42 * 86400),
        ("resets 9pm (America/New_York)", 0),
        (f"Claude AI usage limit reached|{int(NOW) + 60}", 60),
        (f"Claude AI usage limit reached|{(int(NOW) + 60) * 1000}", 60),
        ("resets 31:99pm (UTC)", None),
        ("resets Foo 3, 3am", None),
        ("try again later", None),
    ],
)
def test_reset_times_in_words(text: str, seconds: float | None) -> None:
    found = seconds_until(text, NOW)
    if seconds == 0:  # 21:00 in New York is 02:00 UTC: exactly now means the next one
        seconds = 86400
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_bad_request_about_history_is_not_the_clients_fault() -> None:
    text = "API Error: 400 messages.1.content.0: Invalid `signature` in `thinking` block"
    assert error_for(made(text)).code == "upstream_error"


@pytest.mark.parametrize("text", ["Invalid API key · Please run /login", "Not logged in · Please run /login"])
def test_a_missing_login_has_one_instruction_and_it_is_ours(text: str) -> None:
    error = error_for(made(text))
    assert error.code == "claude_not_logged_in"
    assert "run `cli-session-proxy login`" in error.message
    assert error.message.startswith(text.partition(" · ")[0])
    assert "/login" not in error.message


@pytest.mark.parametrize(
    ("model", "meant"),
    [("sonet", "sonnet"), ("claude-opuss-4-1", "opus"), ("Haiku", "haiku"), ("claude-sonnet-99", "sonnet")],
)
def test_an_unknown_model_names_the_one_that_is_probably_meant(model: str, meant: str) -> None:
    text = 'API Error: 404 {"type":"error","error":{"type":"not_found_error","message":"model: x"}}'
    error = error_for(made(text), model=model)
    assert (error.code, error.param) == ("invalid_request", "model")
    assert f"the provider does not know the model {model!r}: did you mean `{meant}`?" in error.message


def test_a_model_that_is_like_no_other_gets_no_guess() -> None:
    assert "did you mean" not in error_for(made("API Error: 404 not found"), model="gpt-5").message


def test_no_key_is_ever_told() -> None:
    error = error_for(made("API Error: 500 key sk-ant-api03-abcdefghijkl is bad"))
    assert "abcdefgh" not in error.message


@pytest.mark.parametrize("piece", ["https://a:b@", "words ", '{"a":'], ids=["addresses", "words", "depth"])
@pytest.mark.parametrize("where", ["result", "errors", "success"])
def test_what_has_no_end_is_looked_at_in_part(piece: str, where: str) -> None:
    """Said by a shell in its CLI's place, on the event loop: to find the secrets in 60 MB took a minute."""
    text = piece * (60_000_000 // len(piece))
    began = time.process_time()
    if where == "success":
        read({"type": "result", "subtype": "success", "is_error": False, "result": text})
    else:
        told = made(text) if where == "result" else made(errors=[text])
        assert len(error_for(told, now=NOW).message) <= 500
    assert time.process_time() - began < 10


def test_interrupts_timeouts_and_the_rest() -> None:
    assert error_for(made(terminal_reason="aborted_streaming", subtype="error_during_execution")).code == "interrupted"
    assert error_for(made("API Error: Request timed out")).code == "turn_timeout"
    assert error_for(made("", subtype="error_max_turns")).code == "upstream_error"
    assert "something" in error_for(made(errors=["something broke"])).message


@pytest.mark.parametrize(
    ("stderr", "code", "expected"),
    [
        ("Invalid API key · Please run /login", 1, "claude_not_logged_in"),
        ("Error: Session ID 1 is already in use.", 1, "session_busy"),
        ("error: unknown option '--setting-sources'", 1, "claude_unavailable"),
        ("node: not found", 127, "claude_unavailable"),
        ("something that nobody knows", 1, "upstream_error"),
    ],
)
def test_a_death_is_told_by_what_is_recognised_and_names_the_cli(stderr: str, code: int, expected: str) -> None:
    error = error_for_death(ProcessDied("it ended", returncode=code, stderr=stderr, cli="Claude CLI 9.9.9 at /c"))
    assert error.code == expected
    assert "Claude CLI 9.9.9 at /c" in error.message
    assert error.detail == {"exit_code": code}


def test_what_a_process_said_last_is_quoted_short_and_without_keys() -> None:
    long = "word " * 1000 + "the key sk-ant-api03-abcdefghijkl is blocked"
    message = error_for_death(ProcessDied("it ended", stderr=long, notices="on stdout")).message
    assert "is blocked" in message
    assert "abcdefgh" not in message
    assert len(message) < 600
    assert "accept the terms" in error_for_death(ProcessDied("it ended", notices="accept the terms")).message
