"""Reads the attempts at one fix from commits reachable from HEAD and their notes, and tells a new attempt of them.

Writes an attempt as a commit of the staged changes, or as a note on an existing commit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from .. import logs, redact
from ..domain import limits
from ..domain.evidence import Recalled
from ..domain.models import Agent
from ..errors import ConfigError, InvalidRequest
from ..sandbox import LOCAL_OWNER
from ..settings import GitMemory, fix_id_of
from . import records
from .git import GitFailed, Repository
from .records import FixAttempt

log = logs.get(__name__)

# The ref of our notes. `_write_note` configures git to keep them in a rebase.
NOTES = "refs/notes/attempts"
# The most commits with a fix id, and seconds: older ones are not read. 100,000 commits take about a second.
COMMITS = 2_000
SECONDS = 10.0
# Bytes of one message or note that are read; the rest is dropped.
LONGEST = 512 * 1024
# Characters of all messages and notes that are read.
ALL_TEXTS = 16 * 1024 * 1024
# A text of up to so many characters is parsed on the event loop, in a millisecond.
INLINE = 32 * 1024

# With -z a NUL ends each field: id, time, message and notes. Git replaces NULs in a note by line ends.
_FORMAT = "--format=tformat:%H%x00%ct%x00%B%x00%N"


@dataclass(frozen=True, slots=True)
class Earlier:
    """Earlier attempts at a fix."""

    attempts: tuple[FixAttempt, ...] = ()  # newest first
    partly: bool = False  # the history was not read to its end
    last_number: int = 0  # the highest known number of an attempt


async def earlier(repo: Path, fix_id: str | None, most: int, written: Iterable[Path] = ()) -> Earlier:
    """At most so many attempts at this fix (None: at any fix). Raises `ConfigError` without a repository."""
    git = await Repository.opened(repo, written)
    try:
        if await git.head() is None:
            return Earlier()
    except GitFailed as exc:
        raise ConfigError(f"the git repository {repo} cannot be read: {exc.message}") from exc
    matched = f"--grep=Fix-Id: {fix_id or ''}"
    attempts: list[FixAttempt] = []
    partly = False
    log_words = ("log", "-z", _FORMAT, "--encoding=UTF-8", f"--notes={NOTES}", "--fixed-strings", matched, "HEAD", "--")
    try:
        async with asyncio.timeout(SECONDS), aclosing(git.pieces(*log_words)) as pieces:
            count = size = 0
            async for commit, at, texts in _commits(pieces):
                count, size = count + 1, size + sum(map(len, texts))
                if count > COMMITS or size > ALL_TEXTS:
                    partly = True
                    break
                for text in texts:
                    if len(text) > INLINE:
                        in_text = await asyncio.to_thread(records.read, text, commit=commit, at=at)
                    else:
                        in_text = records.read(text, commit=commit, at=at)
                    # A commit may have attempts at several fixes.
                    attempts += [attempt for attempt in in_text if fix_id is None or attempt.fix_id == fix_id]
    except (TimeoutError, GitFailed) as exc:  # keep what was read before: it is nearer to HEAD
        why = exc.message if isinstance(exc, GitFailed) else f"it took longer than {SECONDS:g} s"
        log.warning("git_history_read_in_part", repo=str(repo), why=why)
        partly = True
    # Picked, rebased or squashed commits repeat an attempt: the one nearest to HEAD counts.
    distinct = {repr(replace(attempt, commit="", at=0.0)): attempt for attempt in reversed(attempts)}
    newest = sorted(distinct.values(), key=lambda one: (one.number or 0, one.at), reverse=True)
    last_number = max((attempt.number or 0 for attempt in newest), default=0)
    return Earlier(tuple(newest[:most]), partly, last_number)


async def _commits(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, float, tuple[str, str]]]:
    """Parses the output of `git log`: (id, time, (message, notes)) of each commit."""
    fields: list[bytes] = []
    async for one in limits.split(pieces, b"\0", LONGEST):
        fields.append(one)
        if len(fields) == 4:
            commit, at, message, notes = fields
            when = float(at) if at.isdigit() and len(at) < 12 else 0.0
            yield commit.decode(), when, (message.decode("utf-8", "replace"), notes.decode("utf-8", "replace"))
            fields = []


def fix_of(memory: GitMemory, agent: Agent) -> str:
    """The fix id of an agent: the profile's, or one of its own, different for each owner."""
    if memory.fix_id is not None:
        return memory.fix_id
    name = agent.agent_id if agent.owner == LOCAL_OWNER else f"{agent.owner}/{agent.agent_id}"
    try:
        return fix_id_of(name)
    except ValueError:
        return f"agent-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


async def recall(memory: GitMemory, agent: Agent, written: Iterable[Path]) -> Recalled | None:
    """What an agent is told of earlier attempts at its fix; None if there are no attempts. Raises `ConfigError` if the
    repository cannot be read."""
    fix_id = fix_of(memory, agent)
    history = await earlier(memory.repo, fix_id, memory.attempts, written)
    text = text_of(fix_id, history)
    return None if text is None else Recalled(fix_id, tuple(one.commit for one in history.attempts), text)


def text_of(fix_id: str, history: Earlier) -> str | None:
    """The text for the model, with secrets removed; None if there are no attempts."""
    text = records.text_for_model(fix_id, history.attempts, partly=history.partly)
    return None if text is None else redact.text(text)


# --- writing

# Seconds for `git commit` with a person's own options: a signature may ask for a passphrase.
COMMIT_TIMEOUT = 600.0
# The committer if git has no identity.
_NOBODY = {
    "GIT_AUTHOR_NAME": "cli-session-proxy", "GIT_AUTHOR_EMAIL": "cli-session-proxy@localhost",
    "GIT_COMMITTER_NAME": "cli-session-proxy", "GIT_COMMITTER_EMAIL": "cli-session-proxy@localhost",
}  # fmt: skip


async def write(
    repo: Path, text: str, *, note: str | None = None, options: Sequence[str] = (), written: Iterable[Path] = ()
) -> str:
    """Write `text` as a commit, or as a note on the commit that `note` names. Returns the commit's id. `options`: a
    person's, for `git commit`.

    Without options the index is committed, even if nothing is staged. Raises `ConfigError` and `InvalidRequest`.
    """
    git = await Repository.opened(repo, written)
    try:
        if note is not None:
            return await _write_note(git, text, note)
        if options:
            if not git.has_work_tree:  # git would take one that the configuration names by now
                raise InvalidRequest("the repository has no work tree: use note", param="note")
            words = ("commit", "--no-verify", "--allow-empty", "--cleanup=verbatim", "--file=-", *options)
            words = (*await git.program_overrides(), *words)
            await git.run(*words, stdin=text, limit=COMMIT_TIMEOUT, environment=await _identity(git), as_user=True)
            return await git.head() or ""
        return await _write_commit(git, text)
    except GitFailed as exc:
        raise ConfigError(f"git could not write to {repo}: {exc.message}") from exc


async def _write_commit(git: Repository, text: str) -> str:
    """Commit with plumbing commands, which run no hooks, filters or signers."""
    if await git.run("rev-parse", "--is-bare-repository") == "true":
        raise InvalidRequest("the repository is bare, so nothing can be staged in it: use note", param="note")
    try:
        await git.run("rev-parse", "--quiet", "--verify", "MERGE_HEAD")
    except GitFailed:
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
    except GitFailed:
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
        except GitFailed:
            return _NOBODY
        named[f"GIT_{role}_NAME"], _, rest = identity.rpartition(" <")
        named[f"GIT_{role}_EMAIL"] = rest.partition("> ")[0]
    return named
