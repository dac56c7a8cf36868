"""Directories of agents: readable, injective, never outside; links made once or a hundred times."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import stat
import struct
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy import sandbox
from cli_session_proxy.backends.claude.transcript import files
from cli_session_proxy.errors import InvalidRequest, SandboxError
from cli_session_proxy.sandbox import TMPDIR_LIMIT, Sandboxes, directory_name, make_private, remove_any
from cli_session_proxy.settings import SandboxSettings, Settings

from .files import bound_by_modes

anything = st.text(st.characters(), min_size=1, max_size=256)
owners = st.one_of(st.just("local"), st.text(max_size=20))
# Names that differ only where a careless mapping would lose it.
look_alikes = st.text(st.sampled_from("aAäÄ-~_/.\\ \0ßſsKkİıéé"), min_size=1, max_size=12)


def sandboxes(var: Path, links: dict[str, Path] | None = None) -> Sandboxes:
    return Sandboxes(Settings(var=var, sandbox=SandboxSettings(links=links or {})))


def same_place(name: str) -> str:
    """How a case-insensitive, normalising disk compares names."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold()).casefold()


@pytest.mark.parametrize("name", ["a", "agent-7", "0", "x" * 40, "agents", "agents-foo"])
def test_a_safe_name_of_the_local_owner_stays_readable(name: str) -> None:
    assert directory_name("local", name) == name


@pytest.mark.parametrize(
    "name", ["Agent", "a b", "ä", "agents/foo", "../x", "/etc", "-a", "a-", ".", "..", "x" * 41, "a~b"]
)
def test_any_other_name_gets_a_readable_part_and_a_hash(name: str) -> None:
    readable, mark, digest = directory_name("local", name).partition("~")
    assert mark == "~"
    assert len(digest) == 26
    assert 0 < len(readable) <= 24


@given(owners, st.one_of(anything, look_alikes), owners, st.one_of(anything, look_alikes))
def test_two_agents_never_share_a_directory(owner: str, name: str, other_owner: str, other: str) -> None:
    same = (owner, name) == (other_owner, other)
    one, two = directory_name(owner, name), directory_name(other_owner, other)
    assert (same_place(one) == same_place(two)) is same


@given(look_alikes)
def test_a_name_in_another_case_or_form_is_another_directory(name: str) -> None:
    variants = {name, name.upper(), name.lower(), *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))}
    assert len({same_place(directory_name("local", variant)) for variant in variants}) == len(variants)


@given(owners, anything)
def test_a_directory_is_one_plain_part_below_the_prefix(owner: str, name: str) -> None:
    prefix = Path("/v/sandbox/agents")
    path = sandboxes(Path("/v")).path(directory_name(owner, name))
    assert path.parent == prefix
    assert Path(os.path.normpath(path)) == path
    assert len(path.name) <= 51


def test_no_name_imitates_anothers_project_folder_of_the_cli() -> None:
    hashed = directory_name("local", "X")
    imitation = hashed.replace("~", "-")
    assert directory_name("local", imitation) != imitation


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_an_empty_or_too_long_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        directory_name("local", name)
    assert caught.value.param == "agent_id"


def test_256_characters_and_lone_surrogates_are_fine() -> None:
    assert directory_name("local", "\ud800" * 256) != directory_name("local", "\ud801" * 256)


def test_a_prefixed_name_never_doubles_the_prefix(tmp_path: Path) -> None:
    """The classic failure, `agents/agents/<id>`: a caller passes what it read from a path."""
    boxes = sandboxes(tmp_path / "var")
    prefix = tmp_path / "var" / "sandbox" / "agents"
    for name in (
        "agents/foo",
        "sandbox/agents/foo",
        str(prefix / "foo"),
        "../agents/foo",
        "../x",
        "/etc/passwd",
        "foo/",
    ):
        made = boxes.prepare(directory_name("local", name))
        assert made.parent == prefix
        assert made.is_dir()
    assert not (prefix / "agents").exists()
    assert not (prefix / "foo").exists()
    assert sorted(entry.name for entry in (tmp_path / "var" / "sandbox").iterdir()) == ["agents"]


