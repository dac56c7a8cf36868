"""What a turn added to a transcript, read without reading the rest again."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from pathlib import Path

from ....domain.models import FileMark
from .entries import Parsed, parse


class Reader:
    """Follows one transcript from turn to turn, reading only what was appended.

    It keeps a running hash, so that a mark costs the new bytes only, however long the file is.
    """

    def __init__(self, path: Path, leaf: str | None) -> None:
        self.path = path
        self.leaf = leaf
        self._hash = hashlib.sha256()
        self._size = 0
        self._identity: tuple[int, int] | None = None

    def skip_to(self, mark: FileMark) -> None:
        """Take what the mark describes as read (it was checked); the hash is caught up from the file."""
        with self.path.open("rb") as file:
            self._hash = hashlib.sha256(file.read(mark.size))
        self._size, self.leaf = mark.size, mark.leaf
        self._identity = (mark.device, mark.inode)

    def holds(self, mark: FileMark) -> bool:
        return self._size == mark.size and self._identity == (mark.device, mark.inode)

    def is_at_end(self) -> bool:
        """The file is as it was when it was last read, by size and identity."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return self._size == stat.st_size and self._identity == (stat.st_dev, stat.st_ino)

    def appended(self) -> tuple[Parsed, FileMark] | None:
        """What was added since the last call, and the file's new mark. None when it is not the same file."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if self._identity not in (None, identity) or stat.st_size < self._size:
                    return None
                file.seek(self._size)
                data = file.read()
        except OSError:
            return None
        self._identity = identity
        self._hash.update(data)
        self._size += len(data)
        parsed = parse(data)
        self.leaf = parsed.leaf or self.leaf
        mark = FileMark(*identity, self._size, stat.st_mtime_ns, self._hash.hexdigest(), self.leaf)
        return parsed, mark


_TOTAL = b'{"type":"cost-state",'


def total_cost(path: Path) -> float:
    """US dollars that the CLI takes as spent when it resumes this transcript: its last note of it, else 0."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.rfind(_TOTAL)  # inside a record's text its quotes would be escaped
            end = data.find(b"\n", at)
            line = data[at : end if end >= 0 else len(data)] if at >= 0 else b"{}"
        total = json.loads(line).get("totalCostUSD")
    except (OSError, ValueError):  # no file, an empty one, or a cut line
        return 0.0
    return float(total) if isinstance(total, int | float) else 0.0
