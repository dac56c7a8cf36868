"""What a killed run leaves is removed by the next one, and nothing of a run that lives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from . import owned
from .owned import owned_folder, remove_abandoned
from .postgres import Postgres

ROOT = Path(__file__).parent.parent
# Says which folder is its own, with a file in it and a process that outlives it, and waits to be killed.
RUN = """
import subprocess, sys
from pathlib import Path
from tests.owned import owned_folder
with owned_folder("run-", Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    left = subprocess.Popen(["sleep", "600"], env={"TMPDIR": f"{folder}/inner"}, stdout=subprocess.DEVNULL)
    print(folder, left.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_run(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, place], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            folder, pid = process.stdout.readline().split()
            yield process, Path(folder), int(pid)
        finally:
            process.kill()


def test_a_folder_and_the_processes_of_a_killed_run_are_removed_and_those_of_a_running_one_stay(tmp_path: Path) -> None:
    with other_run(tmp_path) as (killed, abandoned, left), other_run(tmp_path) as (_, held, working):
        (tmp_path / "run-file").touch()
        (tmp_path / "run-link").symlink_to(tmp_path)
        killed.kill()
        killed.wait()
        with owned_folder("run-", tmp_path) as mine:
            assert not abandoned.exists()
            assert not is_running(left)
            assert (held / "file").exists()
            assert is_running(working)
            assert mine.exists()
        assert not mine.exists()
        owned.end_processes_of(held)
        assert not is_running(working)


def test_a_folder_that_was_taken_for_abandoned_before_it_was_held_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another run looks between two calls of the one that makes the folder: before it opens it, and before it holds
    it."""
    made, opened = tempfile.mkdtemp, os.open
    taken: list[str] = []

    def made_and_seen(**options: str) -> str:
        name = made(**options)
        if not taken:
            taken.append(name)
            remove_abandoned("run-", tmp_path)
        return name

    def opened_and_seen(name: Path, flags: int, **options: Any) -> int:
        fd = opened(name, flags, **options)
        if len(taken) == 1 and str(name) not in taken:
            taken.append(str(name))
            remove_abandoned("run-", tmp_path)
        return fd

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_seen)
    monkeypatch.setattr(os, "open", opened_and_seen)
    with owned_folder("run-", tmp_path) as folder:
        assert len(taken) == 2
        assert str(folder) not in taken
        assert list(tmp_path.glob("run-*")) == [folder]


def test_many_runs_that_begin_and_end_at_once_each_keep_their_folder(tmp_path: Path) -> None:
    def run() -> None:
        for _ in range(50):
            with owned_folder("run-", tmp_path) as folder:
                (folder / "file").touch()
                assert (folder / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run) for _ in range(8)]:
            done.result()
    assert not list(tmp_path.glob("run-*"))


def test_a_server_of_postgresql_has_no_memory_that_outlives_its_folder(postgres: Postgres) -> None:
    """The system keeps what it has in /dev/shm under a name of its own when it is killed."""
    maps = Path(f"/proc/{postgres.pid}/maps").read_text()
    assert str(postgres.folder) in maps
    assert "/PostgreSQL." not in maps


def is_running(pid: int) -> bool:
    """A process that ended may still be known, until the init of the machine has read how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
