"""The measurements run: every scenario on a turn or two, in a process of its own (it settles on one core)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest

from bench.bounds import Results, bounds
from bench.contenders import BARE, SPAWNED
from bench.figures import Figure, figure, short
from bench.hosts import CPU, ONE, POSTGRESQL, TWO, postgresql
from bench.machine import cores, cpu_seconds, own_cpu_seconds
from bench.plan import Row
from bench.report import PAGE, PICTURE
from bench.trace import Trace

from .. import postgres
from ..until import until
from .running import run

# All of them: some thirty processes, on one core at a loaded time.
SCENARIOS = "turns,parameters,edits,one-shots,chains,dumps,agents,crowd,hosts,page,freeze"


_SPENT = """
import sys, threading, time
def spend():
    while time.thread_time() < 0.2:
        pass
thread = threading.Thread(target=spend)
thread.start()
thread.join()
print("ended", flush=True)
sys.stdin.read()
"""


async def test_the_cpu_time_of_a_process_holds_that_of_threads_that_have_ended() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SPENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ended\n"
    assert 0.2 <= own_cpu_seconds(process.pid) <= cpu_seconds([process.pid])
    await process.communicate(b"")
    with pytest.raises(OSError, match="Invalid argument"):
        own_cpu_seconds(process.pid)
    assert cpu_seconds([process.pid]) == 0.0


def test_a_figure_is_the_median_and_its_tenths() -> None:
    assert figure(range(11), 2.0) == Figure(10.0, 2.0, 18.0, 11)
    assert [short(value) for value in (0, 0.1234, 1.234, 12.34, 1234.5)] == ["0", "0.123", "1.23", "12.3", "1,234"]


def test_a_bound_holds_by_the_ratio_of_the_medians() -> None:
    def row(measure: str, contender: str, value: float, at: int | None = None) -> Row:
        return Row(measure, contender, "ms", figure([value]), at)

    rows = [row("turn", "proxy", 30), row("turn", BARE, 20), row("turn", SPAWNED, 300), row("turn", POSTGRESQL, 26)]
    rows += [row(CPU, ONE, 50, 16), row(CPU, TWO, 60, 16)]
    found = {bound.measure: (bound.found, bound.met) for bound in bounds(Results(rows), None)}
    assert found["warm turn, proxy ÷ bare warm CLI"] == ("1.50", False)
    assert found["warm turn, a spawn a turn ÷ proxy"] == ("10.0", True)
    assert found["warm turn, proxy on PostgreSQL ÷ bare warm CLI"] == ("1.30", True)
    assert found["CPU of a turn on PostgreSQL, 16 agents a host, two hosts ÷ one"] == ("1.20", False)
    assert found["serve ready"] == ("", None)


def test_without_postgresql_what_it_takes_is_left_out_and_not_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.hosts.programs", lambda: None)
    with postgresql(cores()) as server:
        assert server is None
    assert "PostgreSQL is not installed" in capsys.readouterr().err
    found = {bound.measure: bound.met for bound in bounds(Results([]), None)}
    assert found["CPU of a turn on PostgreSQL, 16 agents a host, two hosts ÷ one"] is None


async def test_a_measurement_does_not_outlive_a_test_that_is_cancelled(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    task = asyncio.create_task(run("timeit", "-n1", "-r1", program, folder=tmp_path))
    await until(lambda: noted.exists() and noted.read_text())
    pid = int(noted.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid)


@pytest.mark.full
@pytest.mark.timeout(600)  # beside other programs it takes over 300 s
@pytest.mark.usefixtures("claude_2")
async def test_every_scenario_runs_and_is_reported(tmp_path: Path) -> None:
    postgres.needed(postgres.programs(), "PostgreSQL")
    (tmp_path / PAGE).write_text("Words.\n<!-- written by `make bench` -->\nold numbers\n")
    said = await run(
        "bench", "--tiny", "--without-ccproxy", "--only", SCENARIOS,
        "--json", str(tmp_path / "bench.json"), "--docs", str(tmp_path),
        folder=tmp_path, env={"MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip

    found = json.loads((tmp_path / "bench.json").read_text())
    turns = {row["contender"]: row["value"]["runs"] for row in found["rows"] if row["measure"] == "turn"}
    assert turns == {BARE: 2, "proxy": 2, POSTGRESQL: 2, SPAWNED: 1}
    measured = {row["measure"] for row in found["rows"]}
    assert {"first token", "dump, memory above idle"} <= measured
    assert {row["contender"] for row in found["rows"] if row["measure"] == CPU} == {ONE, TWO}
    assert {"turn with other parameters", "control round trip", "turns/s", "the proxy's share of it"} <= measured
    attacked = {row["contender"] for row in found["rows"] if row["measure"] == "worst /healthz"}
    assert attacked == {"nothing", "a slow pattern in a schema"}
    crowd = found["crowd"]
    assert (crowd["answered"], crowd["forgotten"], crowd["orphans"]) == (6, 0, 0)
    assert 0 < crowd["most_children"] <= crowd["budget"] + 1  # one may be ending

    page = (tmp_path / PAGE).read_text()
    assert page.startswith("Words.\n<!-- written")
    assert "old numbers" not in page
    assert "| warm turn, proxy ÷ bare warm CLI" in page
    assert "| warm turn, proxy ÷ bare warm CLI" in said
    assert "<svg" in (tmp_path / PICTURE).read_text()


def test_a_trace_counts_functions_files_and_moves_and_reads_top_to_bottom() -> None:
    calls = [("a.py", "one"), ("b.py", "two"), ("b.py", "three.<locals>.<lambda>"), ("a.py", "one")]
    found = Trace([*calls, ("a.py", "one.<locals>.<genexpr>")])
    assert (len(found.functions), len(found.files), found.moves) == (3, 2, 2)
    assert list(found.lines())[:5] == ["a.py", "    one  ×2", "b.py", "    two", "    three.<locals>.<lambda>"]
    assert list(found.lines())[-2:] == [
        "3 functions in 2 files, 2 moves between files",
        "4 frames with comprehensions and generator expressions",
    ]
