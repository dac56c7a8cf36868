"""What some CLIs of some time ago do with a transcript."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.sessions.verifying import Verifier
from cli_session_proxy.domain.models import Message
from turnfault.provider.upstream import Upstream

from ....clis import old_cli_in_full
from ....conftest import MakeSettings
from ....media import image, picture
from ....talking import ask, heard, running
from .meddling import MeddledCli
from .test_loading import transcript_of


async def test_the_transcript_of_a_new_session_may_come_after_the_result(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """As with 2.1.150 to 2.1.260 on a loaded machine."""
    cli = MeddledCli(tmp_path / "cli", claude_2)
    settings = make_settings(claude_bin=cli.path)
    cli.order("result", ("late", str(tmp_path / "claude-config" / "projects"), "0.3"))
    async with running(settings) as engine:
        first = await ask(engine, "one")
    assert cli.done
    assert first.evidence.records == "transcript"
    async with running(settings) as engine:
        second = await ask(engine, "two")
    assert (second.continuity, second.evidence.repaired) == ("resumed", None)
    assert heard(upstream) == ["one", "two"]


@old_cli_in_full
@pytest.mark.full
async def test_a_cli_that_splits_records_at_a_resume_is_given_one_block_a_record(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """Each turn is run by a process that loads the transcript, as the real ones do up to 2.1.29."""
    if "bundled" in str(claude):
        claude = MeddledCli(tmp_path / "cli", claude, version="2.1.1", splits=True).path
    settings = make_settings(claude_bin=claude)
    seen = Message("user", ({"type": "text", "text": "see"}, image(picture(2, 2)), {"type": "text", "text": "this"}))
    turns = []
    for said in (seen, "two", seen, "three", "four"):
        async with running(settings) as engine:
            turns.append(await ask(engine, said))
            agent = await engine.store.agent("local", "a")
            assert agent is not None
            assert not (await Verifier(settings, engine.store).verify(agent)).differences
    assert [turn.evidence.repaired for turn in turns] == [None] * 5
    assert [turn.continuity for turn in turns] == ["started", *["resumed"] * 4]
    texts = [words.strip() for words in heard(upstream) if not words.startswith("[Image: source")]  # 2.1.330 adds that
    assert texts == ["see", "[image]", "this", "two", "see", "[image]", "this", "three", "four"]
    asked = [seen for seen in upstream.requests if "see" in seen.user_texts()]
    assert [after.prefix_kept(before) for before, after in pairwise(asked)] == [1.0] * 4


@pytest.mark.sample(1)
async def test_a_record_of_an_unknown_type_in_the_chain_of_parents_hides_no_turn(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """CLI 1.0.120 does not load it, and nothing that stands before it."""
    cli = MeddledCli(tmp_path / "cli", claude)
    settings = make_settings(claude_bin=cli.path)
    old = "bundled" not in str(claude)
    compared = []
    for said in ("one", "two", "three", "four"):
        if said == "two":
            cli.order("result", ("strange", str(tmp_path / "claude-config" / "projects")))
        async with running(settings) as engine:
            turn = await ask(engine, said)
            agent = await engine.store.agent("local", "a")
            assert agent is not None
            found = (await Verifier(settings, engine.store).verify(agent)).differences
        compared.append([one.kind for one in found if one.at_head])
        if said == "three":
            transcript_of(settings, turn).unlink()
    assert cli.done
    assert turn.continuity == "rebuilt"
    assert heard(upstream) == ["one", "two", "three", "four"]
    assert compared == [[], ["unloaded"] if old else [], [], []]
