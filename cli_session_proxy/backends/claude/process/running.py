"""Which session a living CLI has open, by its own register: `<config dir>/sessions/<pid>.json` (2.1.329).

Older CLIs keep no such register; then nothing is known.
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

# A loaded machine may stop a CLI in the middle of writing its entry. Seconds.
WRITE_WAIT = 1.0
WRITE_POLL = 0.01
# Bytes of an entry; a CLI's own has a few hundred.
MAX_ENTRY = 64 * 1024
# Seconds by which the time when a process began may move with the clock.
CLOCK_MOVES = 60.0


async def holder(config_dir: Path, session_id: str) -> int | None:
    """The pid of a living CLI that says it has this session open; None when none says so.

    A CLI writes its entry anew several times in its first second (run on 2.1.329), not as a whole: one that is no
    JSON is read again, for `WRITE_WAIT` seconds at most.
    """
    give_up = time.monotonic() + WRITE_WAIT
    while True:
        unfinished = False
        for file in sorted((config_dir / "sessions").glob("*.json")):
            try:
                entry = limits.loads(contents(file, most=MAX_ENTRY), limits.CLI_DEPTH)
            except OSError:  # its CLI has just ended, or it is none of a CLI's
                continue
            except ValueError:
                unfinished = True
                continue
            if not isinstance(entry, dict) or entry.get("sessionId") != session_id:
                continue
            pid, said = entry.get("pid"), entry.get("procStart")
            if not isinstance(pid, int) or (started := start_time(pid)) is None:
                continue
            # Both are clock ticks on Linux. The forms differ on macOS.
            comparable = started.isdigit() and isinstance(said, str) and said.isdigit()
            if started == said:
                return pid
            # A process that began after the entry is another one, under the pid of a dead one.
            with contextlib.suppress(psutil.Error, OSError):  # one of them is gone
                if not comparable and psutil.Process(pid).create_time() <= file.stat().st_mtime + CLOCK_MOVES:
                    return pid
        if not unfinished or time.monotonic() >= give_up:
            return None
        await asyncio.sleep(WRITE_POLL)


def has_register(config_dir: Path) -> bool:
    return (config_dir / "sessions").is_dir()
