"""CLI binaries that passed their self-check, kept in `<var>/cli`: an update can take none of them away.

A binary is linked there, which takes no room; where it lies on another disk it is copied, within a bound. A script is
not kept: what it starts lies beside it. The hash is the name, and is compared before a kept one is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

from .. import logs
from ..backends.claude.process.capability import Identity
from ..sandbox import make_private
from .running import sha256_of

log = logs.get(__name__)

# So many of them, those that passed last; and bytes of one that is copied.
MOST = 2
LARGEST = 512 * 1024 * 1024
NAME = "claude"
# How a program that stands by itself begins: Linux; macOS, on one kind of processor and on both.
_PROGRAMS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_KNOWN = "hashes.json"


class KeptBinaries:
    """The folder. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, program: Path, sha256: str) -> Path | None:
        """Keep a copy and remove the older ones. Its path; None where it cannot be kept."""
        place = self._folder / sha256 / NAME
        try:
            if not place.exists():
                with program.open("rb") as file:
                    if not file.read(4).startswith(_PROGRAMS):
                        return None
                make_private(place.parent)
                fresh = place.with_name(f".{secrets.token_hex(8)}")
                try:
                    _link_or_copy(program.resolve(), fresh)
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
        """The kept binary of this hash, which it still has."""
        place = self._folder / sha256 / NAME
        try:
            return place if sha256_of(place) == sha256 else None
        except OSError:
            return None

    # --- hashes of files that were read before

    def sha256(self, identity: Identity) -> str | None:
        """Of the file that lies there; None where it is another one by now. It is read once."""
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
            self._note(known)
        return known[name]

    def identities(self) -> dict[Identity, str]:
        """Every file whose hash is known, as it was then."""
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

    def _note(self, known: dict[str, str]) -> None:
        """A cache: of two concurrent writers the last one wins."""
        newest = dict(list(known.items())[-20:])
        fresh = self._folder / f".{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            make_private(self._folder)
            fresh.write_text(json.dumps(newest))
            os.replace(fresh, self._folder / _KNOWN)


def _link_or_copy(program: Path, place: Path) -> None:
    try:
        os.link(program, place)
    except OSError:  # another disk, another user's file, or no links there
        if program.stat().st_size > LARGEST:
            raise
        shutil.copy2(program, place)
