"""What is kept of a file that is not the chain's, and where."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions import repair
from cli_session_proxy.backends.claude.transcript import files
from cli_session_proxy.backends.claude.transcript.entries import MAX_BYTES
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore

from ....files import bound_by_modes

SESSION = "5e551011-0000-4000-8000-000000000001"


def not_linked(*_: object, **__: object) -> None:
    """Between two disks."""
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize("what", ["a transcript", "a link"])
def test_a_file_is_kept_without_a_move_between_folders(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All such moves of a file system wait for each other. A program of a confined agent let another agent's turn wait
    82 s for its repair."""
    settings = Settings(var=tmp_path / "var")
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    path = projects.path(tmp_path, SESSION)
    path.parent.mkdir(parents=True)
    if what == "a link":
        path.symlink_to("/nowhere")
    else:
        path.write_text("words")
    monkeypatch.setattr(Path, "rename", None)
    kept = Path(repairs._move_aside(path) or "")
    assert not os.path.lexists(path)
    assert kept.is_relative_to(settings.var)
    assert kept.is_symlink() if what == "a link" else kept.read_text() == "words"


@pytest.mark.parametrize("what", ["a transcript", "a file with holes", "a folder"])
def test_only_what_may_be_a_transcript_is_copied_to_another_disk(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an agent's shell put there could fill the disk of the store."""
    settings = Settings(var=tmp_path / "var")
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    path = projects.path(tmp_path, SESSION)
    path.parent.mkdir(parents=True)
    if what == "a folder":
        (path / "below").mkdir(parents=True)
    else:
        path.write_text("words")
        os.truncate(path, 5 if what == "a transcript" else MAX_BYTES + 1)
    rename = Path.rename

    def apart(self: Path, target: Path) -> Path:
        if target.is_relative_to(settings.var) != self.is_relative_to(settings.var):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", apart)
    monkeypatch.setattr(os, "link", not_linked)
    kept = Path(repairs._move_aside(path) or "")
    assert kept.exists()
    assert not path.exists()
    assert kept.is_relative_to(settings.var) == (what == "a transcript")
    repairs.forget_aside(SESSION)
    files.remove(path)
    assert not kept.exists()


def test_a_link_that_is_put_there_meanwhile_copies_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's shell could have any file copied to the store's disk, or a device that never ends."""
    settings = Settings(var=tmp_path / "var")
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    path, secret = projects.path(tmp_path, SESSION), tmp_path / "secret"
    path.parent.mkdir(parents=True)
    path.write_text("words")
    secret.write_text("marmalade")
    look, rename = os.lstat, os.rename
    refused: list[Path] = []

    def then_a_link(at: Path, **more: int) -> os.stat_result:
        found = look(at, **more)
        if at == path and refused:
            refused.clear()
            path.unlink()
            path.symlink_to(secret)
        return found

    def apart(source: Path, target: Path, **more: int) -> None:
        if source == path and Path(target).is_relative_to(settings.var):
            refused.append(source)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target, **more)

    monkeypatch.setattr(os, "lstat", then_a_link)
    monkeypatch.setattr(os, "rename", apart)
    monkeypatch.setattr(os, "link", not_linked)
    repairs._move_aside(path)
    assert path.is_symlink() or not path.exists()
    kept = [one for one in (settings.var / repair.ASIDE).iterdir() if not one.is_symlink()]
    assert "marmalade" not in [one.read_text() for one in kept]


def test_a_copy_that_was_cut_off_is_forgotten_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that was killed while it copied left the words of a deleted agent in its directory."""
    settings = Settings(var=tmp_path / "var")
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    path, aside = projects.path(tmp_path, SESSION), settings.var / repair.ASIDE
    path.parent.mkdir(parents=True)
    path.write_text("words")
    left: list[list[Path]] = []

    def apart(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def killed(descriptor: int) -> None:
        repairs.forget_aside(SESSION)
        left.append([*aside.iterdir()])

    monkeypatch.setattr(Path, "rename", apart)
    monkeypatch.setattr(os, "link", not_linked)
    monkeypatch.setattr(os, "fsync", killed)
    repairs._move_aside(path)
    assert left == [[]]


def test_a_folder_that_was_kept_aside_is_forgotten_as_well(tmp_path: Path) -> None:
    """Also one that is closed for its user."""
    settings = Settings(var=tmp_path)
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    path = projects.path(tmp_path, SESSION)
    (path / "below").mkdir(parents=True)
    path.chmod(0)
    with bound_by_modes():
        aside = Path(repairs._move_aside(path) or "")
        assert (aside / "below").is_dir()
        repairs.forget_aside(SESSION)
    assert not aside.exists()
