"""Opens the store for commands, which read it directly, beside a running server or without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..domain.models import Agent
from ..errors import ConfigError, NotFound
from ..settings import Settings
from ..stores.auto import is_new, place_of, store_for
from ..stores.base import Store
from .migrating import migrating


@asynccontextmanager
async def opened(settings: Settings, *, may_be_new: bool = False) -> AsyncIterator[Store | None]:
    """The store; None if there is none, because reading must not create it.

    Raises `ConfigError` if a `var` that was named has none, unless it `may_be_new`.
    """
    if is_new(settings):
        if "var" in settings.model_fields_set and not may_be_new:
            raise ConfigError(f"no store at {settings.var}: name the directory that `serve` was started with")
        yield None
        return
    async with made(settings) as store:
        yield store


@asynccontextmanager
async def made(settings: Settings) -> AsyncIterator[Store]:
    """The store, created if there is none."""
    store = store_for(settings, migrating)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def agent_in(settings: Settings, store: Store | None, owner: str, agent_id: str) -> tuple[Store, Agent]:
    agent = None if store is None else await store.agent(owner, agent_id)
    if store is None or agent is None:
        raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {place_of(settings)}: see `chains`")
    return store, agent
