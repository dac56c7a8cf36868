"""A proxy that is killed takes its CLIs with it, at once: before one of them can ask the model again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from cli_session_proxy.domain.models import Tool
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.script import HeldReply, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings, processes
from ..matrix import rest_in_full
from ..talking import claude as claude_of
from ..talking import request, running
from ..until import until
from ..wrappers import wrapped
from .others import Other, other_proxy

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [Tool("get_weather", "The weather of a city", SCHEMA).as_json()]
Doing = Callable[[Other, Upstream], Awaitable[None]]

every_kind = pytest.mark.parametrize("kind", ["plain", "no exec"])
# Each way to end a CLI is tried with every kind above; what it is doing meanwhile is no matter of the kind.
one_kind = pytest.mark.parametrize("kind", rest_in_full("no exec", "plain"))


def left(home: Path) -> list[tuple[int, str]]:
    """What still runs with this HOME: a proxy's guardian, its CLIs and whatever these have started."""
    return [(pid, command) for pid, command in processes((), mark=os.fsencode(home)) if pid != os.getpid()]


async def idle(proxy: Other, upstream: Upstream) -> None:
    assert await proxy.ask("one") is not None


async def answering(proxy: Other, upstream: Upstream) -> None:
    gate = HeldReply(after=1, reply=Reply("a long answer, of which the first words are out"))
    upstream.when("two", gate)
    assert await proxy.ask("one") is not None
    await proxy.tell("two")
    async with asyncio.timeout(200):
        await gate.reached.wait()


async def waiting(proxy: Other, upstream: Upstream) -> None:
    """Calls are out. The model would repeat its call for ever, whatever it is told."""
    upstream.when("", ToolUse([("mcp__client__get_weather", {"city": "Rome"})]), times=None)
    answer = await proxy.ask("where", tools=TOOLS)
    assert answer is not None
    assert "output" in answer


# A program without a mark, in a session of its own: what a Mac shows of its own programs.
UNMARKED = "sleep 36001"


def unmarked() -> list[int]:
    return [pid for pid in psutil.pids() if command_of(pid) == UNMARKED]


def command_of(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


@pytest.fixture
def none_is_left() -> Iterator[None]:
    yield
    left = unmarked()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def starts_what_has_no_mark(upstream: Upstream) -> None:
    script = Path(os.environ["HOME"], "start")
    script.write_text(f"exec env -i setsid {UNMARKED}")
    upstream.when("two", ToolUse([("Bash", {"command": f"sh {script}", "description": "Wait"})]))


async def starting_what_has_no_mark(proxy: Other, upstream: Upstream) -> None:
    starts_what_has_no_mark(upstream)
    await proxy.tell("two", wait=False)
    await until(unmarked)


async def using_its_own_tools(proxy: Other, upstream: Upstream) -> None:
    """A shell of the CLI's Bash tool runs: in a session of its own."""
    upstream.when("two", ToolUse([("Bash", {"command": "sleep 3600", "description": "Wait"})]))
    await proxy.tell("two", wait=False)  # it hears a SIGTERM while the turn runs

    async def sleeping() -> bool:
        return any(command == "sleep 3600" for _, command in left(Path(os.environ["HOME"])))

    await until(sleeping)


@asynccontextmanager
async def killed(
    settings: Settings, upstream: Upstream, doing: Doing, runs: str = "asyncio", like: str = "here"
) -> AsyncIterator[Other]:
    """The proxy is killed while it is at that; at the end nothing of it is left, and nobody has asked the model."""
    async with other_proxy(settings, runs=runs, like=like) as proxy:
        await doing(proxy, upstream)
        yield proxy
        before = len(upstream.requests)
        await proxy.end(signal.SIGKILL)

        async def nothing_is_left() -> bool:
            return not left(Path(os.environ["HOME"]))

        await until(nothing_is_left)
        async with httpx.AsyncClient(trust_env=False) as client:  # what they sent before they died has been read now
            await client.get(upstream.url)
        assert [seen.prompt for seen in upstream.requests[before:]] == []


@old_cli_in_full
@every_kind
@pytest.mark.parametrize("doing", rest_in_full(answering, idle))
@pytest.mark.sample(1)
async def test_no_cli_outlives_its_proxy(
    doing: Doing, kind: str, claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with killed(make_settings(claude_bin=wrapped(claude, tmp_path / "bin", kind)), upstream, doing):
        pass


@one_kind
async def test_a_cli_that_waits_for_results_does_not_ask_the_model_when_its_proxy_dies(
    kind: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with killed(make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind)), upstream, waiting):
        pass


@every_kind
@pytest.mark.parametrize("doing", rest_in_full(answering, waiting, idle))
@pytest.mark.sample(1)
async def test_it_is_so_without_a_parent_death_signal_too(
    doing: Doing, kind: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind))
    async with killed(settings, upstream, doing, like="macos"):
        pass


