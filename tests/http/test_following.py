"""A client waits at one proxy for a turn that another one runs, and the request cannot be forwarded there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.http.relay import Relay

from ..until import until
from .cluster import Host, cluster
from .test_leaving import Connection
from .test_passing_on import said

SAME = {"Idempotency-Key": "k"}


@asynccontextmanager
async def apart(url: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Sequence[Host]]:
    """Two proxies that cannot forward to each other; the first one runs a turn."""

    async def unreachable(*_: object) -> bool:
        return False

    async with cluster(url, tmp_path, disconnect_grace=30.0) as proxies:
        patch.setattr(Relay, "_can_accept", unreachable)
        one = proxies[0]
        await one.chat("zero")
        one.model.reached.clear()
        one.model.open.clear()
        yield proxies


async def texts(host: Host) -> list[str]:
    """Of the path."""
    agent = await host.store.agent("local", "a")
    assert agent is not None
    assert agent.head is not None
    return [str(turn.input[0].content[0]["text"]) for turn in await host.store.path(agent.head)]


async def test_who_follows_an_answer_gets_it_if_the_end_of_that_is_not_stored_at_once(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with apart(postgres_url, tmp_path, monkeypatch) as (one, two):
        first = asyncio.create_task(one.chat("one", headers=SAME))
        await one.model.reached.wait()
        follows = asyncio.create_task(two.chat("one", headers=SAME))
        first.cancel()
        await asyncio.wait([first])
        turn = (await one.turns())[-1].id
        await until(lambda: one.store.followers(turn))
        unfollow, tried = two.store.unfollow, asyncio.Event()

        async def fails(*given: str) -> None:
            if not tried.is_set():
                tried.set()
                raise StoreUnavailable("the connection was cut")
            await unfollow(*given)

        monkeypatch.setattr(two.store, "unfollow", fails)
        await until(lambda: all(live.abandoned for live in one.engine._live.values()))
        one.model.open.set()
        assert said(await follows) == "You said: one (2)"

        async def nobody_follows() -> bool:
            return not await one.store.followers(turn)

        await until(nobody_follows)


async def test_who_leaves_before_it_is_stored_that_it_waits_counts_as_one_that_left(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note that it waited came last and stayed: an answer that nobody has was on the path."""
    async with apart(postgres_url, tmp_path, monkeypatch) as (one, two):
        first, second = Connection(one.settings.port, key="k"), Connection(two.settings.port, key="k")
        follow, unfollow, begins, goes_on = two.store.follow, two.store.unfollow, asyncio.Event(), asyncio.Event()

        async def slow(*given: str) -> None:
            begins.set()
            await goes_on.wait()
            await follow(*given)

        async def quick(*given: str) -> None:
            await unfollow(*given)
            goes_on.set()

        monkeypatch.setattr(two.store, "follow", slow)
        monkeypatch.setattr(two.store, "unfollow", quick)
        first.say()
        await one.model.reached.wait()
        second.say()
        await begins.wait()
        writes = two.engine._deliveries._writes
        noting = dict(writes)  # that it waits
        for client in (first, second):
            client.socket.close()
        await until(lambda: all(live.abandoned for host in (one, two) for live in host.engine._live.values()))
        await until(lambda: goes_on.is_set() or (noting and writes != noting))  # that it left comes first, or waits
        goes_on.set()
        await until(lambda: not writes)
        one.model.open.set()
        await until(lambda: not any(host.engine._live for host in (one, two)))
        await one.chat("two")
        assert await texts(one) == ["zero", "two"]
