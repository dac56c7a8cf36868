"""The mark of a transcript: what the file looked like when its content was known, taken and compared.

A stat proves that nothing was written since only as far as the file system's clock goes: two writes within one
tick look like one. So it is never proof of content by itself: whoever loads a file compares its hash as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from ....domain.models import FileMark

# CLI 2.1.330 sets the times of a transcript that it resumes to now (so that no clean-up takes it), in whole ms. What is
# left of that after a conversion from a float; the file system's own clock, whose tick may be behind that (5 ms were
# seen); and how long a loaded machine may take over it. Nanoseconds.
_MS = 1_000_000
_ROUNDING = 1_000
_TICK = 20_000_000
_SLACK = 2_000_000_000


def mark_of(stat: os.stat_result, size: int, sha256: str, leaf: str | None) -> FileMark:
    """The mark of a file that holds exactly these bytes. Take the stat before the bytes are read."""
    return FileMark(stat.st_dev, stat.st_ino, size, stat.st_mtime_ns, sha256, leaf, stat.st_ctime_ns)


def is_untouched(now: FileMark, mark: FileMark) -> bool:
    """The very file, and nothing was written to it since. Renaming it away and back changes its ctime, too."""
    return (now.device, now.inode, now.size, now.mtime_ns, now.ctime_ns) == (
        mark.device, mark.inode, mark.size, mark.mtime_ns, mark.ctime_ns,
    )  # fmt: skip


def is_touched_by_cli(now: FileMark, mark: FileMark) -> bool:
    """The very file, with no new times but those that a CLI sets when it resumes."""
    whole = (now.mtime_ns + _ROUNDING) % _MS <= 2 * _ROUNDING
    at_once = -_TICK <= now.ctime_ns - now.mtime_ns <= _SLACK
    same = (now.device, now.inode, now.size) == (mark.device, mark.inode, mark.size)
    return same and whole and at_once and mark.mtime_ns < now.mtime_ns


def is_unchanged(path: Path, mark: FileMark) -> bool:
    """`is_untouched` of what lies there now, without reading it. Enough for a process that does not load it."""
    try:
        stat = os.stat(path)
    except OSError:
        return False
    return is_untouched(mark_of(stat, stat.st_size, "", None), mark)
