"""What `serve` prints for the person at its terminal: where it listens, each repair, each adopted turn."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from cli_session_proxy import logs
from cli_session_proxy.commands.prerequisites import report
from cli_session_proxy.domain import times
from cli_session_proxy.domain.evidence import Evidence, Refusal
from cli_session_proxy.domain.models import Agent, Link
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.http import repair_lines, server
from cli_session_proxy.http.repair_lines import RepairLines
from cli_session_proxy.http.served import served_at
from cli_session_proxy.http.watchdog import Watchdog
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Store
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings
from ..fakes import AGENT, FakeEngine, turn
from ..talking import by_hand
from ..until import until

SOON = 60
GONE = Link("s1", "s1", "turn_2", "rebuilt", {"found": "missing", "note": "no transcript at /x", "records": 9}, 2.0)
SAID = "Session file was missing; restored."


class Names:
    """The part of a store that is asked."""

    def __init__(self, agent: Agent | None = AGENT) -> None:
        self._agent = agent

    async def agent_by_key(self, key: int) -> Agent | None:
        if self._agent is None:
            raise StoreUnavailable("no")
        assert key == self._agent.key
        return self._agent


@asynccontextmanager
async def telling(names: Names, said: list[str]) -> AsyncIterator[RepairLines]:
    lines = RepairLines(names, said.append)  # type: ignore[arg-type]  # a fake with the part that is read
    task = asyncio.create_task(lines.run())
    try:
        yield lines
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_repair_is_one_line_and_a_sound_turn_none() -> None:
    said: list[str] = []
    async with telling(Names(replace(AGENT, agent_id="a\x1b[31m\nb")), said) as lines:
        lines.turn_ended(turn(1), (Link(None, "s1", "turn_1", "started", {}, 1.0),))
        lines.spawned(0.3)
        lines.turn_ended(turn(2, finished_at=1_790_000_000.0), (GONE,))
        await until(lambda: len(said) >= 1)
    stamp = times.written(1_790_000_000.0)
    assert said == [f"{stamp}  repaired  agent a\ufffd[31m\ufffdb, turn_2: {SAID}"]


async def test_a_failure_and_a_refusal_are_told_as_what_they_are() -> None:
    said: list[str] = []
    error = {"code": "upstream_error", "message": "The provider said: sk-ant-api03-abcdef123456"}
    refusal = Evidence(refusal=Refusal("cyber", "no"))
    async with telling(Names(), said) as lines:
        lines.turn_ended(turn(2, status="cancelled", error={"code": "turn_cancelled", "message": "left"}), ())
        lines.turn_ended(turn(3, status="failed", error=error), ())
        lines.turn_ended(turn(4, status="refused", evidence=refusal), ())
        await until(lambda: len(said) >= 2)
    failed, refused = (line.partition("  ")[2] for line in said)
    assert failed == "failed    agent a, turn_3: The provider said: [redacted]"
    assert refused == "refused   agent a, turn_4: The model refused; the next turn starts from the one before."


async def test_each_adopted_turn_is_a_line() -> None:
    said: list[str] = []
    async with telling(Names(), said) as lines:
        link = Link("s1", "s1", "turn_4", "adopted", {"note": "x", "turns": ["turn_3", "turn_4"]}, 1.0)
        lines.adopted(turn(4), link)
        await until(lambda: len(said) >= 2)
    first, second = (line.partition("  ")[2] for line in said)
    assert first == "adopted   agent a, turn_3: Turns made outside the proxy were adopted."
    assert second.startswith("adopted   agent a, turn_4: ")


async def test_without_its_name_a_repair_is_told_all_the_same() -> None:
    said: list[str] = []
    async with telling(Names(None), said) as lines:
        lines.turn_ended(turn(2), (GONE,))
        await until(lambda: len(said) >= 1)
    assert said[0].endswith(f"agent (its name cannot be read), turn_2: {SAID}")


async def test_a_terminal_that_nobody_reads_keeps_the_last_repairs_and_stops_nothing() -> None:
    said: list[str] = []
    read = threading.Event()

    def say(line: str) -> None:
        read.wait(SOON)
        said.append(line)

    lines = RepairLines(Names(), say)  # type: ignore[arg-type]  # a fake with the part that is read
    task = asyncio.create_task(lines.run())
    lines.turn_ended(turn(0), (GONE,))
    await asyncio.sleep(0)
    for number in range(1, repair_lines.WAITING + 11):
        lines.turn_ended(turn(number), (GONE,))
    read.set()
    await until(lambda: any(f"turn_{repair_lines.WAITING + 10}:" in line for line in said))
    task.cancel()
    await asyncio.wait([task])
    assert any("left out: see `find --repaired`" in line for line in said)
    assert len(said) <= repair_lines.WAITING + 2


async def test_a_terminal_that_is_gone_ends_the_telling_and_nothing_else() -> None:
    def say(_line: str) -> None:
        raise BrokenPipeError

    lines = RepairLines(Names(), say)  # type: ignore[arg-type]  # a fake with the part that is read
    lines.turn_ended(turn(2), (GONE,))
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(lines.run(), SOON)
    lines.turn_ended(turn(3), (GONE,))


# --- in `serve`


class Draining(FakeEngine):
    """An engine that can be started and stopped; while it stops, a turn with a repair ends."""

    def __init__(self, _settings: Settings, _store: Store) -> None:
        super().__init__()
        self.fake_store.agent_by_key = Names().agent_by_key  # type: ignore[attr-defined]
        self.was_told = asyncio.Event()
        self.stopped = 0

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped += 1
        if self.stopped == 1:
            for observer in self.observers:
                cast(RepairLines, observer).turn_ended(turn(2), (GONE,))
            await asyncio.wait_for(self.was_told.wait(), SOON)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Draining]:
    made: list[Draining] = []

    def make(settings: Settings, store: Store) -> Draining:
        made.append(Draining(settings, store))
        return made[-1]

    monkeypatch.setattr(server, "Engine", make)
    return made


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """One that ends nothing: this process goes on."""
    made = Watchdog(leave=lambda _code: None)
    made.start()
    yield made
    made.stop()


async def test_a_repair_that_a_stopping_proxy_makes_is_told(
    engines: list[Draining], watchdog: Watchdog, tmp_path: Path
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("claude"):  # the last line of the start
            os.kill(os.getpid(), signal.SIGTERM)
        if "repaired" in line:
            loop.call_soon_threadsafe(engines[0].was_told.set)

    loop = asyncio.get_running_loop()
    tmp_path.joinpath("var").mkdir()
    await asyncio.wait_for(
        server.serve(
            Settings(port=0, var=tmp_path / "var", claude_bin=tmp_path / "none"), say, watchdog, report=report
        ),
        SOON,
    )
    assert [line.partition(" ")[0] for line in said[:4]] == ["listening", "page:", "try:", "claude:"]
    assert [line.partition(" ")[0] for line in said[4:6]] == ["no", "one-shots"]
    assert said[6].endswith(f"turn_2: {SAID}")


async def test_without_a_terminal_the_proxy_serves_all_the_same(
    engines: list[Draining], watchdog: Watchdog, tmp_path: Path
) -> None:
    def say(_line: str) -> None:
        raise BrokenPipeError

    tmp_path.joinpath("var").mkdir()
    serving = asyncio.create_task(server.serve(Settings(port=0, var=tmp_path / "var"), say, watchdog, report=report))
    async with asyncio.timeout(SOON):
        where = await until(lambda: served_at(tmp_path / "var"))
        assert where is not None
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{where.url}/healthz")).status_code == 200
        engines[0].was_told.set()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert "nothing_more_is_said" in logs.file_of(Settings(var=tmp_path / "var")).read_text()


STUCK = """
import asyncio, os, threading
from cli_session_proxy import cli
from cli_session_proxy.http.repair_lines import RepairLines
from tests.fakes import turn
from tests.http.test_repair_lines import GONE, Names

