"""The files beneath a folder that a running CLI still changes: what goes while one looks is passed over. And the modes
of folders, for root too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

CAPGET, CAPSET = {"x86_64": (125, 126)}.get(os.uname().machine, (90, 91))
OVERRIDES = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


def files(folder: Path | None, pattern: str = "*") -> list[Path]:
    """Those whose path beneath the folder matches the pattern. (`Path.rglob` raises for a folder that went.)"""
    assert folder is not None
    found = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if fnmatch(str(path.relative_to(folder)), pattern) and path.is_file())


def holding(word: str, folder: Path | None, pattern: str = "*") -> list[Path]:
    """Those whose content has the word in it."""
    found = []
    for path in files(folder, pattern):
        with suppress(FileNotFoundError):
            if word.encode() in path.read_bytes():
                found.append(path)
    return found


def opened_files() -> list[str]:
    """The paths of the files and folders that this process has open (Linux)."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            found.append(os.readlink(fd))
    return found


@contextlib.contextmanager
def bound_by_modes() -> Iterator[None]:
    """This thread is refused what a folder's mode refuses, also if it is root's."""
    if sys.platform != "linux" or os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert libc.syscall(CAPGET, header, held) == 0
    effective, *others = struct.unpack("6I", held.raw)
    try:
        assert libc.syscall(CAPSET, header, struct.pack("6I", effective & ~OVERRIDES, *others)) == 0
        yield
    finally:
        assert libc.syscall(CAPSET, header, held) == 0
