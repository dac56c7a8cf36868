"""A tool that waits for a person's word: asked once, answered once, and nothing runs without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import Event, PermissionWithdrawn
from cli_session_proxy.domain.approvals import LARGEST, LONGEST_ASKED, MOST, Verdict, in_one_line
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.approvals import Question
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ApprovalAnswered, LeaseLost, NotFound, ProxyError, StoreUnavailable
from cli_session_proxy.export import explain, feed
from cli_session_proxy.settings import Settings

from ..scripted import Asker, Scripted, delta
from ..talking import request
from ..until import until

ALLOW = Verdict("allowed", "local")


@asynccontextmanager
async def engine_of(
    tmp_path: Path, steps: Sequence[Event | None], **more: Any
) -> AsyncIterator[tuple[Engine, Scripted]]:
    """The backend waits where a step is None, until `go` is released."""
    backend = Scripted(steps)
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "c", **more)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        yield engine, backend
    finally:
        for _ in range(10 * len(steps)):
            backend.go.release()
        await engine.stop()


async def asked(engine: Engine, count: int = 1) -> list[Question]:
    await until(lambda: len(engine.asked("local")) == count)
    return engine.asked("local")


async def stored(engine: Engine, turn_id: str) -> Turn:
    turn = await engine.store.turn(turn_id)
    assert turn is not None
    return turn


async def test_nothing_runs_before_a_person_has_allowed_it_and_the_store_has_that(tmp_path: Path) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1", command="rm  -rf\n/"), None, delta("done")]) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        (now,) = engine.progress()
        assert feed.progress([now])[0]["says"] == "waits for a person's approval: may Bash run?"
        assert question.waiting.approval.asked == "rm -rf /"
        assert asker.told == []
        (waits,) = (await stored(engine, answer.turn_id)).evidence.approvals
        assert (waits.id, waits.tool, waits.outcome) == (question.waiting.approval.id, "Bash", None)
        ended = await engine.approve("local", "a", waits.id, ALLOW)
        assert asker.outcomes == [("r1", "allowed")]
        (told,) = (await stored(engine, answer.turn_id)).evidence.approvals
        assert told == ended
        assert (told.outcome, told.by, told.call) == ("allowed", "local", "toolu_r1")
        assert engine.asked("local") == []
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert turn.evidence.approvals == (told,)
        said = "Bash (rm -rf /) waited for approval: it was allowed once by local."
        assert said in [one.says for one in explain.turn(turn.evidence, turn.attempts)]


async def test_the_first_answer_holds_and_every_other_one_is_told_so(tmp_path: Path) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1"), None]) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        named = question.waiting.approval.id
        verdicts = [Verdict("denied", "local", f"no {n}") for n in range(4)]
        ends = await asyncio.gather(
            *(engine.approve("local", "a", named, verdict) for verdict in verdicts), return_exceptions=True
        )
        assert sorted(type(end).__name__ for end in ends) == ["Approval", *["ApprovalAnswered"] * 3]
        assert [verdict.outcome for _, verdict in asker.told] == ["denied"]
        with pytest.raises(ApprovalAnswered):
            await engine.approve("local", "a", named, ALLOW)
        backend.go.release()
        await answer.turn()
        answer.acknowledge()
        with pytest.raises(ApprovalAnswered):
            await engine.approve("local", "a", named, ALLOW)


async def test_only_the_agents_owner_may_answer_and_only_what_waits(tmp_path: Path) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1"), None]) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        named = question.waiting.approval.id
        await engine.store.ensure_agent("local", "other", "other", named=True, now=1.0)
        for owner, agent, approval in (("bob", "a", named), ("local", "other", named), ("local", "a", "appr_0")):
            with pytest.raises(NotFound):
                await engine.approve(owner, agent, approval, ALLOW)
        assert engine.asked("bob") == []
        assert asker.told == []
        backend.go.release()
        await answer.turn()  # the turn has ended although nobody answered: the CLI did without
        answer.acknowledge()


async def test_what_nobody_answers_in_time_is_refused_and_the_turn_is_not_idle_meanwhile(tmp_path: Path) -> None:
    asker = Asker()
    steps = [asker.asks("r1"), None, delta("done")]
    async with engine_of(tmp_path, steps, approval_timeout=0.3, idle_timeout=0.05) as (engine, backend):
        answer = await engine.submit(request("go"))
        await until(lambda: bool(asker.told))
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
    ((_, verdict),) = asker.told
    assert verdict == Verdict("timed_out", None, "Nobody answered within 0.3 s whether Bash may run: it was not run.")
    assert [one.outcome for one in turn.evidence.approvals] == ["timed_out"]


async def test_a_tool_that_is_allowed_for_the_turn_is_not_asked_for_again_and_others_are(tmp_path: Path) -> None:
    asker = Asker()
    more = [asker.asks("r2"), asker.asks("r3", "Write", file_path="/f", content="x"), None]
    async with engine_of(tmp_path, [asker.asks("r1"), None, *more]) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        await engine.approve("local", "a", question.waiting.approval.id, Verdict("allowed_for_turn", "local"))
        backend.go.release()
        (other,) = await asked(engine)
        assert other.waiting.approval.tool == "Write"
        await until(lambda: len(asker.told) == 2)
        await engine.approve("local", "a", other.waiting.approval.id, Verdict("denied", "local", "not there"))
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert asker.outcomes == [("r1", "allowed_for_turn"), ("r2", "allowed_for_turn"), ("r3", "denied")]
        assert sorted(one.outcome or "" for one in turn.evidence.approvals) == [
            "allowed_for_turn", "allowed_for_turn", "denied",
        ]  # fmt: skip
        # the next turn asks again
        next_answer = await engine.submit(request("go", "", "on"))
        await asked(engine)
        next_answer.cancel()
        next_answer.leave()


async def test_several_at_once_are_answered_each_by_itself_or_all_of_a_tool_for_the_turn(tmp_path: Path) -> None:
    asker = Asker()
    steps = [asker.asks("r1"), asker.asks("r2"), asker.asks("r3", "Write"), None]
    async with engine_of(tmp_path, steps) as (engine, backend):
        answer = await engine.submit(request("go"))
        first, _, write = await asked(engine, 3)
        await engine.approve("local", "a", first.waiting.approval.id, Verdict("allowed_for_turn", "local"))
        await until(lambda: len(asker.told) == 2)
        assert engine.asked("local") == [write]
        await engine.approve("local", "a", write.waiting.approval.id, Verdict("denied", "local"))
        assert sorted(asker.outcomes) == [("r1", "allowed_for_turn"), ("r2", "allowed_for_turn"), ("r3", "denied")]
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert all(one.outcome is not None for one in turn.evidence.approvals)


async def test_what_the_cli_takes_back_is_over(tmp_path: Path) -> None:
    asker = Asker()
    steps = [asker.asks("r1"), None, PermissionWithdrawn("r1"), PermissionWithdrawn("never asked"), None]
    async with engine_of(tmp_path, steps) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        backend.go.release()
        await until(lambda: engine.asked("local") == [])
        with pytest.raises(ApprovalAnswered):
            await engine.approve("local", "a", question.waiting.approval.id, ALLOW)
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert [one.outcome for one in turn.evidence.approvals] == ["withdrawn"]
        assert not any(verdict.allows for _, verdict in asker.told)


async def test_a_cancelled_turn_asks_nobody_any_more_and_its_request_is_open_for_ever(tmp_path: Path) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1"), None]) as (engine, _):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        assert await engine.cancel("local", "a", None) == [answer.turn_id]
        answer.leave()
        assert asker.told == []
        assert engine.asked("local") == []
        with pytest.raises(ApprovalAnswered):
            await engine.approve("local", "a", question.waiting.approval.id, ALLOW)
        turn = await stored(engine, answer.turn_id)
        assert [one.outcome for one in turn.evidence.approvals] == [None]
        said = "Bash (run r1) waited for approval: nobody has answered."
        assert said in [one.says for one in explain.turn(turn.evidence, turn.attempts)]


async def test_a_new_attempt_asks_anew_and_says_that_the_one_before_was_allowed_the_same(tmp_path: Path) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1"), None]) as (engine, backend):
        answer = await engine.submit(request("go", idempotency_key="k"))
        (question,) = await asked(engine)
        assert question.waiting.before is None
        was = await engine.approve("local", "a", question.waiting.approval.id, ALLOW)
        await engine.cancel("local", "a", None)
        answer.leave()
        again = await engine.submit(request("go", idempotency_key="k"))
        assert again.turn_id == answer.turn_id
        (another,) = await asked(engine)
        assert another.waiting.approval.id != question.waiting.approval.id
        assert (another.waiting.before, another.waiting.approval.attempt) == (was.ended_at, 2)
        assert asker.outcomes == [("r1", "allowed")]
        await engine.approve("local", "a", another.waiting.approval.id, Verdict("denied", "local"))
        backend.go.release()
        turn = await again.turn()
        again.acknowledge()
        assert [(one.attempt, one.outcome) for one in turn.evidence.approvals] == [(1, "allowed"), (2, "denied")]


@pytest.mark.parametrize("fault", [StoreUnavailable("the disk is full"), LeaseLost("another proxy has it")])
async def test_what_cannot_be_stored_does_not_run(
    fault: ProxyError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = Asker()
    async with engine_of(tmp_path, [asker.asks("r1"), None]) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)

        async def fails(*_: Any) -> None:
            raise fault

        monkeypatch.setattr(engine.store, "note", fails)
        with pytest.raises(type(fault)):
            await engine.approve("local", "a", question.waiting.approval.id, ALLOW)
        ((_, verdict),) = asker.told
        assert not verdict.allows
        backend.go.release()
        await answer.turn()
        answer.acknowledge()


async def test_what_is_asked_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli_session_proxy.engine.approvals.MOST", 2)
    asker = Asker()
    steps = [asker.asks(f"r{n}") for n in range(3)]
    async with engine_of(tmp_path, [*steps, None]) as (engine, backend):
        answer = await engine.submit(request("go"))
        await asked(engine, 2)
        await until(lambda: bool(asker.told))
        assert asker.outcomes == [("r2", "denied")]
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert len((await stored(engine, turn.id)).evidence.approvals) == 2
    assert MOST < 1000


async def test_what_is_too_large_to_be_shown_is_refused(tmp_path: Path) -> None:
    """A person is shown all of it, without secrets: of 6 MB that held everybody up for 5 s at each look."""
    asker = Asker()
    steps = [asker.asks("large", command="x" * LARGEST), asker.asks("small"), None]
    async with engine_of(tmp_path, steps) as (engine, backend):
        answer = await engine.submit(request("go"))
        (question,) = await asked(engine)
        assert question.waiting.input == {"command": "run small"}
        assert asker.outcomes == [("large", "denied")]
        backend.go.release()
        await answer.turn()
        answer.acknowledge()


def test_what_a_tool_is_to_do_stands_in_a_line() -> None:
    assert in_one_line({"command": "ls\n -l"}) == "ls -l"
    assert in_one_line({"content": "x", "file_path": "/f"}) == "/f"
    assert in_one_line({"a": [1]}) == '{"a": [1]}'
    assert len(in_one_line({"command": "x" * 1000})) == LONGEST_ASKED
    assert in_one_line({"command": f"ls {' ' * 10**6} -l"}) == "ls …"  # looked at in part: 60 MB of words took 4 s
