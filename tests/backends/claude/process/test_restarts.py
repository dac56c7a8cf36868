"""A CLI that keeps dying is started ever more rarely, and its client learns why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.backend import KNOWN, LIMIT, LONGEST_WAIT, Restarts
from cli_session_proxy.backends.claude.process.events import ProcessDied
from cli_session_proxy.errors import ClaudeUnavailable, UpstreamError

from ....conftest import MakeSettings
from ....talking import ask, running

DIED = ProcessDied("it ended with exit code 7", returncode=7, stderr="")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waits(restarts: Restarts, agent: int = 1) -> float:
    """Seconds until this agent's CLI may be started."""
    try:
        restarts.check(agent)
    except ClaudeUnavailable as exc:
        return exc.retry_after or -1.0
    return 0.0


def test_each_death_beyond_the_limit_doubles_the_wait_up_to_a_minute() -> None:
    clock = Clock()
    restarts, told = Restarts(clock), []
    for _ in range(LIMIT + 8):
        restarts.died(1, DIED)
        told.append(waits(restarts))
        clock.now += told[-1]
        assert waits(restarts) == 0.0
    assert told == [0.0] * (LIMIT - 1) + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_a_cli_that_dies_for_days_is_still_told_of_with_the_longest_wait() -> None:
    restarts = Restarts(Clock())
    for _ in range(1100):  # once a minute, for 18 hours
        restarts.died(1, DIED)
    assert waits(restarts) == LONGEST_WAIT


def test_an_answer_forgives_everything() -> None:
    restarts = Restarts(Clock())
    for _ in range(LIMIT):
        restarts.died(1, DIED)
    restarts.lived(1)
    for _ in range(LIMIT - 1):
        restarts.died(1, DIED)
    assert waits(restarts) == 0.0


def test_other_agents_do_not_suffer_and_few_are_remembered() -> None:
    restarts = Restarts(Clock())
    for agent in range(KNOWN + 1):
        for _ in range(LIMIT):
            restarts.died(agent, DIED)
    assert waits(restarts, KNOWN) == 1.0
    assert waits(restarts, KNOWN + 1) == 0.0
    assert waits(restarts, 0) == 0.0
    assert len(restarts._deaths) == KNOWN


def counted(program: Path) -> Path:
    """The file in which this program notes each of its starts, from now on."""
    starts = program.with_name("starts")
    noted = f'open({str(starts)!r}, "a").write("x")\n    if MODE == "deaf":'
    program.write_text(program.read_text().replace('if MODE == "deaf":', noted))
    return starts


async def test_a_cli_that_always_dies_is_left_alone_for_a_while(
    make_settings: MakeSettings, fake_cli: Path, claude_env: dict[str, str]
) -> None:
    starts = counted(fake_cli)
    settings = make_settings(claude_bin=fake_cli, claude_env={**claude_env, "FAKE_CLI": "no-result"})
    async with running(settings) as engine:
        with pytest.raises(UpstreamError):
            await ask(engine, "hello")
        for _ in range(2):
            with pytest.raises(ClaudeUnavailable, match=f"died {LIMIT} times in a row.*gave no result") as refused:
                await ask(engine, "hello")
            assert 0 < (refused.value.retry_after or 0) <= 1.0
    assert starts.read_text() == "x" * LIMIT
