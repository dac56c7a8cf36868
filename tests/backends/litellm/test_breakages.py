"""Mixed chains through what breaks: a killed proxy, a deleted transcript, a branch, a rewind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ...recovery.others import other_proxy
from ...talking import ask, heard, running, text
from .mixed import Talk, claude_told
from .servers import Provider, Reply


async def test_a_deleted_transcript_is_written_again_with_the_other_models_turns(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        for model in ("sonnet", "gpt", "sonnet", "gemini"):
            await talk.tell(model)
        session = await engine.store.session(talk.turns[-1].session_id or "")
        assert session is not None
        Path(session.transcript).unlink()  # noqa: ASYNC240
        last = await talk.tell("sonnet")
        assert talk.shown("sonnet") == talk.told()
        assert last.session_id == session.id
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
    assert (provider.refused, [why for _, why in upstream.refused]) == ([], [])


async def test_a_return_to_claude_is_no_repair(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        for model in ("sonnet", "gpt", "gemini", "sonnet"):
            await talk.tell(model, call=model == "gemini")
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        chain = await engine.store.chain(agent.key)
        assert chain is not None
        assert [link.reason for link in chain.links] == ["started"]
        assert talk.turns[-1].continuity == "resumed"
        assert {turn.session_id for turn in talk.turns} == {talk.turns[0].session_id}
        kept = engine.settings.var / "salvage"
    assert not kept.exists() or not list(kept.iterdir())


async def test_a_branch_leaves_out_what_another_model_said_on_the_old_path(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        first = await talk.tell("sonnet")
        for model in ("gpt", "gemini"):
            await talk.tell(model)
        path = talk.path
        talk.path = path[:2]
        upstream.next()
        for model in ("sonnet", "gpt"):  # each goes on from the first answer
            before = talk.path[:]
            await talk.tell(model, continues=first.id)
            assert talk.shown(model) == talk.told()
            talk.path = before
        talk.path = path  # and the old path goes on as it was
        await talk.tell("sonnet", continues=talk.turns[2].id)
        assert talk.shown("sonnet") == talk.told()
    assert (provider.refused, [why for _, why in upstream.refused]) == ([], [])


async def test_a_rewind_takes_another_models_turn_off_the_path(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        for model in ("sonnet", "gpt", "sonnet", "gemini"):
            await talk.tell(model)
        await engine.rewind("local", "a", "-3")
        talk.path = talk.path[:2]
        for model in ("gpt", "sonnet"):
            await talk.tell(model)
            assert talk.shown(model) == talk.told()
    assert (provider.refused, [why for _, why in upstream.refused]) == ([], [])


async def test_a_client_that_sends_its_history_goes_on_from_another_models_answer(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        provider.next(Reply("Hello Ada.", thinking="who is it"))
        first = await ask(engine, "I am Ada.", agent=None, model="gpt")
        history = (Message.user("I am Ada."), Message.assistant("Hello Ada."), Message.user("Who am I?"))
        second = await ask(engine, *history, agent=None, model="sonnet")
    assert (second.parent_id, second.placed.rule) == (first.id, "history")
    assert text(second)
    assert claude_told(upstream.requests[-1].messages) == [
        ("user", "I am Ada."), ("assistant", "Hello Ada."), ("user", "Who am I?"),
    ]  # fmt: skip


async def test_a_chain_that_another_model_began_is_a_session_of_claudes_later(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        talk = Talk(engine, upstream, provider)
        for model in ("gpt", "gemini", "sonnet", "sonnet"):
            await talk.tell(model)
            assert talk.shown(model) == talk.told()
        assert [turn.continuity for turn in talk.turns] == ["started", "resumed", "resumed", "warm"]
        assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("before journal", marks=pytest.mark.full),
        pytest.param("after journal", marks=pytest.mark.full),
        "before commit",
        pytest.param("before acknowledge", marks=pytest.mark.full),
    ],
)
async def test_a_proxy_killed_in_another_models_turn_loses_and_doubles_nothing(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path, step: str
) -> None:
    settings = with_models(claude_bin=claude_2)
    provider.next(Reply("by gpt"), Reply("by gpt"))
    async with other_proxy(settings, die_at=step) as other:
        assert await other.ask("one") is not None
        assert await other.ask("two", model="gpt", die=True) is None
        assert await other.died() == -signal.SIGKILL
    async with running(settings) as engine:
        again = await ask(engine, "two", model="gpt")
        await ask(engine, "three")
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        turns = [turn async for turn in engine.store.turns(agent.key)]
    assert text(again) == "by gpt"
    assert [role for role, _ in claude_told(upstream.requests[-1].messages)] == ["user", "assistant"] * 2 + ["user"]
    assert heard(upstream) == ["one", "two", "three"]
    assert [turn.status for turn in turns].count("completed") == 3
    assert upstream.requests[-1].prefix_kept(upstream.requests[0]) == 1.0
    assert (provider.refused, [why for _, why in upstream.refused]) == ([], [])
