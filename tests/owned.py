"""Folders of a process of the tests, which the next run removes if that process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .until import PATIENCE, POLL


@contextmanager
def owned_folder(prefix: str, place: Path) -> Iterator[Path]:
    """A new folder in `place` that is this process's until the end of the block: it holds a lock on the folder itself,
    which ends with the process. Those with this prefix that nobody holds are removed first."""
    remove_abandoned(prefix, place)
    folder, lock = _locked_folder(prefix, place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(prefix: str, place: Path) -> None:
    """Remove the folders whose process was killed, and end what it started for them: a server lives on, and keeps its
    memory."""
    for folder in place.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # removed meanwhile, no folder of ours, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def end_processes_of(folder: Path) -> None:
    """End the processes whose TMPDIR is the folder or lies in it: all that the killed process started, but no shell of
    somebody who looks into the folder. Linux only: elsewhere there is no /proc."""
    until = time.monotonic() + PATIENCE
    while pids := list(_processes_of(folder)):
        assert time.monotonic() < until, f"processes of {folder} do not end: {pids}"
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended while we looked
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)


def _processes_of(folder: Path) -> Iterator[int]:
    mark = os.fsencode(f"TMPDIR={folder}")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or another user's
        if any(given == mark or given.startswith(mark + b"/") for given in environment):
            yield int(entry.name)


def _locked_folder(prefix: str, place: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another run took it for abandoned, as nobody held it yet
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for such a run
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)
