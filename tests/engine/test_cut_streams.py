"""The provider's stream is cut in mid-answer: what was given is kept everywhere, the rest was never said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.commands import verifying
from cli_session_proxy.domain.evidence import StreamCut
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import UpstreamError
from turnfault.provider.script import Cut, ErrorEvent, Reply
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..cutting import held, let_go
from ..talking import ask, request, running, text

LONG = "These are the words of an attempt that is never finished, as its stream is cut."
FIRST = "A first block that is finished."
BLOCKS = Reply([{"type": "text", "text": FIRST}, {"type": "text", "text": LONG}])
ANSWER = "The answer."


async def streamed(engine: Engine, said: str, **more: Any) -> Turn:
    """A turn whose client takes every event as it comes."""
    answer = await engine.submit(request(said, **more))
    try:
        async for _ in answer.events():
            pass
        answer.acknowledge()
        return await answer.turn()
    finally:
        answer.leave()


def model_says(upstream: Upstream) -> str:
    """The model's own words in the last request."""
    return " ".join(text for role, text in upstream.requests[-1].texts() if role == "assistant")


@old_cli_in_full  # clients/test_cut_streams.py has it each time
async def test_the_session_holds_what_was_given_and_the_next_turn_extends_it(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude)
    cut = held(Cut(3, Reply(LONG)))
    async with running(settings) as engine, let_go(cut, engine=engine, stream=True):
        await ask(engine, "before")
        before = upstream.requests[-1]
        upstream.next(cut, Reply(ANSWER))
        turn = await streamed(engine, "hello")
        assert (turn.status, turn.output[-1]) == ("completed", {"type": "text", "text": ANSWER})
        given = turn.output[0]["text"]
        assert given
        assert LONG.startswith(given)
        assert turn.evidence.cuts == (StreamCut(text=len(given)),)
    (verified,) = await verifying.verify(settings, None, "a")
    assert verified.differences == ()
    async with running(settings) as engine:
        assert (await ask(engine, "list")).continuity == "resumed"
    assert model_says(upstream) == f"You said: before (1) {given} {ANSWER}"
    assert upstream.requests[-1].prefix_kept(before) >= 0.97


async def test_several_cuts_in_one_turn_are_kept_in_order(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    cuts = [held(Cut(3, Reply(LONG))), held(Cut(7, BLOCKS)), held(Cut(2, Reply(f"Again: {LONG}")))]
    upstream.next(*cuts, Reply(ANSWER))
    async with (
        running(make_settings(claude_bin=claude_2)) as engine,
        let_go(*cuts, engine=engine, stream=True),
    ):
        turn = await streamed(engine, "hello")
        said = [block["text"] for block in turn.output]
        assert [LONG.startswith(said[0]), said[1], LONG.startswith(said[2])] == [True, FIRST, True]
        assert f"Again: {LONG}".startswith(said[3])
        assert said[4:] == [ANSWER]
        assert [cut.text > 0 for cut in turn.evidence.cuts] == [True] * 3
        await ask(engine, "list")
    assert model_says(upstream) == " ".join(said)


@old_cli_in_full
async def test_a_client_that_has_read_nothing_never_sees_what_was_void(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    cut = held(Cut(3, Reply(LONG)))
    upstream.next(cut, Reply(ANSWER))
    async with (
        running(make_settings(claude_bin=claude)) as engine,
        let_go(cut, engine=engine, stream=False),
    ):
        slow = await engine.submit(request("hello"))
        turn = await slow.turn()
        said = [event.delta["text"] async for event in slow.events() if hasattr(event, "delta")]
        slow.acknowledge()
        assert "".join(said) == text(turn) == ANSWER
        assert turn.evidence.cuts == (StreamCut(),)


async def test_an_answer_ends_at_its_stop_sequence_after_a_cut_too(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    cut = held(Cut(3, Reply(LONG)))
    upstream.next(cut, Reply("one STOP two"))
    async with (
        running(make_settings(claude_bin=claude_2)) as engine,
        let_go(cut, engine=engine, stream=True),
    ):
        turn = await streamed(engine, "hello", stop=("STOP",))
        given = turn.output[0]["text"]
        assert [given, turn.output[1]["text"]] == [LONG[: len(given)], "one "]
        await ask(engine, "list")
    assert model_says(upstream) == f"{given} one "


async def test_structured_output_is_told_when_it_is_whole_so_a_cut_leaves_no_trace(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    cut = Cut(2, Reply('{"answer": "half of a long text'), held=True)
    upstream.next(cut, Reply('{"answer": 7}'))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        asking = asyncio.create_task(streamed(engine, "hello", format={"schema": None}))
        await cut.reached.wait()
        cut.open()
        assert json.loads(text(await asking)) == {"answer": 7}


async def test_half_an_answer_is_no_answer(claude_1: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    """CLI 1.0.120 ends so when the provider breaks off with an error in a later block, and calls it a success."""
    async with running(make_settings(claude_bin=claude_1)) as engine:
        upstream.next(ErrorEvent(after=6, reply=BLOCKS), Reply(ANSWER))
        with pytest.raises(UpstreamError, match="stream was cut"):
            await ask(engine, "hello")
        assert text(await ask(engine, "hello")) == ANSWER
    assert upstream.requests[-1].user_texts() == ["hello"]
