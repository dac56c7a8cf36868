"""Whether there are enough descriptors for another process. Checked before a place is given, so that an idle process is
evicted, and before a start: if they run out in the middle, uvloop 0.23 leaks up to four descriptors each time, and
raises "Unknown error -1"."""

from __future__ import annotations

import errno
import os

from ....errors import ClaudeUnavailable
from ....machine import command_to

# Socket pairs that must be free before a start, which takes five at most.
PAIRS = 6
# Pairs for the proxy itself: a database's files, a transcript, a client's connection.
SPARE_PAIRS = 2
# The limit of the process or of the machine is reached.
NONE_FREE = (errno.EMFILE, errno.ENFILE)


def are_free(starts: int) -> bool:
    """Whether so many processes can be started at once, with descriptors left for the proxy's own work in a turn."""
    try:
        check(starts * PAIRS + SPARE_PAIRS)
    except OSError as exc:
        if exc.errno in NONE_FREE:
            return False
        raise
    return True


def check(pairs: int = PAIRS) -> None:
    """Raises OSError if fewer are free. 18 system calls for 6 pairs, 10 µs."""
    opened: list[int] = []
    try:
        for _ in range(pairs):
            opened += os.pipe()
    finally:
        for one in opened:
            os.close(one)


class NoneFree(ClaudeUnavailable):
    """No descriptors for the start of a process. Another one that ends frees some."""


def unavailable(exc: OSError) -> NoneFree:
    return NoneFree(
        f"no file descriptor is free for another Claude CLI ({exc.strerror}): raise the limit of open files "
        f"({command_to('allow more open files')}), or lower max_processes"
    )
