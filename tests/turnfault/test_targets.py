"""A command for each turn, a Python class and a server: each is a target by one line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from turnfault.bench import Options, target_of
from turnfault.errors import TargetError
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream
from turnfault.rows import ROWS, row_of
from turnfault.running import provider, run
from turnfault.score import Score
from turnfault.talk import RequestRefused
from turnfault.targets.base import Target

ADAPTERS = Path(__file__).parent / "adapters.py"
COMMAND = f"command: {sys.executable} {ADAPTERS} {{agent}}"
QUICK = [row for row in ROWS if row.id in ("nothing", "restart", "kill", "two-alternate", "models", "http-500")]


@asynccontextmanager
async def up(target: str, folder: Path, **more: Any) -> AsyncIterator[tuple[Target, Upstream]]:
    async with provider() as upstream:
        found = target_of(Options((target,), **more), upstream, folder)
        await found.up()
        try:
            yield found, upstream
        finally:
            await found.down()


async def scores(target: str, folder: Path) -> dict[str, Score | None]:
    async with up(target, folder) as (found, upstream):
        results = await run(found, upstream, lambda _result: None, QUICK)
    return {result.row.id: result.score for result in results}


@pytest.mark.parametrize("target", [COMMAND, f"python: {ADAPTERS}:OnDisk"], ids=["command", "class"])
@pytest.mark.sample(1)
async def test_what_keeps_its_conversations_on_disk_keeps_them_over_a_kill(target: str, tmp_path: Path) -> None:
    found = await scores(target, tmp_path)
    assert {name: str(score) for name, score in found.items() if score is None or not score.whole} == {}


async def test_a_class_that_keeps_them_in_memory_loses_them_with_its_process(tmp_path: Path) -> None:
    found = await scores(f"python: {ADAPTERS}:InMemory", tmp_path)
    assert {name for name, score in found.items() if score is not None and score.whole} == {
        "nothing", "two-alternate", "models", "http-500",
    }  # fmt: skip


async def test_a_class_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such database"):
        async with up(f"python: {ADAPTERS}:Unmade", tmp_path):
            pass


async def test_a_class_runs_in_another_interpreter_with_no_module_path_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "path=$PYTHONPATH" >&2\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    async with up(f"python: {ADAPTERS}:OnDisk", tmp_path, python=str(program)) as (found, _):
        assert await found.talk("a", by_id=True).tell()
    assert "path=\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("target", [COMMAND, f"python: {ADAPTERS}:InMemory"], ids=["command", "class"])
async def test_a_client_that_leaves_is_refused_and_the_next_turn_is_answered(target: str, tmp_path: Path) -> None:
    async with up(target, tmp_path) as (found, upstream):
        talk, gate = found.talk("a", by_id=True), HeldReply()
        upstream.next(gate)
        talk.leave_after = gate.reached
        with pytest.raises(RequestRefused, match="the client left"):
            await talk.tell()
        gate.open()
        talk.leave_after = None
        assert (await talk.tell()).answer


async def test_a_killed_class_refuses_what_it_was_asked(tmp_path: Path) -> None:
    async with up(f"python: {ADAPTERS}:OnDisk", tmp_path) as (found, upstream):
        talk, gate = found.talk("a", by_id=True), HeldReply()
        upstream.next(gate)
        telling = asyncio.ensure_future(talk.tell())
        await gate.reached.wait()
        await found.down(kill=True)
        with pytest.raises(RequestRefused, match="connection lost"):
            await telling
        with pytest.raises(RequestRefused, match="connection lost"):
            await talk.tell()


@pytest.mark.parametrize(
    ("target", "says"), [("python: adapters.py", "must name a class"), ("command: /no/such/program", "cannot start")]
)
async def test_a_target_that_is_not_there_is_told(target: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((TargetError, RequestRefused), match=says):
        async with up(target, tmp_path) as (found, _):
            await found.talk("a", by_id=True).tell()


async def test_the_same_seed_is_the_same_run_and_another_one_is_not(tmp_path: Path) -> None:
    async def keys(seed: int) -> list[str]:
        told: list[str] = []
        async with up(f"python: {ADAPTERS}:OnDisk", tmp_path) as (found, upstream):
            rows = [row for row in ROWS if row.id in ("nothing", "two-alternate", "text-flag")]
            for result in await run(found, upstream, lambda _result: None, rows, seed):
                told += [event["words"] for event in result.trace if event["event"] == "told"]
        return told

    first, again, other = await keys(1), await keys(1), await keys(2)
    assert first == again
    assert first != other


async def test_a_trace_holds_what_was_said_what_broke_and_what_the_model_was_shown(tmp_path: Path) -> None:
    async with up(f"python: {ADAPTERS}:InMemory", tmp_path) as (found, upstream):
        (result,) = await run(found, upstream, lambda _result: None, [row for row in ROWS if row.id == "kill"])
    kinds = [event["event"] for event in result.trace]
    assert kinds.index("told") < kinds.index("fault") < kinds.index("request")
    last = result.trace[-1]
    assert (last["event"], last["as_before"]) == ("request", 0)
    assert [role for role, _ in last["messages"]] == ["user"]  # it forgot the others


def test_a_row_is_data() -> None:
    row = row_of({"id": "x", "group": "g", "name": "n", "fault": "says", "with": {"text": "hello"}, "needs": ["id"]})
    assert (str(row), list(row.needs), row.by_id) == ("g: n", ["id"], True)
    assert len({row.id for row in ROWS}) == len(ROWS)
    with pytest.raises(AttributeError):
        row_of({"id": "x", "group": "g", "name": "n", "fault": "no such fault"})
