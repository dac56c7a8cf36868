"""A turn of many megabytes in a dump: gone through elsewhere, and shown as a note where that takes too long."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cli_session_proxy import redact
from cli_session_proxy.aside.pool import Helpers
from cli_session_proxy.backends.base import ComparedRecord, Comparison, RequestSeen
from cli_session_proxy.domain.models import Message, Turn
from cli_session_proxy.export import shown
from cli_session_proxy.http.large_turns import LARGE, TOO_LARGE, TurnRenderer, is_large
from cli_session_proxy.http.ui import views
from cli_session_proxy.settings import Settings

from ..fakes import AGENT, FakeEngine, block, turn
from ..serving import serving

# To look for a secret at each of these words takes seconds.
HOSTILE = "bearer x_key " * 700_000
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(bytes(LARGE)).decode()},
}


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    made = Helpers(most=1, seconds=20.0, memory=2 << 30)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("row", "large"),
    [
        (turn(1), False),
        (turn(1, output=(block("x" * (LARGE - 100)),)), False),
        (turn(1, output=(block("x" * (LARGE + 1)),)), True),
        (turn(1, system="x" * (LARGE + 1)), True),
        (turn(1, input=(Message("user", (IMAGE,)),)), True),
        (turn(1, input=(Message("user", ({"type": "tool_result", "content": [IMAGE]},)),)), True),
        (turn(1, tools=({"type": "tool_use", "input": {"a": ["x" * (LARGE + 1)]}},)), True),
    ],
)
def test_what_is_large(row: Turn, large: bool) -> None:
    assert is_large(row) == large


async def test_a_large_turn_is_told_elsewhere_in_the_same_words(helpers: Helpers) -> None:
    tell = TurnRenderer(helpers)
    small, large = turn(1), turn(2, output=(block("sk-ant-secret1 " * LARGE),), input=(Message("user", (IMAGE,)),))
    assert await tell(shown.turn, small) == shown.turn(small)
    assert helpers.processes == 0
    for verbatim in (False, True):
        for show in (shown.turn, shown.measured, shown.contents):
            assert await tell(show, large, verbatim=verbatim) == show(large, verbatim=verbatim)
    assert helpers.processes == 1


async def test_a_turn_that_is_only_large_by_its_files_needs_no_helper_process(helpers: Helpers) -> None:
    """30 turns with a document of 20 MB took 46 s: each was sent to a new process."""
    for place in (IMAGE, {"type": "tool_result", "content": [IMAGE]}):
        row = turn(1, input=(Message("user", (place, block("sk-ant-secret1"))),), output=(block("fine"),))
        for verbatim in (False, True):
            for show in (shown.turn, shown.measured, shown.contents):
                assert await TurnRenderer(helpers)(show, row, verbatim=verbatim) == show(row, verbatim=verbatim)
    assert helpers.processes == 0


async def test_a_turn_that_takes_too_long_is_told_without_its_words(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "_seconds", 0.2)
    row = turn(1, input=(Message.user(HOSTILE),), output=(block(HOSTILE),), system=HOSTILE)
    told = await TurnRenderer(helpers)(shown.turn, row)
    assert (told["id"], told["status"], told["system"]) == ("turn_1", "completed", None)
    assert told["output"] == told["input"][0]["content"] == [block(TOO_LARGE)]


async def test_a_key_of_ours_that_has_no_form_is_hidden_in_a_large_turn_too(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper process had been told of none."""
    monkeypatch.setattr(redact, "_known", {"correct-horse-battery"})
    told = await TurnRenderer(helpers)(shown.turn, turn(1, output=(block("correct-horse-battery " * LARGE),)))
    assert helpers.processes == 1
    assert "correct-horse" not in json.dumps(told)


def test_of_a_transcript_that_a_shell_filled_up_a_part_is_shown_which_differs_first() -> None:
    """A hundred thousand records were 200 MB of JSON, written in a second of the event loop."""
    said = (block("x" * 5000),)
    same = tuple(ComparedRecord(f"s{n}", "user", "equal", said, None) for n in range(2000))
    behind = ComparedRecord("u" * 10_000, "user", "only in the transcript", None, (block("x" * 3_000_000),))
    found = Comparison("different", (), (*same, *[behind] * 98_000))
    compared, large = views.compared(found)
    told = views.comparison(compared, len(found.records))
    assert (large, len(told["records"]), told["total"]) == (False, views.MOST_RECORDS, 100_000)
    assert {one["file"] for one in told["records"]} == {TOO_LARGE}
    compared, large = views.compared(Comparison("equal", (), same))
    told = views.comparison(compared, len(same))
    assert (large, told["records"][0]["chain"]) == (True, "x" * views.SHOWN)
    assert sum(one["chain"] == TOO_LARGE for one in told["records"]) == views.MOST_RECORDS - 398
    assert views.newest_sent(RequestSeen(1, (), 0, (("user", said[0]),) * 1000, None))[1]


@pytest.mark.parametrize("path", ["", "?format=markdown", "?format=html"])
async def test_every_view_of_a_large_turn_is_made_elsewhere(path: str, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.fake_store.agents["a"] = AGENT
    engine.fake_store.rows = [turn(1, output=(block("x" * (LARGE + 1)),))]
    settings = Settings(var=tmp_path / "var", port=0)
    try:
        async with serving(engine, settings) as base, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answer = await http.get(f"{base}/chains/a{path}")
        assert (answer.status_code, "x" * LARGE in answer.text) == (200, True)
        if not path:
            assert json.loads(answer.text)["turns"][0]["id"] == "turn_1"
        assert engine.aside.showing.processes == 1
    finally:
        await engine.aside.close()
