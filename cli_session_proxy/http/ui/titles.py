"""The title of an agent, for people."""

from __future__ import annotations

from ...domain.models import Agent
from ...stores.base import Store
from .views import preview


async def title_of(store: Store, agent: Agent) -> str:
    """The agent's name, or its first question if it is unnamed."""
    if agent.named:
        return agent.agent_id
    first = (await store.page(agent.key, before_seq=None, limit=1, newest=1)).turns
    return preview(block for turn in first for one in turn.input for block in one.content) or agent.agent_id