@pytest.mark.parametrize("wrong", ["agents/foo", "..", ".", "", "/etc", "Foo", "a b", "x~short"])
def test_only_a_directory_name_is_taken(tmp_path: Path, wrong: str) -> None:
    boxes = sandboxes(tmp_path / "var")
    for method in (boxes.path, boxes.prepare, boxes.tmpdir, boxes.remove):
        with pytest.raises(SandboxError):
            method(wrong)
    assert not (tmp_path / "var").exists()


def test_everything_it_makes_is_private(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path / "new" / "var")
    made = [boxes.prepare("a"), boxes.tmpdir("a")]
    above = [tmp_path / "new" / "var", tmp_path / "new" / "var" / "sandbox", made[0].parent]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made + above] == [0o700] * 5


def test_preparing_again_keeps_what_is_there(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path / "var")
    (boxes.prepare("a") / "note").write_text("kept")
    assert (boxes.prepare("a") / "note").read_text() == "kept"


def test_a_sandbox_that_is_a_link_out_is_refused_and_left_alone(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path / "var")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    place = boxes.prepare("first").parent / "a"
    place.symlink_to(outside)
    for method in (boxes.prepare, boxes.remove):
        with pytest.raises(SandboxError, match="symbolic link"):
            method("a")
    assert place.is_symlink()
    assert (outside / "precious").read_text() == "kept"


def test_a_prepared_sandbox_is_not_prepared_again_while_it_stands(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path)
    assert not boxes.prepared("a")
    place = boxes.prepare("a")
    assert boxes.prepared("a")
    place.rename(tmp_path / "moved")
    assert not boxes.prepared("a")
    place.symlink_to(tmp_path / "moved")
    assert not boxes.prepared("a")


def test_a_tmpdir_that_was_cleaned_away_is_made_again(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path)
    boxes.prepare("a")
    boxes.tmpdir("a").rmdir()
    assert not boxes.prepared("a")
    boxes.prepare("a")
    assert boxes.tmpdir("a").is_dir()


def test_links_are_looked_at_every_time(tmp_path: Path) -> None:
    (tmp_path / "skills").mkdir()
    boxes = sandboxes(tmp_path, {"skills": tmp_path / "skills"})
    boxes.prepare("a")
    assert not boxes.prepared("a")


def test_a_disk_that_refuses_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file where the folder belongs")
    with pytest.raises(SandboxError, match="var"):
        sandboxes(tmp_path / "var").prepare("a")


def test_the_tmpdir_lies_outside_the_sandbox_and_fits_a_socket(tmp_path: Path, short_tmp: Path) -> None:
    near = sandboxes(short_tmp)
    assert near.tmpdir("a") == short_tmp / "tmp" / "a"
    far = sandboxes(tmp_path / ("long" * 30))
    one, two = far.tmpdir("a"), far.tmpdir("b")
    try:
        assert one != two
        far.prepare("a")
        assert one.is_dir()
        assert len(str(one)) <= TMPDIR_LIMIT
    finally:
        far.remove("a")
        far.remove("b")
    assert not one.exists()


def test_remove_takes_the_sandbox_but_not_what_it_links_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "knowledge").write_text("kept")
    boxes = sandboxes(tmp_path / "var", {"shared": shared})
    path, other = boxes.prepare("a"), boxes.prepare("b")
    boxes.remove("a")
    boxes.remove("a")
    assert not path.exists()
    assert not boxes.tmpdir("a").exists()
    assert other.is_dir()
    assert (shared / "knowledge").read_text() == "kept"


