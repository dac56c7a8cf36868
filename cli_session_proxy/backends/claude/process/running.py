"""Finds the live CLI that has a session open, in the CLI's own register: `<config dir>/sessions/<pid>.json` (2.1.329).

Older CLIs have no such register.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import psutil

from ....domain import limits
from ..transcript.entries import contents
from .guardian import start_time

# Seconds to wait for an entry that is being written: on a loaded machine the CLI may be paused.
WRITE_WAIT = 1.0
WRITE_POLL = 0.01
# The largest entry in bytes; usually a few hundred.
MAX_ENTRY = 64 * 1024
# Seconds of tolerance for a process's start time, which changes if the clock is set.
CLOCK_TOLERANCE = 60.0


async def holder(config_dir: Path, session_id: str) -> int | None:
    """The pid of a live CLI that has this session open according to its entry in the register; None if there is none.

    A CLI rewrites its entry several times in its first second (run on 2.1.329), not atomically: invalid JSON is read
    again, for at most `WRITE_WAIT` seconds.
    """
    deadline = time.monotonic() + WRITE_WAIT
    while True:
        is_written = False  # an entry is being written just now
        for file in sorted((config_dir / "sessions").glob("*.json")):
            try:
                entry = limits.loads(contents(file, most=MAX_ENTRY), limits.CLI_DEPTH)
            except OSError:  # its CLI has just ended, or it is no entry
                continue
            except ValueError:
                is_written = True
                continue
            if not isinstance(entry, dict) or entry.get("sessionId") != session_id:
                continue
            pid, recorded = entry.get("pid"), entry.get("procStart")
            if not isinstance(pid, int) or (started := start_time(pid)) is None:
                continue
            if started == recorded:
                return pid
            if started.isdigit() and isinstance(recorded, str) and recorded.isdigit():
                continue  # both are clock ticks (Linux): the pid is another process's now
            # On macOS their forms differ. A process that started after the entry was written is another one.
            with contextlib.suppress(psutil.Error, OSError):  # the process or the entry is gone
                if psutil.Process(pid).create_time() <= file.stat().st_mtime + CLOCK_TOLERANCE:
                    return pid
        if not is_written or time.monotonic() >= deadline:
            return None
        await asyncio.sleep(WRITE_POLL)


def has_register(config_dir: Path) -> bool:
    return (config_dir / "sessions").is_dir()
