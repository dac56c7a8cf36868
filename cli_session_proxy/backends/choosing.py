"""Both ways to a model as one backend: `[models.*]` go to LiteLLM, all else to the CLI, which keeps the sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from ..domain.lineage import Past
from ..domain.models import Agent, Record, Session, Turn
from ..stores.base import Facts
from .base import (
    Adoptable,
    Backend,
    Comparison,
    Counts,
    Execution,
    Job,
    KeptTurn,
    Process,
    Program,
    RequestSeen,
    TakenOver,
)
from .litellm.backend import NAME, LiteLLMBackend


class Backends(Backend):
    """See `base.Backend`. `own` is whose sessions and processes there are; `models` keeps nothing outside the chain."""

    def __init__(self, own: Backend, models: LiteLLMBackend) -> None:
        self.own = own
        self.models = models
        self.name = own.name

    async def can_take(self, job: Job) -> bool:
        return await (self.models if job.model in self.models.targets else self.own).can_take(job)

    async def prepare(self, job: Job) -> Execution | Adoptable:
        if job.model not in self.models.targets:
            return await self.own.prepare(job)
        if job.adopt and job.parent is not None:
            found = await self.own.adoptable(job.agent, job.parent)
            if found is not None and found.ended:
                return found
        return await self.models.prepare(job)

    async def adoptable(self, agent: Agent, parent: Turn) -> Adoptable | None:
        return await self.own.adoptable(agent, parent)

    async def settled(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        return await self.own.settled(agent, turn)

    async def compare(self, agent: Agent, turn: Turn) -> Comparison:
        """A turn of another model is in no session yet: the next one that the CLI answers writes it there."""
        return Comparison("none") if turn.backend == NAME else await self.own.compare(agent, turn)

    async def request_of(self, turn: Turn) -> RequestSeen | None:
        return None if turn.backend == NAME else await self.own.request_of(turn)

    async def end_strays(self, strays: Sequence[tuple[int, str]]) -> bool:
        return await self.own.end_strays(strays)

    def imported(
        self, agent: Agent, above: Turn | None, known: Sequence[Record], history: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        return self.own.imported(agent, above, known, history, model)

    async def facts(self) -> Facts:
        return await self.own.facts()

    def project_of(self, agent: Agent) -> str:
        return self.own.project_of(agent)

    async def lines_of(self, session: Session) -> Sequence[str]:
        return await self.own.lines_of(session)

    async def taken_over(
        self, agent: Agent, parent: Turn | None, session: Session, lines: Sequence[Record]
    ) -> TakenOver | None:
        return await self.own.taken_over(agent, parent, session, lines)

    def changes(self) -> AsyncGenerator[str, None]:
        return self.own.changes()

    async def retire(self, agent: Agent) -> None:
        await self.own.retire(agent)

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        await self.own.forget(agent, session_ids)

    async def close(self) -> None:
        await asyncio.gather(self.own.close(), self.models.close())

    def kill(self) -> None:
        self.own.kill()

    def counts(self) -> Counts:
        return self.own.counts()

    def processes(self) -> Sequence[Process]:
        return self.own.processes()

    def program(self) -> Program | None:
        return self.own.program()
