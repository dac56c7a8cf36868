"""Encryption of archives: age files (age-encryption.org/v1), streamed, so that memory stays bounded.

By pyrage, the Rust library of age. Other programs can read this format, too. `archive_key_file` has age identities, one
per line, as `age-keygen` writes them: the first one encrypts, all of them decrypt. Everything here blocks; call it on a
thread.

What is decrypted goes into temporary files without a name. `fetched` opens the source of an `import`.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from .. import redact
from ..errors import ConfigError, InvalidRequest, NotFound, StoreUnavailable
from ..export.incoming import Source
from ..settings import S3, Settings, read_secret
from .places import INSTALL, place_at

# The first bytes of every age file.
MAGIC = b"age-encryption.org/v1\n"
MAKE = "make one: age-keygen, or python3 -c 'import pyrage; print(pyrage.x25519.Identity.generate())'"


class ArchiveKey:
    """The operator's own identities of age. `pyrage`: the library, which is imported only where it is needed."""

    def __init__(self, identities: Sequence[Any], pyrage: Any) -> None:
        self._identities = identities
        self._pyrage = pyrage
        self.recipient = str(identities[0].to_public())  # public; part of the names of archives

    @staticmethod
    def of(settings: Settings) -> ArchiveKey:
        """Raises `ConfigError`."""
        if settings.archive_key_file is None:
            raise ConfigError(f"archive_key_file is not set: name your file with an age identity; {MAKE}")
        try:
            import pyrage  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError(INSTALL) from None
        path = settings.archive_key_file
        text = read_secret(path, "archive_key_file").decode("ascii", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        redact.know(lines)
        try:
            identities = [pyrage.x25519.Identity.from_str(line) for line in lines]
        except pyrage.IdentityError:
            # The error's message is not repeated: it may have a part of the key.
            raise ConfigError(f"archive_key_file {path}: a line is not an AGE-SECRET-KEY-1…; {MAKE}") from None
        if not identities:
            raise ConfigError(f"archive_key_file {path} holds no age identity; {MAKE}")
        return ArchiveKey(identities, pyrage)

    @contextmanager
    def sealing(self, into: IO[bytes]) -> Iterator[IO[bytes]]:
        """A stream: what is written to it is encrypted into the file `into`. Raises `StoreUnavailable` if that file
        cannot be written."""
        reader, writer = os.pipe()

        def seal() -> None:
            with open(reader, "rb") as plain:
                self._pyrage.encrypt_io(plain, into, [self._identities[0].to_public()])

        with ThreadPoolExecutor(1) as executor:
            sealed = executor.submit(seal)
            try:
                with open(writer, "wb") as out:
                    yield out
            except BrokenPipeError:
                pass  # `seal` has stopped reading: its exception, raised below, says why
            if (fault := sealed.exception()) is not None:
                raise StoreUnavailable(f"an archive cannot be prepared: {fault}") from fault

    @contextmanager
    def opened(self, sealed: IO[bytes], name: str) -> Iterator[IO[bytes]]:
        """A stream of the decrypted content of `sealed`. `name`: of that file, for messages. Raises `InvalidRequest`
        for a wrong key, or a file that was changed or cut."""
        reader, writer = os.pipe()
        caller_left = threading.Event()

        def decrypt() -> None:
            with open(writer, "wb", buffering=0) as plain:  # unbuffered: closing must not write the rest
                try:
                    self._pyrage.decrypt_io(sealed, plain, self._identities)
                except Exception:
                    # A caller may stop reading early. Then the pipe breaks, which is no fault of the file.
                    if not caller_left.is_set():
                        raise

        with ThreadPoolExecutor(1) as executor:
            decrypting = executor.submit(decrypt)
            try:
                with open(reader, "rb") as plain:
                    try:
                        yield plain
                    finally:
                        caller_left.set()
            finally:
                if (fault := decrypting.exception()) is not None:
                    raise InvalidRequest(
                        f"{name} cannot be decrypted: it was changed or cut, or archive_key_file does not hold its key"
                    ) from fault


# --- in the clear


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
