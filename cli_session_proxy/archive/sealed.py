"""Encryption of archives: age files (age-encryption.org/v1), streamed, so that memory stays bounded.

By pyrage, the Rust library of age. Other programs can read this format, too. `archive_key_file` has age identities, one
per line, as `age-keygen` writes them: the first one encrypts, all of them decrypt. Everything here blocks; call it on a
thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

from .. import redact
from ..errors import ConfigError, InvalidRequest, StoreUnavailable
from ..settings import Settings, read_secret

# The first bytes of every age file.
MAGIC = b"age-encryption.org/v1\n"
INSTALL = "an archive needs pip install 'cli-session-proxy[archive]'"
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
