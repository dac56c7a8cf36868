"""Where each agent is warm: which proxy has its process, sandbox and session. Only a hint for routing.

A wrong hint only costs time: running a turn needs the agent's lease (see `base.Leases`).
"""

from __future__ import annotations

from typing import Literal, Protocol

from ..domain.models import Agent
from .base import Proxy, Store, Whereabouts

# `away`: it does not answer now, so the store is asked instead.
State = Literal["ok", "away"]


class Registry(Protocol):
    """The rules for every registry:

    - `find` and `note` take a bounded time, and neither fails because the registry does.
    - If the registry has no certain answer, it asks the store.
    - An entry expires by itself, and is gone when the proxy that made it has stopped.
    """

    async def find(self, agent: Agent) -> Whereabouts:
        """The proxy that has the agent; without `home`, which only the store knows. Raises `StoreUnavailable`."""

    # The methods below do nothing by default.

    async def note(self, agent: Agent, here: Proxy, session_id: str | None, epoch: int) -> None:  # noqa: ARG002
        """Register that the proxy `here` has the agent from now on, in this session, under a lease of this epoch."""
        return

    async def forget(self, agent: Agent) -> None:  # noqa: ARG002
        """The agent was deleted."""
        return

    async def close(self) -> None:
        """Remove the entries of this proxy, in a bounded time."""
        return

    @property
    def state(self) -> State | None:
        """None if the registry is the store itself."""
        return None


class StoreRegistry(Registry):
    """Answers from the leases in the store, so nothing has to be registered."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, agent: Agent) -> Whereabouts:
        return await self._store.whereabouts(agent.key)
