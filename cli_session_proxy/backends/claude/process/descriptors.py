"""Whether there are descriptors for one more process. Asked before each start: where they run out in the middle of it,
uvloop leaves open for good what it has opened until then, up to four each time (0.23), and says "Unknown error -1"."""

from __future__ import annotations

import errno
import os

from ....errors import ClaudeUnavailable

# Pairs that are free before a process is started. A start takes four of them on uvloop, two on asyncio.
PAIRS = 6
# Why there are none: the proxy has as many files open as it may, or the machine has.
NONE_FREE = (errno.EMFILE, errno.ENFILE)


def check() -> None:
    """Raises OSError where too few are free. Costs 18 system calls, 10 µs."""
    opened: list[int] = []
    try:
        for _ in range(PAIRS):
            opened += os.pipe()
    finally:
        for one in opened:
            os.close(one)


def unavailable(exc: OSError) -> ClaudeUnavailable:
    return ClaudeUnavailable(
        f"no file descriptor is free for another Claude CLI ({exc.strerror}): raise the limit of open files "
        "(`ulimit -n`), or lower max_processes"
    )
