"""Notices what a person writes into our sessions (`claude --resume` in a sandbox).

Nothing depends on it: every session is verified before use. It lets the chain, the dump and their followers show
the exchange as soon as it is whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from watchfiles import Change, awatch

from .... import logs
from ..mounts import file_system
from ..transcript import Projects
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


class Watcher:
    """Watches the CLI's folders of our agents."""

    def __init__(self, sessions: Sessions, projects: Projects) -> None:
        self._sessions = sessions
        self._projects = projects

    async def changes(self) -> AsyncGenerator[str, None]:
        """The ids of sessions whose transcripts somebody else wrote to. Never ends by itself."""
        while True:
            try:
                await asyncio.to_thread(self._projects.root.mkdir, mode=0o700, parents=True, exist_ok=True)
                silent = await asyncio.to_thread(file_system, self._projects.root) in SILENT
                # By itself watchfiles polls all of WSL. Its variable stays the user's, for a file system unknown here.
                polls = None if "WATCHFILES_FORCE_POLLING" in os.environ else silent
                async for changes in awatch(
                    self._projects.root, watch_filter=self._concerns, step=STEP, debounce=DEBOUNCE,
                    force_polling=polls, poll_delay_ms=POLL,
                ):  # fmt: skip
                    for session_id in sorted({Path(path).stem for _, path in changes}):
                        if not self._sessions.captures.is_as_known(session_id):  # nearly always a turn of ours wrote
                            yield session_id
            except (OSError, RuntimeError) as exc:  # watchfiles raises the latter for what the system refuses
                log.warning("not_watching", folder=str(self._projects.root), error=str(exc))
            await asyncio.sleep(AGAIN)

    def _concerns(self, change: Change, path: str) -> bool:
        file = Path(path)
        return change != Change.deleted and file.suffix == ".jsonl" and self._projects.is_of_agents(file.parent)
