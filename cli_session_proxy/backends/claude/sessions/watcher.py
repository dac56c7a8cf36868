"""Notices what a person writes into our sessions (`claude --resume` in a sandbox).

Nothing depends on it: every session is verified before use. It lets the chain, the dump and their followers show
the exchange as soon as it is whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import cache
from pathlib import Path

from watchfiles import Change, awatch

from .... import logs
from ....domain.limits import is_session_id
from ..mounts import file_system
from ..transcript import SUFFIX, Projects, sessions_in
from .manager import Sessions

log = logs.get(__name__)

# The CLI writes in batches about 100 ms apart. Changes are looked at so often, and collected for so long, in ms.
STEP = 400
DEBOUNCE = 1600
# A Windows drive in WSL does not tell of changes: there all files are looked at, with such pauses, in ms. watchfiles by
# itself does so everywhere in WSL.
SILENT = ("9p", "drvfs")
POLL = 5000
# When watching is not possible (too many watches, no directory), it is tried again after so many seconds.
AGAIN = 60.0
# Folders that are watched, those of the agents that were active last: each costs 70 µs when another one joins them.
MOST = 128
# Sessions that are told of one look. A person writes into one.
AT_ONCE = 1000


class Watcher:
    """Watches the CLI's folders of our agents, each by itself: what lies in them is the agents', links to other places
    too, and nothing is watched there."""

    def __init__(self, sessions: Sessions, projects: Projects) -> None:
        self._sessions = sessions
        self._projects = projects

    async def changes(self) -> AsyncGenerator[str, None]:
        """The ids of sessions whose transcripts somebody else wrote to. Never ends by itself."""
        root = self._projects.root
        before: list[Path] | None = None
        while True:
            try:
                folders = await asyncio.to_thread(self._folders)
                # Nobody watched until now what was written in folders that have joined them.
                for folder in set(folders).difference(folders if before is None else before):
                    for path in (await asyncio.to_thread(sessions_in, folder))[:AT_ONCE]:
                        if not self._sessions.captures.is_as_known(path.stem):
                            yield path.stem
                before = folders
                silent = await asyncio.to_thread(file_system, root) in SILENT
                # By itself watchfiles polls all of WSL. Its variable stays the user's, for a file system unknown here.
                polls = None if "WATCHFILES_FORCE_POLLING" in os.environ else silent
                watching = awatch(
                    root, *folders, watch_filter=None, step=STEP, debounce=DEBOUNCE, recursive=False,
                    force_polling=polls, poll_delay_ms=POLL,
                )  # fmt: skip
                async with aclosing(watching):
                    async for changes in watching:
                        # Not here: an agent may make a hundred thousand files.
                        written, is_joined = await asyncio.to_thread(self._read, changes)
                        for session_id in written[:AT_ONCE]:
                            if not self._sessions.captures.is_as_known(session_id):  # nearly always a turn of ours
                                yield session_id
                        if is_joined:  # an agent's first transcript: watched, too
                            break
                continue
            except (OSError, RuntimeError) as exc:  # watchfiles raises the latter for what the system refuses
                log.warning("not_watching", folder=str(root), error=str(exc))
            await asyncio.sleep(AGAIN)

    def _folders(self) -> list[Path]:
        """Of agents, those that were written to last. A link is none."""
        self._projects.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        with os.scandir(self._projects.root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and self._projects.is_of_agents(Path(entry.path)):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found, reverse=True)[:MOST]]

    def _read(self, changes: Collection[tuple[Change, str]]) -> tuple[list[str], bool]:
        """The sessions of our agents that were written to, and whether a folder of another agent is there."""
        root = str(self._projects.root)
        written, is_joined = set(), False
        is_ours = cache(lambda folder: self._projects.is_of_agents(Path(folder)))
        for change, path in changes:
            folder, _, name = path.rpartition(os.sep)
            if folder == root:
                is_joined = is_joined or (change == Change.added and is_ours(path))
            elif change != Change.deleted and name.endswith(SUFFIX) and is_ours(folder):
                written.add(name.removesuffix(SUFFIX))
        return sorted(filter(is_session_id, written)), is_joined
