"""A proxy that dies at any step: what it acknowledged is there once, and what it was doing runs once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from cli_session_proxy.backends.claude.process import guardian_program
from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from turnfault.provider.script import HeldReply, Reply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, heard, running, text
from ..until import until
from .others import other_proxy, overwritten
from .proxy import STEPS

# At these steps the CLI has the whole answer on disk: nobody needs to ask the model again.
ANSWERED = ("after result", "before commit", "before acknowledge")


async def turns_of(engine: Engine, agent_id: str = "a") -> list[Turn]:
    agent = await engine.store.agent("local", agent_id)
    assert agent is not None
    return [turn async for turn in engine.store.turns(agent.key)]


async def queued(settings: Settings, count: int) -> None:
    """Wait until so many turns are accepted and wait in the store."""
    store = store_for(settings)
    await store.open()

    async def waiting() -> bool:
        return count == len([turn async for turn in store.unfinished() if turn.status == "queued"])

    await until(waiting)
    await store.close()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.sample(4)
async def test_a_proxy_killed_at_a_step_loses_and_doubles_nothing(
    step: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with other_proxy(settings, die_at=step) as other:
        assert await other.ask("one") is not None
        assert await other.ask("two", die=True) is None
        assert await other.died() == -signal.SIGKILL
    async with running(settings) as engine:
        again = await ask(engine, "two")
        asked = [seen for seen in upstream.requests if seen.prompt == "two"]
        await ask(engine, "three")
        turns = await turns_of(engine)
    assert text(again) == "You said: two (2)"
    assert heard(upstream) == ["one", "two", "three"]
    assert [turn.status for turn in turns].count("completed") == 3
    if step in ANSWERED:
        assert len(asked) == 1
        assert [turn.status for turn in turns] == ["completed"] * 3
    kept = [now.prefix_kept(before) for before, now in zip(upstream.requests, upstream.requests[1:], strict=False)]
    assert kept[-1] == 1.0


@pytest.mark.parametrize(
    "step",
    ["after result", *(pytest.param(step, marks=pytest.mark.full) for step in ("after send", "before acknowledge"))],
)
async def test_an_old_cli_loses_and_doubles_nothing_either(
    step: str, claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_1)
    async with other_proxy(settings, die_at=step) as other:
        assert await other.ask("one") is not None
        assert await other.ask("two", die=True) is None
    async with running(settings) as engine:
        await ask(engine, "two")
        asked = [seen for seen in upstream.requests if seen.prompt == "two"]
        await ask(engine, "three")
    assert heard(upstream) == ["one", "two", "three"]
    if step in ANSWERED:
        assert len(asked) == 1


async def test_a_prompt_that_was_damaged_on_disk_after_the_crash_is_asked_again_as_it_was(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with other_proxy(settings, die_at="after result") as other:
        assert await other.ask("fact-1 of a", die=True) is None
    await overwritten(settings, "fact-1 of a", "fact-X of a")
    async with running(settings) as engine:
        await ask(engine, "fact-1 of a")
        await ask(engine, "and now")
        turns = await turns_of(engine)
    assert heard(upstream) == ["fact-1 of a", "and now"]
    assert [[attempt["status"] for attempt in turn.attempts] for turn in turns] == [
        ["cancelled", "completed"],
        ["completed"],
    ]


async def test_another_request_keeps_the_answer_that_may_have_arrived(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with other_proxy(settings, die_at="after result") as other:
        assert await other.ask("one", die=True) is None
    async with running(settings) as engine:
        await ask(engine, "two")
        assert heard(upstream) == ["one", "two"]
        # The conversation has gone on: the same words are new ones.
        await ask(engine, "one")
        [settled, *_] = await turns_of(engine)
    assert heard(upstream) == ["one", "two", "one"]
    assert settled.evidence.settled
    assert settled.backend == "claude"
    assert settled.answered_by


async def test_a_cli_that_was_left_all_the_same_is_ended_before_anything_is_sent_again(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no `setpriv`, so no parent-death signal
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply(reply=Reply("too late"))
    upstream.when("two", gate)
    async with other_proxy(settings) as other:
        assert await other.ask("one") is not None
        await other.tell("two")
        async with asyncio.timeout(60):
            await gate.reached.wait()
        [note] = (settings.var / "run").glob("*/[0-9]*")
        children = psutil.Process(other.pid).children()
        [guardian] = [child for child in children if guardian_program.__file__ in child.cmdline()]
        guardian.suspend()
        await other.end(signal.SIGKILL)
        assert start_time(int(note.name)) is not None
        async with running(settings) as engine:
            assert start_time(int(note.name)) is None
            gate.open()
            await ask(engine, "three")
            turns = await turns_of(engine)
            assert not note.exists()
    guardian.resume()  # it finds the CLI dead, and ends

    async def ended() -> bool:
        return not guardian.is_running()

    await until(ended)
    assert heard(upstream) == ["one", "three"]
    assert [turn.status for turn in turns] == ["completed", "cancelled", "completed"]
    assert turns[1].error is not None
    assert turns[1].error["code"] == "interrupted"
    assert [entry["status"] for entry in turns[1].attempts] == ["cancelled"]


async def test_a_retry_of_what_was_queued_at_the_crash_is_a_new_attempt_of_the_same_turn(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("one", gate)
    async with other_proxy(settings) as other:
        await other.tell("one", wait=False)
        async with asyncio.timeout(60):
            await gate.reached.wait()
        await other.tell("two", wait=False, idempotency_key="k")
        await queued(settings, 1)
        await other.end(signal.SIGKILL)
    async with running(settings) as engine:
        again = await ask(engine, "two", idempotency_key="k")
        replayed = await ask(engine, "two", idempotency_key="k")
        turns = await turns_of(engine)
    assert heard(upstream) == ["two"]
    assert again.id == replayed.id == turns[1].id
    assert [turn.status for turn in turns] == ["cancelled", "completed"]


async def test_sigterm_drains_what_runs_and_waits(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply()
    upstream.when("one", gate)
    async with other_proxy(settings) as other:
        await other.tell("one", wait=False)
        async with asyncio.timeout(60):
            await gate.reached.wait()
        await other.tell("two", wait=False)
        await queued(settings, 1)
        other.process.send_signal(signal.SIGTERM)
        gate.open()
        assert [(await other.heard() or {}).get("text") for _ in range(2)] == ["You said: one (1)", "You said: two (2)"]
        assert await other.end(signal.SIGTERM) == 0
    assert not list((settings.var / "run").glob("*"))


async def test_the_drain_is_bounded_and_ends_turns_with_a_reason(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, drain_timeout=0.5)
    gate = HeldReply()
    upstream.when("one", gate)
    async with other_proxy(settings) as other:
        await other.tell("one", wait=False)
        async with asyncio.timeout(60):
            await gate.reached.wait()
        await other.tell("two", wait=False)
        await queued(settings, 1)
        assert await other.end(signal.SIGTERM) == 0
        assert [(await other.heard() or {}).get("error") for _ in range(2)] == ["interrupted"] * 2
    async with running(settings) as engine:
        assert [turn.status for turn in await turns_of(engine)] == ["cancelled"] * 2
        await ask(engine, "three")
    assert heard(upstream) == ["three"]
