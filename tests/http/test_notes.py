"""What an answer's headers say beside its words: what the model was not shown, and that a retry cannot help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli_session_proxy import errors
from cli_session_proxy.domain.evidence import Evidence, Note, StreamCut
from cli_session_proxy.domain.models import Finished, Started

from ..fakes import SESSION, TURN, hello, text
from .test_server import HELLO, Serving
from .test_server import serving as serving  # noqa: PLC0414 - a fixture

NOTES = (Note("system_prompt_replaced"), Note("thinking_left_out", 3))
SAID = "system_prompt_replaced=1, thinking_left_out=3"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_left_out_of_the_request_is_in_the_headers(serving: Serving, stream: bool) -> None:
    turn = replace(TURN, evidence=Evidence(notes=NOTES))
    steps = [Started("a", "turn_1", SESSION, "warm", notes=NOTES), *text("Hello there."), Finished(turn)]
    async with serving(lambda _: steps) as door:
        answer = await door.post({**HELLO, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-continuity-note"] == SAID


async def test_what_the_cli_did_by_itself_is_in_the_headers(serving: Serving) -> None:
    seen = Evidence(notes=NOTES, compacted={}, retries=({"error_status": 529},), cuts=(StreamCut(),))
    steps = [Started("a", "turn_1", SESSION, "warm"), *text("Hello."), Finished(replace(TURN, evidence=seen))]
    async with serving(lambda _: steps) as door:
        answer = await door.post(HELLO)
        assert answer.headers["x-continuity-note"] == f"{SAID}, cli_compacted=1, cli_asked_again=2"


async def test_a_turn_that_was_shown_as_it_was_said_has_no_note(serving: Serving) -> None:
    async with serving(lambda _: hello()) as door:
        assert "x-continuity-note" not in (await door.post()).headers


HOPELESS = [
    errors.InvalidRequest("bad"),
    errors.ContextTooLong("long"),
    errors.ClaudeNotLoggedIn("login"),
    errors.RequestTooLarge("large"),
    errors.RateLimited("until tomorrow", retry_after=86_400.0, retry=False),
    errors.UpstreamError("400", retry=False),
]
HOPEFUL = [
    errors.RateLimited("in a second", retry_after=1.0),
    errors.UpstreamError("failed"),
    errors.Overloaded("busy"),
    errors.StoreUnavailable("disk"),
]


@pytest.mark.parametrize("error", HOPELESS)
async def test_where_a_retry_cannot_help_the_headers_say_so(serving: Serving, error: errors.ProxyError) -> None:
    async with serving(lambda _: [error]) as door:
        assert (await door.post()).headers["x-should-retry"] == "false"


@pytest.mark.parametrize("error", HOPEFUL)
async def test_where_a_retry_may_help_nothing_is_said(serving: Serving, error: errors.ProxyError) -> None:
    async with serving(lambda _: [error]) as door:
        assert "x-should-retry" not in (await door.post()).headers


@pytest.mark.parametrize("error", [*HOPELESS, *HOPEFUL])
def test_a_stored_error_says_the_same_of_retries(error: errors.ProxyError) -> None:
    again = errors.from_dict(error.as_dict())
    assert (type(again), again.retry) == (type(error), error.retry)
