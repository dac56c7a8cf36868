"""`migrate`: the whole store moves into another database, beside running proxies or without them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from .. import logs
from ..engine.ownership import HEARTBEAT, Instances, PauseWatch
from ..errors import ConfigError, NotFound, StoreUnavailable
from ..sandbox import make_private
from ..settings import Settings
from ..stores.auto import is_new, move_of, place_of
from ..stores.base import Granted, LeaseHeld, Proxy, Store
from ..stores.sql.moving import Move, MovedRows, NotHeld
from ..stores.sqlite.store import FILE
from .stored import made
from .terminal import progress_bar

log = logs.get(__name__)

# Seconds between requests for a lease that another proxy holds.
AGAIN = 0.05
# How many leases are requested concurrently.
AT_ONCE = 16
# How many times leases of agents are taken that were created meanwhile.
TRIES = 100


def target_of(settings: Settings, to: str) -> Settings:
    """The same settings with the other store. Raises `ConfigError`."""
    if to.startswith(("postgresql://", "postgres://")):
        return settings.model_copy(update={"store": SecretStr(to)})
    if "://" in to:  # not repeated: there may be a password in it
        raise ConfigError("--to takes postgresql://user@host:5432/database, or a --var without a store")
    path = Path(to).expanduser().absolute()
    var = path.parent if path.name == FILE else path
    if not var.is_dir() and (var.suffix or var.exists()):
        raise ConfigError(
            f"--to {to}: a store in SQLite is <var>/{FILE}: name that file, or the folder that --var names"
        )
    return settings.model_copy(update={"store": None, "var": var})


async def migrate(settings: Settings, to: str) -> MovedRows:
    """Move the store of these settings. Raises `ConfigError`, `InvalidRequest`, `StoreUnavailable`."""
    target = target_of(settings, to)
    if is_new(settings):
        raise NotFound(f"there is no store in {place_of(settings)}: nothing to move")
    if target.store is None:
        await asyncio.to_thread(make_private, target.var)
    with progress_bar("moving") as move_bar:
        stopped = threading.Event()

        def step(done: int, total: int) -> None:
            if stopped.is_set():
                raise StoreUnavailable("the move was stopped: run it again to continue")
            move_bar(done, total)

        move = move_of(settings, target, step)
        try:
            if await asyncio.to_thread(move.was_marked):
                return await asyncio.to_thread(move.open_target)
            async with made(settings) as store:
                for part in (move.begin, move.copy, move.verify, move.catch_up):
                    await asyncio.to_thread(part)
                return await _finish(settings, store, move)
        finally:
            stopped.set()


async def give_up(settings: Settings, to: str) -> None:
    """Abandon a move that was begun. The store is unchanged."""
    async with made(settings):
        await asyncio.to_thread(move_of(settings, target_of(settings, to)).give_up)


async def _finish(settings: Settings, store: Store, move: Move) -> MovedRows:
    """Copy the last changes and mark the store as moved, while this program holds the lease of every agent, as a proxy
    of the store."""
    instances = Instances(settings.var, store if store.spans_hosts else None)
    proxy = Proxy(instances.id, socket.gethostname(), settings.lease)
    if not store.spans_hosts:
        instances.enter()
    try:
        async with _heartbeats(store, proxy):
            agent_keys: Sequence[int] = ()  # of the agents whose leases are missing
            for _ in range(TRIES):
                await _acquire(store, instances, proxy, agent_keys)
                await asyncio.to_thread(move.catch_up)
                try:
                    return await asyncio.to_thread(move.finish, proxy.id)
                except NotHeld as exc:
                    agent_keys = exc.agent_keys
        raise StoreUnavailable("new agents kept arriving, so the store was not moved: try again at a quieter time")
    finally:
        instances.leave(settled=True)


@asynccontextmanager
async def _heartbeats(store: Store, proxy: Proxy) -> AsyncIterator[None]:
    """Heartbeats of this proxy, so that nobody takes its leases."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT * proxy.lease)
            try:
                await store.renew(proxy)
            except StoreUnavailable as exc:  # the next one may be in time; else the leases are acquired again
                log.warning("lease_not_renewed", error=exc.message)

    await store.renew(proxy)
    beating = asyncio.create_task(beat())
    try:
        yield
    except BaseException:
        try:
            await store.resign(proxy.id)  # frees the leases, so that the store serves again at once
        except StoreUnavailable as exc:
            log.warning("leases_not_released", error=exc.message)  # others take them when they have expired
        raise
    finally:
        beating.cancel()
        await asyncio.wait([beating])


async def _acquire(store: Store, instances: Instances, proxy: Proxy, agent_keys: Sequence[int]) -> None:
    """Acquire the leases of these agents, after their running turns have ended. What dead proxies left is not settled
    here: the proxy that takes the agent over in the new store does it."""
    requests = asyncio.Semaphore(AT_ONCE)
    pauses = PauseWatch(proxy.lease)

    async def take(agent_key: int) -> None:
        while True:
            async with requests:
                pauses.was_awake()
                answer = await store.acquire(agent_key, proxy, awake=pauses.was_awake)
                if isinstance(answer, LeaseHeld) and instances.has_ended(answer.holder):
                    answer = await store.acquire(agent_key, proxy, dead=(answer.holder,), awake=pauses.was_awake)
            if isinstance(answer, Granted):
                return
            await asyncio.sleep(AGAIN)

    try:
        async with asyncio.TaskGroup() as group:
            for agent_key in agent_keys:
                group.create_task(take(agent_key))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
