"""The CLI compacts its session: the chain knows, and a client's whole history still finds it."""

from __future__ import annotations

from pathlib import Path

from turnfault.provider.script import Reply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, running, text
from .dumped import dumped

# The CLI believes the figures of the answer: beyond this its context counts as full (990,000 tokens: 2.1.329 compacts).
FULL = {"input_tokens": 990_000}


async def test_a_whole_history_finds_the_chain_across_a_compaction(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("turn 2", Reply("That was a lot.", usage=FULL))
    history: list[str] = []
    turns = []
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for n in range(6):
            turns.append(await ask(engine, *history, f"turn {n}", agent=None))
            history += [f"turn {n}", text(turns[-1])]
        dump, _ = await dumped(engine)
    assert [turn.parent_id for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
    assert [turn.placed.matched for turn in turns] == [0, 2, 4, 6, 8, 10]
    assert len({turn.session_id for turn in turns}) == 1
    assert [n for n, turn in enumerate(dump["turns"]) if "compacted" in turn["reason"]] == [3]
    # what the summary stands for is not sent again, what follows it is
    assert "turn 4" in str(upstream.requests[-1].messages)
    assert upstream.requests[-1].user_texts()[-1] == "turn 5"


async def test_an_edit_above_a_compaction_reaches_the_model_with_its_own_words(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("turn 2", Reply("That was a lot.", usage=FULL))
    history: list[str] = []
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for n in range(5):
            turn = await ask(engine, *history, f"turn {n}", agent=None)
            history += [f"turn {n}", text(turn)]
        edited = await ask(engine, *history[:4], "another turn 2", agent=None)
    assert edited.placed.matched == 4
    assert upstream.requests[-1].user_texts() == ["turn 0", "turn 1", "another turn 2"]
