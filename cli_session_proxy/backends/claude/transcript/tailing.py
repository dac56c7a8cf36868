"""A transcript from turn to turn: what was added, without reading the rest again; and the whole of it once more."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from pathlib import Path
from typing import BinaryIO, Literal

from ....domain.models import FileMark
from .entries import Parsed, parse
from .opening import is_touched_by_cli, is_untouched, mark_of, opened

# Bytes hashed at a time.
CHUNK = 1024 * 1024

How = Literal["gone", "another_file", "content", "records", "touched"]


class Changed(Exception):
    """The file does not hold what its mark describes.

    `how`: it is gone (or cannot be read), another file lies there, its content is another, records follow, or it was
    written to or moved although its content is the same.
    """

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.how = how


class Reader:
    """Follows one transcript from turn to turn, reading only what was appended.

    It keeps a running hash, so that a mark costs the new bytes only, however long the file is. The hash is of what
    was read when it was appended: damage to those bytes since then is never part of it.
    """

    def __init__(self, path: Path, leaf: str | None) -> None:
        self.path = path
        self.leaf = leaf
        self._hash = hashlib.sha256()
        self._size = 0
        self._identity: tuple[int, int] | None = None

    @staticmethod
    def behind(path: Path, mark: FileMark) -> Reader:
        """One that has read what the mark describes. Raises `Changed` where the file does not begin with that."""
        try:
            with opened(path) as file:
                return Reader._behind(file, path, mark)
        except OSError as exc:
            raise Changed("gone") from exc

    @staticmethod
    def _behind(file: BinaryIO, path: Path, mark: FileMark) -> Reader:
        stat = os.fstat(file.fileno())
        if (stat.st_dev, stat.st_ino) != (mark.device, mark.inode):
            raise Changed("another_file")
        reader = Reader(path, mark.leaf)
        while chunk := file.read(min(CHUNK, mark.size - reader._size)):
            reader._hash.update(chunk)
            reader._size += len(chunk)
        if reader._size != mark.size or reader._hash.hexdigest() != mark.sha256:
            raise Changed("content")
        reader._identity = (mark.device, mark.inode)
        return reader

    def copy(self) -> Reader:
        """One that stays where this one is now."""
        other = Reader(self.path, self.leaf)
        other._hash, other._size, other._identity = self._hash.copy(), self._size, self._identity
        return other

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
            with opened(self.path) as file:
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
        return parsed, mark_of(stat, self._size, self._hash.hexdigest(), self.leaf)


def reread(path: Path, mark: FileMark, *, lenient: bool = False) -> tuple[Reader, FileMark]:
    """The whole file once more, after a process has loaded it: a reader behind its end, and its mark now.

    Raises `Changed` where the process may have loaded anything else than what the mark describes: also where the
    content is the same, but somebody had the file in hands meanwhile; unless `lenient`. The CLI's own notes may have
    followed, and it may have set the file's times.
    """
    reader = Reader.behind(path, mark)
    got = reader.appended()
    if got is None:
        raise Changed("another_file")
    added, now = got
    if added.path or added.broken:
        raise Changed("records")
    if not added.entries and not lenient and not is_untouched(now, mark) and not is_touched_by_cli(now, mark):
        raise Changed("touched")
    return reader, now


_TOTAL = b'{"type":"cost-state",'


def total_cost(path: Path) -> float:
    """US dollars that the CLI takes as spent when it resumes this transcript: its last note of it, else 0."""
    try:
        with opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.rfind(_TOTAL)  # inside a record's text its quotes would be escaped
            end = data.find(b"\n", at)
            line = data[at : end if end >= 0 else len(data)] if at >= 0 else b"{}"
        total = json.loads(line).get("totalCostUSD")
    except (OSError, ValueError):  # no file, an empty one, or a cut line
        return 0.0
    return float(total) if isinstance(total, int | float) else 0.0
