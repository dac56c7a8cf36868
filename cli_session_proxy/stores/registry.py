"""Which proxy has an agent warm: its process, its sandbox, its session. A hint; the truth stays in the store.

One that is wrong costs time and nothing else: whoever runs a turn has the agent's lease (see `base.Leases`).
"""

from __future__ import annotations

from typing import Literal, Protocol

from ..domain.models import Agent
from .base import Proxy, Store, Whereabouts

# `away`: it does not answer just now, and the store tells instead.
State = Literal["ok", "away"]


class Registry(Protocol):
    """- `find` and `note` take a bounded time, and neither fails because the registry does.
    - What it does not know, or not for sure, it asks the store.
    - An entry expires by itself, and is gone when the proxy that made it has stopped.
    """

    async def find(self, agent: Agent) -> Whereabouts:
        """The proxy that has it. Its `home` is the store's to tell. Raises `StoreUnavailable`."""

    async def note(self, agent: Agent, here: Proxy, session_id: str | None, epoch: int) -> None:
        """This proxy has it from now on, in this session, by a lease of this epoch."""

    async def forget(self, agent: Agent) -> None:
        """The agent was deleted."""

    async def close(self) -> None:
        """Remove the entries of this proxy, in a bounded time."""

    @property
    def state(self) -> State | None:
        """None where there is nothing beside the store."""


class StoreRegistry(Registry):
    """The rows by which leases are held tell it all."""

    state = None

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, agent: Agent) -> Whereabouts:
        return await self._store.whereabouts(agent.key)

    async def note(self, agent: Agent, here: Proxy, session_id: str | None, epoch: int) -> None: ...

    async def forget(self, agent: Agent) -> None: ...

    async def close(self) -> None: ...
