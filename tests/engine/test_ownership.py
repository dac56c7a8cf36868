"""A lease that two proxies want, on the in-memory backend."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from cli_session_proxy.backends.memory import MemoryBackend
from cli_session_proxy.domain.models import Agent
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ClaudeUnavailable, StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Granted, Held, Lease, Proxy
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore

from ..talking import ask
from ..until import until
from .test_core import core, settings, turns

__all__ = ["settings"]


class RefusesOnce(SqliteStore):
    """A disk that is full for a moment, just when a lease is given back."""

    refused = 0

    async def release(self, lease: Lease) -> None:
        if not self.refused:
            self.refused += 1
            raise StoreUnavailable("database or disk is full: free space on its disk")
        await super().release(lease)


class ResistsOnce(MemoryBackend):
    """A process that cannot be ended at the first try."""

    refused = 0

    async def retire(self, agent: Agent) -> None:
        if not self.refused:
            self.refused += 1
            raise ClaudeUnavailable("a process could not be ended")
        await super().retire(agent)


@pytest.mark.parametrize("fails", ["the store", "the backend"])
async def test_a_hand_over_that_failed_is_tried_again(settings: Settings, fails: str) -> None:
    store = RefusesOnce(settings.var / FILE)
    backend = ResistsOnce()
    store.refused, backend.refused = int(fails != "the store"), int(fails != "the backend")
    first = Engine(settings, store, backend)
    await first.start()
    try:
        async with core(settings) as (second, _):
            await ask(first, "one")
            await ask(first, "hello", agent="another")  # so that its heartbeat goes on
            async with asyncio.timeout(3 * settings.lease):
                await ask(second, "two")
            assert [turn.status for turn in await turns(second)] == ["completed", "completed"]
    finally:
        await first.stop()
    assert (store.refused, backend.refused) == (1, 1)


class SlowToAsk(SqliteStore):
    """A proxy on a busy machine: a while passes between a turn's acceptance and the first request for the lease."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.var / FILE)
        self.goes_on = asyncio.Event()

    async def acquire(
        self, agent_key: int, proxy: Proxy, *, dead: Collection[str] = (), expired: bool = True
    ) -> Granted | Held:
        await self.goes_on.wait()
        return await super().acquire(agent_key, proxy, dead=dead, expired=expired)


class Counting(SqliteStore):
    asked = 0

    async def responds(self, proxy_id: str) -> bool:
        answer = await super().responds(proxy_id)
        self.asked += 1
        return answer


async def test_a_turn_keeps_its_place_while_its_proxy_has_not_asked_for_the_lease_yet(settings: Settings) -> None:
    slow, store = SlowToAsk(settings), Counting(settings.var / FILE)
    first, second = Engine(settings, slow, MemoryBackend()), Engine(settings, store, MemoryBackend())
    await first.start()
    await second.start()
    try:
        one = asyncio.create_task(ask(first, "one"))

        async def accepted() -> bool:
            return await store.agent("local", "a") is not None and len(await turns(second)) == 1

        await until(accepted)
        two = asyncio.create_task(ask(second, "two"))
        await until(lambda: store.asked > 0)
        slow.goes_on.set()
        await asyncio.gather(one, two)
        before, after = await turns(second)
        assert (before.parent_id, after.parent_id) == (None, before.id)
    finally:
        slow.goes_on.set()
        await first.stop()
        await second.stop()
