"""When a process started, as text that only ever is compared: with the pid it names a process for good."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

PS_TIMEOUT = 5.0
_DEAD = "ZX"  # ended, and only waiting for its parent to take note
_STARTTIME = 22  # proc_pid_stat(5): clock ticks after boot


async def start_time(pid: int) -> str | None:
    """None when there is no such process (any more)."""
    if sys.platform.startswith("linux"):
        return _by_proc(pid)
    return await _by_ps(pid)


def _by_proc(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the program's name, may be any bytes; the third follows the last ")".
    fields = stat.rpartition(b")")[2].decode("ascii").split()
    return None if fields[0] in _DEAD else fields[_STARTTIME - 3]


async def _by_ps(pid: int) -> str | None:
    process = await asyncio.create_subprocess_exec(
        "ps", "-o", "stat=,lstart=", "-p", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(PS_TIMEOUT):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    state, _, started = output.decode(errors="replace").strip().partition(" ")
    return started.strip() or None if state[:1] not in _DEAD else None
