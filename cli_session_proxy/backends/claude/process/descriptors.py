"""Whether there are descriptors for one more process. Asked before a place is given, so that an idle one gives way, and
before a start by the event loop: where they run out in the middle of that, uvloop leaves open for good what it has
opened until then, up to four each time (0.23), and says "Unknown error -1"."""

from __future__ import annotations

import errno
import os

from ....errors import ClaudeUnavailable
from ....machine import command_to

# Pairs that are free before a process is started. A start takes four of them at most.
PAIRS = 6
# Pairs for the proxy's own: a database's files, a transcript, a client's connection.
SPARE_PAIRS = 2
# Why there are none: the proxy has as many files open as it may, or the machine has.
NONE_FREE = (errno.EMFILE, errno.ENFILE)


def are_free(starts: int) -> bool:
    """Whether so many processes can be started at once, beside what the proxy itself opens for a turn."""
    try:
        check(starts * PAIRS + SPARE_PAIRS)
    except OSError as exc:
        if exc.errno in NONE_FREE:
            return False
        raise
    return True


def check(pairs: int = PAIRS) -> None:
    """Raises OSError where fewer are free. Costs 18 system calls for 6, 10 µs."""
    opened: list[int] = []
    try:
        for _ in range(pairs):
            opened += os.pipe()
    finally:
        for one in opened:
            os.close(one)


class NoneFree(ClaudeUnavailable):
    """For the start of a process: another one that ends frees some."""


def unavailable(exc: OSError) -> NoneFree:
    return NoneFree(
        f"no file descriptor is free for another Claude CLI ({exc.strerror}): raise the limit of open files "
        f"({command_to('allow more open files')}), or lower max_processes"
    )
