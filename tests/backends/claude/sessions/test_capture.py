"""What a turn added to a transcript, where the CLI makes it hard to see."""

from __future__ import annotations

from pathlib import Path

from cli_session_proxy.testing.script import Reply
from cli_session_proxy.testing.upstream import Upstream

from ....conftest import MakeSettings
from ....talking import ask, heard, running, text


async def test_a_turn_cut_at_a_stop_sequence_behind_a_prompt_that_the_old_cli_cuts_is_remembered(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_1)
    upstream.when("two", Reply("one two three four five six seven eight nine ten"))
    async with running(settings) as engine:
        await ask(engine, "/one is a path")
        turn = await ask(engine, "two", stop=["five"])
        own = [record for record in await engine.store.own_records(turn.id) if record.uuid]
        await ask(engine, "three")
    assert text(turn) == "one two three four "
    assert len(own) == 2
    assert heard(upstream) == ["/one is a pat", "h", "two", "three"]
