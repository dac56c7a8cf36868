"""Sessions that an application runs by itself with the Claude Agent SDK, as turns of an agent's chain.

Transcript lines are stored as they arrive. A complete exchange becomes a turn. Its parent is the last turn of its
session; or the agent's head, if the chain has continued that turn meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from .. import logs
from ..backends.base import Backend
from ..domain.limits import is_session_id
from ..domain.models import Agent, Record, Session
from ..sandbox import Sandboxes, directory_name
from ..stores.base import MirroredLines, MirrorKey, Store
from ..tasks import in_thread_at
from .executor import adopt
from .live import Observer
from .ownership import Ownership

log = logs.get(__name__)

# An application in this process belongs to the local user.
OWNER = "local"


class Mirroring:
    """One per engine."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        sandboxes: Sandboxes,
        ownership: Ownership,
        observers: Sequence[Observer],
    ) -> None:
        self._store = store
        self._backend = backend
        self._sandboxes = sandboxes
        self._ownership = ownership
        self._observers = observers

    async def agent(self, agent_id: str) -> Agent:
        directory = directory_name(OWNER, agent_id)
        return await self._store.ensure_agent(OWNER, agent_id, directory, named=True, now=time.time())

    async def directory(self, agent_id: str) -> Path:
        """The agent's sandbox. It is created if it does not exist."""
        agent = await self.agent(agent_id)
        return await in_thread_at(self._sandboxes.path(agent.dir), self._sandboxes.prepare, agent.dir)

    async def append(self, agent_id: str, key: MirrorKey, lines: Sequence[Record]) -> None:
        """Store lines of a transcript. If an answer ends among them, make turns of its session's lines."""
        agent = await self.agent(agent_id)
        await self._store.mirror(agent.key, key, lines)
        is_main = not key.subpath and is_session_id(key.session_id)
        if is_main and await asyncio.to_thread(self._backend.has_end_of_answer, lines):
            await self._make_turns(agent, key)

    async def load(self, agent_id: str, key: MirrorKey) -> list[str] | None:
        """The lines of a transcript: the chain's records, then lines that are not a turn yet. None if the session is
        unknown or another agent's."""
        agent = await self.agent(agent_id)
        mirrored = await self._store.mirrored(agent.key, key)
        session = await self._store.session(key.session_id) if not key.subpath else None
        if session is None or session.agent_key != agent.key:
            return None if mirrored is None else [line.line for line in mirrored]
        if mirrored is None and key.project != self._backend.project_of(agent):
            return None
        return [*await self._backend.lines_of(session, mirrored or ())]

    async def sessions(self, agent_id: str, project: str) -> dict[str, float]:
        """When each session of this project was last written to: mirrored ones and, if the project is the agent's
        sandbox, those of the chain."""
        agent = await self.agent(agent_id)
        written: dict[str, float] = {}
        if project == self._backend.project_of(agent):
            chain = await self._store.chain(agent.key)
            head = await self._store.turn(agent.head) if agent.head is not None else None
            for session in chain.sessions if chain is not None else ():
                ended_at = head.finished_at if head is not None and session.tip_turn_id == head.id else None
                written[session.id] = ended_at or session.created_at
        for key, at in await self._store.mirrors(agent.key, project):
            if not key.subpath:
                written[key.session_id] = max(at, written.get(key.session_id, 0.0))
        return written

    async def subpaths(self, agent_id: str, project: str, session_id: str) -> list[str]:
        """The session's further transcripts, of sub-agents."""
        agent = await self.agent(agent_id)
        known = await self._store.mirrors(agent.key, project)
        return [key.subpath for key, _ in known if key.session_id == session_id and key.subpath]

    async def _make_turns(self, agent: Agent, key: MirrorKey) -> None:
        """Make turns of the complete exchanges among the session's lines."""
        async with self._ownership.hold(agent) as lease:
            lines = await self._store.mirrored(agent.key, key)
            now = await self._store.agent_state(agent.key, None, at_head=True)
            if not lines or now is None:
                return
            session = await self._store.session(key.session_id)
            if session is None:
                session = Session(key.session_id, agent.key, None, "", "", time.time())
            if session.agent_key != agent.key:
                log.warning("session_not_taken_over", **agent.named_in_logs, session_id=session.id)
                return
            parent = now.parent
            if session.tip_turn_id is None:
                parent = None
            elif parent is None or parent.id != session.tip_turn_id:
                path = await self._store.ancestors(parent.id) if parent is not None else []
                if session.tip_turn_id not in path:  # another branch
                    parent = await self._store.turn(session.tip_turn_id)
            adoptable = await self._backend.turns_from_sdk(agent, parent, session, lines)
            if adoptable is not None:
                became_turns = MirroredLines(key, adoptable.lines)
                await adopt(self._store, lease, adoptable, self._observers, became_turns)