def test_a_folder_that_its_agent_has_closed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for any user: nothing is closed to root."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    boxes = sandboxes(tmp_path / "var")
    sandbox = boxes.prepare("a")
    for closed in (sandbox / "x" / "y", sandbox / "x"):
        closed.mkdir(parents=True, exist_ok=True)
        closed.chmod(0o500)
    (sandbox / "out").symlink_to(outside)

    def refused(call: Callable[..., None], *args: str, **named: int) -> None:
        above = named.get("dir_fd", named.get("src_dir_fd"))
        if above is not None and not os.fstat(above).st_mode & stat.S_IWUSR:
            raise PermissionError(13, "Permission denied", args[0])
        call(*args, **named)

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, partial(refused, getattr(os, name)))
    boxes.remove("a")
    assert not sandbox.exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500


@pytest.mark.parametrize("place", ["sandbox", "the CLI's notes"])
def test_folders_that_are_nested_deeper_than_any_path_are_removed(tmp_path: Path, place: str) -> None:
    """An agent could keep its words there from `delete` and from retention, or take all descriptors of the proxy."""
    boxes = sandboxes(tmp_path / "var")
    top = boxes.prepare("a") if place == "sandbox" else tmp_path / "project" / "memory"
    (top / "beside").mkdir(parents=True)
    at = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=at)
        os.close(os.open("file", os.O_CREAT, dir_fd=at))
        above, at = at, os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(at)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    try:
        if place == "sandbox":
            boxes.remove("a")
        else:
            files.remove_project(top.parent, whole=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not top.exists()


def test_a_closed_folder_that_becomes_a_link_while_it_is_removed_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CLI was given is removed while a program that the agent left running goes on."""
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "kept").write_text("kept")
    outside.chmod(0o500)
    top = tmp_path / "var" / "top"
    (top / "closed").mkdir(parents=True)
    chmod, calls = os.chmod, 0

    def swapped(path: str | Path, mode: int, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the folder within; the first one is of `top`
            (top / "closed").rename(top.with_name("moved"))
            (top / "closed").symlink_to(outside)
        chmod(path, mode, **more)

    monkeypatch.setattr(os, "chmod", swapped)
    with contextlib.suppress(SandboxError):  # that it has changed
        remove_any(top)
    assert calls >= 2
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500
    assert (outside / "kept").read_text() == "kept"
    assert (outside / "inner").is_dir()


def test_links_are_made_once_and_again_in_silence(tmp_path: Path) -> None:
    target = tmp_path / "CLAUDE.md"
    target.write_text("be kind")
    boxes = sandboxes(tmp_path / "var", {"CLAUDE.md": target, ".claude/skills/mine": tmp_path})
    for _ in range(2):
        path = boxes.prepare("a")
        assert (path / "CLAUDE.md").read_text() == "be kind"
        assert os.readlink(path / ".claude" / "skills" / "mine") == str(tmp_path)


def test_a_stale_link_is_re_pointed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    place = sandboxes(tmp_path / "var").prepare("a") / "shared"
    place.symlink_to(old)  # dangling as well
    sandboxes(tmp_path / "var", {"shared": new}).prepare("a")
    assert os.readlink(place) == str(new)
    assert [entry.name for entry in place.parent.iterdir()] == ["shared"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_something_real_in_the_way_is_an_error_and_left_alone(tmp_path: Path, kind: str) -> None:
    place = sandboxes(tmp_path / "var").prepare("a") / "shared"
    if kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
    with pytest.raises(SandboxError, match="left alone"):
        sandboxes(tmp_path / "var", {"shared": tmp_path}).prepare("a")
    assert place.exists()
    assert not place.is_symlink()


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"nowhere does not exist"):
        sandboxes(tmp_path / "var", {"shared": tmp_path / "nowhere"}).prepare("a")


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", ".", ""])
def test_a_link_stays_inside_its_sandbox(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="inside the sandbox"):
        sandboxes(tmp_path / "var", {name: tmp_path}).prepare("a")


def test_a_link_is_not_made_through_a_link_that_leads_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (sandboxes(tmp_path / "var").prepare("a") / "sub").symlink_to(outside)
    with pytest.raises(SandboxError, match="symbolic link"):
        sandboxes(tmp_path / "var", {"sub/shared": tmp_path}).prepare("a")
    assert list(outside.iterdir()) == []


def test_a_folder_that_becomes_a_link_while_it_is_looked_at_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that the agent left running can do that."""
    outside = tmp_path / "outside"
    outside.mkdir()
    sub = sandboxes(tmp_path / "var").prepare("a") / "sub"
    sub.mkdir()
    symlink = os.symlink

    def swapped(wanted: str, place: str | Path, **more: Any) -> None:
        if sub.is_dir() and not sub.is_symlink():
            sub.rename(sub.with_name("moved"))
            symlink(outside, sub)
        symlink(wanted, place, **more)

    monkeypatch.setattr(os, "symlink", swapped)
    sandboxes(tmp_path / "var", {"sub/shared": tmp_path}).prepare("a")
    assert list(outside.iterdir()) == []
    assert sub.is_symlink()


def test_that_an_agent_was_confined_is_seen_wherever_its_directory_is_and_gone_with_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, two = (Sandboxes(Settings(var=tmp_path / name, sandbox_root=root)) for name in ("one", "two"))
    one.note_confined("a")
    one.note_confined("a")
    assert [boxes.was_confined("a") for boxes in (one, two)] == [True, True]
    assert not one.was_confined("b")
    two.remove("a")
    assert [boxes.was_confined("a") for boxes in (one, two)] == [False, False]
    one.private("a").mkdir(parents=True)  # by an earlier version
    assert one.was_confined("a")
    one.private("a", shows_settings=True).mkdir()
    one.remove("a")
    assert list((tmp_path / "one" / "confined").iterdir()) == []


def test_what_is_started_ahead_has_directories_that_no_agent_can_have(tmp_path: Path) -> None:
    boxes = sandboxes(tmp_path / "var")
    for _ in range(2):
        cwd, tmpdir = boxes.agentless("ahead")
        assert cwd.is_dir()
        assert tmpdir.is_dir()
    assert cwd.parent == boxes.prefix.parent
    assert tmpdir != boxes.tmpdir("ahead")
    for folder in (cwd, tmpdir):
        assert folder.stat().st_mode & 0o777 == 0o700


def _prepare_many(var: str, target: str, rounds: int) -> None:
    """Run in a process of its own; both processes re-point the same links to and fro."""
    for number in range(rounds):
        boxes = sandboxes(Path(var), {"deep/er/shared": Path(target), "second": Path(target)})
        path = boxes.prepare(f"agent-{number}")
        assert boxes.tmpdir(f"agent-{number}").is_dir()
        # the link may be the other process's by now, but it is never missing
        assert (path / "deep" / "er" / "shared").is_dir()


@pytest.mark.parametrize("targets", [("one", "one"), ("one", "two")], ids=["same", "different"])
@pytest.mark.sample(1)
def test_two_processes_preparing_the_same_sandboxes_both_succeed(tmp_path: Path, targets: tuple[str, str]) -> None:
    for name in set(targets):
        (tmp_path / name).mkdir()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_prepare_many, args=(str(tmp_path / "var"), str(tmp_path / name), 100))
        for name in targets
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_directories_lie_below_the_root_that_the_settings_name_whatever_var_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    hosts = [Sandboxes(Settings(var=tmp_path / name, sandbox_root=root)) for name in ("one", "two")]
    assert [host.prepare("a") for host in hosts] == [root / "agents" / "a"] * 2
    assert [host.tmpdir("a").parent for host in hosts] == [hosts[0].tmpdir("b").parent] * 2
    assert {host.agentless("ahead") for host in hosts} == {(root / "ahead", hosts[0].agentless("ahead")[1])}
    assert not [name for name in ("one", "two") if (tmp_path / name).exists()]


