"""A path is made of a session id only where it is one, and files are put back below their session's own folder."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.transcript import files
from cli_session_proxy.backends.claude.transcript.files import gather, put_back
from cli_session_proxy.domain.models import Record
from cli_session_proxy.errors import SandboxError

from ....talking import events

SESSION = "5e551011-0000-4000-8000-000000000001"
NO_IDS = ("", ".", "..", "../x", "a/b", "/x", "*", "x", f"{SESSION}/..", f"{SESSION}\n", f" {SESSION}", SESSION[:-1])


def kept(name: str, data: bytes = b"x") -> Record:
    line = {"type": "cli-session-proxy/file", "name": name, "data": base64.b64encode(data).decode()}
    return Record(json.dumps(line, separators=(",", ":")))


@pytest.mark.parametrize("session_id", NO_IDS)
def test_no_path_is_made_of_what_is_no_session_id(tmp_path: Path, session_id: str) -> None:
    with pytest.raises(SandboxError, match="no session id"):
        files.in_folder(tmp_path, session_id)
    with pytest.raises(SandboxError, match="no session id"):
        files.find_elsewhere(tmp_path, session_id, ())


def test_nothing_but_a_transcript_is_removed_or_written(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl"
    other.write_text("mine")
    (tmp_path / "notes").mkdir()
    with pytest.raises(SandboxError, match="no session id"):
        files.remove(other)
    with pytest.raises(SandboxError, match="no session id"):
        transcript.write(other, [], SESSION)
    assert other.read_text() == "mine"
    assert (tmp_path / "notes").is_dir()


def test_a_copy_elsewhere_is_a_file_and_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = tmp_path / "projects" / "other"
    folder.mkdir(parents=True)
    (folder / f"{SESSION}.jsonl").symlink_to(secret)
    assert files.find_elsewhere(tmp_path, SESSION, ()) == []


def test_of_a_folder_without_an_end_a_part_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"00000000-0000-4000-8000-{number:012}.jsonl" for number in range(9)}
    for name in (*names, "notes.jsonl", f"{SESSION}.txt"):
        (tmp_path / name).touch()
    (tmp_path / f"{SESSION}.jsonl").symlink_to(tmp_path / "notes.jsonl")
    assert {path.name for path in files.sessions_in(tmp_path)} == names
    assert files.sessions_in(tmp_path / "nowhere") == []
    assert not events(caplog)
    monkeypatch.setattr(files, "MOST_NAMES", 5)
    assert len(files.sessions_in(tmp_path)) <= 5
    assert [event["event"] for event in events(caplog)] == ["names_left_out"]


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
            files.write_below(project, f"{SESSION}/tool-results/x.txt", b"theirs")
        assert put_back(project, [record]) == 0
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"x.txt": "mine"}


def test_a_file_and_a_folder_with_one_name_or_something_in_the_way_stop_no_conversation(tmp_path: Path) -> None:
    """A shell can make both, one after the other, and remove its transcript: nothing could be written again then."""
    names = ("a", "a/b", "c/d", "c", "in/the/way", "in/way")
    records = [kept(f"{SESSION}/{name}", name.encode()) for name in names]
    (tmp_path / SESSION / "in" / "way" / "full").mkdir(parents=True)
    (tmp_path / SESSION / "in" / "the").write_text("mine")
    assert put_back(tmp_path, records) == 2
    found = {str(at.relative_to(tmp_path / SESSION)): at.read_text() for at in tmp_path.rglob("*") if at.is_file()}
    assert found == {"a/b": "a/b", "c": "c", "in/the": "mine"}


def test_a_name_that_no_file_can_have_stops_no_conversation(tmp_path: Path) -> None:
    """An import took half a surrogate pair: the agent's transcript could not be written again."""
    names = ("\ud800", "x" * 256, os.fsdecode(b"\xff"), "b")
    records = [kept(f"{SESSION}/{name}", b"x") for name in names]
    assert [files.is_sound(record) for record in records] == [False, True, True, True]
    restored = put_back(tmp_path, records)
    found = {os.fsencode(at.name) for at in (tmp_path / SESSION).iterdir()}
    assert found in ({b"\xff", b"b"}, {b"b"})  # macOS takes no bytes that are no text
    assert restored == len(found)


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


def refusing(name: Any) -> Callable[..., int]:
    """`os.open`, to which this name is closed. To root none is."""
    really = os.open

    def opening(at: Any, flags: int, *more: Any, **named: Any) -> int:
        if at == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(at, flags, *more, **named)

    return opening


def test_nothing_is_gathered_of_a_folder_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn was answered, and is kept. Root can open such a folder."""
    (tmp_path / SESSION).mkdir()
    monkeypatch.setattr(os, "open", refusing(tmp_path / SESSION))
    assert gather(tmp_path / f"{SESSION}.jsonl", None) == []


def test_what_cannot_be_read_is_not_removed_where_a_transcript_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not copied, and then removed with the others."""
    source, target = (tmp_path / folder / f"{SESSION}.jsonl" for folder in ("one", "two"))
    for name in ("closed/x", "open/y"):
        place = source.with_suffix("") / name
        place.parent.mkdir(parents=True)
        place.write_text(name)
    source.touch()
    monkeypatch.setattr(os, "open", refusing("closed"))
    files.move(source, target)
    monkeypatch.undo()
    assert (source.with_suffix("") / "closed" / "x").read_text() == "closed/x"
    assert (target.with_suffix("") / "open" / "y").read_text() == "open/y"
    assert target.exists()


