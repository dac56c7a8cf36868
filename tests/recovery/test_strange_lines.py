"""Lines that are JSON and no record of a CLI's, and files that are none: they wedge no agent, and end nothing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_session_proxy.domain.limits import LINE_VALUES
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, events, heard, request, running
from ..until import until
from .others import other_proxy
from .test_interrupted import killed, transcript_of
from .test_kill import turns_of


def said(parent: str, **more: object) -> JSON:
    message: JSON = {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", **more}
    return {"type": "assistant", "uuid": str(uuid.uuid4()), "parentUuid": parent, "message": message}


LINES: dict[str, Callable[[str], JSON]] = {
    "more values than are read": lambda _: {"type": "note", "values": [[]] * LINE_VALUES},
    "an id that is a list": lambda parent: said(parent, content=[{"type": "tool_use", "id": []}]),
    "without a message": lambda parent: {**said(parent), "message": None},
    "usage that is a list": lambda parent: said(parent, usage=[1]),
}


def append(path: Path, line: Callable[[str], JSON]) -> None:
    """Behind the newest record, as whoever may write there does."""
    records = [one for one in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if one.get("uuid")]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line(records[-1]["uuid"])) + "\n")


@pytest.mark.parametrize("line", rest_in_full(*LINES, quick=2))
@pytest.mark.sample(1)
async def test_a_line_that_is_no_record_is_repaired_like_a_damaged_one(
    line: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        await ask(engine, "one")
    append(transcript_of(settings), LINES[line])
    async with running(settings) as engine:
        turn = await ask(engine, "two")
        assert turn.continuity == "rebuilt"
        repaired = turn.evidence.repaired
        assert repaired is not None
        assert repaired.found == ("unreadable" if line == "more values than are read" else "tail")
        assert (await ask(engine, "three")).continuity == "warm"
    assert heard(upstream) == ["one", "two", "three"]


@pytest.mark.parametrize("which", rest_in_full("an id that is a list", "more values than are read"))
async def test_a_line_that_comes_while_a_turn_runs_costs_no_answer(
    which: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        await ask(engine, "one")
        gate = HeldReply(after=1)
        upstream.when("two", gate)
        answer = await engine.submit(request("two"))
        await gate.reached.wait()
        append(transcript_of(settings), LINES[which])
        gate.open()
        assert (await answer.turn()).status == "completed"
        answer.acknowledge()
        answer.leave()
        await ask(engine, "three")
    async with running(settings) as engine:
        await ask(engine, "four")
    assert heard(upstream) == ["one", "two", "three", "four"]


def as_a_link_to_nothing(path: Path, settings: Settings) -> None:
    path.unlink()
    path.symlink_to(settings.var / "nowhere")


def beside_a_link_to_nothing(path: Path, settings: Settings) -> None:
    (path.parent / "old.jsonl").symlink_to(settings.var / "nowhere")


def with_a_line_that_is_no_record(path: Path, settings: Settings) -> None:
    append(path, LINES["an id that is a list"])


HARM = [as_a_link_to_nothing, beside_a_link_to_nothing, with_a_line_that_is_no_record]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.sample(1)
async def test_a_proxy_starts_whatever_a_killed_one_left_of_a_transcript(
    harm: Callable[[Path, Settings], None], claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.when("two", HeldReply())  # else the CLI may have written the whole answer before it is ended
    async with other_proxy(settings, die_at="after send") as other:
        assert await other.ask("one") is not None
        assert await other.ask("two", die=True) is None
        await killed(other, settings)
    harm(transcript_of(settings), settings)
    async with running(settings) as engine:
        assert [turn.status for turn in await turns_of(engine)] == ["completed", "cancelled"]
        await ask(engine, "three")
    assert heard(upstream) == ["one", "three"]


async def test_a_proxy_settles_what_its_neighbour_left_beside_a_link_to_nothing(
    claude_2: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        async with other_proxy(settings, die_at="after send") as other:
            assert await other.ask("one") is not None
            beside_a_link_to_nothing(transcript_of(settings), settings)
            assert await other.ask("two", die=True) is None

        async def settled() -> bool:
            return [turn async for turn in engine.store.unfinished()] == []

        await until(settled)
    assert "not_recovered" not in [event["event"] for event in events(caplog)]
