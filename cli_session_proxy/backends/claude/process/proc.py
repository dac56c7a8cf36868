"""When a process started, as text that only ever is compared: with the pid it names a process for good."""

from __future__ import annotations

import sys

import psutil

from . import guardian_program

_DEAD = "ZX"  # ended, and only waiting for its parent to take note


def start_time(pid: int) -> str | None:
    """None when there is no such process (any more)."""
    if sys.platform == "linux":
        # In clock ticks after boot. psutil makes a time of day of them, which changes when the clock is set.
        now = guardian_program.status(pid)
        return None if now is None or now[0] in _DEAD else str(now[1])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
