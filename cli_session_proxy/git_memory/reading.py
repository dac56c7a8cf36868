"""Reads the attempts at one fix, from commits reachable from HEAD and their notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from .. import logs
from ..domain import limits
from ..errors import ConfigError
from . import records
from .git import Failed, Repository
from .records import FixAttempt

log = logs.get(__name__)

# The ref of our notes. `writing` configures git to keep them in a rebase.
NOTES = "refs/notes/attempts"
# The most commits with a fix id, and seconds: older ones are not read. 100,000 commits take about a second.
COMMITS = 2_000
SECONDS = 10.0
# Bytes of one message or note that are read; the rest is dropped.
LONGEST = 512 * 1024
# Characters of all of them that are kept; and of one that is parsed on the event loop, in a millisecond.
ALL = 16 * 1024 * 1024
SHORT = 32 * 1024

# With -z a NUL ends each field: id, time, message and notes. Git replaces NULs in a note by line ends.
_FORMAT = "--format=tformat:%H%x00%ct%x00%B%x00%N"


@dataclass(frozen=True, slots=True)
class Earlier:
    """`attempts`: newest first. `partly`: the history was not read to its end. `last`: the highest known number.
    `others`: other fixes in the same commits."""

    attempts: tuple[FixAttempt, ...] = ()
    partly: bool = False
    last: int = 0
    others: tuple[str, ...] = ()


async def earlier(repo: Path, fix_id: str | None, most: int) -> Earlier:
    """At most so many attempts at this fix (None: at any fix). Raises `ConfigError` without a repository."""
    git = await Repository.opened(repo)
    try:
        if await git.head() is None:
            return Earlier()
    except Failed as exc:
        raise ConfigError(f"the git repository {repo} cannot be read: {exc.said}") from exc
    said = "Fix-Id: " if fix_id is None else f"Fix-Id: {fix_id}"
    found: list[FixAttempt] = []
    others: dict[str, None] = {}
    partly = False
    words = ("log", "-z", _FORMAT, "--encoding=UTF-8", f"--notes={NOTES}", "--fixed-strings", f"--grep={said}", "HEAD")
    try:
        async with asyncio.timeout(SECONDS), aclosing(git.pieces(*words, "--")) as pieces:
            count = size = 0
            async for commit, at, texts in _commits(pieces):
                count, size = count + 1, size + sum(map(len, texts))
                if count > COMMITS or size > ALL:
                    partly = True
                    break
                for text in texts:
                    if len(text) > SHORT:
                        found_here = await asyncio.to_thread(records.read, text, commit=commit, at=at)
                    else:
                        found_here = records.read(text, commit=commit, at=at)
                    for attempt in found_here:
                        if fix_id is None or attempt.fix_id == fix_id:
                            found.append(attempt)
                        else:
                            others[attempt.fix_id] = None
    except (TimeoutError, Failed) as exc:  # keep what was read before: it is nearer to HEAD
        why = exc.said if isinstance(exc, Failed) else f"it took longer than {SECONDS:g} s"
        log.warning("git_history_read_in_part", repo=str(repo), why=why)
        partly = True
    # Picked, rebased or squashed commits repeat an attempt: the one nearest to HEAD counts.
    once = {repr(replace(attempt, commit="", at=0.0)): attempt for attempt in reversed(found)}
    newest = sorted(once.values(), key=lambda one: (one.number or 0, one.at), reverse=True)
    last = max((attempt.number or 0 for attempt in newest), default=0)
    return Earlier(tuple(newest[:most]), partly, last, tuple(others))


async def _commits(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, float, tuple[str, str]]]:
    """(id, time, (message, notes)) of each."""
    fields: list[bytes] = []
    async for one in limits.split(pieces, b"\0", LONGEST):
        fields.append(one)
        if len(fields) == 4:
            commit, at, message, notes = fields
            when = float(at) if at.isdigit() and len(at) < 12 else 0.0
            yield commit.decode(), when, (message.decode("utf-8", "replace"), notes.decode("utf-8", "replace"))
            fields = []
