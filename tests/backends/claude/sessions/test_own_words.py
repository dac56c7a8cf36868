"""What a turn was asked and given is in the chain as it was sent, whatever becomes of its lines in the transcript."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cli_session_proxy.domain.models import Turn
from cli_session_proxy.settings import Settings
from cli_session_proxy.testing.script import Gate, Reply, ToolUse
from cli_session_proxy.testing.upstream import Upstream

from ....conftest import MakeSettings
from ....recovery.others import overwritten
from ....talking import ask, heard, running
from ....tools.test_loops import WEATHER, called, calls, result, results


async def again(settings: Settings, upstream: Upstream) -> str:
    """The next request that reaches the model, from a transcript that is read anew."""
    async with running(settings) as engine:
        await ask(engine, "and now")
    return upstream.requests[-1].raw.decode()


async def test_a_prompt_that_is_damaged_while_it_is_answered_stays_what_was_asked(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings, gate = make_settings(claude_bin=claude_2), Gate()
    upstream.when("fact-2", gate)
    async with running(settings) as engine:
        await ask(engine, "fact-1 of a")
        asking = asyncio.create_task(ask(engine, "fact-2 of a"))
        await gate.reached.wait()
        await overwritten(settings, "fact-2 of a", "fact-X of a")
        gate.open()
        await asking
    await again(settings, upstream)
    assert heard(upstream) == ["fact-1 of a", "fact-2 of a", "and now"]


async def test_a_result_that_is_damaged_while_it_is_answered_stays_what_the_client_sent(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings, gate = make_settings(claude_bin=claude_2), Gate(reply=Reply("It is sunny."))
    upstream.when("where", ToolUse([called("get_weather")]))
    async with running(settings) as engine:
        turn: Turn = await ask(engine, "where", tools=(WEATHER,))
        [call] = calls(turn)
        upstream.when("sunny-1", gate)
        asking = asyncio.create_task(ask(engine, results(result(call, "sunny-1 in Rome")), tools=(WEATHER,)))
        await gate.reached.wait()
        await overwritten(settings, "sunny-1 in Rome", "sunny-X in Rome")
        gate.open()
        await asking
    told = await again(settings, upstream)
    assert "sunny-1 in Rome" in told
    assert "sunny-X" not in told
