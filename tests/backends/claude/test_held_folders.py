"""A program of a confined agent can hold up whoever looks into its folders, for as long as it lives: it lists a folder
into memory that cannot be written meanwhile, and the kernel lets nobody else look for a name there. Others go on.

The attack itself needs a processor for itself (`hold.c` in docs/security.md took 32 s for a `stat`). Here each call
that looks for a name in a held folder waits, in whichever thread it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cli_session_proxy.backends.claude.process import confine, login
from cli_session_proxy.backends.claude.sessions.capture import Captures, LiveSession
from cli_session_proxy.backends.claude.sessions.manager import Sessions
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.sandbox import Sandboxes
from turnfault.provider.script import Fail, ToolUse

from ...talking import ask, claude, events, running, text
from ...until import POLL, until
from .test_confined import MARK, Shells, bubblewrap, shells

__all__ = ["bubblewrap", "shells"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap is Linux's")

PATIENCE = 60.0
CALLS = ("access", "lstat", "mkdir", "open", "readlink", "rename", "replace", "rmdir", "scandir", "stat", "unlink")


class Held:
    """Folders whose lock somebody holds, and the calls that wait for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: set[Path] = set()
        self.waiting: list[str] = []
        self.released = threading.Event()
        self.holder: psutil.Process | None = None  # a process that releases all when it ends
        self._loop = threading.current_thread()
        for name in CALLS:
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        call = getattr(os, name)

        def calling(path: Any, *more: Any, **options: Any) -> Any:
            if self.folders and isinstance(path, str | Path) and self._is_held(Path(path)):
                assert threading.current_thread() is not self._loop, f"the event loop waits: {name} {path}"
                self.waiting.append(f"{name} {path}")
                while not self.released.wait(POLL) and (self.holder is None or self.holder.is_running()):
                    pass
            return call(path, *more, **options)

        monkeypatch.setattr(os, name, calling)

    def _is_held(self, path: Path) -> bool:
        return not self.released.is_set() and any(folder in path.parents for folder in self.folders)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.released.set()


async def talk(engine: Engine, agent: str, *said: str) -> str:
    return text(await ask(engine, *said, agent=agent, profile="confined", system="be kind"))


def project(shells: Shells, agent: str) -> Path:
    assert shells.settings.claude_config_dir is not None
    [folder] = shells.settings.claude_config_dir.glob(f"projects/*-{agent}")
    return folder


async def test_held_agents_take_no_thread_of_others(shells: Shells, held: Held) -> None:
    threads = 2
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
    names = [f"held{number}" for number in range(threads)]
    async with running(shells.settings) as engine:
        answers = {name: await talk(engine, name, "one") for name in names}
    async with running(shells.settings) as engine:  # without their processes
        held.folders.update(project(shells, name) for name in names)
        turns = [asyncio.create_task(talk(engine, name, "one", answers[name], "two")) for name in names]
        await until(lambda: len(held.waiting) == threads)
        assert await talk(engine, "other", "hello")
        held.released.set()
        assert all(await asyncio.gather(*turns))


async def test_a_held_folder_of_a_login_holds_up_no_other_confined_agent(shells: Shells, held: Held) -> None:
    places = Sandboxes(shells.settings)
    config_dir = shells.settings.claude_config_dir
    assert config_dir is not None
    config_dir.mkdir(exist_ok=True)
    (config_dir / ".credentials.json").write_text('{"claudeAiOauth": {}}')
    async with running(shells.settings) as engine:
        for name in ("one", "other"):
            answer = await talk(engine, name, "hello")
        held.folders.add(places.private("one"))
        turn = asyncio.create_task(talk(engine, "one", "hello", answer, "again"))
        await until(lambda: held.waiting)
        assert await talk(engine, "other", "hello", answer, "again")
        assert await talk(engine, "new", "hello")
        held.released.set()
        assert await turn


async def test_a_login_that_made_others_wait_is_left_alone_by_them_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that held their folders now and then delayed each turn of the others by up to two seconds."""
    (tmp_path / login.FILE).write_text('{"claudeAiOauth": {}}')
    logins, state = login.Logins(tmp_path, tmp_path), login._state
    one, other = (tmp_path / "confined" / name for name in ("one", "other"))
    for private in (one, other):
        await logins.exchange(private, give=True)
    monkeypatch.setattr(login, "WAIT", POLL)
    monkeypatch.setattr(login, "WAIT_FOR_ONE", 0.0)  # it waits for however short a time
    released, looked = threading.Event(), list[Path]()

    def looking(path: Path) -> tuple[int, ...] | None:
        looked.append(path.parent)
        if path.parent == one:
            released.wait()
        return state(path)

    monkeypatch.setattr(login, "_state", looking)
    try:
        await logins.exchange(other, give=True)
        await until(lambda: one in looked)
    finally:
        released.set()
    await until(lambda: one in logins._left_alone and not logins._in_use[one].locked())
    monkeypatch.setattr(login, "WAIT", PATIENCE)
    looked.clear()
    await logins.exchange(other, give=True)
    assert one not in looked
    await logins.exchange(one, give=True)
    assert one in looked
    monkeypatch.setattr(logins, "_left_alone", {})  # the time is over
    looked.clear()
    await logins.exchange(other, give=True)
    assert one in looked


async def test_a_login_that_makes_others_wait_again_and_again_is_left_alone_for_longer_and_one_that_did_once_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine each copy is slow now and then. In the end each such time hid its renewals for an hour."""
    (tmp_path / login.FILE).write_text('{"claudeAiOauth": {}}')
    logins, state = login.Logins(tmp_path, tmp_path), login._state
    one, other = (tmp_path / "confined" / name for name in ("one", "other"))
    now = 0.0

    def slow(path: Path) -> tuple[int, ...] | None:
        nonlocal now
        now += 1.0 if path.parent == one else 0.0
        return state(path)

    monkeypatch.setattr(login, "time", SimpleNamespace(monotonic=lambda: now))
    for private in (one, other):
        await logins.exchange(private, give=True)
    monkeypatch.setattr(login, "_state", slow)
    lasted = list[float]()
    for pause in (0.0, 1.0, 1.0, 1.0, login.LONGEST_LEFT_ALONE, 1.0):
        now += pause
        await logins.exchange(other, give=True)
        until, lasts = logins._left_alone[one]
        now, lasted = until, [*lasted, lasts]
    assert lasted == [60.0, 240.0, 960.0, 3600.0, 60.0, 240.0]


