"""Watches for turns that a person adds to our sessions (`claude --resume` in a sandbox).

Nothing depends on it, because every session is verified before use. With it, the chain, the dump and their followers
show the exchange as soon as it is complete.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from watchfiles import Change, awatch

from .... import logs
from ....domain.limits import is_session_id
from ....tasks import in_thread_at, works_at
from ..mounts import file_system
from ..transcript import Projects
from ..transcript.files import SUFFIX, sessions_in
from .manager import Sessions

log = logs.get(__name__)

T = TypeVar("T")

# Milliseconds between two looks, and for collecting changes. The CLI writes in batches about 100 ms apart.
STEP = 400
DEBOUNCE = 1600
# Milliseconds between polls on a Windows drive in WSL, which has no notifications. watchfiles itself polls everywhere
# in WSL.
SILENT = ("9p", "drvfs")
POLL = 5000
# Seconds until watching is tried again after a failure (too many watches, no directory).
AGAIN = 60.0
# In watchfiles' error (1.1) if the user has no watch left: it names a folder that has no fault.
OUT_OF_WATCHES = "MaxFilesWatch"
# The most watched folders, those of the most recently active agents: each costs 70 µs when another one is added.
MOST = 128
# The most sessions that are reported per look. A person writes into one.
AT_ONCE = 1000
# Seconds that one agent's folder is waited for. Usually it takes milliseconds.
LONGEST_LOOK = 5.0


class Watcher:
    """Watches the CLI's folders of our agents, not recursively: agents may have put anything there, e.g. links."""

    def __init__(self, sessions: Sessions, projects: Projects) -> None:
        self._sessions = sessions
        self._projects = projects
        self._held: set[Path] = set()  # folders whose agents held a look up
        self._left_out: set[Path] = set()  # folders that watchfiles cannot read, or with a name that it cannot

    async def changes(self) -> AsyncGenerator[str, None]:
        """The ids of sessions whose transcripts others wrote to. Never ends by itself."""
        root = self._projects.root
        before: list[Path] | None = None
        folders: list[Path] = []
        while True:
            try:
                folders = await asyncio.to_thread(self._folders)
                # Newly added folders may have changed before.
                for folder in set(folders).difference(folders if before is None else before):
                    for path in (await self._look(folder, sessions_in, folder) or ())[:AT_ONCE]:
                        if await self._is_changed(path):
                            yield path.stem
                before = folders
                silent = await asyncio.to_thread(file_system, root) in SILENT
                # By default watchfiles polls all of WSL. For an unknown file system the user's variable applies.
                polls = None if "WATCHFILES_FORCE_POLLING" in os.environ else silent
                watching = awatch(
                    root, *folders, watch_filter=None, step=STEP, debounce=DEBOUNCE, recursive=False,
                    force_polling=polls, poll_delay_ms=POLL,
                )  # fmt: skip
                async with aclosing(watching):
                    async for changes in watching:
                        # In a thread: an agent may make a hundred thousand files.
                        written, is_joined = await asyncio.to_thread(self._read, changes)
                        for path in written[:AT_ONCE]:
                            if await self._is_changed(path):  # usually it was our own turn
                                yield path.stem
                        if is_joined:  # an agent's first transcript: watch its folder, too
                            break
                continue
            except (OSError, RuntimeError, ExceptionGroup) as exc:  # watchfiles raises RuntimeError for system errors
                why = str(exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc)
                log.warning("not_watching", folder=str(root), error=why)
                # It fails at a name that is not UTF-8, and at a folder that may not be read: go on without that agent.
                named = {at for at in folders if f'"{at}{os.sep}' in why or f'"{at}"' in why}
                if named and OUT_OF_WATCHES not in why:
                    # Not a folder that was removed meanwhile: there may be another agent of its name later.
                    self._left_out.update(await asyncio.to_thread(list, filter(os.path.lexists, named)))
                    continue
            await asyncio.sleep(AGAIN)

    async def _is_changed(self, path: Path) -> bool:
        """Whether others wrote to this transcript. False if its agent does not let us look."""
        unchanged = await self._look(path.parent, self._sessions.captures.is_unchanged_since_turn, path.stem)
        return unchanged is False

    async def _look(self, folder: Path, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function that looks into this folder. None if a program of the agent holds it up: the other folders do
        not wait for it."""
        if folder in self._held and works_at(folder):
            return None
        self._held.discard(folder)
        try:
            async with asyncio.timeout(LONGEST_LOOK):
                return await in_thread_at(folder, function, *arguments)
        except TimeoutError:
            self._held.add(folder)
            log.warning("not_watched", folder=str(folder), seconds=LONGEST_LOOK)
            return None

    def _folders(self) -> list[Path]:
        """The agents' folders that were written to last, without links."""
        self._projects.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        with os.scandir(self._projects.root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and self._projects.is_of_agents(Path(entry.path)):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        watched = [path for _, path in sorted(found, reverse=True) if path not in self._left_out]
        return watched[:MOST]

    def _read(self, changes: Collection[tuple[Change, str]]) -> tuple[list[Path], bool]:
        """Our agents' transcripts that were written to, and whether there is a folder of a new agent."""
        root = str(self._projects.root)
        written, is_joined = set[Path](), False
        is_ours = cache(lambda folder: self._projects.is_of_agents(Path(folder)))
        for change, path in changes:
            folder, _, name = path.rpartition(os.sep)
            if folder == root:
                is_joined = is_joined or (change == Change.added and is_ours(path))
            elif change != Change.deleted and name.endswith(SUFFIX) and is_ours(folder):
                written.add(Path(path))
        return sorted(path for path in written if is_session_id(path.stem)), is_joined