def test_files_that_claim_more_than_any_disk_has_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confined agent's quota does not count what a file has no blocks for. Its copy would fill the disk."""
    monkeypatch.setattr(files, "MAX_FILE", 1024)
    monkeypatch.setattr(files, "MOST_COPIED", 3072)
    source, target = (tmp_path / folder / f"{SESSION}.jsonl" for folder in ("one", "two"))
    beside = source.with_suffix("")
    beside.mkdir(parents=True)
    source.touch()
    for name, size in (("a", 1 << 43), ("b", 1024), ("c", 1024), ("d", 1024), ("e", 1024)):
        with (beside / name).open("wb") as file:
            file.truncate(size)
    files.move(source, target)
    assert sorted(path.name for path in target.with_suffix("").iterdir()) == ["b", "c", "d"]
    assert sorted(path.name for path in beside.iterdir()) == ["a", "b", "c", "d", "e"]
    assert target.exists()


def test_a_file_is_copied_beside_another_transcript_through_no_link(tmp_path: Path) -> None:
    source, outside = tmp_path / "one" / f"{SESSION}.jsonl", tmp_path / "outside"
    result = source.with_suffix("") / "tool-results" / "x.txt"
    result.parent.mkdir(parents=True)
    result.write_text("of the session")
    os.utime(result, ns=(1_000_000_000, 2_000_000_000))
    target = tmp_path / "two" / source.name
    assert files.copy_beside(source, target) == (1, [])
    copied = target.with_suffix("") / "tool-results" / "x.txt"
    assert (copied.read_text(), copied.stat().st_mtime_ns) == ("of the session", 2_000_000_000)
    outside.mkdir()
    (outside / "x.txt").write_text("mine")
    copied.unlink()
    copied.parent.rmdir()
    copied.parent.symlink_to(outside)
    with pytest.raises(SandboxError, match="is a symbolic link or a file where a folder belongs"):
        files.copy_beside(source, target)
    assert (outside / "x.txt").read_text() == "mine"


def test_a_folder_that_becomes_a_link_while_it_is_looked_at_brings_in_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, outside = tmp_path / f"{SESSION}.jsonl", tmp_path / "outside"
    results = path.with_suffix("") / "tool-results"
    results.mkdir(parents=True)
    outside.mkdir()
    for place, words in ((results, "of the session"), (outside, "a secret")):
        (place / "x.txt").write_text(words)
    open_file = os.open

    def swapped(name: str | Path, *given: int, **named: int) -> int:
        if Path(name).name == "x.txt" and not results.is_symlink():
            results.rename(tmp_path / "away")
            results.symlink_to(outside)
        return open_file(name, *given, **named)

    monkeypatch.setattr(os, "open", swapped)
    [record] = gather(path, None)
    assert base64.b64decode(json.loads(record.line)["data"]) == b"of the session"


@pytest.mark.parametrize(
    ("limit", "most", "kept_of_them"),
    [("MAX_FILES", 3, 3), ("MAX_TOTAL", 15, 3), ("DEEPEST", 1, 1), ("MOST_NAMES", 6, 3)],  # of three folders
)
def test_what_lies_beside_a_transcript_is_kept_within_bounds(
    limit: str,
    most: int,
    kept_of_them: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    for number in range(5):
        folder = path.with_suffix("").joinpath(*["below"] * number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.txt").write_text("12345")
    assert len(gather(path, None)) == 5
    assert not events(caplog)
    monkeypatch.setattr(files, limit, most)
    assert len(gather(path, None)) == kept_of_them
    [said] = events(caplog)
    assert (said["event"], said["kept"]) == ("files_not_kept", kept_of_them)
    assert said["left_out"]
    if limit in ("DEEPEST", "MOST_NAMES"):
        target = tmp_path / "elsewhere" / path.name
        path.touch()
        files.move(path, target)
        assert target.exists()
        assert len(gather(path, None)) == kept_of_them  # nothing was removed that was not copied


@pytest.mark.parametrize("what", ["a file", "a folder", "a link"])
def test_whatever_lies_in_a_transcripts_place_is_removed_with_all_that_was_left_of_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    path, other = project / f"{SESSION}.jsonl", project / f"{SESSION[:-1]}2.jsonl"
    outside.mkdir()
    (outside / "x").write_text("mine")
    transcript.write(other, [], other.stem)

    def killed(*_given: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            transcript.write(path, [Record('{"words":"marmalade"}')], SESSION)
    assert [name.name for name in project.iterdir() if "marmalade" in name.read_text()] != []
    if what == "a file":
        path.write_text("{}")
    elif what == "a folder":
        (path / "below").mkdir(parents=True)
        (path / "below" / "x").write_text("x")
    else:
        path.symlink_to(outside)
    (path.with_suffix("") / "tool-results").mkdir(parents=True)
    path.with_name(f"{SESSION}{files.ASIDE}1").write_text("marmalade")
    files.remove(path)
    assert list(project.iterdir()) == [other]
    assert (outside / "x").read_text() == "mine"
