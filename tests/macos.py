"""What macOS does not have or does otherwise, forced on Linux. Nobody has run the tests on a Mac.

No /proc and no /sys for our own code, no CLOCK_BOOTTIME, no `sched_getaffinity`; the environment of the system's own
programs is hidden; what a process weighs for itself is refused; the time of the boot, and with it when a process
started, moves with the clock; F_FULLFSYNC fails, as on a network's or FUSE's file system. psutil still reads /proc: on
macOS it asks the kernel.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil

from cli_session_proxy import machine

HIDDEN = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/")
LINUX_ONLY = ("/proc", "/sys")
FULLFSYNC = 51

Set = Callable[[Any, str, Any], None]
Delete = Callable[[Any, str], None]


hides_linux = False  # an audit hook cannot be taken away again


def _refuse_linux(event: str, arguments: tuple[Any, ...]) -> None:
    """To the program, not to psutil and not to the tests."""
    if not hides_linux or event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if isinstance(path, str) and path.startswith(LINUX_ONLY):
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            if "/psutil/" in frame.f_code.co_filename:
                return
            if "/cli_session_proxy/" in frame.f_code.co_filename:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


@cache
def _hook() -> None:
    sys.addaudithook(_refuse_linux)


def like_macos(set_: Set = setattr, delete: Delete = delattr) -> None:
    """In this process; with a monkeypatch's functions for the time of a test."""
    kernel: Any = vars(psutil)["_psplatform"]
    environ, boot_time, control = psutil.Process.environ, kernel.boot_time, fcntl.fcntl
    seconds = itertools.count(1)

    def hidden(process: psutil.Process) -> dict[str, str]:
        return {} if process.exe().startswith(HIDDEN) else environ(process)

    def refused(process: psutil.Process, *_: Any) -> None:
        raise psutil.AccessDenied(process.pid)

    def moving() -> float:
        return float(boot_time()) + next(seconds)

    def fails(fd: Any, command: int, *more: Any) -> Any:
        if command == FULLFSYNC:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return control(fd, command, *more)

    set_(sys, "platform", "darwin")
    set_(psutil.Process, "environ", hidden)
    set_(psutil.Process, "memory_full_info", refused)
    set_(kernel, "boot_time", moving)
    set_(fcntl, "fcntl", fails)
    _hook()
    set_(machine, "SYSTEM", "macos")
    set_(sys.modules[__name__], "hides_linux", True)
    if hasattr(os, "process_cpu_count"):  # of Python 3.13; on Linux it asks for what is taken away below
        set_(os, "process_cpu_count", os.cpu_count)
    for owner, name in ((time, "CLOCK_BOOTTIME"), (os, "sched_getaffinity")):
        if hasattr(owner, name):
            delete(owner, name)
    set_(fcntl, "F_FULLFSYNC", FULLFSYNC)
