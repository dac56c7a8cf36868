"""Temporary files without a name: they disappear when this process ends, however it ends."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import IO, Literal


class Unnamed:
    """A temporary file without a name, in a folder for conversations. `name`: for error messages."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `__exit__`
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> Unnamed:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()

    def open(self, _mode: Literal["rb"] = "rb", /) -> IO[bytes]:
        """A new reader at the beginning, with its own position. The file has to stay open."""
        self.file.flush()
        return io.BufferedReader(_Reader(self.file.fileno()))


class _Reader(io.RawIOBase):
    """Reads by offset: a duplicated descriptor would share its position with other readers."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed: any buffer
        data = os.pread(self._fd, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
