"""How a CLI is ended: asked, then told, then killed with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process

KILL_WAIT = 10.0  # seconds the kernel gets to end a killed process


def signal_group(pid: int, number: int) -> None:
    """The group, not the child alone: a tool may have left a background shell. Gone already: fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


async def end(child: Process, *, gently: bool, grace: float) -> None:
    """Ask (end of stdin) where `gently`, wait, TERM, wait, KILL, reap. Each wait takes `grace` seconds at most."""
    assert child.stdin is not None
    if gently:
        child.stdin.close()  # "finishes the turn, rc 0" (facts)
        await _exited(child, grace)
    if child.returncode is None:
        signal_group(child.pid, signal.SIGTERM)
        await _exited(child, grace)
    signal_group(child.pid, signal.SIGKILL)  # the rest of the group as well
    await _exited(child, KILL_WAIT)


async def _exited(child: Process, timeout: float) -> None:
    with contextlib.suppress(TimeoutError):  # the next step is harsher
        await asyncio.wait_for(child.wait(), timeout)
