"""How a CLI is ended: asked, then told, then killed with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import Process

import structlog

from .proc import start_time

KILL_WAIT = 10.0  # seconds the kernel gets to end a killed process
STRAY_POLL = 0.02  # seconds; a stray is not our child, so nobody tells us when it ends

log = structlog.get_logger(__name__)


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


async def end_stray(pid: int, started: str, grace: float) -> None:
    """TERM, wait, KILL the group of another proxy's CLI, while the pid is still the process that was started then."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_WAIT)):
        if await start_time(pid) != started:
            return
        signal_group(pid, number)
        log.info("orphan_ended", pid=pid, signal=number.name)
        until = time.monotonic() + patience
        while await start_time(pid) == started and time.monotonic() < until:  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(STRAY_POLL)
    signal_group(pid, signal.SIGKILL)  # what it had started, in its group
