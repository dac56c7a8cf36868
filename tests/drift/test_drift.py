"""A CLI that changes one thing tomorrow: a right answer or a clear error, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import NAMES, Observation, Observed
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import events
from .cli import ChangingCli
from .life import Life, live
from .report import DRIFT, Row, row
from .tomorrow import CHANGES


@pytest.fixture
def life(make_settings: MakeSettings, claude_2: Path, upstream: Upstream, tmp_path: Path, change: str) -> Life:
    cli = ChangingCli(tmp_path / "cli", claude_2)
    # The bounds of a `serve` that nobody has configured.
    bounds = {"turn_timeout": 1800.0, "idle_timeout": 300.0, "spawn_timeout": 60.0, "stop_grace": 5.0}
    return Life(make_settings(claude_bin=cli.path, spares=int("claim" in change), **bounds), upstream, cli)


# Of what it says one change; the others with `make drift`. Elsewhere each time: a request that is refused or not
# answered (selfcheck/test_checking.py), an exit without an answer (a row of continuity/test_matrix.py), a record of a
# new type (backends/claude/sessions/test_old_ways.py), a transcript in another place (below).
EACH_TIME = {"no assistant frames"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "change", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.full) for name in CHANGES]
)
async def test_a_changed_cli_answers_right_or_says_what_is_wrong(
    life: Life, change: str, record_property: Callable[[str, Row], None]
) -> None:
    await live(life, change)
    for step in life.steps:
        words = f"FAULT {step.fault}" if step.fault else step.error or "right"
        print(f"{step.seconds:6.1f} {step.name:24} {words}")
    record_property(DRIFT, row(change, life.steps, life.cli.path.parent))
    assert not life.faults


@pytest.mark.parametrize("change", [""])
@pytest.mark.full
async def test_a_cli_that_keeps_its_sessions_elsewhere_is_given_new_ids_and_doubted(life: Life) -> None:
    await life.up()
    try:
        await life.tell("before")
        life.replaced("transcript in another folder, of the newer turns only")
        await life.restart()
        for name in ("first", "second", "third"):
            await life.tell(name)
        agent = await life.engine.store.agent("local", "a")
        assert agent is not None
        links = await life.engine.store.repairs(agent.key, limit=10)
    finally:
        await life.down()
    assert not life.faults
    assert [link.reason for link in links] == ["rebuilt", "rebuilt"]
    assert all(link.from_session != link.to_session for link in links)
    known = capability.known(life.cli.path)
    assert known is not None
    assert known[0].observed["place"].outcome == "failed"


@pytest.mark.parametrize("change", [""])
@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("transcript: records that do not hang together", "records", "do not hang on what was before them"),
        pytest.param("no transcript", "place", "nothing of its answers in", marks=pytest.mark.full),
        pytest.param("transcript under another name", "place", "nothing of its answers in", marks=pytest.mark.full),
    ],
)
async def test_a_transcript_that_is_of_no_use_twice_in_a_row_degrades_a_cli_that_had_passed(
    life: Life, what: str, name: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    await life.up()
    try:
        life.replaced(what)
        await life.tell("first")
        found = capability.known(life.cli.path)
        assert found is not None
        cli = found[0]
        passed: Observed = {name: Observation.of(name, "ok") for name in NAMES}
        capability.observe(capability.identity_of(cli.path), cli.version, passed)
        for agent in ("b", "c", "d"):
            await life.tell("of another agent", agent)
        found = capability.known(life.cli.path)
    finally:
        await life.down()
    assert not life.faults
    assert found is not None
    failed = [(one.name, one.detail) for one in found[0].observed.values() if one.outcome == "failed"]
    assert [name for name, _ in failed] == [name]
    assert words in failed[0][1]
    said = [event for event in events(caplog) if event.get("event") == "claude_degraded"]
    assert [(event["version"], event["path"]) for event in said] == [(cli.version, str(cli.path))]


@pytest.mark.parametrize("change", [""])
@pytest.mark.full
async def test_a_session_that_a_cli_could_not_write_is_written_again_and_the_next_turn_says_so(life: Life) -> None:
    life.settings = life.settings.model_copy(update={"max_processes": 1})
    await life.up()
    try:
        await life.tell("before")
        life.replaced("no transcript, as the disk is full")
        await life.restart()
        await life.tell("not written")
        await life.tell("of another agent, which takes its place", "b")
        await life.tell("written again")
        agent = await life.engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head is not None
        turn = await life.engine.store.turn(agent.head)
    finally:
        await life.down()
    assert not life.faults
    assert turn is not None
    assert [note.code for note in turn.evidence.notes] == ["session_not_written"]
    assert turn.evidence.written is not None or turn.evidence.repaired is not None
