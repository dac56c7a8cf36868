"""What the watcher tells of changes in the CLI's folders, without a CLI."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from watchfiles import Change, awatch

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions import watcher
from cli_session_proxy.backends.claude.sessions.manager import Sessions
from cli_session_proxy.backends.claude.sessions.watcher import Watcher
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Settings

ONE, TWO, THREE = ("00000000-0000-4000-8000-00000000000" + digit for digit in "123")


class Watched:
    """A watcher over a configuration directory, and agent `a`'s folder in it. `known`: sessions of our own turns."""

    def __init__(self, tmp_path: Path) -> None:
        settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
        sandboxes = Sandboxes(settings)
        self.known: set[str] = set()
        self.captures = SimpleNamespace(is_unchanged_since_turn=self.known.__contains__)
        sessions: Any = SimpleNamespace(captures=self.captures)
        self.projects = tmp_path / "config" / "projects"
        self.ours = transcript.project_dir(tmp_path / "config", sandboxes.path("a"))
        self.ours.mkdir(parents=True)
        projects = transcript.Projects(settings, sandboxes, tmp_path / "config")
        self.changes: AsyncGenerator[str, None] = Watcher(cast(Sessions, sessions), projects).changes()

    async def told(self, write: Path) -> str:
        """The first session that is told. The file is written until then: nothing says when watching has begun."""

        async def writing() -> None:
            while True:
                await asyncio.to_thread(write.write_text, "{}\n")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(writing())
        try:
            async with asyncio.timeout(60):
                return await anext(self.changes)
        finally:
            task.cancel()


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(watcher, "STEP", 10)
    monkeypatch.setattr(watcher, "DEBOUNCE", 50)
    monkeypatch.setattr(watcher, "AGAIN", 0.01)
    found = Watched(tmp_path)
    async with aclosing(found.changes):
        yield found


async def test_a_session_that_was_written_to_is_told(watched: Watched) -> None:
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE


async def test_what_our_own_turn_wrote_is_not_told(watched: Watched) -> None:
    watched.known.add(ONE)
    (watched.ours / f"{ONE}.jsonl").write_text("{}\n")
    assert await watched.told(watched.ours / f"{TWO}.jsonl") == TWO


async def test_other_projects_and_other_files_are_not_told(watched: Watched) -> None:
    other = watched.projects / "-home-somebody"
    other.mkdir()
    for path in (other / f"{ONE}.jsonl", watched.ours / f"{ONE}.txt"):
        path.write_text("{}\n")
    assert await watched.told(watched.ours / f"{TWO}.jsonl") == TWO


@pytest.mark.full
async def test_a_flood_of_files_holds_up_nobody_and_is_told_in_part(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    read, names = Watcher._read, {f"00000000-0000-4000-8000-{number:012}" for number in range(50_000)}
    flood = {(Change.added, str(watched.ours / f"{name}.jsonl")) for name in names}
    main = threading.get_ident()

    def flooded(one: Watcher, changes: Any) -> tuple[list[Path], bool]:
        assert threading.get_ident() != main
        return read(one, {*changes, *flood})

    monkeypatch.setattr(watcher, "AT_ONCE", 3)
    monkeypatch.setattr(Watcher, "_read", flooded)
    assert await watched.told(watched.ours / f"{ONE}.jsonl") in names
    for _ in range(2):
        assert await anext(watched.changes) in names


async def test_a_folder_that_is_held_does_not_keep_others_from_being_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a confined agent holds it, for as long as it lives."""
    released, asked = threading.Event(), list[str]()

    def unchanged(session_id: str) -> bool:
        asked.append(session_id)
        return session_id != TWO and (released.wait() or True)

    monkeypatch.setattr(watched.captures, "is_unchanged_since_turn", unchanged)
    monkeypatch.setattr(watcher, "LONGEST_LOOK", 0.1, raising=False)
    other = watched.ours.with_name(f"{watched.ours.name}-other")
    other.mkdir()
    try:
        for session_id in (ONE, THREE):
            (watched.ours / f"{session_id}.jsonl").write_text("{}\n")
        assert await watched.told(other / f"{TWO}.jsonl") == TWO
        (watched.ours / f"{ONE}.jsonl").write_text("{} {}\n")
        assert await watched.told(other / f"{TWO}.jsonl") == TWO
        assert len(asked) - asked.count(TWO) <= 1
    finally:
        released.set()


def watches() -> set[int]:
    """The inodes that this process watches."""
    found: set[int] = set()
    for file in Path("/proc/self/fdinfo").iterdir():
        with suppress(OSError):  # that of this look itself
            found |= {int(inode, 16) for inode in re.findall(r"^inotify wd:\w+ ino:(\w+)", file.read_text(), re.M)}
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
async def test_nothing_is_watched_where_a_link_of_an_agents_leads(watched: Watched, tmp_path: Path) -> None:
    """It could lead to `/`: the watches of a machine are few, and the event loop waits until all are made."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (watched.ours / "link").symlink_to(tmp_path / "far")
    (watched.ours / "folder" / "in").mkdir(parents=True)
    (watched.projects / watched.ours.with_name(f"{watched.ours.name}-link").name).symlink_to(tmp_path / "far")
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    await asyncio.to_thread((watched.ours / "folder").rename, watched.ours / "moved")
    assert await watched.told(watched.ours / f"{TWO}.jsonl") in (ONE, TWO)
    assert watched.ours.stat().st_ino in watches()
    far = (tmp_path / "far", tmp_path / "far" / "away", watched.ours / "moved" / "in")
    assert not {path.stat().st_ino for path in far} & watches()


async def test_a_new_agents_folder_is_watched_and_what_was_written_there_before_is_told(watched: Watched) -> None:
    other = watched.ours.with_name(watched.ours.name + "b")
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE

    async def new() -> None:
        await asyncio.to_thread(other.mkdir)
        await asyncio.to_thread((other / f"{TWO}.jsonl").write_text, "{}\n")

    watched.known.add(ONE)
    making = asyncio.create_task(new())
    async with asyncio.timeout(60):
        assert await anext(watched.changes) == TWO
    await making
    watched.known.add(TWO)
    assert await watched.told(other / f"{THREE}.jsonl") == THREE


async def test_of_a_new_agents_folder_without_an_end_a_part_is_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "AT_ONCE", 3)
    other = watched.ours.with_name(watched.ours.name + "b")
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    watched.known.add(ONE)
    made = watched.projects / "-of-nobody"  # all at once: nothing is written there once it is watched
    made.mkdir()
    for number in range(9):
        (made / f"11111111-0000-4000-8000-{number:012}.jsonl").touch()
    made.rename(other)
    told = [
        await watched.told(watched.ours / f"{ONE}.jsonl"),
        await anext(watched.changes),
        await anext(watched.changes),
    ]
    assert all(name.startswith("11111111") for name in told)
    assert await watched.told(watched.ours / f"{TWO}.jsonl") == TWO


