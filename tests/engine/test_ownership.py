"""A lease that two proxies want, on the in-memory backend."""

from __future__ import annotations

import asyncio

import pytest

from cli_session_proxy.backends.memory import MemoryBackend
from cli_session_proxy.domain.models import Agent
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ClaudeUnavailable, StoreUnavailable
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Lease
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore

from ..talking import ask
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
