"""Keeps CLI binaries that passed their self-check in `<var>/cli`, so that they survive an update of the CLI.

A binary is hard-linked, which takes no space; from another disk it is copied, up to a size. A script is not kept,
because it needs the files beside it. The folder's name is the binary's hash, which is verified before each use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path

from .. import logs
from ..backends.claude.process.capability import Identity
from ..sandbox import make_private

log = logs.get(__name__)

# How many binaries are kept, the newest ones; and the most bytes that are copied.
MOST = 2
LARGEST = 512 * 1024 * 1024
NAME = "claude"
# The first bytes of a native program: ELF (Linux); Mach-O (macOS), for one architecture and for several.
_PROGRAMS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
# The cache of hashes, and how many it holds: the newest ones.
_KNOWN = "hashes.json"
NOTED = 20


class KeptBinaries:
    """The folder of kept binaries. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, program: Path, sha256: str) -> Path | None:
        """Keep this binary and remove older ones. Returns the path of the kept binary; None if it cannot be kept."""
        place = self._folder / sha256 / NAME
        try:
            if not place.exists():
                with program.open("rb") as file:
                    if not file.read(4).startswith(_PROGRAMS):
                        return None
                make_private(place.parent)
                fresh = place.with_name(f".{secrets.token_hex(8)}")
                source = program.resolve()
                try:
                    try:
                        os.link(source, fresh)
                    except OSError:  # another disk, another user's file, or no support for links
                        if source.stat().st_size > LARGEST:
                            raise
                        shutil.copy2(source, fresh)
                    os.replace(fresh, place)
                finally:
                    fresh.unlink(missing_ok=True)
            os.utime(place.parent)
            every = [one for one in self._folder.iterdir() if one.is_dir()]
            for old in sorted(every, key=lambda one: one.stat().st_mtime, reverse=True)[MOST:]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as exc:
            log.warning("claude_not_kept", path=str(program), error=exc.strerror)
            return None
        return place

    def of(self, sha256: str) -> Path | None:
        """The path of the kept binary with this hash; None if there is none or its content has changed."""
        place = self._folder / sha256 / NAME
        try:
            return place if sha256_of(place) == sha256 else None
        except OSError:
            return None

    # --- cached hashes

    def sha256(self, identity: Identity) -> str | None:
        """The hash of the file; None if the path now has another file. Each file is read only once."""
        known = self._known()
        name = json.dumps(identity)
        if name not in known:
            path = Path(identity[0])
            try:
                known[name] = sha256_of(path)
                status = os.stat(path)
            except OSError:
                return None
            if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != identity[1:]:
                return None
            newest = dict(list(known.items())[-NOTED:])
            fresh = self._folder / f".{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):  # of two concurrent writers the last one wins
                make_private(self._folder)
                fresh.write_text(json.dumps(newest))
                os.replace(fresh, self._folder / _KNOWN)
        return known[name]

    def identities(self) -> dict[Identity, str]:
        """All files with a cached hash. They may have changed since."""
        out: dict[Identity, str] = {}
        for name, sha256 in self._known().items():
            path, device, inode, size, mtime = json.loads(name)
            out[str(path), int(device), int(inode), int(size), int(mtime)] = sha256
        return out

    def _known(self) -> dict[str, str]:
        try:
            found = json.loads((self._folder / _KNOWN).read_text())
            return {str(name): str(sha256) for name, sha256 in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Blocks: 230 MB take half a second of a core. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