@pytest.mark.parametrize("names", ["no folder", "a folder"])
async def test_where_watching_is_refused_it_is_tried_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """The second is what watchfiles 1.1 says if somebody else has taken all of the user's watches (Linux)."""
    at = f'"{watched.ours}"'
    limit = f"OS file watch limit reached. about [{at}] (Error {{ kind: MaxFilesWatch, paths: [{at}] }})"
    why = OSError(limit) if names == "a folder" else RuntimeError("too many watches")
    tried: list[Path] = []

    def refused_once(*folders: Path, **options: Any) -> AsyncGenerator[Any, None]:
        tried.append(folders[0])
        if len(tried) == 1:
            raise why
        return awatch(*folders, **options)

    monkeypatch.setattr(watcher, "awatch", refused_once)
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    assert len(tried) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems refuse such names")
async def test_an_agent_that_makes_a_name_which_is_not_utf_8_stops_the_watching_of_no_other(watched: Watched) -> None:
    other = watched.ours.with_name(watched.ours.name + "b")
    other.mkdir()
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    watched.known.add(ONE)
    os.close(os.open(os.fsencode(watched.ours) + b"/\xff", os.O_CREAT))
    assert await watched.told(other / f"{TWO}.jsonl") == TWO
    assert watched.ours.stat().st_ino not in watches()


async def test_an_agent_that_closes_its_folder_stops_the_watching_of_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What watchfiles 1.1 says of a folder with mode 0300; root can read it."""
    other = watched.ours.with_name(watched.ours.name + "b")
    other.mkdir()

    def refused(*folders: Path, **options: Any) -> AsyncGenerator[Any, None]:
        if watched.ours in folders:
            raise PermissionError(f'Permission denied (os error 13) about ["{watched.ours}"]')
        return awatch(*folders, **options)

    monkeypatch.setattr(watcher, "awatch", refused)
    assert await watched.told(other / f"{TWO}.jsonl") == TWO


async def test_a_folder_that_is_removed_before_it_is_watched_is_watched_once_it_is_there_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an agent that is deleted, and of the next one of that name."""
    other = watched.ours.with_name(watched.ours.name + "b")
    other.mkdir()
    tried: list[tuple[Path, ...]] = []

    def watching(*folders: Path, **options: Any) -> AsyncGenerator[Any, None]:
        tried.append(folders)
        if len(tried) == 1:
            other.rmdir()
        return awatch(*folders, **options)

    monkeypatch.setattr(watcher, "awatch", watching)
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    assert other in tried[0]
    assert other not in tried[1]
    watched.known.add(ONE)
    other.mkdir()
    assert await watched.told(other / f"{TWO}.jsonl") == TWO


@pytest.mark.parametrize(("kind", "polls"), [("ext4", False), ("9p", True), ("drvfs", True)])
async def test_only_a_windows_drive_is_polled_in_wsl(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: str, polls: bool
) -> None:
    """watchfiles polls everywhere in WSL, which it knows by the kernel's name."""
    asked: list[bool | None] = []

    def watching(*folders: Path, force_polling: bool | None = None, **options: Any) -> AsyncGenerator[Any, None]:
        asked.append(force_polling)
        return awatch(*folders, force_polling=force_polling, **options)

    mount = SimpleNamespace(mountpoint=str(watched.projects), fstype=kind)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])  # noqa: A006 - psutil's name
    monkeypatch.setattr(watcher, "POLL", 10)
    monkeypatch.setattr(watcher, "awatch", watching)
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
    assert asked == [polls]


async def test_where_nothing_says_what_file_system_it_is_changes_are_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(**_: bool) -> None:
        raise FileNotFoundError("/proc/filesystems")

    monkeypatch.setattr(psutil, "disk_partitions", nothing)
    assert await watched.told(watched.ours / f"{ONE}.jsonl") == ONE
