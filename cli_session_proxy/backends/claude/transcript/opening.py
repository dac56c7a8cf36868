"""Files in the CLI's directories are opened and marked here: others write there, and may put anything in their place.

Opening a pipe waits for a writer, reading a device never ends, and a sparse file has any size: of such a thing nothing
is read. What is refused is an OSError with words, as for a file that cannot be read for other reasons.

The mark of a transcript is what the file looked like when its content was known, taken and compared. A stat proves that
nothing was written since only as far as the file system's clock goes: two writes within one tick look like one. So it
is never proof of content by itself: whoever loads a file compares its hash as well.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ....domain.models import FileMark

# Bytes. A transcript of 20,000 turns has about 60 MB; one is read into memory as a whole.
MAX_BYTES = 512 * 1024 * 1024

# CLI 2.1.330 sets the times of a transcript that it resumes to now (so that no clean-up takes it), in whole ms. What is
# left of that after a conversion from a float; the file system's own clock, whose tick may be behind that (5 ms were
# seen); and how long a loaded machine may take over it. Nanoseconds.
_MS = 1_000_000
_ROUNDING = 1_000
_TICK = 20_000_000
_SLACK = 2_000_000_000


def opened(path: Path, *, most: int = MAX_BYTES, follow: bool = True) -> BinaryIO:
    """A regular file of at most `most` bytes, open to read. `follow`: also by a symbolic link. Raises OSError."""
    _check(os.stat(path, follow_symlinks=follow), path, most)  # a device must not even be opened
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    try:
        _check(os.fstat(fd), path, most)  # it may have been replaced since
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def contents(path: Path, *, most: int = MAX_BYTES, follow: bool = True) -> bytes:
    """The bytes of such a file. Raises OSError, also where it has grown too large meanwhile."""
    with opened(path, most=most, follow=follow) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise _too_large(path, most)
    return data


def _check(found: os.stat_result, path: Path, most: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if found.st_size > most:
        raise _too_large(path, most)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))


def mark_of(seen: os.stat_result, size: int, sha256: str, leaf: str | None) -> FileMark:
    """The mark of a file that holds exactly these bytes. Take the stat before the bytes are read."""
    return FileMark(seen.st_dev, seen.st_ino, size, seen.st_mtime_ns, sha256, leaf, seen.st_ctime_ns)


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
        seen = os.stat(path)
    except OSError:
        return False
    return is_untouched(mark_of(seen, seen.st_size, "", None), mark)
