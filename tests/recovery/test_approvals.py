"""A proxy that dies around a person's word: the tool never runs without one, and at most once for each."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.domain.approvals import Verdict
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.approvals import Question
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.stores.auto import store_for
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..clis import seen_working
from ..conftest import MakeSettings
from ..talking import request, running
from ..until import until
from .others import other_proxy
from .proxy import WORDS


class Bench:
    """Settings with a profile whose Bash waits, and a command that leaves a line each time that it runs."""

    def __init__(self, settings: Settings, upstream: Upstream, file: Path) -> None:
        self.settings = settings
        self._file = file
        upstream.when("run it", ToolUse([("Bash", {"command": f"echo ran >> {file}"})]), times=None)

    @property
    def runs(self) -> int:
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0


@pytest.fixture
async def bench(claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path) -> Bench:
    (tmp_path / "bin").mkdir()
    binary = await seen_working(claude_2, tmp_path / "bin")
    profiles = {"coder": Profile(tools=("Bash",), approve=("Bash",))}
    return Bench(make_settings(claude_bin=binary, profiles=profiles, profile="coder"), upstream, tmp_path / "ran")


async def the_turn(engine: Engine) -> Turn:
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    (turn,) = [turn async for turn in engine.store.turns(agent.key)]
    return turn


async def it_waits(settings: Settings) -> None:
    """Until the store has a request that nobody has answered."""
    store = store_for(settings)
    await store.open()

    async def waits() -> bool:
        return any([turn.evidence.approvals async for turn in store.unfinished()])

    await until(waits)
    await store.close()


async def asked(engine: Engine) -> Question:
    await until(lambda: bool(engine.asked("local")))
    (question,) = engine.asked("local")
    return question


async def answered_again(engine: Engine, decision: Verdict) -> tuple[Turn, Question]:
    """The same request once more; the person says this."""
    again = await engine.submit(request("run it"))
    question = await asked(engine)
    await engine.approve("local", "a", question.waiting.approval.id, decision)
    turn = await again.turn()
    again.acknowledge()
    return turn, question


async def test_a_proxy_killed_while_a_person_is_asked_never_runs_the_tool(bench: Bench) -> None:
    async with other_proxy(bench.settings) as other:
        await other.tell("run it", wait=False)
        await it_waits(bench.settings)
        await other.end(signal.SIGKILL)
    async with running(bench.settings) as engine:
        left = await the_turn(engine)
        assert (left.status, (left.error or {})["code"]) == ("cancelled", "interrupted")
        assert [one.outcome for one in left.evidence.approvals] == [None]
        assert engine.asked("local") == []
        assert bench.runs == 0
        turn, question = await answered_again(engine, Verdict("allowed", "local"))
        assert turn.id == left.id
        assert question.waiting.before is None
    assert bench.runs == 1
    assert [(one.attempt, one.outcome) for one in turn.evidence.approvals] == [(1, None), (2, "allowed")]


@pytest.mark.parametrize("step", WORDS)
@pytest.mark.sample(2)
async def test_a_proxy_killed_behind_the_word_runs_the_tool_at_most_once(step: str, bench: Bench) -> None:
    async with other_proxy(bench.settings, die_at=step) as other:
        await other.tell("run it", wait=False)
        await other.tell(decide="allow", die=True, wait=False)
        assert await other.died() == -signal.SIGKILL
    async with running(bench.settings) as engine:
        left = await the_turn(engine)
        ran = bench.runs
        assert ran <= (1 if step == "after the word is sent" else 0)
        if left.status == "completed":  # the CLI had ended the turn by itself, with the tool's own result
            assert ran == 1
            return
        known = [] if step == "before the question is stored" else ["allowed"]
        assert [one.outcome for one in left.evidence.approvals] == known
        # Nothing runs again by itself: the person is asked anew, and told that it may have run.
        turn, question = await answered_again(engine, Verdict("denied", "local", "enough"))
        assert (question.waiting.before is not None) is bool(known)
    assert bench.runs == ran
    assert [one.outcome for one in turn.evidence.approvals] == [*known, "denied"]


async def test_a_proxy_that_was_paused_and_lost_the_agent_lets_nothing_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = bench.settings.model_copy(update={"lease": 1.0})
    async with other_proxy(settings) as other:
        await other.tell("run it", wait=False)
        await it_waits(settings)
        await other.pause(settings)
        async with running(settings) as engine:
            turn, _ = await answered_again(engine, Verdict("allowed", "local"))
            assert bench.runs == 1
            other.wake()
            await other.tell(decide="allow", wait=False)  # a page that still shows what waited there
            answer: dict[str, Any] | None = await other.heard()
            assert answer is not None
            assert turn.status == "completed"
    assert bench.runs == 1
