"""A system prompt is not part of the path: another one continues the conversation, in the same process where it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, claude, heard, running, text
from ..without_cli import running_without_cli


def system(upstream: Upstream) -> str:
    return str(upstream.requests[-1].body["system"][-1]["text"])


@pytest.mark.parametrize("model", ["sonnet", "default"])
@pytest.mark.sample(1)
async def test_a_clock_that_replaces_the_system_prompt_costs_no_process(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, model: str
) -> None:
    history: list[str] = []
    pids = set()
    async with running(make_settings(claude_bin=claude_2, system_prompt_changes="replace")) as engine:
        for n in range(4):
            clock = f"You are ADA. It is 12:0{n}."
            turn = await ask(engine, *history, f"turn {n}", agent=None, system=clock, model=model)
            history += [f"turn {n}", text(turn)]
            assert system(upstream) == clock
            assert turn.continuity == ("warm" if n else "started")
            process = claude(engine).pool.peek(turn.session_id or "")
            assert process is not None
            pids.add(process.pid)
    assert len(pids) == 1
    assert heard(upstream) == [f"turn {n}" for n in range(4)]
    # the conversation is kept byte for byte: only the system prompt differs from the request before
    before, now = (seen.body["messages"] for seen in upstream.requests[-2:])
    roles = [message["role"] for message in now if message["role"] != "system"]
    assert roles == ["user", "assistant"] * 3 + ["user"]
    assert len(now) == len(before) + 2


async def test_a_system_prompt_that_appears_or_goes_is_obeyed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    said: list[str] = []
    async with running(make_settings(claude_bin=claude_2, system_prompt="NEUTRAL")) as engine:
        for n, prompt in enumerate([None, "You are ADA.", " ", "You are BOB."]):
            turn = await ask(engine, *said, f"turn {n}", agent=None, system=prompt)
            said += [f"turn {n}", text(turn)]
            expected = "NEUTRAL" if prompt is None else prompt
            if expected.strip():
                assert system(upstream) == expected
            else:
                assert "ADA" not in str(upstream.requests[-1].body["system"])
    assert heard(upstream) == [f"turn {n}" for n in range(4)]


async def test_after_a_restart_the_last_system_prompt_is_the_one_in_force(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    async with running_without_cli(settings, upstream) as engine:
        await ask(engine, "one", system="You are ALPHA.")
        await ask(engine, "two", system="You are BETA.")
    async with running_without_cli(settings, upstream) as engine:
        await ask(engine, "three")
    assert system(upstream) == "You are BETA."
    assert heard(upstream) == ["one", "two", "three"]


async def test_an_old_cli_obeys_another_system_prompt_too(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_1)) as engine:
        await ask(engine, "one", system="You are ALPHA.")
        await ask(engine, "two", system="You are BETA.")
    assert "BETA" in str(upstream.requests[-1].body["system"])
    assert heard(upstream) == ["one", "two"]
