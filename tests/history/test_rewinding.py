"""A warm process is taken back where an edit, a failure or a turn left off the path would cost a new one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.backends.claude.transcript import REWOUND
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.script import Fail, HeldReply, Refusal, Reply
from turnfault.provider.upstream import Upstream

from ..clis import seen_working
from ..conftest import MakeSettings
from ..files import files
from ..matrix import rest_in_full
from ..talking import ask, by_hand, claude, heard, request, running, text
from ..until import until


@pytest.fixture
async def settings(make_settings: MakeSettings, claude_2: Path, tmp_path: Path) -> Settings:
    """With a CLI that its self-check has seen to rewind."""
    return make_settings(claude_bin=await seen_working(claude_2, tmp_path))


async def _verified(engine: Engine) -> None:
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    verified = await claude(engine)._verifier.verify(agent)
    assert verified.differences == ()


def _pids(engine: Engine) -> set[int]:
    return {process.pid for process in claude(engine).processes()}


async def _said(engine: Engine, *words: str) -> tuple[list[Turn], list[str]]:
    """The turns of a conversation whose client sends all of it each time, and what it has by then."""
    turns: list[Turn] = []
    said: list[str] = []
    for word in words:
        turns.append(await ask(engine, *said, word))
        said += [word, text(turns[-1])]
    return turns, said


def _path(engine: Engine, turn: Turn) -> Path:
    assert turn.session_id is not None
    (path,) = files(claude(engine).sessions._config_dir, f"*/{turn.session_id}.jsonl")
    return path


async def test_an_edited_message_is_answered_by_the_same_process(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        (one, _, three), said = await _said(engine, "one", "two", "three")
        pids = _pids(engine)
        edited = await ask(engine, *said[:2], "two, edited")
        assert heard(upstream) == ["one", "two, edited"]
        assert (edited.parent_id, edited.session_id, edited.continuity) == (one.id, three.session_id, "branched")
        assert _pids(engine) == pids
        await _verified(engine)
        more = await ask(engine, *said[:2], "two, edited", text(edited), "four")
        assert (more.parent_id, more.continuity) == (edited.id, "warm")
        assert heard(upstream) == ["one", "two, edited", "four"]
        await _verified(engine)
        # The turns that were taken back are in the chain still.
        back = await ask(engine, *said, "five")
        assert (back.parent_id, back.continuity) == (three.id, "branched")
        assert back.session_id != three.session_id
        assert heard(upstream) == ["one", "two", "three", "five"]
        await _verified(engine)


async def test_the_first_message_too_where_nothing_else_was_said(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        one = await ask(engine, "one")
        again = await ask(engine, "one, edited", fresh=True)
        assert heard(upstream) == ["one, edited"]
        assert (again.parent_id, again.session_id, again.continuity) == (None, one.session_id, "branched")
        await ask(engine, "one, edited", text(again), "two")
        assert heard(upstream) == ["one, edited", "two"]
        await _verified(engine)
        # A conversation of some turns stays where it is.
        other = await ask(engine, "other", fresh=True)
        assert (other.continuity, other.session_id == one.session_id) == ("started", False)


@pytest.mark.parametrize(
    "fault", rest_in_full("refused by the API", "cancelled in the stream", "declined", "cancelled", quick=2)
)
@pytest.mark.sample(1)
async def test_a_turn_that_failed_leaves_its_process_in_step(
    fault: str, settings: Settings, upstream: Upstream
) -> None:
    async with running(settings) as engine:
        (one, two), said = await _said(engine, "one", "two")
        pids = _pids(engine)
        if fault.startswith("cancelled"):
            gate = HeldReply(after=2 if "stream" in fault else 0, reply=Reply("This is never heard to its end."))
            upstream.when("bad", gate)
            answer = await engine.submit(request(*said, "bad"))
            await gate.reached.wait()
            await engine.cancel("local", "a", None)
            with pytest.raises(ProxyError):
                await answer.turn()
            answer.leave()
            gate.open()
        elif fault == "declined":
            upstream.when("bad", Refusal("cyber", "No."))
            assert (await ask(engine, *said, "bad")).status == "refused"
        else:
            upstream.when("bad", Fail(400), times=None)
            with pytest.raises(ProxyError):
                await ask(engine, *said, "bad")
        three = await ask(engine, *said, "three")
        assert heard(upstream) == ["one", "two", "three"]
        assert (three.parent_id, three.session_id, three.continuity) == (two.id, one.session_id, "warm")
        assert _pids(engine) == pids
        await _verified(engine)
        # What lies in the file of it is not loaded by the next process either.
        await claude(engine).pool.discard(str(one.session_id))
        four = await ask(engine, *said, "three", text(three), "four")
        assert heard(upstream) == ["one", "two", "three", "four"]
        assert four.continuity == "resumed"
        await _verified(engine)


async def test_a_process_that_cannot_be_taken_back_after_a_failure_is_ended(
    settings: Settings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> bool:
        raise RuntimeError("as no thread is free")

    async with running(settings) as engine:
        _, said = await _said(engine, "one", "two")
        upstream.when("bad", Fail(400), times=None)
        with monkeypatch.context() as patched:
            patched.setattr(ClaudeProcess, "rewind", broken)
            with pytest.raises(ProxyError):
                await ask(engine, *said, "bad")
        assert not claude(engine).processes()
        await ask(engine, *said, "three")
        assert heard(upstream) == ["one", "two", "three"]
        await _verified(engine)


async def test_a_failed_edit_is_repeated_by_the_same_process(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        (one, _), said = await _said(engine, "one", "two")
        pids = _pids(engine)
        upstream.when("bad", Fail(400), times=None)
        with pytest.raises(ProxyError):
            await ask(engine, *said[:2], "bad")
        edited = await ask(engine, *said[:2], "edited")
        assert heard(upstream) == ["one", "edited"]
        assert (edited.parent_id, edited.session_id) == (one.id, one.session_id)
        assert _pids(engine) == pids
        await _verified(engine)


async def test_a_rewound_head_and_what_was_left_off_go_back_in_the_process(
    settings: Settings, upstream: Upstream
) -> None:
    async with running(settings) as engine:
        await ask(engine, "one")
        await ask(engine, "two")
        pids = _pids(engine)
        await engine.rewind("local", "a", "-1")
        three = await ask(engine, "three")
        assert heard(upstream) == ["one", "three"]
        gate = HeldReply()
        upstream.when("never heard", gate)
        answer = await engine.submit(request("never heard"))
        await gate.reached.wait()
        answer.leave()
        gate.open()

        async def undelivered() -> bool:
            turn = await engine.store.turn(answer.turn_id)
            return turn is not None and turn.delivery == "undelivered"

        await until(undelivered)
        four = await ask(engine, "four")
        assert heard(upstream) == ["one", "three", "four"]
        assert four.parent_id == three.id
        assert _pids(engine) == pids
        await _verified(engine)


@pytest.mark.parametrize(
    "damage", rest_in_full("gone", "a CLI that was not checked", "CLI 1.0.120", "killed", "cut", quick=2)
)
@pytest.mark.sample(1)
async def test_the_next_process_has_the_path_and_nothing_else(
    damage: str, settings: Settings, upstream: Upstream, make_settings: MakeSettings, claude_1: Path, claude_2: Path
) -> None:
    async with running(settings) as engine:
        _, said = await _said(engine, "one", "two", "three")
        edited = await ask(engine, *said[:2], "edited")
        said = [*said[:2], "edited", text(edited)]
        (process,) = claude(engine).processes()
        if damage == "killed":
            os.kill(process.pid, signal.SIGKILL)
        await claude(engine).pool.discard(str(edited.session_id))
        path = _path(engine, edited)
        if damage == "gone":
            path.unlink()
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-40])
        if damage not in ("gone", "cut"):
            await _verified(engine)
    if "CLI" in damage:
        settings = make_settings(claude_bin=claude_1 if damage == "CLI 1.0.120" else claude_2)
    async with running(settings) as engine:
        after = await ask(engine, *said, "four")
        assert heard(upstream)[-3:] == ["one", "edited", "four"]
        assert after.parent_id == edited.id
        if damage in ("killed", "a CLI that was not checked"):
            assert after.continuity == "resumed"
            assert REWOUND not in _path(engine, after).read_bytes()
        if damage != "CLI 1.0.120":  # CLI 1.x leaves attachments out when it copies a session
            await _verified(engine)


async def test_a_process_that_dies_in_an_edit_costs_no_turn(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        (one, two), said = await _said(engine, "one", "two")
        gate = HeldReply()
        upstream.when("edited", gate)
        asked = asyncio.create_task(ask(engine, *said[:2], "edited"))
        await gate.reached.wait()
        (process,) = claude(engine).processes()
        os.kill(process.pid, signal.SIGKILL)
        edited = await asked
        assert heard(upstream) == ["one", "edited"]
        assert edited.parent_id == one.id
        back = await ask(engine, *said, "three")
        assert back.parent_id == two.id
        assert heard(upstream) == ["one", "two", "three"]
        await _verified(engine)


async def test_a_person_goes_on_by_hand_behind_an_edit(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        await ask(engine, "one")
        await ask(engine, "two")
        await engine.rewind("local", "a", "-1")
        three = await ask(engine, "three")
        await by_hand(settings, str(three.session_id), "by hand")
        assert heard(upstream) == ["one", "three", "by hand"]
        await ask(engine, "four")
        assert heard(upstream) == ["one", "three", "by hand", "four"]
        await _verified(engine)


async def test_a_process_whose_own_tools_have_run_is_not_taken_back(
    make_settings: MakeSettings, settings: Settings, upstream: Upstream
) -> None:
    """It would take a file that it read in a turn that was taken back for known."""
    reading = make_settings(claude_bin=settings.claude_bin, profiles={"r": Profile(tools=("Read",))}, profile="r")
    async with running(reading) as engine:
        (one, _), said = await _said(engine, "one", "two")
        edited = await ask(engine, *said[:2], "edited")
        assert heard(upstream) == ["one", "edited"]
        assert edited.session_id != one.session_id
