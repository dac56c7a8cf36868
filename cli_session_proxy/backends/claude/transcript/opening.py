"""Files in the CLI's directories are opened here: others write there, and may put anything in a file's place.

Opening a pipe waits for a writer, reading a device never ends, and a sparse file has any size: of such a thing nothing
is read. What is refused is an OSError with words, as for a file that cannot be read for other reasons.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Bytes. A transcript of 20,000 turns has about 60 MB; one is read into memory as a whole.
MAX_BYTES = 512 * 1024 * 1024


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