saying = threading.Event()

def say(line):
    saying.set()
    cli._say_at_once(line)

async def main():
    lines = RepairLines(Names(), say)
    task = asyncio.create_task(lines.run())
    lines.turn_ended(turn(2), (GONE,))
    while not saying.is_set():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # it stands in the write by now; if not, this test is passed for nothing, never failed
    task.cancel()

os.set_blocking(1, False)
try:
    while True:
        os.write(1, b"x")
except BlockingIOError:
    os.set_blocking(1, True)
asyncio.run(main())
"""


async def test_a_line_that_nobody_reads_does_not_keep_the_program_from_ending() -> None:
    unread, stdout = os.pipe()
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, cwd=ROOT, stdout=stdout, env=buffered)
    try:
        assert await asyncio.wait_for(process.wait(), SOON) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(stdout)
        os.close(unread)


# --- the command


@asynccontextmanager
async def served(settings: Settings, claude: Path) -> AsyncIterator[asyncio.StreamReader]:
    assert settings.claude_config_dir is not None
    args = ["--var", settings.var, "--claude-bin", claude, "--claude-config-dir", settings.claude_config_dir]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy", "serve", "--port", "0", *map(str, args),
        stdout=asyncio.subprocess.PIPE, limit=1024 * 1024,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SOON):
            yield process.stdout
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), SOON) == 0


async def test_serve_prints_where_it_listens_and_a_line_for_each_repair(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(claude_bin=claude_2)
    assert settings.claude_config_dir is not None
    for name, value in settings.claude_env.items():
        monkeypatch.setenv(name, value)
    async with served(settings, claude_2) as lines:
        first = (await lines.readline()).decode()
        assert first.startswith("listening on http://127.0.0.1:")
        while not (await lines.readline()).startswith(b"claude 2.1."):
            pass
        assert (await lines.readline()).startswith(b"no key: ")
        assert (await lines.readline()).startswith(b"one-shots ")
        async with httpx.AsyncClient(base_url=first.split()[2], trust_env=False, timeout=SOON) as http:
            await say(http, "one")
            [path] = settings.claude_config_dir.glob("projects/*/*.jsonl")
            await asyncio.to_thread(path.unlink)
            turn_id = await say(http, "two")
            line = (await lines.readline()).decode()
            assert line.endswith(f"  repaired  agent a, {turn_id}: {SAID}\n")
            await by_hand(settings, path.stem, "three")
            line = (await lines.readline()).decode()
            assert "  adopted   agent a, turn_" in line
            assert "Turns made outside the proxy were adopted." in line
            assert "three" not in line
            assert "three" in (await http.get("/v1/chains/a?format=markdown")).text
            told = (await http.get("/metrics")).text
    assert 'cli_session_proxy_repairs_total{found="other",reason="adopted"} 1.0' in told


async def say(http: httpx.AsyncClient, words: str) -> str:
    body = {"model": "sonnet", "messages": [{"role": "user", "content": words}]}
    answer = await http.post("/v1/chat/completions", json=body, headers={"X-Agent-Id": "a"})
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Turn-Id"]
