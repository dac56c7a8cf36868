"""Temporary files without a name, and `fetched`, which opens the source of an `import`."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

from ..errors import InvalidRequest, NotFound
from ..export.incoming import Source
from ..settings import S3, Settings
from .places import place_at
from .sealed import MAGIC, ArchiveKey


class UnnamedFile:
    """A temporary file without a name: it disappears when this process ends, however it ends. `folder`: where it takes
    its space. `name`: for error messages."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `__exit__`
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> UnnamedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()

    def open(self, _mode: Literal["rb"] = "rb", /) -> IO[bytes]:
        """A new reader at the beginning, with its own position. The file has to stay open."""
        self.file.flush()
        return io.BufferedReader(_OffsetReader(self.file.fileno()))


class _OffsetReader(io.RawIOBase):
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


@contextmanager
def fetched(settings: Settings, source: str) -> Iterator[Source]:
    """The plain export at `source`: a file, or an object of S3-compatible storage (`s3://…`). An encrypted one is
    decrypted into a temporary file. Blocks. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`, `ConfigError`."""
    with ExitStack() as stack:
        export: Source = Path(source).expanduser()
        if source.startswith(S3):
            where, _, name = source.rpartition("/")
            export = temporary = stack.enter_context(UnnamedFile(settings.var, source))
            if not place_at(where).fetch(name, temporary.file):
                raise NotFound(f"there is no object {source}")
        try:
            with export.open("rb") as file:
                is_sealed = file.read(len(MAGIC)) == MAGIC
                file.seek(0)
                plain = stack.enter_context(UnnamedFile(settings.var, source))
                if is_sealed:
                    with ArchiveKey.of(settings).opened(file, source) as opened:
                        shutil.copyfileobj(opened, plain.file)
        except FileNotFoundError:
            raise NotFound(f"there is no file {source}: give the path of an export") from None
        except OSError as exc:
            raise InvalidRequest(f"{source} cannot be read ({exc.strerror}): give this user the right to") from exc
        yield plain if is_sealed else export
