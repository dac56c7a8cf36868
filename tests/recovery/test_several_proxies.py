"""Several proxies on one `var/`: one writer an agent, in the order of acceptance, and retries find their turn."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import cast

import pytest

from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..talking import ask, heard, request, running
from ..until import until
from .others import other_proxy
from .test_kill import turns_of


async def reached(gate: HeldReply) -> None:
    async with asyncio.timeout(200):
        await gate.reached.wait()


async def is_undelivered(engine: Engine, turn_id: str) -> bool:
    turn = await engine.store.turn(turn_id)
    return turn is not None and turn.delivery == "undelivered"


@old_cli_in_full
@pytest.mark.full
async def test_two_proxies_take_turns_and_neither_trusts_its_old_process(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude)
    said: list[str] = []
    async with running(settings) as one, other_proxy(settings) as two:
        for n in range(2):
            said += [f"one {n}", f"two {n}"]
            await ask(one, f"one {n}")
            answer = await two.ask(f"two {n}")
            assert answer is not None
            assert answer["continuity"] == "resumed"
            assert heard(upstream) == said


async def test_two_proxies_at_once_serve_one_agent_in_order(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as one, running(settings) as two, other_proxy(settings) as three:
        for n in range(2):
            await three.tell(f"three {n}", wait=False)
        asking = [ask(engine, f"{name} {n}") for n in range(2) for name, engine in (("one", one), ("two", two))]
        await asyncio.gather(*asking)
        assert all("text" in (answer or {}) for answer in [await three.heard(), await three.heard()])
        await ask(one, "last")
        turns = await turns_of(one)
    said = [block["text"] for turn in turns for message in turn.input for block in message.content]
    assert len(said) == 7
    assert heard(upstream) == said
    assert [turn.parent_id for turn in turns] == [None, *(turn.id for turn in turns[:-1])]


async def test_a_turn_waits_for_the_one_that_another_proxy_accepted_before_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(settings) as one, running(settings) as two:
        answers = [await one.submit(request("first"))]
        await reached(gate)
        answers += [await two.submit(request("second")), await one.submit(request("third"))]
        gate.open()
        for answer in answers:
            await answer.turn()
            answer.acknowledge()
    assert heard(upstream) == ["first", "second", "third"]


async def test_a_proxy_that_starts_leaves_the_turns_of_a_living_one_alone(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(settings) as one:
        asking = asyncio.create_task(ask(one, "first"))
        await reached(gate)
        async with running(settings) as two:
            gate.open()
            turn = await asking
            assert turn.status == "completed"
            await ask(two, "second")
    assert heard(upstream) == ["first", "second"]


async def test_a_living_proxy_settles_the_turn_of_one_that_dies_beside_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("lost", gate)
    async with running(settings) as one, other_proxy(settings) as two:
        await ask(one, "first")
        await two.tell("lost")
        await reached(gate)
        waiting = asyncio.create_task(ask(one, "second"))
        await two.end(signal.SIGKILL)
        await waiting
        assert heard(upstream) == ["first", "second"]
        assert [turn.status for turn in await turns_of(one)] == ["completed", "cancelled", "completed"]


async def test_a_retry_that_comes_to_another_proxy_gets_the_running_turns_answer(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(settings) as one, running(settings) as two:
        first = asyncio.create_task(ask(one, "first", idempotency_key="k"))
        await reached(gate)
        again = await two.submit(request("first", idempotency_key="k"))
        gate.open()
        turn = await again.turn()
        again.acknowledge()
        assert turn.id == (await first).id
    assert len(upstream.requests) == 1


async def test_who_left_one_proxy_finds_its_turn_at_another(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, disconnect_grace=3600.0)
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(settings) as one, running(settings) as two:
        answer = await one.submit(request("first"))
        await reached(gate)
        answer.leave()
        await until(lambda: is_undelivered(two, answer.turn_id))
        again = await two.submit(request("first"))
        assert again.turn_id == answer.turn_id
        await until(lambda: one.store.followers(answer.turn_id))
        # The grace is over: the first proxy sees that somebody waits again. Its timer is run by hand.
        await cast("asyncio.Task[None]", one._live[answer.turn_id]._on_empty())
        gate.open()
        await again.turn()
        again.acknowledge()
        await ask(two, "second")
    assert heard(upstream) == ["first", "second"]
    assert len(upstream.requests) == 2
