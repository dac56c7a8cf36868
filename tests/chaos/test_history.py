"""A history is made of its seed alone, and any part of it is a history."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from ..matrix import rest_in_full
from .checker import Fault
from .doors import Wire
from .history import Commit, Cut, History, Join, Kill, Leave, Network, Open, Repeat, Say, Shape, Start, made, read, told
from .model import FaultKind
from .runner import Report
from .shrinking import shrunk

SHAPES = [
    Shape(), Shape(proxies=3), Shape(proxies=3, tools=True, length=60), Shape(cli="1", wrapper=True),
    Shape(proxies=3, hosts=True),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", rest_in_full(*range(20)))
def test_the_same_seed_makes_the_same_history(seed: int, shape: Shape) -> None:
    history = made(seed, shape)
    assert history == made(seed, shape)
    assert len(history.steps) >= shape.length
    turns = [step.turn for step in history.steps if isinstance(step, Say)]
    assert len(turns) == len(set(turns))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", rest_in_full(*range(5)))
def test_a_history_is_read_from_what_was_printed_of_it(seed: int, shape: Shape) -> None:
    history = made(seed, shape)
    assert read("\n".join(history.lines()), seed) == history
    report = Report(history, [], [], Counter(), [f"  1.00 {told(step)}" for step in history.steps])
    assert read("\n".join(report.lines()), seed) == history


@pytest.mark.parametrize("seed", rest_in_full(*range(20), quick=3))
def test_whoever_is_repeated_left_or_let_go_has_spoken_before(seed: int) -> None:
    said: set[int | None] = {None}
    for step in made(seed, Shape(proxies=3, tools=True, length=60)).steps:
        match step:
            case Say():
                said.add(step.turn)
            case Repeat() | Leave() | Open() | Join():
                assert step.turn in said


def test_every_kind_of_step_happens() -> None:
    shape = Shape(proxies=3, tools=True, length=60)
    seen = {type(step).__name__ for seed in range(30) for step in made(seed, shape).steps}
    assert seen == {
        "Say", "Repeat", "Leave", "Open", "Join", "Kill", "Terminate", "Start", "Pause", "Wake", "KillCli", "Spoil",
    }  # fmt: skip


def test_every_kind_of_step_happens_in_wide_histories() -> None:
    histories = [made(seed, Shape(proxies=3, tools=True, length=60, wide=True)) for seed in range(60)]
    steps = [step for history in histories for step in history.steps]
    assert {type(step).__name__ for step in steps} >= {"Rewind", "Delete", "Carry", "Expire", "Commit", "Skew"}
    said = [step for step in steps if isinstance(step, Say)]
    assert {say.wire for say in said if say.wire} == set(get_args(Wire))
    assert {say.fault for say in said if say.fault} == set(get_args(FaultKind))
    assert any(say.full for say in said)
    for history in histories:  # each number once
        numbers = [step.turn for step in history.steps if isinstance(step, Say | Commit)]
        assert len(numbers) == len(set(numbers))


def test_what_happens_to_hosts_happens_only_there() -> None:
    kinds = {"Cut", "Mend", "Database", "Registry", "Skew"}
    for hosts in (True, False):
        shape = Shape(proxies=3, length=60, hosts=hosts)
        histories = [made(seed, shape) for seed in range(30)]
        seen = {type(step).__name__ for history in histories for step in history.steps}
        assert seen & kinds == (kinds if hosts else set())
        cut = {step.network for history in histories for step in history.steps if isinstance(step, Cut)}
        assert cut == (set(get_args(Network)) if hosts else set())
        assert any(speaker.front for history in histories for speaker in history.speakers) == hosts


def test_a_history_without_pauses_has_none() -> None:
    steps = [step for seed in range(30) for step in made(seed, Shape(proxies=3, pauses=False)).steps]
    assert not {"Pause", "Wake"} & {type(step).__name__ for step in steps}


async def test_a_failing_history_is_shrunk_to_the_steps_that_matter() -> None:
    """A world in which a start after a kill loses turn 1."""

    async def run(history: History) -> Report:
        broken, killed = [], False
        for step in history.steps:
            killed = killed or isinstance(step, Kill)
            if isinstance(step, Start) and killed:
                broken = [Fault("lost", "ada", 1, "gone")]
        return Report(history, broken, [], Counter(), [])

    history = made(4, Shape(length=60))
    assert any(isinstance(step, Kill) for step in history.steps)
    report = await shrunk(history, run, lambda line: None, frozenset())
    assert [type(step).__name__ for step in report.history.steps] == ["Kill", "Start"]
    assert report.faults
