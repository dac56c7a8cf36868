"""What file system a path lies on."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def file_system(path: Path) -> str:
    """As the system calls it: `ext4`, `apfs`, `9p`. Empty where nothing is known. Follows links."""
    real = Path(os.path.realpath(path))
    try:
        mounts = [one for one in psutil.disk_partitions(all=True) if real.is_relative_to(one.mountpoint)]
    except OSError:  # no /proc
        return ""
    nearest = max(reversed(mounts), key=lambda one: len(one.mountpoint), default=None)  # the last one covers the others
    return "" if nearest is None else nearest.fstype
