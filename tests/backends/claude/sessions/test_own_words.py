"""What a turn was asked and given is in the chain as it was sent, whatever becomes of its lines in the transcript."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.sessions.exchanges import is_prompt
from cli_session_proxy.backends.claude.transcript import Entry
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....matrix import rest_in_full
from ....recovery.others import overwritten
from ....talking import ask, heard, running
from ....tools.test_loops import TOOLS, WEATHER, called, calls, result, results


async def again(settings: Settings, upstream: Upstream) -> str:
    """The next request that reaches the model, from a transcript that is read anew."""
    async with running(settings) as engine:
        await ask(engine, "and now")
    return upstream.requests[-1].raw.decode()


async def test_a_prompt_that_is_damaged_while_it_is_answered_stays_what_was_asked(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings, gate = make_settings(claude_bin=claude_2), HeldReply()
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
    settings, gate = make_settings(claude_bin=claude_2), HeldReply(reply=Reply("It is sunny."))
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


@pytest.mark.parametrize("more", rest_in_full({"is_error": True}, {}))
async def test_a_result_whose_records_are_lost_is_sent_again_in_the_form_in_which_it_was_sent_first(
    more: dict[str, bool], claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings, gate = make_settings(claude_bin=claude_2), HeldReply(reply=Reply("It is sunny."))
    assert settings.claude_config_dir is not None
    upstream.when("where", ToolUse([called("get_weather"), called("get_time")]))
    async with running(settings) as engine:
        turn: Turn = await ask(engine, "where", tools=TOOLS)
        weather, time = calls(turn)
        upstream.when("", gate)
        said = results(result(weather, "sunny", **more), result(time, " noon\n", **more))
        asking = asyncio.create_task(ask(engine, said, tools=TOOLS))
        await gate.reached.wait()
        [transcript] = settings.claude_config_dir.glob("projects/*/*.jsonl")
        transcript.write_bytes(transcript.read_bytes()[:1000])
        gate.open()
        await asking
        await ask(engine, "and now", tools=TOOLS)
    before, now = upstream.requests[-2:]
    assert now.prefix_kept(before) == 1.0, (before.messages, now.messages)


def test_what_the_cli_says_near_a_usage_limit_is_not_a_persons_prompt() -> None:
    said = "[Usage limit approaching. Checkpoint now: finish the current step.]"
    for marks in ({"isMeta": True}, {"turnCompanion": True}, {"usageLimitNote": "near_limit"}):
        data = {"type": "user", "uuid": "u", "parentUuid": None, "message": {"content": said}, **marks}
        assert not is_prompt(Entry(json.dumps(data), data))
