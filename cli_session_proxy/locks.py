"""Exclusive file locks by flock(2), and writes that survive a power cut.

The kernel releases a lock when its holder ends, however it ends. A lock belongs to the open file, so two engines in
one process exclude each other too. CLIs never inherit one (Python's files are not inheritable). Acquiring and releasing
a free lock takes about 10 µs. The filelock package is not used: on a file system without flock it falls back to a lock
that nobody releases for a dead holder, and it leaves its file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from .errors import StoreUnavailable

SUFFIX = ".lock"
# The folder below `var/` with a file for each proxy, which is locked while the proxy lives.
RUN = "run"


def to_drive(fd: int) -> None:
    """Flush this file to the drive, so that its content survives a power cut. Raises OSError.

    On macOS fsync alone does not reach the drive. Network and FUSE file systems may offer nothing better.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    getattr(os, "fdatasync", os.fsync)(fd)


def is_held(path: Path) -> bool:
    """Whether any process holds the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent checks do not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class FileLock:
    """An exclusive lock on a file. `path.parent` exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Whether the lock is now ours. Raises `StoreUnavailable` if the file cannot be opened."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise StoreUnavailable(f"cannot open {self._path} ({exc.strerror}): fix that, then try again") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                is_same = os.path.samestat(os.fstat(fd), self._path.stat())
            except FileNotFoundError:
                is_same = False
            if not is_same:  # its last holder has removed the file: a lock on that one excludes nobody
                raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Remove the file, then unlock it. Idempotent."""
        if self._fd is None:
            return
        self._path.unlink(missing_ok=True)
        fd, self._fd = self._fd, None
        os.close(fd)
