"""Taking an agent over: only from a proxy that does not respond, and never beside a CLI that may still write."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.backends.claude import backend
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import Proxy
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..serving import START, serve
from ..talking import ask, heard, running
from ..until import until
from .others import other_proxy, paused, store_file
from .test_kill import turns_of
from .test_several_proxies import reached

LEASE = 1.5


async def test_a_machine_that_sleeps_while_another_proxy_waits_for_the_agent_fences_nobody_out(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Both proxies sleep, and the one that waits wakes up first: to it, every lease of the others has expired."""
    settings = make_settings(claude_bin=claude_2, lease=4 * LEASE)
    gate = HeldReply()
    upstream.when("slow", gate)
    store = store_for(settings)
    async with other_proxy(settings) as holder, other_proxy(settings) as waiting:
        await store.open()
        await holder.tell("slow", wait=False)
        await reached(gate)
        await waiting.tell("next", wait=False)

        async def both_there() -> bool:
            return len([turn async for turn in store.unfinished()]) == 2

        await until(both_there)
        first, second = [turn.instance or "" async for turn in store.unfinished()]

        async def fresh() -> bool:
            proxy = await store.proxy(first)
            return proxy is not None and proxy.lease > 0.75 * settings.lease

        await until(fresh)  # they are to sleep for a heartbeat and more: a shorter pause is none
        for one in (holder, waiting):
            await one.pause(settings)

        async def expired() -> bool:
            return not (await store.responds(first) or await store.responds(second))

        await until(expired)
        waiting.wake()
        await until(lambda: store.responds(second))  # it has asked for the agent in the transaction that says so
        holder.wake()
        gate.open()
        assert (await holder.heard() or {}).get("text") == "You said: slow (1)"
        assert (await waiting.heard() or {}).get("text") == "You said: next (2)"
        await store.close()
    assert heard(upstream) == ["slow", "next"]
    assert len(upstream.requests) == 2


async def test_a_session_whose_cli_cannot_be_ended_is_left_to_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(claude_bin=claude_2, lease=LEASE)
    gate = HeldReply()
    upstream.when("lost", gate)
    monkeypatch.setattr(backend, "end_stray", lambda _pid, _started: False)
    async with running(settings) as survivor, other_proxy(settings) as other:
        first = await other.ask("first")
        assert first is not None
        await other.tell("lost", wait=False)
        await reached(gate)
        await other.pause(settings)
        second = await ask(survivor, "second")
        gate.open()  # the CLI that nobody ended writes its answer into the session that it has
        other.wake()
        assert (await other.heard() or {}).get("error") in ("lease_lost", "interrupted")
        third = await ask(survivor, "third")
        old, _, *_ = await turns_of(survivor)
    assert second.continuity == "branched"
    assert old.session_id is not None
    assert old.session_id not in (second.session_id, third.session_id)
    assert heard(upstream) == ["first", "second", "third"]


@pytest.mark.parametrize("busy", rest_in_full(True, False), ids=["in mid-turn", "idle"])
async def test_a_client_of_another_proxy_is_answered_though_the_agents_holder_is_paused(
    busy: bool, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """Over HTTP, as two `serve` on one `var/`: without the lease's end it would wait for `turn_timeout`, 30 minutes."""
    settings = make_settings(claude_bin=claude_2, lease=LEASE)
    gate = HeldReply()
    upstream.when("lost", gate)
    body = {"model": "sonnet", "agent_id": "a"}
    async with AsyncExitStack() as stack:
        holder, process = await stack.enter_async_context(serve(settings, tmp_path))
        other, _ = await stack.enter_async_context(serve(settings, tmp_path))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=START))

        async def said(url: str, text: str) -> httpx.Response:
            messages = [{"role": "user", "content": text}]
            return await http.post(f"{url}/v1/chat/completions", json=body | {"messages": messages})

        assert (await said(holder, "first")).status_code == 200
        if busy:
            lost = asyncio.create_task(said(holder, "lost"))
            await reached(gate)
        await paused(process, store_file(settings))
        assert (await said(other, "second")).status_code == 200
        process.send_signal(signal.SIGCONT)
        if busy:
            gate.open()
            fenced = await lost
            assert (fenced.status_code, fenced.json()["error"]["code"]) in (
                (503, "lease_lost"), (503, "interrupted"),
            )  # fmt: skip
            assert int(fenced.headers["retry-after"]) > 0
        assert (await said(holder, "third")).status_code == 200
    assert heard(upstream) == ["first", "second", "third"]


async def test_a_warm_turn_asks_nothing_of_the_leases(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease costs no wait of its own on a warm turn: the write that commits it is what checks it."""
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one")
        asked: list[str] = []
        for name in ("acquire", "release", "renew"):
            real = getattr(engine.store, name)

            async def noted(*args: object, _name: str = name, _real: object = real, **more: object) -> object:
                asked.append(_name)
                return await _real(*args, **more)  # type: ignore[operator]

            monkeypatch.setattr(engine.store, name, noted)
        turn = await ask(engine, "two")
        assert turn.continuity == "warm"
        assert asked == []
        await engine.store.acquire(turn.agent_key, Proxy("other", "here", 1.0))
        assert asked == ["acquire"]  # it would have been seen
    assert heard(upstream) == ["one", "two"]
