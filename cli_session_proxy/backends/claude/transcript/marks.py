"""The mark of a transcript: what the file looked like when its content was known, taken and compared.

A stat proves that nothing was written since only as far as the file system's clock goes: two writes within one
tick look like one. So it is never proof of content by itself: whoever loads a file compares its hash as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from ....domain.models import FileMark


def mark_of(stat: os.stat_result, size: int, sha256: str, leaf: str | None) -> FileMark:
    """The mark of a file that holds exactly these bytes. Take the stat before the bytes are read."""
    return FileMark(stat.st_dev, stat.st_ino, size, stat.st_mtime_ns, sha256, leaf, stat.st_ctime_ns)


def is_same_file(stat: os.stat_result, mark: FileMark) -> bool:
    return (stat.st_dev, stat.st_ino) == (mark.device, mark.inode)


def is_untouched(stat: os.stat_result, mark: FileMark) -> bool:
    """The very file, and nothing was written to it since. Renaming it away and back changes its ctime, too."""
    times = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return is_same_file(stat, mark) and times == (mark.size, mark.mtime_ns, mark.ctime_ns)


def is_unchanged(path: Path, mark: FileMark) -> bool:
    """`is_untouched` of what lies there now, without reading it. Enough for a process that does not load it."""
    try:
        return is_untouched(os.stat(path), mark)
    except OSError:
        return False
