"""Warns of unsafe places for a database: synced folders and network file systems."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..backends.claude.mounts import file_system
from ..settings import Settings

PROGRAM = Path(__file__).parent
# Folders that programs sync to other machines, even in the middle of a write and without locks.
SYNCED = {
    "Mobile Documents": "iCloud Drive", "CloudStorage": "a cloud's folder", "Dropbox": "Dropbox",
    "Google Drive": "Google Drive", "Nextcloud": "Nextcloud", "pCloud Drive": "pCloud",
}  # fmt: skip
ONEDRIVE = "OneDrive"  # also "OneDrive - Company"
# Folders that macOS can move into iCloud Drive.
IN_ICLOUD = ("Desktop", "Documents")
ICLOUD = Path("Library/Mobile Documents/com~apple~CloudDocs")
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "smbfs": "SMB", "cifs": "SMB", "smb3": "SMB", "afpfs": "AFP", "webdav": "WebDAV",
    "9p": "a Windows drive", "drvfs": "a Windows drive", "fuse.sshfs": "sshfs",
}  # fmt: skip


def warnings(settings: Settings) -> Iterator[tuple[str, str]]:
    """Directories in unsafe places, and how to fix it."""
    asked = ("var", settings.var, "choose another with --var"), ("the program", PROGRAM, "install it elsewhere")
    for what, path, mend in asked:
        if (why := unsafe(path)) is not None:
            yield f"{what} ({path}) lies {why}", mend


def unsafe(path: Path) -> str | None:
    """Why this directory is unsafe; None if no reason is known."""
    real = Path(os.path.realpath(path))
    for part in real.parts:
        if part in SYNCED or part.startswith(ONEDRIVE):
            return f"in {SYNCED.get(part, ONEDRIVE)}, which copies files while they are being written"
    home = Path.home()
    if sys.platform == "darwin" and real.is_relative_to(home):
        first = real.relative_to(home).parts[:1]
        if first and first[0] in IN_ICLOUD and (home / ICLOUD / first[0]).exists():
            return "in iCloud Drive, which copies files while they are being written"
    kind = NETWORK.get(file_system(real))
    return None if kind is None else f"on {kind}, where locks and synced writes may not hold"
