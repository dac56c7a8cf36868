"""A refusal is an answer: it stays in the tree, off the path, and the conversation goes on from before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli_session_proxy.backends.base import Refused
from cli_session_proxy.commands import moving
from cli_session_proxy.domain.models import Block, Message, Turn, Usage
from cli_session_proxy.engine.engine import Answer, Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Refusal
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..memory_backend import MemoryBackend, echo
from ..talking import ask, heard, request, running, text
from .test_core import settings, turns, words

__all__ = ["settings"]

WHY = "The model refused to answer this (cyber). It is about exploits."


async def squeamish(path: Sequence[Message]) -> Sequence[Block] | Refused:
    """Refuses whatever has a bad word in it, however long ago."""
    if any("bad" in word for word in words(path)):
        return Refused("cyber", "It is about exploits.", Usage(3, 1))
    return await echo(path)


async def _engine(settings: Settings) -> tuple[Engine, MemoryBackend]:
    backend = MemoryBackend(squeamish)
    engine = Engine(settings, backend=backend)
    await engine.start()
    return engine, backend


async def _head(engine: Engine, agent: str = "a") -> str | None:
    found = await engine.store.agent("local", agent)
    assert found is not None
    return found.head


async def test_a_refused_turn_is_answered_and_the_next_one_continues_its_parent(settings: Settings) -> None:
    engine, backend = await _engine(settings)
    try:
        first = await ask(engine, "one")
        refused = await ask(engine, "bad")
        assert (refused.status, refused.stop_reason, text(refused)) == ("refused", "refusal", WHY)
        assert refused.usage == Usage(3, 1)
        assert await _head(engine) == first.id
        third = await ask(engine, "three")
        assert third.parent_id == first.id
        assert words(backend.seen[-1]) == ["one", "three"]
        assert [turn.status for turn in await turns(engine)] == ["completed", "refused", "completed"]
    finally:
        await engine.stop()


@pytest.mark.parametrize("agent", ["a", None])
async def test_a_client_that_sends_the_refusal_back_goes_on_from_before_it(
    settings: Settings, agent: str | None
) -> None:
    engine, backend = await _engine(settings)
    said: list[str] = []

    async def say(word: str) -> Turn:
        turn = await ask(engine, *said, word, agent=agent)
        said.extend((word, text(turn)))
        return turn

    try:
        one = await say("one")
        await say("bad")
        two = await say("two")
        await say("bad again")
        await say("worse and bad")
        three = await say("three")
        assert words(backend.seen[-1]) == ["one", "two", "three"]
        assert [one.parent_id, two.parent_id, three.parent_id] == [None, one.id, two.id]
        assert three.placed.imported == 0
        assert three.placed.diverged_at is None
        (row,) = [row async for row in engine.store.summaries()]
        assert row.turns == 6
    finally:
        await engine.stop()


async def test_a_stranger_whose_first_words_were_refused_stays_the_same_agent(settings: Settings) -> None:
    engine, backend = await _engine(settings)
    try:
        refused = await ask(engine, "bad", agent=None)
        turn = await ask(engine, "bad", text(refused), "good", agent=None)
        assert (turn.agent_key, turn.parent_id) == (refused.agent_key, None)
        assert words(backend.seen[-1]) == ["good"]
    finally:
        await engine.stop()


async def test_the_id_of_a_refused_turn_names_what_it_was_to_continue(settings: Settings) -> None:
    engine, backend = await _engine(settings)
    try:
        first = await ask(engine, "one")
        refused = await ask(engine, "bad")
        again = await ask(engine, "worse and bad", continues=refused.id)
        turn = await ask(engine, "two", continues=again.id)
        assert turn.parent_id == first.id
        assert words(backend.seen[-1]) == ["one", "two"]
    finally:
        await engine.stop()


async def test_a_clients_own_retry_is_given_the_refusal_again_and_nobody_is_asked(settings: Settings) -> None:
    engine, backend = await _engine(settings)
    try:
        refused = await ask(engine, "bad")
        asked = len(backend.seen)
        again = await ask(engine, "bad", is_retry=True)
        assert (again.id, again.status) == (refused.id, "refused")
        assert len(backend.seen) == asked
        keyed = [await ask(engine, "bad", agent="b", idempotency_key="k") for _ in range(2)]
        assert keyed[0].id == keyed[1].id
        assert len(backend.seen) == asked + 1
    finally:
        await engine.stop()


async def test_two_refusals_in_a_row_name_the_way_out(settings: Settings) -> None:
    engine, _ = await _engine(settings)
    try:
        await ask(engine, "one")
        first, second = await ask(engine, "bad"), await ask(engine, "bad too")
        assert "rewind" not in text(first)
        assert "2 requests in a row were refused behind the same answer" in text(second)
        assert "cli-session-proxy rewind AGENT --to -1" in text(second)
        assert second.evidence.refusal is not None
        assert second.evidence.refusal.behind == 1
        await ask(engine, "two")
        assert "rewind" not in text(await ask(engine, "bad once more"))
    finally:
        await engine.stop()


async def test_all_clients_of_a_stream_are_told_the_same(settings: Settings) -> None:
    engine, _ = await _engine(settings)
    try:
        answers = [await engine.submit(request("bad", idempotency_key="k")) for _ in range(2)]
        seen = await asyncio.gather(*(_words_of(answer) for answer in answers))
        assert seen == [WHY, WHY]
    finally:
        await engine.stop()


async def _words_of(answer: Answer) -> str:
    said = [event.delta["text"] async for event in answer.events() if hasattr(event, "delta")]
    answer.acknowledge()
    return "".join(said)


async def test_a_chain_with_a_refusal_can_be_taken_elsewhere(settings: Settings, tmp_path: Path) -> None:
    engine, _ = await _engine(settings)
    try:
        await ask(engine, "one")
        await ask(engine, "bad")
    finally:
        await engine.stop()
    file = tmp_path / "a.jsonl"
    await moving.export(settings, "local", "a", file)
    await moving.import_(settings, "local", file, "b")
    engine, backend = await _engine(settings)
    try:
        agent = await engine.store.agent("local", "b")
        assert agent is not None
        brought = [turn async for turn in engine.store.turns(agent.key)]
        assert [turn.status for turn in brought] == ["completed", "refused"]
        turn = await ask(engine, "one", text(brought[0]), "bad", text(brought[1]), "two", agent="b")
        assert (turn.parent_id, turn.placed.imported) == (brought[0].id, 0)
        assert "bad" not in words(backend.seen[-1])
    finally:
        await engine.stop()


# --- on the real CLI


@old_cli_in_full
async def test_the_cli_is_asked_once_and_its_session_goes_on_without_the_refusal(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        await ask(engine, "one")
        upstream.when("bad", Refusal("cyber", "It is about exploits."), times=None)
        refused = await ask(engine, "bad")
        assert (refused.status, text(refused)) == ("refused", WHY)
        assert [seen.prompt for seen in upstream.requests].count("bad") == 1
        [before] = [seen for seen in upstream.requests if seen.prompt == "one"]
        turn = await ask(engine, "two")
        assert heard(upstream) == ["one", "two"]
        assert turn.status == "completed"
        if "bundled" in str(claude):
            assert upstream.requests[-1].prefix_kept(before) == 1.0


@old_cli_in_full
async def test_what_was_said_before_the_refusal_is_the_answer(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude)) as engine:
        upstream.next(Refusal("bio", None, said="First you take"))
        refused = await ask(engine, "bad")
        assert (refused.status, text(refused)) == ("refused", "First you take")
        assert refused.evidence.refusal is not None
        assert refused.evidence.refusal.category == "bio"
        await ask(engine, "bad", "First you take", "good", agent="a")
        assert heard(upstream) == ["good"]