@pytest.mark.parametrize("runs", ["uvloop", "thread"])
@pytest.mark.sample(1)
async def test_it_is_so_on_every_loop_that_an_engine_runs_on(
    runs: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with killed(make_settings(claude_bin=claude_2), upstream, idle, runs) as proxy:
        for _ in range(2):  # the threads that started come to their end, and the CLI does not
            answer = await proxy.ask("again")
            assert answer is not None
            assert answer["continuity"] == "warm"
        await waiting(proxy, upstream)


@one_kind
async def test_a_spare_dies_with_its_proxy(
    kind: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=wrapped(claude_2, tmp_path / "bin", kind), spares=1)
    async with killed(settings, upstream, idle):

        async def two() -> bool:
            return len(list((settings.var / "run").glob("*/[0-9]*"))) == 2

        await until(two)


@old_cli_in_full
async def test_what_the_cli_has_started_dies_with_its_proxy_too(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    profiles = {"shell": Profile(tools=("Bash(sleep *)",))}
    settings = make_settings(claude_bin=claude, profile="shell", profiles=profiles)
    async with killed(settings, upstream, using_its_own_tools):
        pass


@old_cli_in_full
async def test_what_the_cli_has_started_ends_with_a_turn_that_is_cut_short(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    profiles = {"shell": Profile(tools=("Bash(sleep *)",))}
    settings = make_settings(claude_bin=claude, profile="shell", profiles=profiles, drain_timeout=0.1)
    async with other_proxy(settings) as proxy:
        await using_its_own_tools(proxy, upstream)
        assert await proxy.end(signal.SIGTERM) == 0
        assert left(Path(os.environ["HOME"])) == []


@old_cli_in_full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_has_no_mark_ends_with_the_proxy_too(
    number: signal.Signals, claude: Path, make_settings: MakeSettings, upstream: Upstream, none_is_left: None
) -> None:
    profiles = {"shell": Profile(tools=("Bash(sh:*)",))}  # the form that CLI 1.0.120 knows too
    settings = make_settings(claude_bin=claude, profile="shell", profiles=profiles, drain_timeout=0.1)
    async with other_proxy(settings, like="macos") as proxy:
        await starting_what_has_no_mark(proxy, upstream)
        await proxy.end(number)
        await until(lambda: not unmarked())


@pytest.mark.parametrize("cut", rest_in_full("left", "killed", "cancelled", quick=2))
async def test_what_has_no_mark_ends_with_a_turn_that_is_cut_short(
    cut: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, none_is_left: None
) -> None:
    profiles = {"shell": Profile(tools=("Bash(sh *)",))}
    settings = make_settings(claude_bin=claude_2, profile="shell", profiles=profiles, disconnect_grace=0.1)
    starts_what_has_no_mark(upstream)
    async with running(settings) as engine:
        answer = await engine.submit(request("two"))
        await until(unmarked)
        if cut == "cancelled":
            answer.cancel()
        elif cut == "killed":
            (process,) = claude_of(engine).pool.table.all()
            process.kill()
        else:
            answer.leave()
        await until(lambda: not unmarked())
        answer.leave()
