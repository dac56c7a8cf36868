"""A commit of what is staged, or a note, in real repositories."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cli_session_proxy.errors import ConfigError, InvalidRequest
from cli_session_proxy.git_memory.attempts import NOTES, earlier, write

from ..until import until
from .repository import Repo, attempt


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


async def test_what_is_staged_is_committed_and_nothing_else(repo: Repo) -> None:
    (repo.path / "staged").write_text("1")
    repo("add", "staged")
    (repo.path / "loose").write_text("2")
    first = await write(repo.path, attempt(1))  # also the first commit of all
    second = await write(repo.path, attempt(2))  # also where nothing is staged
    assert repo("rev-parse", "HEAD", "HEAD~1").split() == [second, first]
    assert repo("ls-tree", "--name-only", "HEAD") == "staged"
    assert repo("status", "--porcelain") == "?? loose"
    assert repo("symbolic-ref", "HEAD") == "refs/heads/main"
    assert repo.message(first) == attempt(1).strip()
    assert repo("log", "-1", "--format=%an <%ae>") == "cli-session-proxy <cli-session-proxy@localhost>"


async def test_the_persons_own_name_and_options_count(repo: Repo) -> None:
    repo("config", "user.name", "Grace")
    repo("config", "user.email", "grace@example.org")
    repo.commit("base", file="a")
    (repo.path / "a").write_text("changed")
    await write(repo.path, attempt(1))
    assert repo("log", "-1", "--format=%cn") == "Grace"
    await write(repo.path, attempt(2), options=("--all", "--author=Alan <alan@example.org>"))
    assert repo("log", "-1", "--format=%cn %an") == "Grace Alan"
    assert repo("status", "--porcelain") == ""
    assert [one.number for one in (await earlier(repo.path, "login-500", 9)).attempts] == [2, 1]
    with pytest.raises(ConfigError, match="no-such-option"):
        await write(repo.path, attempt(3), options=("--no-such-option",))


async def test_no_command_line_holds_words_of_an_attempt(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read it."""
    start, seen = asyncio.create_subprocess_exec, []

    async def noted(*words: Any, **options: Any) -> Process:
        seen.append(words)
        return await start(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    made = await write(repo.path, attempt(1))
    await write(repo.path, attempt(2), note=made)
    assert seen
    assert not [words for words in seen if "retried the query" in " ".join(map(str, words))]


async def test_a_note_leaves_the_commit_as_it_is_and_a_second_one_is_added_to_it(repo: Repo) -> None:
    before = repo.commit("fix", file="a")
    assert await write(repo.path, attempt(1), note="HEAD") == before
    assert await write(repo.path, attempt(2), note=before[:10]) == before
    assert repo("rev-parse", "HEAD") == before
    assert repo("notes", f"--ref={NOTES}", "show", before).count("Fix-Id:") == 2
    assert repo("config", "--get-all", "notes.rewriteRef") == NOTES
    for wrong in ("HEAD~5", "nothing", "0" * 40):
        with pytest.raises(InvalidRequest, match="note must name a commit"):
            await write(repo.path, attempt(3), note=wrong)


async def test_a_merge_under_way_an_unmerged_index_and_a_bare_repository_are_refused(
    repo: Repo, tmp_path: Path
) -> None:
    repo.commit("base", file="a")
    repo("clone", "--quiet", "--bare", str(repo.path), str(tmp_path / "bare"))
    with pytest.raises(InvalidRequest, match="bare"):
        await write(tmp_path / "bare", attempt(1))
    repo("checkout", "--quiet", "-b", "other")
    repo.commit("other", file="b")
    repo("checkout", "--quiet", "main")
    repo.commit("main", file="c")
    head = repo("rev-parse", "HEAD")
    repo("merge", "--quiet", "--no-commit", "other")
    with pytest.raises(InvalidRequest, match="merge is under way"):
        await write(repo.path, attempt(1))
    assert repo("rev-parse", "HEAD") == head
    (repo.path / ".git" / "index.lock").touch()
    (repo.path / ".git" / "refs" / "heads" / "main.lock").touch()
    repo_head = repo.path / ".git" / "MERGE_HEAD"
    repo_head.unlink()
    with pytest.raises(ConfigError, match="could not write"):
        await write(repo.path, attempt(1))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.sample(1)
def test_a_git_that_ends_before_we_look_is_heard(repo: Repo, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each of these has ended when its start returns. With a pipe for stdin, uvloop raises then."""
    start = asyncio.create_subprocess_exec

    async def ended(*words: Any, **options: Any) -> Process:
        child = await start(*words, **options)

        async def has_ended() -> bool:
            return child.returncode is not None

        await until(has_ended)
        return child

    async def case() -> None:
        made = await write(repo.path, attempt(1), options=("--quiet",))
        await write(repo.path, attempt(2), note=made)
        assert len((await earlier(repo.path, "login-500", 9)).attempts) == 2
        assert await write(repo.path, attempt(3)) == repo("rev-parse", "HEAD")
        with pytest.raises(ConfigError, match="no-such-option"):  # it reads nothing of what it is given
            await write(repo.path, attempt(4) * 1000, options=("--no-such-option",))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended)
    run(case())
