"""Opens the store for commands, or starts an engine on it: beside running servers or without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .. import logs
from ..domain.models import Agent
from ..errors import ConfigError, NotFound
from ..settings import Settings
from ..stores.auto import is_new, place_of, store_for
from ..stores.base import Store
from .terminal import migration_progress

if TYPE_CHECKING:
    from ..engine.engine import Engine


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
    async with opened_or_new(settings) as store:
        yield store


@asynccontextmanager
async def opened_or_new(settings: Settings) -> AsyncIterator[Store]:
    """The store, created if there is none."""
    store = store_for(settings, migration_progress)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def engine_in(settings: Settings, *, log_to_file: bool = False) -> AsyncIterator[Engine]:
    """A running engine of this process, as another proxy of the store. `log_to_file`: it writes the proxy's log file.

    Raises `ProxyError` if it cannot start.
    """
    from ..engine.engine import Engine  # noqa: PLC0415 - commands that only read must start fast

    engine = Engine(settings, store_for(settings, migration_progress))
    try:
        await engine.start()
        if log_to_file:
            logs.configure(settings)
        yield engine
    finally:
        await engine.stop()
        if log_to_file:
            logs.shut_down()


async def agent_in(settings: Settings, store: Store | None, owner: str, agent_id: str) -> tuple[Store, Agent]:
    """The store and the owner's agent of this name. Raises `NotFound`."""
    agent = None if store is None else await store.agent(owner, agent_id)
    if store is None or agent is None:
        raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {place_of(settings)}: see `chains`")
    return store, agent
