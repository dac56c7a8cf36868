"""A full context: the CLI compacts and the chain says so, or the client is told and the chain is as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnfault.provider.script import Fail, Reply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from .talk import ASKS_FOR_SUMMARY, EngineTalk, RequestRefused, talking

FULL = {"input_tokens": 990_000}


async def _filled(talk: EngineTalk) -> str:
    """Three turns, the last of which reports a full context. Returns what a summary of them would be."""
    for _ in range(2):
        await talk.tell()
    talk.upstream.next(Reply(usage=FULL))
    await talk.tell()
    return "Told so far: " + ", ".join(fact.key for fact in talk.facts)


async def test_a_compaction_is_recorded_and_survives_a_wipe_with_the_prompt_cache(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        summary = await _filled(talk)
        upstream.when(ASKS_FOR_SUMMARY, Reply(f"<summary>{summary}</summary>"), times=None)
        after = await talk.tell()
        assert talk.turn.evidence.compacted
        assert summary in str(upstream.requests[-1].messages)
        assert after.key in upstream.requests[-1].prompt
        await talk.tell()
        before = talk.turn
        await talk.down()
        for path in talk.projects.glob("*/*.jsonl"):
            path.unlink()
        await talk.up()
        last = await talk.tell()
        assert (talk.turn.continuity, talk.turn.parent_id) == ("rebuilt", before.id)
        assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
        told = str(upstream.requests[-1].messages)
        assert summary in told
        assert [told.count(fact.text) for fact in talk.facts[3:]] == [1, 1, 1]
        assert last.key in upstream.requests[-1].prompt


async def test_a_turn_that_fails_after_a_compaction_says_so_and_the_next_one_knows_all_there_was(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        summary = await _filled(talk)
        before = talk.turn
        upstream.when(ASKS_FOR_SUMMARY, Reply(f"<summary>{summary}</summary>"), times=None)
        fact = talk.new_fact()
        upstream.when(fact.key, Fail(400, message="no"), times=None)
        with pytest.raises(RequestRefused):
            await talk.tell(fact)
        failed = [turn async for turn in talk.engine.store.turns(before.agent_key)][-1]
        assert failed.status == "failed"
        assert failed.evidence.compacted
        await talk.tell()
        assert talk.turn.parent_id == before.id
        assert summary in str(upstream.requests[-1].messages)
        assert fact.key not in str(upstream.requests[-1].messages)


async def test_a_turn_before_the_compaction_can_still_be_continued(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        upstream.when(ASKS_FOR_SUMMARY, Reply("<summary>a summary</summary>"), times=None)
        await talk.tell()
        first, facts = talk.turn, list(talk.facts)
        talk.upstream.next(Reply(usage=FULL))
        await talk.tell()
        await talk.tell()
        assert talk.turn.evidence.compacted
        talk.facts, talk.extra = facts, {"continues": first.id}
        score = await talk.probe()
        assert score.whole, score
        assert talk.turn.continuity == "branched"


async def test_without_compaction_a_full_context_is_told_and_the_chain_stays(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2, on_context_full="error"), upstream) as talk:
        await _filled(talk)
        head, count = talk.turn.id, len(upstream.requests)
        score = await talk.probe()
        assert score.refused == "context_too_long"
        assert len(upstream.requests) == count
        agent = await talk.engine.store.agent("local", talk.agent)
        assert agent is not None
        assert agent.head == head


@pytest.mark.full
async def test_a_cli_that_sums_the_prompt_up_too_is_stopped_before_it_goes_on(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """CLI 1.0.120 compacts whatever it is told: the turn fails instead of being answered without its prompt."""
    async with talking(make_settings(claude_bin=claude_1, on_context_full="error"), upstream) as talk:
        summary = await _filled(talk)
        upstream.when(ASKS_FOR_SUMMARY, Reply(f"<summary>{summary}</summary>"), times=None)
        head = talk.turn.id
        assert (await talk.probe()).refused == "context_too_long"
        agent = await talk.engine.store.agent("local", talk.agent)
        assert agent is not None
        assert agent.head == head
