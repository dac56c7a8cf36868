"""An attempt as a new commit of what is staged, or as a note on a commit that is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, InvalidRequest
from .git import Failed, Repository
from .reading import NOTES

# Seconds for `git commit` with a person's own options: a signature may ask for a passphrase.
BY_HAND = 600.0
# Who commits where git knows nobody.
_NOBODY = {
    "GIT_AUTHOR_NAME": "cli-session-proxy", "GIT_AUTHOR_EMAIL": "cli-session-proxy@localhost",
    "GIT_COMMITTER_NAME": "cli-session-proxy", "GIT_COMMITTER_EMAIL": "cli-session-proxy@localhost",
}  # fmt: skip


async def write(repo: Path, text: str, *, note: str | None = None, options: Sequence[str] = ()) -> str:
    """The id of the new commit, or of the one that `note` names. `options` are for `git commit`, by a person.

    Without options the index is committed as it is, also where nothing is staged. Raises `ConfigError` and
    `InvalidRequest`.
    """
    git = await Repository.opened(repo)
    try:
        if note is not None:
            return await _noted(git, text, note)
        if options:
            words = ("commit", "--no-verify", "--allow-empty", "--cleanup=verbatim", "--file=-", *options)
            words = (*await git.own_programs(), *words)
            await git.run(*words, stdin=text, limit=BY_HAND, environment=await _identity(git), free=True)
            return await git.head() or ""
        return await _committed(git, text)
    except Failed as exc:
        raise ConfigError(f"git could not write to {repo}: {exc.said}") from exc


async def _committed(git: Repository, text: str) -> str:
    """By plumbing commands, which run no hook, filter or signer."""
    if await git.run("rev-parse", "--is-bare-repository") == "true":
        raise InvalidRequest("the repository is bare, so nothing can be staged in it: use note", param="note")
    try:
        await git.run("rev-parse", "--quiet", "--verify", "MERGE_HEAD")
    except Failed:
        pass  # no merge is under way
    else:
        raise InvalidRequest("a merge is under way in the repository: end it first, or use note", param="note")
    parent = await git.head()
    tree = await git.run("write-tree", writes=True)
    above = ("-p", parent) if parent else ()
    identity = await _identity(git)
    made = await git.run("commit-tree", tree, *above, "-F", "-", stdin=text, environment=identity, writes=True)
    # Only where HEAD is still what the commit was made on. Every user of the machine can read this line.
    await git.run("update-ref", "-m", "commit", "HEAD", made, parent or "", environment=identity, writes=True)
    return made


async def _noted(git: Repository, text: str, revision: str) -> str:
    commit = await git.reachable(revision)
    # A rebase or an amended commit takes along the notes that this setting names.
    try:
        following = (await git.run("config", "--local", "--get-all", "notes.rewriteRef")).split()
    except Failed:
        following = []
    if NOTES not in following:
        await git.run("config", "--local", "--add", "notes.rewriteRef", NOTES, writes=True)
    words = ("notes", f"--ref={NOTES}", "append", "--file=-", commit)
    await git.run(*words, stdin=text, environment=await _identity(git), writes=True)
    return commit


async def _identity(git: Repository) -> dict[str, str]:
    """Whom to name: who git says it is, or one of ours where no identity is configured."""
    named = {}
    for role in ("AUTHOR", "COMMITTER"):
        try:
            told = await git.run("-c", "user.useConfigOnly=true", "var", f"GIT_{role}_IDENT", free=True)
        except Failed:
            return _NOBODY
        named[f"GIT_{role}_NAME"], _, rest = told.rpartition(" <")
        named[f"GIT_{role}_EMAIL"] = rest.partition("> ")[0]
    return named
