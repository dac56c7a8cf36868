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

SESSION = "5e551011-0000-4000-8000-000000000001"


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
    kept = Path(repairs._move_aside(path) or "")
    assert kept.exists()
    assert not path.exists()
    assert kept.is_relative_to(settings.var) == (what == "a transcript")
    repairs.forget_aside(SESSION)
    files.remove(path)
    assert not kept.exists()


def test_a_folder_that_was_kept_aside_is_forgotten_as_well(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path)
    projects = transcript.Projects(settings, Sandboxes(settings), tmp_path)
    repairs = repair.Repairs(settings, SqliteStore(tmp_path / FILE), projects)
    aside = tmp_path / repair.ASIDE / f"{SESSION}-1.jsonl"
    (aside / "below").mkdir(parents=True)
    repairs.forget_aside(SESSION)
    assert not aside.exists()
