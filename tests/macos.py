"""What macOS does not have or does otherwise, forced on Linux. Nobody has run the tests on a Mac.

No /proc, no CLOCK_BOOTTIME, no `sched_getaffinity`; the environment of the system's own programs is hidden; what a
process weighs for itself is refused; the time when a process started moves with the clock; F_FULLFSYNC fails, as on a
network's or FUSE's file system.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cli_session_proxy import machine

HIDDEN = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/")
NOWHERE = Path("/nowhere")
FULLFSYNC = 51

Set = Callable[[Any, str, Any], None]
Delete = Callable[[Any, str], None]


def like_macos(set_: Set = setattr, delete: Delete = delattr) -> None:
    """In this process; with a monkeypatch's functions for the time of a test."""
    environ, create_time, control = psutil.Process.environ, psutil.Process.create_time, fcntl.fcntl
    seconds = itertools.count(1)

    def hidden(process: psutil.Process) -> dict[str, str]:
        return {} if process.exe().startswith(HIDDEN) else environ(process)

    def refused(process: psutil.Process, *_: Any) -> None:
        raise psutil.AccessDenied(process.pid)

    def moving(process: psutil.Process) -> float:
        return create_time(process) + next(seconds)

    def fails(fd: Any, command: int, *more: Any) -> Any:
        if command == FULLFSYNC:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return control(fd, command, *more)

    set_(sys, "platform", "darwin")
    set_(psutil.Process, "environ", hidden)
    set_(psutil.Process, "memory_full_info", refused)
    set_(psutil.Process, "create_time", moving)
    set_(fcntl, "fcntl", fails)
    for function in (machine.memory, machine.cores):
        set_(function, "__defaults__", (NOWHERE, NOWHERE))
    for owner, name in ((time, "CLOCK_BOOTTIME"), (os, "sched_getaffinity")):
        if hasattr(owner, name):
            delete(owner, name)
    set_(fcntl, "F_FULLFSYNC", FULLFSYNC)
