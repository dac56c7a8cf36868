"""Anything may lie where a file of the CLI's is looked for: it is read where it is a file, or refused in words."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.process.running import holder
from cli_session_proxy.backends.claude.sessions.adoption import ForeignTranscript
from cli_session_proxy.backends.claude.transcript import comparing, entries, files
from cli_session_proxy.backends.claude.transcript.entries import contents, opened
from cli_session_proxy.domain.models import FileMark
from cli_session_proxy.errors import InvalidRequest

Make = Callable[[Path], object]
MARK = FileMark(1, 1, 1, 1, "0" * 64, None)


def sparse(path: Path) -> None:
    """Of the size of a disk, with nothing in it."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


KINDS = [os.mkfifo, linked_pipe, endless, sparse, Path.mkdir]
ODD = pytest.mark.parametrize("make", KINDS, ids=lambda one: one.__name__)
pytestmark = pytest.mark.timeout(30)


@ODD
def test_what_is_no_file_or_too_large_is_refused_in_words(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    make(path)
    for read in (opened, contents):
        with pytest.raises(OSError, match=r"regular|larger|directory") as refused:
            read(path)
        assert refused.value.strerror


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_link_is_no_transcript_also_one_to_what_this_process_has_open(tmp_path: Path) -> None:
    """An agent's shell cannot know the name of another's transcript; the number under which we read it, it can try."""
    path, link, own = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    path.write_bytes(b"words")
    link.symlink_to(path)
    with opened(path) as theirs:
        own.symlink_to(f"/proc/self/fd/{theirs.fileno()}")
        for at in (link, own):
            assert at.read_bytes() == contents(path) == b"words"
            with pytest.raises(OSError, match="it is a link"):
                contents(at)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        contents(path, most=4)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_replaced_while_it_is_opened_is_refused_as_well(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"words")
    before, really = os.lstat(path), os.lstat

    def stale(place: Path, **more: int) -> os.stat_result:
        return before if place == path else really(place, **more)

    path.unlink()
    make(path)
    monkeypatch.setattr(os, "lstat", stale)
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"regular|directory"):
        opened(path)
    assert len(os.listdir("/proc/self/fd")) == count


def test_what_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's shell that is told of the opening lets it grow until there is no memory left."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"words")
    really = entries.opened

    def grown(place: Path) -> BinaryIO:
        file = really(place)
        os.truncate(place, entries.MAX_BYTES + 1)
        return file

    monkeypatch.setattr(entries, "opened", grown)
    monkeypatch.setattr(comparing, "opened", grown)
    verdict = transcript.check(path, MARK, None)
    assert verdict is not None
    assert (verdict.found, "it is larger" in verdict.note) == ("unreadable", True)


def test_no_look_follows_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lead to a file system that does not answer, such as a mount over the network: some looks are on the event
    loop, and a thread that waits there can never be ended."""
    session = "00000000-0000-4000-8000-000000000000"
    folder = tmp_path / "projects" / "agent"
    folder.mkdir(parents=True)
    path, target = folder / f"{session}.jsonl", tmp_path / "target"
    target.write_text("{}")
    path.symlink_to(target)
    seen, really = target.stat(), os.stat
    mark = entries.mark_of(seen, seen.st_size, "", None)

    def followed(at: Any, **more: Any) -> os.stat_result:
        assert more.get("follow_symlinks") is False or not os.path.islink(at), at
        return really(at, **more)

    monkeypatch.setattr(os, "stat", followed)
    assert not transcript.is_unchanged(path, mark)
    assert not transcript.Reader(path, mark).is_at_end()
    assert files.find_elsewhere(tmp_path, session, ()) == []
    assert files.sessions_in(folder) == []


# --- who reads the CLI's files


@ODD
def test_such_a_transcript_is_unreadable(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    make(path)
    verdict = transcript.check(path, MARK, None)
    assert verdict is not None
    assert verdict.found == "unreadable"
    assert transcript.Reader(path, None).appended() is None
    assert transcript.total_cost(path) == 0.0
    with pytest.raises(InvalidRequest, match="cannot be read"):
        ForeignTranscript(path)


@ODD
def test_such_a_thing_beside_a_transcript_is_left_out(make: Make, tmp_path: Path) -> None:
    beside = tmp_path / "a"
    beside.mkdir()
    (beside / "kept").write_bytes(b"words")
    make(beside / "odd")
    [record] = files.gather(tmp_path / "a.jsonl", None)
    assert '"name":"a/kept"' in record.line


@ODD
@pytest.mark.sample(3)
async def test_such_an_entry_in_the_register_of_sessions_is_passed_over(make: Make, tmp_path: Path) -> None:
    """It is looked at on the event loop."""
    (tmp_path / "sessions").mkdir()
    make(tmp_path / "sessions" / "1.json")
    (tmp_path / "sessions" / "2.json").write_text('{"a":' * 2000)
    assert await asyncio.wait_for(holder(tmp_path, "s"), 60) is None


# --- lines that nest too deep


@pytest.mark.parametrize("levels", [500, 1100, 100_000])
def test_a_line_that_nests_too_deep_is_a_broken_one_and_the_others_are_read(levels: int) -> None:
    deep = '{"a":' * levels + "1" + "}" * levels
    good = '{"uuid":"u","parentUuid":null,"type":"user","message":{"role":"user","content":"hello"}}'
    other = good.replace('"u"', '"v"')
    parsed = transcript.parse(f"{good}\n{deep}\n{other}\n".encode())
    assert (len(parsed.entries), parsed.broken) == (2, 1)


@pytest.mark.parametrize("refusal", [errno.ELOOP, errno.ENOTDIR, errno.EACCES])
def test_a_link_in_the_place_of_the_folder_beside_a_transcript_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Linux calls it no directory, macOS a loop."""

    def refused(path: Path, flags: int, **_: object) -> int:
        raise OSError(refusal, os.strerror(refusal), str(path))

    monkeypatch.setattr(os, "open", refused)
    assert list(files._opened_beside(tmp_path / "a.jsonl", [])) == []


def test_a_fault_of_the_disk_is_not_taken_for_an_absent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, flags: int, **_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        list(files._opened_beside(tmp_path / "a.jsonl", []))
