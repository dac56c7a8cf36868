"""A task that is interrupted is done where its history is kept, and goes round in circles where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnfault import tasks
from turnfault.bench import Options

from .test_targets import ADAPTERS


@pytest.mark.parametrize("task", tasks.tasks(), ids=lambda task: task.id)
async def test_a_tasks_test_fails_until_its_right_attempt(task: tasks.Task, tmp_path: Path) -> None:
    desk = tasks.Desk(task, tmp_path)
    assert not await desk.passes()
    await desk.run("first attempt")
    assert not await desk.passes()
    await desk.run("second attempt")
    assert await desk.passes()


async def outcomes(kind: str, folder: Path) -> dict[str, set[str]]:
    found = await tasks.run(Options((f"python: {ADAPTERS}:{kind}",), name=kind), print, output=folder)
    assert tasks.read(folder) == {kind: found}
    told: dict[str, set[str]] = {}
    for one in found:
        what = "left out" if one.left_out else "done" if one.done else one.says
        told.setdefault(one.interruption, set()).add(what)
    return told


async def test_what_keeps_its_history_gets_every_task_done(tmp_path: Path) -> None:
    assert await outcomes("OnDisk", tmp_path) == {
        "none": {"done"}, "killed": {"done"}, "limit": {"done"}, "other model": {"done"}, "other host": {"left out"},
    }  # fmt: skip


@pytest.mark.full
async def test_what_forgets_does_not_know_its_task_after_a_kill(tmp_path: Path) -> None:
    found = await outcomes("InMemory", tmp_path)
    assert found["none"] == {"done"}
    assert found["killed"] == {"What is the task?"}


def test_the_model_that_is_not_shown_its_attempt_makes_it_again() -> None:
    task = ("user", "Mend it. (ticket T-1234)")
    looked = [task, ("assistant", "run: look"), ("user", "1. x.py: …")]
    assert tasks.model(looked) == "run: first attempt"
    tested = [*looked, ("assistant", "run: first attempt"), ("user", "2. x.py is written"), ("assistant", "run: test"),
              ("user", "3. test: failed")]  # fmt: skip
    assert tasks.model(tested) == "run: second attempt"
    assert tasks.model([*looked, ("user", "3. test: failed")]) == "run: first attempt"
    assert tasks.model([("user", "3. test: failed")]) == "What is the task?"
    flat = "\n".join(f"{role}: {text}" for role, text in tested)
    assert tasks.model([("user", flat)]) == "run: second attempt"
