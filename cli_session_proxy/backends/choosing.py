"""Two backends as one: LiteLLM for `[models.*]`, the settings' own backend (the CLI) for all else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from ..domain.lineage import Past
from ..domain.models import Agent, Record, Turn
from .base import Adoptable, Backend, Comparison, Execution, Job, RequestSeen
from .litellm.backend import NAME, LiteLLMBackend


class Backends(Backend):
    """See `base.Backend`. `own` has the sessions and processes; `models` keeps nothing outside the chain.

    Methods that are not overridden here are those of `own`.
    """

    def __init__(self, own: Backend, models: LiteLLMBackend) -> None:
        self.own = own
        self.models = models
        self.name = own.name
        for name in vars(Backend).keys() - vars(Backends).keys():
            if not name.startswith("_"):
                setattr(self, name, getattr(own, name))

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

    async def compare(self, agent: Agent, turn: Turn) -> Comparison:
        """A turn of another model has no session yet: the next turn on the CLI writes it to one."""
        return Comparison("none") if turn.backend == NAME else await self.own.compare(agent, turn)

    async def request_of(self, turn: Turn) -> RequestSeen | None:
        return None if turn.backend == NAME else await self.own.request_of(turn)

    def history_records(
        self, agent: Agent, parent: Turn | None, path: Sequence[Record], exchanges: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        return self.own.history_records(agent, parent, path, exchanges, model)

    async def close(self) -> None:
        await asyncio.gather(self.own.close(), self.models.close())
