"""What must survive a power cut is given to the drive."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_session_proxy.http import keys
from cli_session_proxy.locks import to_drive
from cli_session_proxy.stores.sqlite.file import copy_aside

from .macos import FULLFSYNC

Asked = list[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """How files were given to the drive, with macOS's own call; `no full` before it: that fails."""
    told: Asked = []

    def control(fd: int, command: int, *_: object) -> int:
        assert command == FULLFSYNC
        if told[:1] == ["no full"]:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        told.append("full")
        return 0

    def plain(name: str) -> Callable[[int], None]:
        return lambda fd: told.append(name)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.delattr(os, "fdatasync", raising=False)  # macOS has none
    monkeypatch.setattr(os, "fsync", plain("fsync"))
    return told


def test_on_macos_it_is_asked_to_reach_the_drive_and_fsync_stands_in_where_that_fails(asked: Asked) -> None:
    to_drive(0)
    assert asked == ["full"]
    asked[:] = ["no full"]
    to_drive(0)  # a network's file system
    assert asked == ["no full", "fsync"]


def test_the_key_and_a_backup_with_its_name_reach_the_drive(asked: Asked, tmp_path: Path) -> None:
    keys.make_key(tmp_path / "var")
    assert asked == ["full"]
    copy_aside(tmp_path / "none", tmp_path / "copy")
    assert asked == ["full"] * 3


def test_where_there_is_no_other_call_it_is_the_systems_own(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        to_drive(file.fileno())
