"""Opens the source of an `import`: a file, or an object of S3-compatible storage, plain or encrypted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import InvalidRequest, NotFound
from ..export.incoming import Source
from ..settings import S3, Settings
from .places import place_at
from .sealed import MAGIC, ArchiveKey
from .unnamed import Unnamed


@contextmanager
def fetched(settings: Settings, source: str) -> Iterator[Source]:
    """The decrypted export, in a temporary file. Blocks. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`,
    `ConfigError`."""
    with ExitStack() as stack:
        path = Path(source).expanduser()
        if source.startswith(S3):
            where, _, name = source.rpartition("/")
            temporary = stack.enter_context(Unnamed(settings.var, source))
            if not place_at(where).fetch(name, temporary.file):
                raise NotFound(f"there is no object {source}")
        found: Source = temporary if source.startswith(S3) else path
        try:
            with found.open("rb") as file:
                is_sealed = file.read(len(MAGIC)) == MAGIC
                file.seek(0)
                plain = stack.enter_context(Unnamed(settings.var, source))
                if is_sealed:
                    with ArchiveKey.of(settings).opened(file, source) as opened:
                        shutil.copyfileobj(opened, plain.file)
        except FileNotFoundError:
            raise NotFound(f"there is no file {source}: give the path of an export") from None
        except OSError as exc:
            raise InvalidRequest(f"{source} cannot be read ({exc.strerror}): give this user the right to") from exc
        yield plain if is_sealed else found
