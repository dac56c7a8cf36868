"""Directories where a database should not lie."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cli_session_proxy.commands import prerequisites


@pytest.mark.parametrize(
    ("below", "says"),
    [
        ("Library/Mobile Documents/com~apple~CloudDocs/code/var", "iCloud"), ("Library/CloudStorage/Box/var", "cloud"),
        ("Dropbox/var", "Dropbox"), ("OneDrive - Work/var", "OneDrive"), ("code/var", None),
    ],
)  # fmt: skip
def test_folders_that_are_synced(below: str, says: str | None, tmp_path: Path) -> None:
    found = prerequisites.why_unsafe(tmp_path / below)
    assert (found is None) is (says is None)
    assert (says or "") in (found or "")


def test_the_desktop_that_macos_keeps_in_icloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert prerequisites.why_unsafe(Path.home() / "Desktop" / "var") is None
    (Path.home() / prerequisites.ICLOUD / "Desktop").mkdir(parents=True)
    assert "iCloud" in (prerequisites.why_unsafe(Path.home() / "Desktop" / "var") or "")
    assert prerequisites.why_unsafe(Path.home() / "Documents" / "var") is None


@pytest.mark.parametrize(("kind", "says"), [("nfs4", "NFS"), ("smbfs", "SMB"), ("9p", "Windows"), ("apfs", None)])
def test_file_systems_of_a_network(
    kind: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="nfs"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)  # noqa: A006 - psutil's name
    found = prerequisites.why_unsafe(tmp_path / "var")
    assert (found is None) is (says is None)
    assert (says or "") in (found or "")
