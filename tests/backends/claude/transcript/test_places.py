"""A path is made of a session id only where it is one, and files are put back below their session's own folder."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.transcript.files import gather, put_back
from cli_session_proxy.domain.models import Record
from cli_session_proxy.errors import SandboxError

SESSION = "5e551011-0000-4000-8000-000000000001"
NO_IDS = ("", ".", "..", "../x", "a/b", "/x", "*", "x", f"{SESSION}/..", f"{SESSION}\n", f" {SESSION}", SESSION[:-1])


def kept(name: str, data: bytes = b"x") -> Record:
    line = {"type": "cli-session-proxy/file", "name": name, "data": base64.b64encode(data).decode()}
    return Record(json.dumps(line, separators=(",", ":")))


@pytest.mark.parametrize("session_id", NO_IDS)
def test_no_path_is_made_of_what_is_no_session_id(tmp_path: Path, session_id: str) -> None:
    with pytest.raises(SandboxError, match="no session id"):
        transcript.path_of(tmp_path, tmp_path, session_id)
    with pytest.raises(SandboxError, match="no session id"):
        transcript.find_elsewhere(tmp_path, session_id, tmp_path / "x")


def test_nothing_but_a_transcript_is_removed_or_written(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl"
    other.write_text("mine")
    (tmp_path / "notes").mkdir()
    with pytest.raises(SandboxError, match="no session id"):
        transcript.remove(other)
    with pytest.raises(SandboxError, match="no session id"):
        transcript.write(other, [], SESSION, strict_order=False)
    assert other.read_text() == "mine"
    assert (tmp_path / "notes").is_dir()


def test_a_copy_elsewhere_is_a_file_and_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = tmp_path / "projects" / "other"
    folder.mkdir(parents=True)
    (folder / f"{SESSION}.jsonl").symlink_to(secret)
    assert transcript.find_elsewhere(tmp_path, SESSION, tmp_path / "x") == []


@pytest.mark.parametrize("at", [SESSION, f"{SESSION}/tool-results", f"{SESSION}/tool-results/x.txt"])
def test_a_link_in_the_way_is_never_written_through(tmp_path: Path, at: str) -> None:
    outside, project = tmp_path / "outside", tmp_path / "project"
    outside.mkdir()
    (outside / "x.txt").write_text("mine")
    place = project / at
    place.parent.mkdir(parents=True)
    place.symlink_to(outside / "x.txt" if at.endswith("x.txt") else outside)
    record = kept(f"{SESSION}/tool-results/x.txt", b"theirs")
    if at.endswith("x.txt"):  # replaced by the file, as `rename` does
        assert put_back(project, [record]) == 1
        assert place.read_bytes() == b"theirs"
        assert not place.is_symlink()
    else:
        with pytest.raises(SandboxError, match="link"):
            put_back(project, [record])
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"x.txt": "mine"}


def test_what_links_lead_to_is_not_gathered(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    path = tmp_path / "project" / f"{SESSION}.jsonl"
    path.parent.mkdir()
    path.with_suffix("").symlink_to(outside)
    assert gather(path, None) == []
    path.with_suffix("").unlink()
    path.with_suffix("").mkdir()
    (path.with_suffix("") / "dir").symlink_to(outside)
    (path.with_suffix("") / "file").symlink_to(outside / "key")
    assert gather(path, None) == []
