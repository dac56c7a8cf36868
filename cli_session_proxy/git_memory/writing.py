"""Writes an attempt as a commit of the staged changes, or as a note on an existing commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, InvalidRequest
from .git import Failed, Repository
from .reading import NOTES

# Seconds for `git commit` with a person's own options: a signature may ask for a passphrase.
COMMIT_TIMEOUT = 600.0
# The committer if git has no identity.
_NOBODY = {
    "GIT_AUTHOR_NAME": "cli-session-proxy", "GIT_AUTHOR_EMAIL": "cli-session-proxy@localhost",
    "GIT_COMMITTER_NAME": "cli-session-proxy", "GIT_COMMITTER_EMAIL": "cli-session-proxy@localhost",
}  # fmt: skip


async def write(repo: Path, text: str, *, note: str | None = None, options: Sequence[str] = ()) -> str:
    """Write `text` as a commit, or as a note on the commit that `note` names. Returns the commit's id. `options`: a
    person's, for `git commit`.

    Without options the index is committed, even if nothing is staged. Raises `ConfigError` and `InvalidRequest`.
    """
    git = await Repository.opened(repo)
    try:
        if note is not None:
            return await _write_note(git, text, note)
        if options:
            words = ("commit", "--no-verify", "--allow-empty", "--cleanup=verbatim", "--file=-", *options)
            words = (*await git.program_overrides(), *words)
            await git.run(*words, stdin=text, limit=COMMIT_TIMEOUT, environment=await _identity(git), as_user=True)
            return await git.head() or ""
        return await _write_commit(git, text)
    except Failed as exc:
        raise ConfigError(f"git could not write to {repo}: {exc.message}") from exc


async def _write_commit(git: Repository, text: str) -> str:
    """Commit with plumbing commands, which run no hooks, filters or signers."""
    if await git.run("rev-parse", "--is-bare-repository") == "true":
        raise InvalidRequest("the repository is bare, so nothing can be staged in it: use note", param="note")
    try:
        await git.run("rev-parse", "--quiet", "--verify", "MERGE_HEAD")
    except Failed:
        pass  # no merge in progress
    else:
        raise InvalidRequest("a merge is under way in the repository: end it first, or use note", param="note")
    parent = await git.head()
    tree = await git.run("write-tree", writes=True)
    parents = ("-p", parent) if parent else ()
    identity = await _identity(git)
    made = await git.run("commit-tree", tree, *parents, "-F", "-", stdin=text, environment=identity, writes=True)
    # Only if HEAD is still its parent. The reflog gets no text of it: every user of this machine sees the command line.
    await git.run("update-ref", "-m", "commit", "HEAD", made, parent or "", environment=identity, writes=True)
    return made


async def _write_note(git: Repository, text: str, revision: str) -> str:
    commit = await git.reachable(revision)
    # With this setting, rebase and amend keep our notes.
    try:
        rewritten = (await git.run("config", "--local", "--get-all", "notes.rewriteRef")).split()
    except Failed:
        rewritten = []
    if NOTES not in rewritten:
        await git.run("config", "--local", "--add", "notes.rewriteRef", NOTES, writes=True)
    words = ("notes", f"--ref={NOTES}", "append", "--file=-", commit)
    await git.run(*words, stdin=text, environment=await _identity(git), writes=True)
    return commit


async def _identity(git: Repository) -> dict[str, str]:
    """The committer: git's own identity, or ours if none is configured."""
    named = {}
    for role in ("AUTHOR", "COMMITTER"):
        try:
            identity = await git.run("-c", "user.useConfigOnly=true", "var", f"GIT_{role}_IDENT", as_user=True)
        except Failed:
            return _NOBODY
        named[f"GIT_{role}_NAME"], _, rest = identity.rpartition(" <")
        named[f"GIT_{role}_EMAIL"] = rest.partition("> ")[0]
    return named