async def test_a_held_start_takes_no_place_of_others(
    shells: Shells, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its boundary is made before it gets one of the few permits to start."""
    settings = shells.settings.model_copy(update={"max_spawns": 1})
    make = confine._wrapper

    def making(*arguments: Any) -> Any:
        if (place := arguments[3]).cwd.name == "one":
            held.folders.add(place.project)
        return make(*arguments)

    monkeypatch.setattr(confine, "_wrapper", making)
    async with running(settings) as engine:
        turn = asyncio.create_task(talk(engine, "one", "hello"))
        await until(lambda: held.waiting)
        assert await talk(engine, "new", "hello")
        held.released.set()
        assert await turn


async def test_a_transcript_that_is_held_is_read_once_its_cli_was_killed(
    shells: Shells, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is complete, so no time limit of the turn counts any more; nor could it be cancelled or deleted."""
    capture = Captures.capture

    async def holding(one: Captures, ready: LiveSession, *arguments: Any) -> Any:
        held.holder = psutil.Process(ready.process.pid)
        held.folders.add(Path(ready.session.transcript).parent)
        return await capture(one, ready, *arguments)

    settings = shells.settings.model_copy(update={"idle_timeout": 8.0})
    async with running(settings) as engine:
        monkeypatch.setattr(Captures, "capture", holding)
        turn = await ask(engine, "hello", agent="one", profile="confined", system="be kind")
        assert held.waiting
        monkeypatch.setattr(Captures, "capture", capture)
        held.folders.clear()
        records = await engine.store.own_records(turn.id)
        assert [record.synthetic for record in records] == [True, False]  # made of what was sent, and reported
        assert await talk(engine, "one", "hello", text(turn), "again")
    assert "transcript_held" in [event["event"] for event in events(caplog)]


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_a_failed_turn_waits_for_no_program_of_another_cli_of_the_agent(
    shells: Shells, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new session's transcript is removed. Its own CLI has ended by then, another one of the agent lives."""
    spoil = Sessions.spoil

    async def holding(one: Sessions, ready: LiveSession, *arguments: Any, **options: Any) -> None:
        [other] = [process for process in one._pool.table.processes.values() if process is not ready.process]
        held.holder = psutil.Process(other.pid)
        held.folders.add(Path(ready.session.transcript).parent)
        await spoil(one, ready, *arguments, **options)

    async with running(shells.settings.model_copy(update={"idle_timeout": 8.0})) as engine:
        answer = await talk(engine, "one", "hello")
        monkeypatch.setattr(Sessions, "spoil", holding)
        shells.upstream.when("fail", Fail(400, message="no"), times=None)
        with pytest.raises(InvalidRequest):
            await ask(engine, "fail", agent="one", profile="confined", system="be kind", fresh=True)
        assert held.waiting
        held.folders.clear()
        assert await talk(engine, "one", "hello", answer, "again")


@pytest.mark.timeout(120)
async def test_a_deletion_waits_for_no_program_of_the_agent(shells: Shells, held: Held) -> None:
    """Each of its CLIs has ended before the first file is removed."""
    async with running(shells.settings) as engine:
        for words in ("hello", "good day"):
            await ask(engine, words, agent="one", profile="confined", system="be kind", fresh=True)
        agent = await engine.agent_named("local", "one")
        lives = {name: one.pid for name, one in claude(engine).pool.table.processes.items()}
        last = [name for name in await engine.store.named_by(agent.key) if name in lives][-1]
        assert len(lives) == 2
        held.holder = psutil.Process(lives[last])
        held.folders.add(project(shells, "one"))
        assert await engine.delete("local", "one")


async def test_a_confined_cli_ends_before_another_one_of_the_agent_runs_unconfined(shells: Shells) -> None:
    """Programs in it could hold up the event loop, which looks into the folders of an agent that is not confined."""
    mark = f"{MARK}1"

    def lives() -> bool:
        return any(mark in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))

    async with running(shells.settings) as engine:
        shells.upstream.when("stay", ToolUse([("Bash", {"command": f"setsid sleep {mark} >/dev/null 2>&1 & echo"})]))
        await talk(engine, "one", "stay")
        assert lives()
        await ask(engine, "elsewhere", agent="one", profile="free", fresh=True)
        assert not lives()


async def test_a_lost_transcript_is_not_looked_for_in_a_folder_that_is_held(shells: Shells, held: Held) -> None:
    async with running(shells.settings) as engine:
        await talk(engine, "one", "hello")
        answer = text(await ask(engine, "hello", agent="other"))
    async with running(shells.settings) as engine:
        for lost in project(shells, "other").glob("*.jsonl"):
            lost.unlink()
        held.folders.add(project(shells, "one"))
        assert (await ask(engine, "hello", answer, "again", agent="other")).continuity == "rebuilt"
    assert not held.waiting
