"""Notices what a person writes into our sessions (`claude --resume` in a sandbox), and adopts it while nobody waits.

Nothing depends on it: every session is verified before use, and would be adopted then. It makes the chain, the dump
and whoever follows them show the exchange as soon as it is whole. A fault here never touches a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog
from watchfiles import Change, awatch

from ....domain.models import Agent
from ....errors import ProxyError
from ....sandbox import Sandboxes
from ....settings import Settings
from ....stores.base import Lease, Store
from .. import environment, transcript
from .adoption import Observer, adopt
from .manager import Sessions

log = structlog.get_logger(__name__)

# The CLI writes in batches about 100 ms apart. Changes are looked at so often, and collected for so long, in ms.
STEP = 400
DEBOUNCE = 1600
# When watching is not possible (too many watches, no directory), it is tried again after so many seconds.
AGAIN = 60.0


class Watcher:
    """Watches the CLI's folders of our agents. `busy` tells of an agent that has a turn in this proxy."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        sessions: Sessions,
        sandboxes: Sandboxes,
        hold_if_free: Callable[[Agent], AbstractAsyncContextManager[Lease | None]],
        busy: Callable[[int], bool],
        observers: Sequence[Observer],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._hold_if_free = hold_if_free
        self._busy = busy
        self._observers = observers
        self._projects = environment.config_dir(settings) / "projects"
        self._ours = transcript.project_dir(environment.config_dir(settings), sandboxes.prefix).name + "-"

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._projects.mkdir, mode=0o700, parents=True, exist_ok=True)
                async for changes in awatch(self._projects, watch_filter=self._concerns, step=STEP, debounce=DEBOUNCE):
                    for session_id in sorted({Path(path).stem for _, path in changes}):
                        await self._look(session_id)
            except (OSError, RuntimeError) as exc:  # watchfiles raises the latter for what the system refuses
                log.warning("not_watching", folder=str(self._projects), error=str(exc))
            await asyncio.sleep(AGAIN)

    def _concerns(self, change: Change, path: str) -> bool:
        file = Path(path)
        return change != Change.deleted and file.suffix == ".jsonl" and file.parent.name.startswith(self._ours)

    async def _look(self, session_id: str) -> None:
        if self._sessions.captures.is_as_known(session_id):
            return  # nearly always: a turn of ours wrote
        try:
            await self._adopt(session_id)
        except ProxyError as exc:
            log.warning("not_adopted", session_id=session_id, error=exc.message)

    async def _adopt(self, session_id: str) -> None:
        session = await self._store.session(session_id)
        agent = await self._store.agent_by_key(session.agent_key) if session else None
        if agent is None or self._busy(agent.key):
            return
        async with self._hold_if_free(agent) as lease:
            agent = await self._store.agent_by_key(agent.key)
            if lease is None or agent is None or agent.head is None or await self._store.waiting(agent.key):
                return
            head = await self._store.turn(agent.head)
            foreign = await self._sessions.foreign(agent, head) if head else None
            if head is not None and foreign is not None and transcript.has_ended(foreign.entries):
                adopted = await adopt(self._store, lease, agent, head, foreign, self._observers)
                log.info("adopted", agent=agent.agent_id, session_id=foreign.session.id, turn_id=adopted.id)
