"""Two things that break at one turn are both told, by the real CLI's evidence."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_session_proxy.export import shown
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, running
from ..tools.test_loops import WEATHER, called, calls, result, results
from .rows_cli import kill_after_the_prompt_is_on_disk
from .talk import talking


async def test_a_repair_is_told_though_its_attempt_died_and_the_next_one_needed_another(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        await talk.tell()
        await talk.restart()
        talk.transcript.unlink()
        await kill_after_the_prompt_is_on_disk(talk)
        links = await talk.links()
        gone, repeated = shown.says(talk.turn, links)
        assert gone.startswith("The session's transcript was gone (no transcript at ")
        assert repeated.startswith("Attempt 1 failed (it ended with exit code -9 before the result)")
        assert shown.link(links[-1])["says"].startswith(
            "The session's transcript still held records of an attempt that was not kept"
        )


async def test_a_lost_sandbox_is_told_where_results_of_tools_come_back(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", ToolUse([called("get_weather")]))
    async with running(settings) as engine:
        asked = await ask(engine, "where", tools=(WEATHER,))
    shutil.rmtree(settings.var / "sandbox" / "agents" / "a")
    async with running(settings) as engine:
        [call] = calls(asked)
        turn = await ask(engine, results(result(call, "sunny")), tools=(WEATHER,))
    [lost] = shown.says(turn)[:1]
    assert lost.startswith("The agent's sandbox directory was missing (nothing at ")
