"""What is read back from real repositories of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli_session_proxy.errors import ConfigError, InvalidRequest
from cli_session_proxy.git_memory import attempts, git
from cli_session_proxy.git_memory.attempts import NOTES, Earlier, earlier, write

from ..files import opened_files
from .repository import Repo, attempt

FIX = "login-500"


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


async def numbers(repo: Repo, fix: str = FIX, most: int = 10) -> list[int | None]:
    return [one.number for one in (await earlier(repo.path, fix, most)).attempts]


async def test_the_attempts_at_one_fix_come_newest_first(repo: Repo) -> None:
    for number in (1, 2, 3):
        repo.commit(attempt(number))
        repo.commit(f"ordinary work {number}", file=f"{number}.txt")
    repo.commit(attempt(7, fix="login-5000"))
    found = await earlier(repo.path, FIX, 10)
    assert [one.number for one in found.attempts] == [3, 2, 1]
    assert found.attempts[0].commit == repo("rev-parse", "HEAD~2")
    assert (found.last_number, found.partly) == (3, False)
    assert await numbers(repo, most=2) == [3, 2]
    assert (await earlier(repo.path, FIX, 2)).last_number == 3


async def test_only_what_head_leads_to_is_read(repo: Repo) -> None:
    repo.commit(attempt(1))
    repo("checkout", "--quiet", "-b", "other")
    other = repo.commit(attempt(2))
    await write(repo.path, attempt(3), note="other")
    repo("checkout", "--quiet", "main")
    assert await numbers(repo) == [1]
    repo("replace", "main", other)
    assert await numbers(repo) == [1]
    with pytest.raises(InvalidRequest, match="HEAD leads to"):
        await write(repo.path, attempt(4), note="other")


async def test_notes_are_read_and_a_rebase_an_amended_commit_and_a_fixup_take_them_along(repo: Repo) -> None:
    repo.commit("base", file="a")
    repo("checkout", "--quiet", "-b", "work")
    for number in (1, 2):
        repo.commit(f"work {number}", file=f"w{number}")
        await write(repo.path, attempt(number), note="HEAD")
    repo("checkout", "--quiet", "main")
    repo.commit("meanwhile", file="b")
    repo("checkout", "--quiet", "work")
    repo("rebase", "--quiet", "main")
    assert await numbers(repo) == [2, 1]
    repo("commit", "--quiet", "--amend", "-m", "work 2, again")
    assert await numbers(repo) == [2, 1]
    repo("rebase", "--quiet", "-i", "main", GIT_SEQUENCE_EDITOR="sed -i '2s/^pick/fixup/'")
    assert repo("rev-list", "--count", "main..HEAD") == "1"
    assert await numbers(repo) == [2, 1]


async def test_a_squash_merge_keeps_the_attempts_of_the_branch_that_is_deleted(repo: Repo) -> None:
    repo.commit("base", file="a")
    repo("checkout", "--quiet", "-b", "work")
    repo.commit(attempt(1), file="b")
    repo.commit(attempt(2, model="sonnet"), file="b")
    repo("checkout", "--quiet", "main")
    repo("merge", "--quiet", "--squash", "work")
    repo("commit", "--quiet", "--no-edit")
    repo("branch", "-D", "work")
    repo("reflog", "expire", "--expire=now", "--all")
    repo("gc", "--quiet", "--prune=now")
    found = await earlier(repo.path, FIX, 10)
    assert [(one.number, one.trailers["Model"]) for one in found.attempts] == [(2, "sonnet"), (1, "haiku")]
    assert [one.sections["Root cause"] for one in found.attempts] == ["cause 2", "cause 1"]


async def test_an_attempt_that_was_picked_twice_is_told_once(repo: Repo) -> None:
    repo.commit("base")
    repo("checkout", "--quiet", "-b", "work")
    repo.commit(attempt(1), file="b")
    repo("checkout", "--quiet", "main")
    repo.commit("meanwhile", file="c")
    repo("cherry-pick", "work")
    repo("merge", "--quiet", "--no-edit", "work")
    assert await numbers(repo) == [1]


async def test_worktrees_shallow_clones_and_bare_repositories_are_read(repo: Repo, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        repo.commit(attempt(number))
    repo("worktree", "add", "--quiet", "-b", "beside", str(tmp_path / "tree"))
    tree = Repo(tmp_path / "tree", start=False)
    tree.commit(attempt(4))
    assert await numbers(tree) == [4, 3, 2, 1]
    assert await numbers(repo) == [3, 2, 1]
    repo("clone", "--quiet", "--depth=2", f"file://{repo.path}", str(tmp_path / "shallow"))
    assert await numbers(Repo(tmp_path / "shallow", start=False)) == [3, 2]
    repo("clone", "--quiet", "--bare", str(repo.path), str(tmp_path / "bare"))
    assert await numbers(Repo(tmp_path / "bare", start=False)) == [3, 2, 1]
    (repo.path / "deep" / "er").mkdir(parents=True)
    assert await numbers(Repo(repo.path / "deep" / "er", start=False)) == [3, 2, 1]


async def test_a_partial_clone_fetches_nothing(repo: Repo, tmp_path: Path) -> None:
    repo.commit(attempt(1), file="a")
    repo("config", "uploadpack.allowFilter", "true")
    repo("clone", "--quiet", "--no-checkout", "--filter=blob:none", f"file://{repo.path}", str(tmp_path / "partial"))
    shutil.rmtree(repo.path)
    assert await numbers(Repo(tmp_path / "partial", start=False)) == [1]


async def test_commits_of_others_in_any_encoding_are_read_as_far_as_they_go(repo: Repo) -> None:
    repo.commit("by hand\n\nwe tried to wait\n\nSigned-off-by: Ada <a@b>\nFix-Id: login-500\nCo-authored-by: X <x@y>\n")
    (repo.path / "m").write_bytes("Grüße\n\nFix-Id: login-500\nAttempt: 2\n".encode("latin-1"))
    repo("-c", "i18n.commitEncoding=latin-1", "commit", "--quiet", "--allow-empty", "-F", "m")
    raw = repo("cat-file", "commit", "HEAD").partition("\n\n")[0].replace("encoding latin-1\n", "")
    (repo.path / "raw").write_bytes(raw.encode() + b"\n\n\xff\xfe \x1b[31mbinary\n\nFix-Id: login-500\nAttempt: 3\n")
    made = repo("hash-object", "-t", "commit", "-w", "--literally", "raw")
    repo("reset", "--quiet", "--hard", made)
    found = (await earlier(repo.path, FIX, 10)).attempts
    assert [one.number for one in found] == [3, None]  # the commit in between is not above that one
    assert "\x1b" not in found[0].headline
    assert found[1].sections["Reasoning"] == "we tried to wait"
    repo("reset", "--quiet", "--hard", "ORIG_HEAD")
    assert [one.headline for one in (await earlier(repo.path, FIX, 10)).attempts] == ["Grüße", "by hand"]


async def test_a_huge_message_and_a_note_of_bytes_leave_the_others_readable(repo: Repo) -> None:
    repo.commit(attempt(1))
    repo.commit("x" * (3 * attempts.LONGEST) + "\n\nFix-Id: login-500\nAttempt: 5\n")
    repo.commit(attempt(2))
    (repo.path / "note").write_bytes(b"\0\0Fix-Id: login-500\0" * 10)
    blob = repo("hash-object", "-w", "note")
    repo("notes", f"--ref={NOTES}", "add", "-C", blob, "HEAD")
    assert await numbers(repo) == [2, 1, None]  # None: what the note says, once


async def test_more_commits_than_are_read_are_told_as_such(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        repo.commit(attempt(number))
    monkeypatch.setattr(attempts, "COMMITS", 2)
    found = await earlier(repo.path, FIX, 10)
    assert [one.number for one in found.attempts] == [3, 2]
    assert found.partly


async def test_a_history_with_a_hole_is_read_up_to_it(repo: Repo) -> None:
    lost = repo.commit(attempt(1))
    repo.commit(attempt(2))
    repo.commit(attempt(3))
    (repo.path / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    found = await earlier(repo.path, FIX, 10)
    assert ([one.number for one in found.attempts], found.partly) == ([3], True)


async def test_nothing_that_the_repository_names_is_run(repo: Repo, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "evil"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {ran}\nexit 0\n')
    program.chmod(0o755)
    repo.commit(attempt(1), file="a")
    hooks = repo.path / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for hook in ("pre-commit", "prepare-commit-msg", "commit-msg", "post-commit", "reference-transaction",
                 "post-rewrite", "pre-auto-gc"):  # fmt: skip
        shutil.copy(program, hooks / hook)
    (repo.path / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for name in ("core.fsmonitor", "gpg.program", "core.pager", "filter.evil.clean", "filter.evil.process",
                 "diff.evil.textconv", "diff.external", "core.editor", "core.sshCommand"):  # fmt: skip
        repo("config", name, str(program), GIT_TRACE="0")
    repo("config", "log.showSignature", "true")
    repo("config", "commit.gpgSign", "true")
    ran.unlink(missing_ok=True)
    (repo.path / "a").write_text("changed")
    await earlier(repo.path, FIX, 10)
    await write(repo.path, attempt(2))
    await write(repo.path, attempt(3), note="HEAD")
    await write(repo.path, attempt(4), options=("--no-gpg-sign",))
    said = ran.read_text() if ran.exists() else ""
    assert "hooks" not in said
    assert "filter" not in said or said == ""
    ran.unlink(missing_ok=True)
    assert await numbers(repo) == [4, 3, 2, 1]
    assert not ran.exists(), ran.read_text()


async def test_programs_that_the_repository_names_for_a_commit_by_hand_are_not_run_and_the_users_own_are(
    repo: Repo, tmp_path: Path
) -> None:
    """The configuration that the repository's own one includes counts as its own."""
    ran, own = tmp_path / "ran", tmp_path / "own"
    for name, log in (("evil", ran), ("mine", own)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho $0 >> {log}\ncat\n")
        (tmp_path / name).chmod(0o755)
    repo.commit(attempt(1), file="a")
    (repo.path / ".gitattributes").write_text("a filter=evil\nb filter=mine\n")
    (repo.path / "b").write_text("b")
    repo("add", "b")
    included = repo.path / ".git" / "more"
    repo("config", "include.path", str(included))
    repo("config", "--global", "filter.mine.clean", str(tmp_path / "mine"))
    evil = str(tmp_path / "evil")
    for name in ("gpg.program", "gpg.openpgp.program", "gpg.ssh.defaultKeyCommand", "filter.evil.clean",
                 "filter.evil.process", "filter.mine.clean", "trailer.x.command", "core.sshCommand"):  # fmt: skip
        repo("config", "--file", str(included), name, evil)
    repo("config", "--file", str(included), "filter.evil.required", "true")
    repo("config", "--file", str(included), "commit.gpgSign", "true")
    (repo.path / "a").write_text("changed")
    (repo.path / "b").write_text("changed")
    with pytest.raises(ConfigError):  # gpg itself has no key here
        await write(repo.path, attempt(2), options=("--all",))
    await write(repo.path, attempt(3), options=("--all", "--no-gpg-sign", "--trailer=y: 1"))
    assert not ran.exists(), ran.read_text()
    assert own.exists()


async def test_a_program_by_a_name_that_no_option_can_say_is_refused(repo: Repo, tmp_path: Path) -> None:
    """`git -c` takes what stands before the first `=` for the name: `filter.a=b.clean` could not be switched off."""
    ran = tmp_path / "ran"
    (tmp_path / "evil").write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    (tmp_path / "evil").chmod(0o755)
    repo.commit(attempt(1), file="a")
    (repo.path / ".gitattributes").write_text("a filter=a=b\n")
    (repo.path / "a").write_text("changed")
    repo("config", "filter.a=b.clean", str(tmp_path / "evil"))
    with pytest.raises(ConfigError, match=r"cannot be switched off \(filter\.a=b\.clean\)"):
        await write(repo.path, attempt(2), options=("--all",))
    assert not ran.exists()


async def test_programs_that_a_submodule_names_are_not_run_by_a_commit_by_hand(repo: Repo, tmp_path: Path) -> None:
    """`git commit --all` looks into it, with its own configuration."""
    ran = tmp_path / "ran"
    (tmp_path / "evil").write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    (tmp_path / "evil").chmod(0o755)
    inner = Repo(repo.path / "inner")
    inner.commit("one", file="a")
    repo("-c", "advice.addEmbeddedRepo=false", "add", "inner")
    repo.commit(attempt(1))
    inner("config", "filter.evil.clean", str(tmp_path / "evil"))
    (inner.path / ".gitattributes").write_text("* filter=evil\n")
    (inner.path / "a").write_text("two")
    repo("config", "submodule.inner.ignore", "none")
    repo("status", "--porcelain")
    assert ran.exists()
    ran.unlink()
    (inner.path / "a").write_text("six")
    await write(repo.path, attempt(2), options=("--all",))
    assert not ran.exists()


@pytest.mark.parametrize("protocol", ["ext", "file"])
async def test_a_repository_that_names_itself_a_partial_clone_fetches_and_runs_nothing(
    protocol: str, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(git._ENVIRONMENT, "GIT_NO_LAZY_FETCH")  # an older git does not know it
    ran = tmp_path / "ran"
    secret = Repo(tmp_path / "secret")
    secret.commit("the word is marmalade", file="a")
    repo.commit(attempt(1))
    parent = repo("rev-parse", "HEAD")
    repo.commit(attempt(2))
    url = f"ext::sh -c touch% {ran}" if protocol == "ext" else f"file://{secret.path}"
    for name, value in (
        ("remote.o.url", url), ("remote.o.promisor", "true"), ("extensions.partialClone", "o"),
        (f"protocol.{protocol}.allow", "always"), ("core.repositoryFormatVersion", "1"),
    ):  # fmt: skip
        repo("config", name, value)
    (repo.path / ".git" / "objects" / parent[:2] / parent[2:]).unlink()
    assert (await earlier(repo.path, FIX, 10)).partly
    assert not ran.exists()
    assert not list((repo.path / ".git" / "objects" / "pack").glob("*"))


async def test_a_link_in_a_folder_that_agents_write_leads_to_no_other_repository(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the next process either, which does not know where the path led before."""
    added, other = tmp_path / "added", Repo(tmp_path / "other")
    other.commit(attempt(7))
    repo.commit(attempt(1))
    added.mkdir()
    inside = added / "repo"
    repo.path.rename(inside)
    assert (await earlier(inside, FIX, 10, (added,))).last_number == 1
    (tmp_path / "name").symlink_to(inside)  # a person's link elsewhere
    for path, written in ((tmp_path / "name", added), (inside, inside), (inside, inside / ".git" / "refs")):
        assert (await earlier(path, FIX, 10, (written,))).last_number == 1
    (tmp_path / "outer").symlink_to(added)  # the same
    assert (await earlier(tmp_path / "outer" / "repo", FIX, 10, (added,))).last_number == 1
    inside.rename(added / "aside")
    inside.symlink_to(other.path)
    monkeypatch.setattr(git, "_first_used", {})
    assert (await earlier(inside, FIX, 10)).last_number == 7
    head = other("rev-parse", "HEAD")
    for ask in (
        lambda: earlier(inside, FIX, 10, (added,)),
        lambda: earlier(tmp_path / "outer" / "repo", FIX, 10, (added,)),
        lambda: write(inside, attempt(2), written=(added,)),
    ):
        with pytest.raises(ConfigError, match="not its own"):
            await ask()
    assert other("rev-parse", "HEAD") == head


async def test_a_git_directory_of_another_repository_is_refused(repo: Repo, tmp_path: Path) -> None:
    other = Repo(tmp_path / "other")
    other.commit(attempt(7))
    repo.commit(attempt(1))
    assert (await earlier(repo.path, FIX, 10)).last_number == 1
    place = repo.path / ".git"
    place.rename(tmp_path / "aside")

    def a_file() -> None:
        place.write_text(f"gitdir: {other.path}/.git\n")

    def a_link() -> None:
        place.symlink_to(other.path / ".git")

    def a_common_directory() -> None:
        shutil.copytree(tmp_path / "aside", place)
        (place / "commondir").write_text(f"{other.path}/.git\n")

    def links_within() -> None:
        shutil.copytree(tmp_path / "aside", place)
        for name in ("objects", "refs"):
            shutil.rmtree(place / name)
            (place / name).symlink_to(other.path / ".git" / name)

    def a_copy() -> None:
        shutil.copytree(other.path / ".git", place)

    for put in (a_file, a_link, a_common_directory, links_within, a_copy):
        put()
        for ask in (lambda: earlier(repo.path, FIX, 10), lambda: write(repo.path, attempt(2))):
            with pytest.raises(ConfigError, match=r"not its own|was replaced by another one"):
                await ask()
        place.unlink() if place.is_symlink() or place.is_file() else shutil.rmtree(place)
    (tmp_path / "aside").rename(place)
    assert (await earlier(repo.path, FIX, 10)).last_number == 1
    assert other.message() == attempt(7).strip()


async def test_a_hook_that_the_configuration_names_is_refused(repo: Repo) -> None:
    """git 2.54 runs those whatever `core.hooksPath` says."""
    repo.commit(attempt(1), file="a")
    repo("config", "hook.mine.command", "touch ran")
    repo("config", "hook.mine.event", "reference-transaction")
    for ask in (lambda: earlier(repo.path, FIX, 10), lambda: write(repo.path, attempt(2))):
        with pytest.raises(ConfigError, match=r"names a hook \(hook\.mine\.command\)"):
            await ask()


async def test_a_configuration_too_long_to_be_looked_through_is_refused(repo: Repo) -> None:
    repo.commit(attempt(1), file="a")
    with (repo.path / ".git" / "config").open("a") as file:
        file.write("".join(f"[pad]\n\tp{number} = x\n" for number in range(150_000)))
        file.write('[hook "mine"]\n\tcommand = touch ran\n')
    with pytest.raises(ConfigError, match="printed more than"):
        await earlier(repo.path, FIX, 10)


async def test_a_git_file_that_leads_to_a_bare_repository_is_refused(repo: Repo, tmp_path: Path) -> None:
    repo.commit(attempt(7), file="a")
    bare, led = tmp_path / "bare.git", tmp_path / "led"
    repo("clone", "--bare", "--quiet", str(repo.path), str(bare))
    assert (await earlier(bare, FIX, 10)).last_number == 7
    led.mkdir()
    (led / ".git").write_text(f"gitdir: {bare}\n")
    with pytest.raises(ConfigError, match="not its own"):
        await earlier(led, FIX, 10)


@pytest.mark.parametrize("above", [True, False], ids=["above the repository", "elsewhere"])
async def test_a_work_tree_that_is_the_users_own_files_is_refused(repo: Repo, tmp_path: Path, above: bool) -> None:
    """`commit -- --all` would take them in."""
    repo.commit(attempt(1), file="a")
    mine = tmp_path if above else tmp_path / "mine"
    mine.mkdir(exist_ok=True)
    (mine / "a").write_text("the user's own")
    repo("config", "core.worktree", str(mine))
    with pytest.raises(ConfigError, match="not its own"):
        await earlier(repo.path, FIX, 10)
    with pytest.raises(ConfigError, match="not its own"):
        await write(repo.path, attempt(2), options=("--all",))
    repo("config", "--unset", "core.worktree")
    assert "own" not in repo("show", "HEAD:a")


async def test_a_work_tree_that_is_named_after_the_check_is_not_committed(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.commit(attempt(1), file="a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("the user's own")
    repo("config", "core.bare", "true")
    overrides = git.Repository.program_overrides

    async def then_named(self: git.Repository) -> list[str]:
        repo("config", "core.bare", "false")
        repo("config", "core.worktree", str(tmp_path / "mine"))
        return await overrides(self)

    monkeypatch.setattr(git.Repository, "program_overrides", then_named)
    with pytest.raises(InvalidRequest, match="no work tree"):
        await write(repo.path, attempt(2), options=("--all",))


@pytest.mark.parametrize("place", ["logs/HEAD", "logs", "refs/heads", "index", "COMMIT_EDITMSG", "objects/pack"])
async def test_a_link_in_a_git_directory_leads_git_nowhere(repo: Repo, tmp_path: Path, place: str) -> None:
    """git appends to a log and writes refs through links, in any file and any other repository."""
    other = Repo(tmp_path / "other")
    other.commit(attempt(7), file="a")
    repo.commit(attempt(1), file="a")
    (repo.path / ".git" / "COMMIT_EDITMSG").touch()
    real, target = repo.path / ".git" / place, other.path / ".git" / place
    real.rename(tmp_path / "aside")
    real.symlink_to(target)
    before = other("log", "--all", "--format=%H"), other("reflog"), target.read_bytes() if target.is_file() else b""
    for ask in (lambda: earlier(repo.path, FIX, 10), lambda: write(repo.path, attempt(2))):
        with pytest.raises(ConfigError, match="not its own"):
            await ask()
    after = other("log", "--all", "--format=%H"), other("reflog"), target.read_bytes() if target.is_file() else b""
    assert before == after


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["_refuse_pipes", "_check", "_outside"])
@pytest.mark.sample(1)
async def test_a_repository_that_an_agents_program_holds_is_not_waited_for(
    repo: Repo, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Other agents have the same one."""
    repo.commit(attempt(1))
    released = threading.Event()
    owner = git if name == "_outside" else git.Repository
    look = getattr(owner, name)

    def held(*arguments: Any) -> Any:
        released.wait()
        return look(*arguments)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, held)
            patched.setattr(git, "LIMIT", 1.0)
            with pytest.raises(ConfigError, match="a look at its files took longer"):
                await earlier(repo.path, FIX, 10)
    finally:
        released.set()
    assert await numbers(repo) == [1]


@pytest.mark.parametrize("name", ["HEAD", "commondir", "index", "packed-refs", NOTES])
async def test_a_pipe_that_git_would_open_is_refused_before_it_waits_there(repo: Repo, name: str) -> None:
    repo.commit(attempt(1))
    pipe = repo.path / ".git" / name
    pipe.unlink(missing_ok=True)
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=f"{name} in the git repository .* neither a file nor a folder: remove it"):
        await earlier(repo.path, FIX, 10)
    pipe.unlink()
    os.mkfifo(repo.path / "pipe")  # among the files of its work tree it does no harm
    if name not in ("HEAD", "index"):
        assert await numbers(repo) == [1]


@pytest.mark.timeout(60)
async def test_a_file_of_any_size_that_git_would_read_is_refused_before_it_does(repo: Repo) -> None:
    """A sparse one takes no room on the disk: git read such references, and used a processor, for 30 s."""
    repo.commit(attempt(1))
    refs = repo.path / ".git" / "packed-refs"
    refs.touch()
    os.truncate(refs, 4 * 1024**4)
    with pytest.raises(ConfigError, match="packed-refs is larger than git's limit of memory here: remove it"):
        await earlier(repo.path, FIX, 10)
    refs.unlink()
    assert await numbers(repo) == [1]


async def test_a_git_directory_of_very_many_files_is_not_looked_through(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent can make names without an end: each look would take a thread for a minute."""
    repo.commit(attempt(1), file="a")
    monkeypatch.setattr(git, "MOST_FILES", 2)
    with pytest.raises(ConfigError, match="git gc"):
        await earlier(repo.path, FIX, 10)


@pytest.mark.parametrize(("name", "mend"), [("objects/info/alternates", "repack"), ("info/grafts", "remove")])
async def test_objects_and_parents_from_elsewhere_are_refused(repo: Repo, tmp_path: Path, name: str, mend: str) -> None:
    other = Repo(tmp_path / "other")
    foreign = other.commit(attempt(7))
    own = repo.commit(attempt(1))
    place = repo.path / ".git" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text(f"{other.path}/.git/objects\n" if mend == "repack" else f"{own} {foreign}\n")
    for ask in (lambda: earlier(repo.path, FIX, 10), lambda: write(repo.path, attempt(2))):
        with pytest.raises(ConfigError, match=f"lies outside.*{mend}"):
            await ask()


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """It happens between the look at a repository and git's own start."""
    if sys.platform != "linux" or ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("Landlock keeps git there since Linux 5.13")
    checked = git.Repository._check

    def checked_and_done(one: git.Repository, *given: Any) -> Any:
        found = checked(one, *given)
        act()
        return found

    monkeypatch.setattr(git.Repository, "_check", checked_and_done)


@pytest.mark.parametrize("bare", [False, True], ids=["a work tree", "bare"])
@pytest.mark.parametrize("way", ["alternates", "objects", "refs", "HEAD", "the folder", "the git directory", "above"])
@pytest.mark.sample(5)
async def test_what_is_put_there_while_git_works_leads_it_to_no_other_repository(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, bare: bool
) -> None:
    other = Repo(tmp_path / "other")
    foreign = other.commit(attempt(7))
    path, target = repo.path, other.path
    repo.commit(attempt(1))
    if bare:
        path, target = tmp_path / "bare.git", tmp_path / "other.git"
        repo("clone", "--quiet", "--bare", str(repo.path), str(path))
        other("clone", "--quiet", "--bare", str(other.path), str(target))
    place, theirs = (path, target) if bare else (path / ".git", target / ".git")

    def replaced() -> None:
        if way == "alternates":
            (place / "objects" / "info").mkdir(exist_ok=True)
            (place / "objects" / "info" / "alternates").write_text(f"{theirs}/objects\n")
            (place / "HEAD").write_text(f"{foreign}\n")
            return
        at, to = {"the folder": (path, target), "the git directory": (place, theirs)}.get(
            way, (place / way, theirs / way)
        )
        at.rename(tmp_path / "aside")
        at.symlink_to(to)
        if way in ("refs", "objects"):
            (place / "HEAD").write_text(f"{foreign}\n" if way == "objects" else "ref: refs/heads/main\n")

    if way == "above":  # a folder on the way to it
        inner = tmp_path / "above" / "it"
        inner.parent.mkdir()
        path.rename(inner)
        beside = tmp_path / "beside"
        beside.mkdir()
        (beside / "it").symlink_to(target)
        path, target = inner, other.path

        def replaced() -> None:
            inner.parent.rename(tmp_path / "aside")
            inner.parent.symlink_to(beside)

    meanwhile(monkeypatch, replaced)
    before = other("log", "--all", "--format=%H"), other("reflog")
    with contextlib.suppress(ConfigError):
        assert 7 not in [one.number for one in (await earlier(path, FIX, 10)).attempts]
    monkeypatch.undo()
    assert (other("log", "--all", "--format=%H"), other("reflog")) == before


async def test_what_the_configuration_includes_leads_git_to_no_other_repository(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git may read the files that it includes. One is replaced by a link before git reads it again."""
    other = Repo(tmp_path / "other")
    foreign = other.commit(attempt(7))
    repo.commit(attempt(1))
    place, included = repo.path / ".git", repo.path / "included"
    included.write_text("[user]\n\tname = Ada\n")
    repo("config", "includeIf.onbranch:main.path", str(included))  # no longer after the replacement of HEAD
    assert await numbers(repo) == [1]
    opened = git.Repository.head

    async def replaced(one: git.Repository) -> str | None:
        included.unlink()
        included.symlink_to(other.path / ".git")
        (place / "objects" / "info" / "alternates").write_text(f"{other.path}/.git/objects\n")
        (place / "HEAD").write_text(f"{foreign}\n")
        return await opened(one)

    monkeypatch.setattr(git.Repository, "head", replaced)
    with pytest.raises(ConfigError, match="replaced meanwhile"):
        await numbers(repo)


@pytest.mark.parametrize("note", [None, "HEAD"], ids=["a commit", "a note"])
async def test_a_hook_that_is_put_there_while_git_works_is_not_run(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str | None
) -> None:
    """As one that the configuration names would be with git 2.54."""
    ran = tmp_path / "ran"
    repo.commit(attempt(1), file="a")
    hook = repo.path / ".git" / "hooks" / "reference-transaction"

    def put() -> None:
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {ran} {hook.parent}/ran\n")
        hook.chmod(0o755)

    monkeypatch.setattr(git, "_CONFIGURATION", git._CONFIGURATION[1:])
    meanwhile(monkeypatch, put)
    with contextlib.suppress(ConfigError):
        await write(repo.path, attempt(2), note=note)
    assert not ran.exists()
    assert not hook.with_name("ran").exists()


async def test_an_object_that_unpacks_to_much_ends_at_the_bound_of_memory(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.commit(attempt(1))
    head = repo("cat-file", "commit", "HEAD").partition("\n\n")[0]
    bomb = repo("hash-object", "-t", "commit", "-w", "--stdin", stdin=f"{head}\n\n{' ' * 100_000_000}")
    repo("update-ref", "HEAD", bomb)
    repo.commit(attempt(2))
    assert not (await earlier(repo.path, FIX, 10)).partly
    monkeypatch.setattr(git, "MEMORY", 64 * 1024 * 1024)
    assert (await earlier(repo.path, FIX, 10)).partly


async def test_a_configuration_without_an_end_ends_at_the_bound_of_memory(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read before the repository is known to be one of its own."""
    repo.commit(attempt(1))
    with (repo.path / ".git" / "config").open("a") as config:
        config.write(f"[a]\n\tb = {'x' * 48 * 1024 * 1024}\n")
    start, started = asyncio.create_subprocess_exec, 0

    async def counted(*words: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        return await start(*words, **options)

    monkeypatch.setattr(git, "MEMORY", 64 * 1024 * 1024)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
    with pytest.raises(ConfigError, match=r"(?i)memory"):
        await earlier(repo.path, FIX, 10)
    assert started == 1


async def test_what_a_repository_makes_git_say_is_not_kept_without_an_end(repo: Repo) -> None:
    """It was read to its end before it was cut: an agent that writes there decides how much that is."""
    repo.commit(attempt(1))
    with (repo.path / ".git" / "config").open("a") as config:
        config.write("[pad]\n" + "\tp = x\n" * 1_000_000)
    before = psutil.Process().memory_info().rss
    highest = before
    reading_it = asyncio.create_task(earlier(repo.path, FIX, 10))
    while not reading_it.done():
        highest = max(highest, psutil.Process().memory_info().rss)
        await asyncio.sleep(0.005)
    with pytest.raises(ConfigError, match="printed more than"):
        await reading_it
    assert highest - before < 20 * 1024 * 1024


async def test_a_file_without_an_end_that_a_git_directory_is_named_by_is_not_read(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.commit(attempt(1))
    (repo.path / ".git").rename(repo.path / "git")
    tree = repo.path / "git" / "worktrees" / "x"
    tree.mkdir(parents=True)
    (tree / "commondir").write_text("../..\n")
    shutil.copy(repo.path / "git" / "HEAD", tree)
    (repo.path / ".git").write_text(f"gitdir: {tree}\n")
    (tree / "gitdir").write_text(f"{repo.path}/.git\n")
    assert await numbers(repo) == [1]
    monkeypatch.setattr(git, "_first_used", {})
    (tree / "gitdir").unlink()
    os.mkfifo(tree / "gitdir")
    with pytest.raises(ConfigError, match="not its own"):
        await asyncio.wait_for(earlier(repo.path, FIX, 10), 60)
    (tree / "gitdir").unlink()
    with (tree / "gitdir").open("wb") as file:
        file.truncate(1 << 42)  # takes no room on the disk
    with pytest.raises(ConfigError, match="not its own"):
        await earlier(repo.path, FIX, 10)
    (tree / "gitdir").unlink()
    (tree / "gitdir").mkdir()  # `open` leaves a folder's descriptor open
    with pytest.raises(ConfigError, match="not its own"):
        await earlier(repo.path, FIX, 10)
    assert str(tree / "gitdir") not in opened_files()


async def test_where_less_memory_is_allowed_git_runs_with_that(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but root may raise it again."""
    repo.commit(attempt(1))
    start, less = asyncio.create_subprocess_exec, 1024**3

    async def within(*words: Any, **options: Any) -> Any:
        bounded = ("prlimit", f"--data={less}:{less}", "setpriv", "--bounding-set=-all", "--")
        return await start(*bounded, *words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", within)
    assert await numbers(repo) == [1]


@pytest.mark.parametrize("note", [None, "HEAD"], ids=["a commit", "a note"])
async def test_a_link_that_is_put_there_while_git_works_leads_it_to_no_write_outside(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str | None
) -> None:
    repo.commit(attempt(1), file="a")
    await write(repo.path, attempt(2), note=note)
    victim = tmp_path / "profile"
    victim.write_text("mine\n")
    logs = repo.path / ".git" / "logs"

    def replaced() -> None:
        shutil.rmtree(logs)
        (logs / "refs" / "notes").mkdir(parents=True)
        for name in ("HEAD", "refs/notes/attempts"):
            (logs / name).symlink_to(victim)

    meanwhile(monkeypatch, replaced)
    with pytest.raises(ConfigError, match="could not write"):
        await write(repo.path, attempt(3), note=note)
    assert victim.read_text() == "mine\n"


async def test_without_a_repository_git_or_a_commit_it_says_what_to_do(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await earlier(repo.path, FIX, 10) == Earlier()
    (tmp_path / "empty").mkdir()
    for place, why in ((tmp_path / "empty", "git init"), (tmp_path / "none", "no such directory")):
        with pytest.raises(ConfigError, match=why):
            await earlier(place, FIX, 10)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="git is not installed"):
        await earlier(repo.path, FIX, 10)


async def test_no_git_of_the_repositorys_own_is_run(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder of PATH, such as node_modules/.bin, lies in the repository when git is run there."""
    repo.commit(attempt(1))
    ran, own = tmp_path / "ran", repo.path / "bin" / "git"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\ntouch {ran}\nexec {shutil.which("git")} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"bin{os.pathsep}{os.environ['PATH']}")
    assert await numbers(repo) == [1]
    assert not ran.exists()
