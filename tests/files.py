"""The files beneath a folder that a running CLI still changes: what goes while one looks is passed over."""

from __future__ import annotations

import os
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path


def files(folder: Path | None, pattern: str = "*") -> list[Path]:
    """Those whose path beneath the folder matches the pattern. (`Path.rglob` raises for a folder that went.)"""
    assert folder is not None
    found = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if fnmatch(str(path.relative_to(folder)), pattern) and path.is_file())


def holding(word: str, folder: Path | None, pattern: str = "*") -> list[Path]:
    """Those whose content has the word in it."""
    found = []
    for path in files(folder, pattern):
        with suppress(FileNotFoundError):
            if word.encode() in path.read_bytes():
                found.append(path)
    return found
