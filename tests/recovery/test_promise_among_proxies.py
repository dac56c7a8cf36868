"""The promise among several proxies: they die, pause and share an agent, and clients come and go between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.domain.models import JSON
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, claude, heard, request, running
from ..tools.test_loops import TOOLS, called, calls, result, results, tool_blocks
from ..until import until
from .others import other_proxy
from .test_kill import queued, turns_of
from .test_several_proxies import reached

TOLD = [tool.as_json() for tool in TOOLS]


def clis(settings: Settings) -> list[int]:
    """The CLIs that proxies on this `var/` have noted, by pid."""
    return [int(note.name) for note in (settings.var / "run").glob("*/[0-9]*")]


async def gone(pids: list[int]) -> None:
    def alive(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()

    async def none_left() -> bool:
        return not any(map(alive, pids))

    await until(none_left)


def phantoms(upstream: Upstream) -> list[str]:
    """Words that no client said and no model answered, in any request."""
    found = []
    for seen in upstream.requests:
        for _, text in seen.texts():
            if "interrupted" in text or "No response requested" in text or "did not answer" in text:
                found.append(text)
    return found


async def calls_at(other: Any) -> list[JSON]:
    """The calls that the model makes at this proxy."""
    said = await other.ask("where", tools=TOLD)
    return [block for block in said["output"] if block["type"] == "tool_use"]


def called_once(upstream: Upstream) -> None:
    """The next "where" makes the model call a tool of the client."""
    upstream.when("where", ToolUse([called("get_weather")], text="Let me look."))


async def test_results_that_another_proxy_took_survive_the_death_of_the_proxy_that_made_the_calls(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    called_once(upstream)
    async with running(settings) as survivor, other_proxy(settings) as other:
        (call,) = await calls_at(other)
        await ask(survivor, results(result(call, "sunny")), tools=TOOLS)
        left = clis(settings)
        await other.end(signal.SIGKILL)
        await gone([pid for pid in left if claude(survivor).pool.counts().busy == 0 and pid not in own(survivor)])
        await ask(survivor, "list", tools=TOOLS)
    assert tool_blocks(upstream) == [("call", call["id"]), ("result", call["id"])]
    assert heard(upstream) == ["where", "tool_result: sunny", "list"]
    assert phantoms(upstream) == []


def own(engine: Engine) -> list[int]:
    return [process.pid for process in claude(engine).pool.table.all()]


async def test_results_are_taken_by_a_proxy_beside_the_one_that_died_while_its_calls_waited(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    called_once(upstream)
    async with running(settings) as survivor, other_proxy(settings) as other:
        (call,) = await calls_at(other)
        left = clis(settings)
        await other.end(signal.SIGKILL)
        await gone(left)
        turn = await ask(survivor, results(result(call, "sunny")), tools=TOOLS)
        await ask(survivor, "list", tools=TOOLS)
    assert turn.status == "completed"
    assert heard(upstream) == ["where", "tool_result: sunny", "list"]
    assert phantoms(upstream) == []


@pytest.mark.parametrize("where", ["at the proxy that runs the turn", "at the proxy that was left for another"])
@pytest.mark.sample(1)
async def test_an_answer_that_was_fetched_at_another_proxy_stays_on_the_path(
    where: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, disconnect_grace=60.0)
    gate = HeldReply()
    upstream.when("first", gate)
    async with running(settings) as one, running(settings) as two:
        answer = await one.submit(request("first", idempotency_key="k"))
        await reached(gate)
        answer.leave()
        again = await two.submit(request("first", idempotency_key="k"))
        assert again.turn_id == answer.turn_id
        next_at = one if where.startswith("at the proxy that runs") else two
        following = asyncio.create_task(ask(next_at, "second"))
        await queued(settings, 1)
        gate.open()
        turn = await again.turn()
        again.acknowledge()
        await following
        await ask(two, "third")
        turns = await turns_of(two)
    assert heard(upstream) == ["first", "second", "third"]
    assert [turn.parent_id for turn in turns] == [None, turn.id, turns[1].id]


@pytest.mark.parametrize("step", rest_in_full("before commit", "before acknowledge", "after result", quick=2))
@pytest.mark.sample(1)
async def test_the_same_words_at_a_surviving_proxy_are_the_turn_that_the_crash_left_open(
    step: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as survivor, other_proxy(settings, die_at=step) as other:
        assert await other.ask("one", die=True) is None
        assert await other.died() == -signal.SIGKILL
        await ask(survivor, "one")
        await ask(survivor, "two")
        turns = await turns_of(survivor)
    assert heard(upstream) == ["one", "two"]
    assert len(upstream.requests) == 2
    assert [turn.status for turn in turns] == ["completed"] * 2


async def test_words_whose_turn_never_ran_before_the_crash_are_the_same_turn_too(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as survivor, other_proxy(settings, die_at="after journal") as other:
        assert await other.ask("one", die=True) is None
        assert await other.died() == -signal.SIGKILL
        await ask(survivor, "one")
        turns = await turns_of(survivor)
    assert heard(upstream) == ["one"]
    assert [turn.status for turn in turns] == ["completed"]


async def test_a_slow_clients_answer_that_the_conversation_went_on_from_is_replayed_to_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        slow = await engine.submit(request("one", idempotency_key="k"))
        turn = await slow.turn()
        await ask(engine, "two")
        slow.leave()
        again = await ask(engine, "one", idempotency_key="k")
        await ask(engine, "three")
    assert again.id == turn.id
    assert heard(upstream) == ["one", "two", "three"]


async def test_a_slow_client_that_leaves_while_the_next_turn_runs_gets_its_answer_again(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("two", gate)
    async with running(make_settings(claude_bin=claude_2)) as engine:
        slow = await engine.submit(request("one", idempotency_key="k"))
        turn = await slow.turn()
        following = asyncio.create_task(ask(engine, "two"))
        await reached(gate)
        slow.leave()
        again = await ask(engine, "one", idempotency_key="k")
        gate.open()
        await following
        await ask(engine, "three")
    assert again.id == turn.id
    assert heard(upstream) == ["one", "two", "three"]


@pytest.mark.parametrize("step", rest_in_full("before commit", "after result"))
async def test_calls_that_a_killed_proxy_never_gave_out_are_made_again(
    step: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with other_proxy(settings, die_at=step) as other:
        assert await other.ask("one", tools=TOLD) is not None
        called_once(upstream)
        assert await other.ask("where", tools=TOLD, die=True) is None
        left = clis(settings)
    await gone(left)
    called_once(upstream)
    async with running(settings) as engine:
        turn = await ask(engine, "where", tools=TOOLS)
        (call,) = calls(turn)
        await ask(engine, results(result(call, "sunny")), tools=TOOLS)
        await ask(engine, "list", tools=TOOLS)
    assert turn.status == "requires_action"
    assert heard(upstream) == ["one", "where", "tool_result: sunny", "list"]
    assert phantoms(upstream) == []


# --- a proxy that is paused


@pytest.fixture
def short_lease(make_settings: MakeSettings, claude_2: Path) -> Callable[..., Settings]:
    return lambda **more: make_settings(claude_bin=claude_2, lease=1.5, **more)


async def test_a_paused_proxys_agent_is_taken_over_and_the_proxy_is_fenced_out(
    short_lease: Callable[..., Settings], upstream: Upstream
) -> None:
    settings = short_lease()
    gate = HeldReply()
    upstream.when("lost", gate)
    async with running(settings) as survivor, other_proxy(settings) as other:
        await other.ask("first")
        await other.tell("lost", wait=False)
        await reached(gate)
        await other.pause(settings)
        paused = [pid for pid in clis(settings) if pid not in own(survivor)]
        await ask(survivor, "second")
        assert heard(upstream) == ["first", "second"]
        other.wake()
        gate.open()
        told = await other.heard()
        assert told is not None
        assert told["error"] in ("lease_lost", "interrupted")
        await gone([pid for pid in paused if pid not in own(survivor)])
        await ask(survivor, "third")
        assert (await other.ask("fourth") or {}).get("text") == "You said: fourth (4)"
        turns = await turns_of(survivor)
    assert heard(upstream) == ["first", "second", "third", "fourth"]
    assert [turn.status for turn in turns] == ["completed", "cancelled", "completed", "completed", "completed"]


@pytest.mark.full
async def test_an_idle_paused_proxy_keeps_its_agents_for_the_time_of_its_lease_only(
    short_lease: Callable[..., Settings], upstream: Upstream
) -> None:
    settings = short_lease()
    async with running(settings) as survivor, other_proxy(settings) as other:
        await other.ask("first")
        await other.pause(settings)
        await ask(survivor, "second")
        other.wake()
        assert (await other.ask("third") or {}).get("text") == "You said: third (3)"
        await ask(survivor, "fourth")
    assert heard(upstream) == ["first", "second", "third", "fourth"]


@pytest.mark.full
async def test_a_pause_in_which_nobody_asked_for_the_agent_fences_nobody_out(
    short_lease: Callable[..., Settings], upstream: Upstream
) -> None:
    settings = short_lease()
    gate = HeldReply()
    upstream.when("slow", gate)
    async with running(settings) as survivor, other_proxy(settings) as other:
        await other.tell("slow", wait=False)
        await reached(gate)
        await other.pause(settings)

        async def expired() -> bool:
            (turn,) = await turns_of(survivor)
            return not await survivor.store.responds(str(turn.instance))

        await until(expired)
        other.wake()
        gate.open()
        assert (await other.heard() or {}).get("text") == "You said: slow (1)"
        await ask(survivor, "second")
    assert heard(upstream) == ["slow", "second"]


async def test_the_same_words_at_another_proxy_while_the_first_is_paused_run_once(
    short_lease: Callable[..., Settings], upstream: Upstream
) -> None:
    settings = short_lease()
    gate = HeldReply()
    upstream.when("one", gate)
    async with running(settings) as survivor, other_proxy(settings) as other:
        await other.tell("one", wait=False, idempotency_key="k")
        await reached(gate)
        await other.pause(settings)
        turn = await ask(survivor, "one", idempotency_key="k")
        other.wake()
        gate.open()
        await other.heard()
        assert (await other.ask("one", idempotency_key="k") or {}).get("turn") == turn.id
        await ask(survivor, "two")
    assert heard(upstream) == ["one", "two"]