def test_of_very_many_folders_nobody_says_that_they_hold_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of all of them were kept while they were looked into."""
    monkeypatch.setattr(sandbox, "MOST_FOLDERS", 10)
    boxes = sandboxes(tmp_path / "var")
    box = boxes.prepare("a")
    for n in range(9):
        (box / str(n)).mkdir()
    assert not boxes.has_files("a")
    (box / "9").mkdir()
    assert boxes.has_files("a")


def test_usual_folders_are_removed_without_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A confined agent's program held up the removal of another agent's folders: while it lists one of its own into
    memory that it cannot be given, it moves a file out of there. All moves on that disk wait for it."""

    def moved(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    top = tmp_path / "top"
    (top / "project" / "node_modules" / "a" / "dist" / "x").mkdir(parents=True)
    (top / "project" / "node_modules" / "a" / "dist" / "x" / "file").write_text("x")
    monkeypatch.setattr(os, "rename", moved)
    remove_any(top)
    assert not top.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="where a descriptor leads is read in /proc")
def test_a_subvolume_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of a subvolume of btrfs, which any user may make in an own folder, nothing is moved: an agent that made one
    could not be deleted."""
    top, rename = tmp_path / "top", os.rename
    (top / "subvolume" / "a" / "b" / Path(*"cdefghijklmnopqrstuvwxyz")).mkdir(parents=True)
    (top / "1" / "2" / "3" / "4" / "5" / "6" / "subvolume" / Path(*"abcdefghijklmnopqr")).mkdir(parents=True)
    (top / "subvolume" / "a" / "e" / "f").mkdir(parents=True)
    (top / "subvolume" / "a" / "b" / "file").write_text("x")

    def within_one(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        inside = ["subvolume" in Path(f"/proc/self/fd/{fd}").readlink().parts for fd in (src_dir_fd, dst_dir_fd)]
        if len({*inside}) == 2:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", within_one)
    remove_any(top)
    assert not top.exists()


@pytest.mark.parametrize("mode", [0, 0o300, 0o500])
def test_a_folder_that_an_agent_closed_is_used_and_removed(tmp_path: Path, mode: int) -> None:
    """An agent that took its user's rights to its own folders could never be deleted, nor continued."""
    boxes, session_id = sandboxes(tmp_path / "var"), "5e551011-0000-4000-8000-000000000001"
    boxes.prepare("a")
    project = tmp_path / "project"
    project.mkdir()
    transcript = project / f"{session_id}.jsonl"
    transcript.write_text("{}")
    for folder in (boxes.path("a"), boxes.tmpdir("a"), project):
        folder.chmod(mode)
    with bound_by_modes():
        assert not os.access(boxes.path("a"), os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        assert boxes.prepared("a") is None
        (boxes.prepare("a") / "x").write_text("x")
        assert boxes.prepared("a") is not None
        files.remove(transcript)
        assert not [*project.iterdir()]
        boxes.remove("a")
    assert not boxes.has("a")


@pytest.mark.skipif(sys.platform != "linux", reason="POSIX ACLs are Linux's")
def test_an_agents_folder_that_takes_away_the_rights_to_new_files_is_given_them_again(tmp_path: Path) -> None:
    """Its CLI found no transcript, and all later turns of the agent failed."""
    nobody = b"".join(struct.pack("<HHI", who, 0, 0xFFFFFFFF) for who in (0x01, 0x04, 0x20))  # user, group, others
    os.setxattr(tmp_path, sandbox.ACL_OF_NEW, struct.pack("<I", 2) + nobody)
    made = [tmp_path / "before", tmp_path / "after"]
    for file in made:
        file.touch(0o600)
        sandbox.restore_access(tmp_path)
    assert [stat.S_IMODE(file.stat().st_mode) for file in made] == [0, 0o600]


def test_a_folder_that_its_user_closed_stays_closed(tmp_path: Path) -> None:
    """Only an agent's own folders are opened again, not `var` or the folder of all agents."""
    boxes = sandboxes(tmp_path / "var")
    boxes.prepare("a")
    for folder in (tmp_path / "var", boxes.prefix):
        folder.chmod(0o500)
        make_private(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o500
        folder.chmod(0o700)
