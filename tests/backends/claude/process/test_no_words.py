"""An answer whose frames nobody understands is taken from the result, or it is an error: never an empty success."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.domain.models import BlockDelta
from cli_session_proxy.errors import UpstreamError
from cli_session_proxy.settings import Profile
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ....clis import old_cli_in_full
from ....conftest import MakeSettings
from ....matrix import rest_in_full
from ....talking import ask, events, heard, request, running, text
from .translating import Mode, translated


@old_cli_in_full
@pytest.mark.parametrize("mode", rest_in_full("whole", "frames", "block", quick=2))
async def test_words_that_no_frame_brought_are_taken_from_the_result(
    mode: Mode, claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with running(make_settings(claude_bin=translated(tmp_path / "cli", claude, mode))) as engine:
        for number, said in enumerate(("one", "two"), 1):
            answer = await engine.submit(request(said))
            events = [event async for event in answer.events()]
            answer.acknowledge()
            turn = await answer.turn()
            streamed = "".join(str(event.delta["text"]) for event in events if isinstance(event, BlockDelta))
            assert text(turn) == streamed == f"You said: {said} ({number})"
            assert turn.status == "completed"
        await ask(engine, "one", f"{text(turn).replace('two (2)', 'one (1)')}", "two", text(turn), "three")
    assert heard(upstream) == ["one", "two", "three"]


async def test_an_answer_of_several_blocks_is_the_one_that_was_streamed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    blocks = [{"type": "text", "text": words} for words in ("first part", "last part")]
    upstream.next(Reply(blocks, thinking="I think"))
    async with running(make_settings(claude_bin=translated(tmp_path / "cli", claude_2, "whole"))) as engine:
        turn = await ask(engine, "one")
        after = await ask(engine, "two")
    assert [block["text"] for block in turn.output if block["type"] == "text"] == ["first part", "last part"]
    assert after.continuity == "warm"


@old_cli_in_full
async def test_a_success_without_any_words_is_an_error_that_names_the_cli_and_is_not_kept(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        await ask(engine, "one")
    mute = translated(tmp_path / "cli", claude, "mute")
    async with running(make_settings(claude_bin=mute)) as engine:
        with pytest.raises(UpstreamError, match=r"gave no words of an answer") as error:
            await ask(engine, "lost")
    version = "1.0.120" if "bundled" not in str(claude) else "2.1."
    assert f"Claude CLI {version}" in error.value.message
    assert str(mute) in error.value.message
    async with running(settings) as engine:
        await ask(engine, "two")
    assert heard(upstream) == ["one", "two"]


async def test_words_behind_a_tool_that_no_frame_brought_follow_those_that_were_heard(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """A turn with a tool of the CLI's own: only the block with the last words is of a type that we do not know."""
    looked = ToolUse([("Read", {"file_path": str(tmp_path / "nothing")})], text="I look.")
    upstream.next(looked, Reply([{"type": "text", "text": "There is nothing."}]))
    cli = translated(tmp_path / "cli", claude_2, "last")
    async with running(make_settings(claude_bin=cli, profiles={"coder": Profile(tools=("Read",))})) as engine:
        turn = await ask(engine, "look", profile="coder")
    assert [block["text"] for block in turn.output] == ["I look.", "There is nothing."]


async def test_a_model_that_says_nothing_at_all_is_an_error_too(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.next(Reply([]), Reply([]))  # CLI 2.1.330 asks once more by itself
    async with running(make_settings(claude_bin=claude_2)) as engine:
        with pytest.raises(UpstreamError, match=r"gave no words of an answer"):
            await ask(engine, "lost")
        await ask(engine, "one")
    assert heard(upstream) == ["one"]


async def test_a_cli_is_held_to_be_silent_after_two_answers_in_a_row_without_words(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One may be the model's doing."""
    mute = translated(tmp_path / "cli", claude_2, "mute")
    async with running(make_settings(claude_bin=mute)) as engine:
        for degraded in ([], ["frames"]):
            with pytest.raises(UpstreamError, match=r"gave no words of an answer"):
                await ask(engine, "lost")
            told = [event for event in events(caplog) if event.get("event") == "claude_degraded"]
            assert [event["observation"] for event in told] == degraded
