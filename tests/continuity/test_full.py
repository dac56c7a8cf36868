"""A context that is full, and that the CLI cannot make shorter by itself: the turn is answered, and what was lost is
said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.sessions import summaries
from cli_session_proxy.export.formats import FORMATS
from turnfault.provider.rules import Rules
from turnfault.provider.script import Behaviour, Fail, Reply
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..media import image, picture
from .rows_poison import KEY, TOO_LONG, more_than_a_request
from .score import Fact
from .talk import ASKS_FOR_SUMMARY, EngineTalk, RequestRefused, talking


def answers(seen: Seen) -> Behaviour:
    """The CLI's own summaries are refused; ours hold the facts that they were made of."""
    if ASKS_FOR_SUMMARY in seen.prompt:
        return TOO_LONG
    if summaries.ASK in seen.prompt:
        return Reply(" ".join(dict.fromkeys(KEY.findall(seen.prompt))))
    return Reply("Noted.", thinking="hm")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(behave=answers) as server:
        yield server


async def _filled(talk: EngineTalk, count: int, size: int) -> None:
    for _ in range(count):
        fact = talk.new_fact()
        await talk.tell(Fact(f"{fact.text} {'word ' * (size // 5)}", fact.key))


async def _dumped(talk: EngineTalk) -> str:
    agent = await talk.engine.store.agent_by_key(talk.turn.agent_key)
    assert agent is not None
    return "".join([piece async for piece in FORMATS["markdown"].write(talk.engine.store, agent, sandbox="")])


@old_cli_in_full
@pytest.mark.full
async def test_what_cannot_be_compacted_is_summarised_in_pieces_and_the_turn_is_answered(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude), upstream) as talk:
        await _filled(talk, 8, 4000)
        upstream.rules = Rules(context=6000)
        await talk.tell()
        codes = {note.code: note.count for note in talk.turn.evidence.notes}
        assert codes["summarised"] in range(1, 9)
        assert "not_summarised" not in codes
        asked = [seen for seen in upstream.requests if summaries.ASK in seen.prompt]
        assert len(asked) <= summaries.MOST_CALLS
        last = upstream.requests[-1]
        told = last.raw.decode()
        assert all(fact.key in told for fact in talk.facts)
        assert f"the model is shown a summary of its first {codes['summarised']} exchanges" in await _dumped(talk)
        await talk.tell()
        assert upstream.requests[-1].prefix_kept(last) > 0.99
        await talk.restart()
        before = upstream.requests[-1]
        await talk.tell()
        # CLI 1.0.120 changes its newest message at the turn after it: a thought behind that is void, which is said.
        assert {note.code for note in talk.turn.evidence.notes} <= {"thinking_left_out"}
        if "_bundled" in str(claude):
            assert (talk.turn.continuity, talk.turn.evidence.notes) == ("resumed", ())
            assert upstream.requests[-1].prefix_kept(before) == 1.0
        assert len(list(talk.projects.glob("*/*.jsonl"))) <= len(talk.facts)  # none of a summary's own sessions


@pytest.mark.full
async def test_images_that_fill_the_request_are_left_out_where_the_cli_cannot_compact(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        await talk.tell()
        await more_than_a_request(talk)
        await talk.tell()
        assert ("images_left_out", 1) in [(note.code, note.count) for note in talk.turn.evidence.notes]
        assert all(fact.key in upstream.requests[-1].raw.decode() for fact in talk.facts)


@old_cli_in_full
async def test_a_remedy_that_does_not_help_leaves_nothing_behind(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """The image is left out, and the request is refused all the same: the next turn begins where this one did."""
    async with talking(make_settings(claude_bin=claude), upstream) as talk:
        talk.beside = (image(picture(200, 200)),)
        await talk.tell()
        talk.beside = ()
        fact = talk.new_fact()
        upstream.when(fact.key, Fail(400, message="image is not wanted"), times=None)
        with pytest.raises(RequestRefused, match="invalid_request"):
            await talk.tell(fact)
        upstream.heal()
        await talk.tell()
        assert "image" in str(upstream.requests[-1].messages[0])
        assert not talk.turn.evidence.notes
        assert not list(talk.settings.var.glob("salvage/*"))
