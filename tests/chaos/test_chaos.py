"""Histories of fixed seeds over the real parts: no acknowledged turn is lost, doubled, reordered, foreign or answered
twice, nothing is made up, and nobody outlives their proxy.

A failure prints the history and the command that runs it again; `make chaos` runs new seeds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import CI, ROOT
from . import cluster
from .history import History, Shape, made, read
from .runner import run

# Steps of a history that is run at `make full`.
SHORT = 16

HISTORIES = [
    pytest.param(11, Shape(1, length=SHORT, pauses=False), id="one proxy", marks=pytest.mark.full),
    pytest.param(12, Shape(1, tools=True, length=SHORT, pauses=False), id="one proxy, tools", marks=pytest.mark.full),
    pytest.param(13, Shape(3, length=SHORT), id="three proxies", marks=pytest.mark.full),
    pytest.param(
        14, Shape(3, tools=True, length=SHORT, pauses=False), id="three proxies, tools", marks=pytest.mark.full
    ),
    pytest.param(
        15, Shape(2, tools=True, length=SHORT, pauses=False, wrapper=True), id="behind a script", marks=pytest.mark.full
    ),
    pytest.param(6, Shape(1, tools=True, length=SHORT, pauses=False, wide=True), id="every wire"),
    pytest.param(
        4, Shape(3, tools=True, length=SHORT, wide=True), id="every wire, three proxies", marks=pytest.mark.full
    ),
    pytest.param(17, Shape(1, length=SHORT, wide=True, release=True), id="chains of 0.1.0", marks=pytest.mark.full),
    pytest.param(16, Shape(2, cli="1", length=SHORT, pauses=False), id="CLI 1.0.120", marks=pytest.mark.full),
]


@pytest.mark.full  # each time, without hosts of their own: engine/test_hosts.py, continuity/test_hosts.py
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "length", "tools"),
    [(1471, 10, False), *((seed, 2 * SHORT, tools) for seed in (22, 23) for tools in (False, True))],
)
def test_a_history_on_three_hosts_keeps_every_promise(seed: int, length: int, tools: bool, claude_2: Path) -> None:
    """The first: the database restarts, and a host is cut off from it for longer than a lease. Network namespaces need
    root, and a process that enters them at its start; in CI they have to be there."""
    on_hosts("--proxies", "3", "--seed", str(seed), "--length", str(length), *["--tools"] * tools)


def on_hosts(*asked: str) -> str:
    """What a run on hosts has reported; every promise was kept."""
    why = cluster.missing()
    if why is not None:
        (pytest.fail if CI else pytest.skip)(why)
    told = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--hosts", *asked], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


# Planted histories, and what has to be noticed where their breakages are in force.
PLANTED = [
    # Redis starts again empty, a host is cut off from the others while it has the agent warm, and another one from
    # Redis. Turn 3 runs where it arrived.
    pytest.param(
        "hosts_that_do_not_reach_each_other",
        {
            "entries that Redis forgot", "passed on and answered", "passed on and ran_here", "not_passed_on at h2",
            "registry_away at h2",
        },
        marks=pytest.mark.full,  # each time, without machines of their own: http/test_passing_on.py
    ),
    # A host is cut off from the others in the middle of an answer that it gives by way of another one.
    pytest.param(
        "an_answer_that_is_lost_between_hosts",
        {"passed on and interrupted", "hop_broken at h1"},
        marks=pytest.mark.full,
    ),
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "expected"), PLANTED)
def test_hosts_notice_what_they_are_cut_off_from(name: str, expected: set[str], claude_2: Path) -> None:
    told = on_hosts("--replay", str(Path(__file__).parent / "planted" / f"{name}.txt"))
    [line] = re.findall(r"^noticed: (.*)$", told, re.MULTILINE)
    noticed = {name: int(count) for name, count in re.findall(r"([^,]+?) (\d+)(?:, |$)", line)}
    # No count is exact: a busy host may not say within a second that it is there.
    assert expected <= {name for name, count in noticed.items() if count}, told


# Histories that broke a promise once, shrunk to the steps that did it: a printed report is one.
FOUND = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "found").glob("*.txt"))}
# Of these, what has a test of its own by now that takes the same steps in each run: the history itself is `full`.
ELSEWHERE = {
    "a_cut_stream_on_responses": "clients/test_cut_streams.py",
    "a_stream_that_is_cut": "clients/test_cut_streams.py",
    "an_exchange_with_calls_that_is_told_twice": "history/test_call_ids.py",
    "a_flipped_letter_during_a_turn": "backends/claude/sessions/test_loading.py",
    "a_flipped_letter_then_the_cli_dies": "backends/claude/sessions/test_loading.py",
    "swapped_while_a_session_is_loaded": "backends/claude/sessions/test_loading.py",
    "calls_wait_while_another_proxy_dies_with_their_results": "recovery/test_promise_among_proxies.py",
    "crash_then_the_same_words_elsewhere": "recovery/test_promise_among_proxies.py",
    "results_at_another_proxy_then_the_first_dies": "recovery/test_promise_among_proxies.py",
    "dies_just_as_calls_are_made": "recovery/test_interrupted.py",
    "dies_while_calls_wait": "tools/test_breakages.py",
    "left_and_came_again_at_another_proxy": "recovery/test_promise_among_proxies.py",
    "paused_in_mid_answer": "recovery/test_promise_among_proxies.py",
    "results_that_a_new_process_compacts": "tools/test_breakages.py",
}


async def kept(history: History, request: pytest.FixtureRequest, folder: Path) -> None:
    binary: Path = request.getfixturevalue(f"claude_{history.shape.cli}")
    report = await run(history, binary, folder)
    told = "\n".join(report.lines())
    assert not report.faults, told
    assert report.median >= 0.99, told


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "shape"), HISTORIES)
async def test_a_history_keeps_every_promise(
    seed: int, shape: Shape, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    await kept(made(seed, shape), request, tmp_path / "run")


@pytest.mark.full  # the kinds of steps are each tested in their own room
@pytest.mark.timeout(600)
async def test_summaries_fallbacks_commits_retention_and_the_sdk_keep_every_promise(
    claude_2: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    planted = Path(__file__).parent / "planted" / "beside_a_conversation.txt"
    await kept(read(planted.read_text(), seed=2), request, tmp_path / "run")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ELSEWHERE else ()) for name in FOUND]
)
@pytest.mark.sample(1)
async def test_a_history_that_broke_a_promise_once_keeps_it(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    await kept(read(FOUND[name], seed=1), request, tmp_path / "run")
