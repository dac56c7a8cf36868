"""Breakages at random, with a printed seed: `--seed N` runs the same again (the machine's timing stays its own)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cli_session_proxy.errors import ClaudeUnavailable
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Cut, ErrorEvent, Fail
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from . import rows_cli, rows_files, rows_upstream
from .row import Breaks
from .talk import EngineTalk, RequestRefused, Talk, talking

RETRIES = 8  # of a client whose CLIs are killed all the time


async def _restart(talk: Talk) -> None:
    await talk.restart()


def _now(breaks: object) -> Breaks:
    async def run(talk: Talk) -> None:
        assert callable(breaks)
        breaks(talk)

    return run


BREAKAGES: Sequence[Breaks] = (
    *map(
        _now,
        (
            rows_files.delete, rows_files.remove_a_middle_line, rows_files.break_a_parent, rows_files.cut_the_last_line,
            rows_files.empty, rows_files.swap_for_another, rows_files.wipe_projects, rows_files.append_garbage,
            rows_files.make_unreadable, rows_files.put_under_a_doubled_prefix,
        ),
    ),
    rows_cli.kill_while_idle, rows_cli.kill_before_the_prompt_is_on_disk, rows_cli.kill_after_the_prompt_is_on_disk,
    rows_cli.kill_in_mid_answer, rows_cli.continue_by_hand, rows_upstream.fails_then_resent(Fail(400)),
    rows_upstream.always(Fail(529)), rows_upstream.once(Cut(after=2)), rows_upstream.once(ErrorEvent(after=1)),
    rows_upstream.three_models, _restart, _restart,
)  # fmt: skip


async def _chaos(settings: Settings, upstream: Upstream, seed: int, turns: int) -> None:
    print(f"chaos: --seed {seed}")
    dice = random.Random(seed)
    async with talking(settings, upstream) as talk:
        await talk.tell()
        await talk.tell()
        while len(talk.facts) < turns:
            broken = [dice.choice(BREAKAGES) for _ in range(dice.choice((0, 1, 1, 2)))]
            if rows_cli.continue_by_hand in broken:  # nobody can continue by hand what is broken
                broken = [rows_cli.continue_by_hand]
            for breaks in broken:
                # the second one may find its file gone, or no transcript any more
                with suppress(OSError, IndexError, ValueError):
                    await breaks(talk)
            score = await talk.probe()
            names = [getattr(breaks, "__qualname__", str(breaks)) for breaks in broken]
            assert score.whole, f"seed {seed}, turn {len(talk.facts)}, after {names}: {score}"
            upstream.forget(keep=4)


@pytest.mark.full  # `tests.chaos` has histories of as many turns in every run
async def test_a_conversation_survives_fifteen_turns_of_chaos(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, seed: int
) -> None:
    await _chaos(make_settings(claude_bin=claude_2, cli_retries=1), upstream, seed, 15)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_conversation_survives_five_hundred_turns_of_chaos(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, seed: int
) -> None:
    await _chaos(make_settings(claude_bin=claude_2, cli_retries=1), upstream, seed, 500)


# --- many agents ------------------------------------------------------------------------------------------


class _OneOfMany(EngineTalk):
    """An agent among others on one engine."""

    def __init__(self, first: EngineTalk, name: str) -> None:
        super().__init__(first.settings, first.upstream, name)
        self.engine = first.engine

    async def _say(self, said: str) -> str:
        try:
            return await super()._say(said)
        except RequestRefused as refused:
            error = refused.__cause__
            if isinstance(error, ClaudeUnavailable) and error.retry_after:
                await asyncio.sleep(error.retry_after)  # its CLI was killed three times in a row, as it happens
            raise


async def _kill_at_random(first: EngineTalk, dice: random.Random, kills: int) -> None:
    """Each time some more requests have reached the model, one living CLI is killed."""
    seen = 0
    for _ in range(kills):
        seen = len(first.upstream.requests) + dice.randint(1, 6)
        await first.upstream.arrived(seen, timeout=600)
        for pid in dice.sample(first.pids(), 1) if first.pids() else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _many(settings: Settings, upstream: Upstream, seed: int, agents: int, turns: int) -> None:
    print(f"chaos: --seed {seed}")
    dice = random.Random(seed)
    async with talking(settings, upstream) as first:
        talks = [_OneOfMany(first, f"agent {number}") for number in range(agents)]

        async def converse(talk: EngineTalk) -> None:
            for _ in range(turns):
                await talk.tell(tries=RETRIES)

        killer = asyncio.create_task(_kill_at_random(first, dice, agents))
        await asyncio.gather(*map(converse, talks))
        killer.cancel()
        await asyncio.wait([killer])
        for talk in talks:
            score = await talk.probe()
            assert score.whole, f"seed {seed}, {talk.agent}: {score}"


async def test_three_agents_keep_their_own_words_while_their_processes_are_killed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, seed: int
) -> None:
    await _many(make_settings(claude_bin=claude_2, max_processes=2), upstream, seed, agents=3, turns=2)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_fifty_agents_keep_their_own_words_while_their_processes_are_killed(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, seed: int
) -> None:
    settings = make_settings(claude_bin=claude_2, max_processes=12, turn_timeout=300.0, spawn_timeout=300.0)
    await _many(settings, upstream, seed, agents=50, turns=4)
