"""A sliding window: what is older is left out of the request, at a turn boundary, rarely and by much."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cli_session_proxy.backends.litellm import summary
from cli_session_proxy.domain.models import Message
from cli_session_proxy.domain.options import TurnSize, Window, left_out
from cli_session_proxy.export import explain
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.script import Reply as Thought
from turnfault.provider.upstream import Upstream

from ...talking import ask, request, running
from .mixed import WEATHER, claude_told
from .servers import Provider, Reply, texts

TEN = Window(10, "turns")


def history(turns: int) -> list[Message]:
    out: list[Message] = []
    for number in range(turns):
        out += [Message.user(f"q{number}"), Message.assistant(f"a{number}")]
    return out


async def long_chain(engine: object, turns: int) -> None:
    """A chain of so many turns, brought by a client."""
    await ask(engine, *history(turns), Message.user(f"q{turns}"), model="gpt")  # type: ignore[arg-type]


def test_a_window_is_written_in_turns_or_tokens() -> None:
    assert (Window.parse("40 turns"), Window.parse("100k tokens")) == (Window(40, "turns"), Window(100_000, "tokens"))
    assert str(Window.parse(" 1M tokens ")) == "1000000 tokens"
    for bad in ("40", "turns", "-3 turns", "1 turns", "1 turn", "40 bytes", "40 turns; drop", "9" * 12 + " turns"):
        with pytest.raises(ValueError, match="window"):
            Window.parse(bad)


def test_a_window_of_turns_holds_and_its_head_stays_for_half_a_window() -> None:
    heads = []
    for length in range(1, 500):
        path = [TurnSize(10, True)] * length
        head = left_out(TEN, path)
        assert length - head <= 10
        heads.append(head)
    changes = [at for at in range(1, len(heads)) if heads[at] != heads[at - 1]]
    assert min(after - before for before, after in pairwise(changes)) == 5


def test_a_window_of_tokens_holds_and_its_head_stays() -> None:
    window, heads = Window(1000, "tokens"), []
    for length in range(1, 300):
        path = [TurnSize(40 + 13 * (at % 7), True) for at in range(length)]
        head = left_out(window, path)
        assert sum(turn.tokens for turn in path[head:]) <= 1000
        heads.append(head)
    changes = [at for at in range(1, len(heads)) if heads[at] != heads[at - 1]]
    assert min(after - before for before, after in pairwise(changes)) >= 4


def test_a_window_never_begins_with_results() -> None:
    for length in range(2, 60):
        path = [TurnSize(10, at % 3 == 0) for at in range(length)]
        assert path[left_out(TEN, path)].opens
    loop = [TurnSize(10, True), *[TurnSize(10, False)] * 30]
    assert left_out(TEN, loop) == 0  # one chain of calls is shown from its start


@pytest.mark.full
async def test_a_window_of_ten_on_a_chain_of_five_hundred(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models(of_models={"gpt": {"window": "10 turns"}})) as engine:
        await long_chain(engine, 500)
        changes, before = 0, provider.openai[-1]["messages"]
        said: str | Message = "q"
        for number in range(25):
            call = number % 4 == 0
            calls = [("call_0", "get_weather", {"city": "Rome"})] if call else []
            provider.next(Reply(f"b{number}", calls=calls))  # type: ignore[arg-type]
            turn = await ask(engine, said, model="gpt", tools=(WEATHER,))
            now = provider.openai[-1]["messages"]
            assert len([one for one in now if one["role"] == "assistant"]) <= 9
            if now[: len(before)] != before:
                changes += 1
            before = now
            said = f"more {number}"
            if call:
                block = {"type": "tool_result", "tool_use_id": turn.output[-1]["id"], "content": "sunny"}
                said = Message("user", (block,))
        assert provider.refused == []
        assert changes <= 25 // 5
        assert [note.code for note in turn.evidence.notes] == ["outside_window"]
        whole = await ask(engine, "all of it", model="gemini")
    assert len(provider.gemini[-1]["contents"]) > 1000  # nothing of the chain is gone
    assert whole.evidence.notes == ()


def opening(provider: Provider) -> str:
    """The first words of the user's in the last request."""
    return next(said for role, said in texts(provider.openai[-1]) if role == "user")


async def test_what_a_window_leaves_out_is_summarised_once_for_each_cut_and_never_in_the_chain(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models(of_models={"gpt": {"window": "4 turns", "window_summary": True}})
    async with running(settings) as engine:
        for number in range(4):
            await ask(engine, f"q{number}", model="gpt")
        provider.next(Reply("they spoke of 0 and 1"), Reply("a4"))
        turn = await ask(engine, "q4", model="gpt")
        asked = provider.openai[-2]["messages"][-1]["content"]
        assert ("user: q0" in asked, "user: q1" in asked, "q2" in asked) == (True, True, False)
        assert opening(provider) == f"{summary.HEADER}\nthey spoke of 0 and 1\n\nq2"
        before, requests = provider.openai[-1]["messages"], len(provider.openai)
        await ask(engine, "q5", model="gpt")
        assert (provider.openai[-1]["messages"][: len(before)], len(provider.openai)) == (before, requests + 1)
        provider.next(Reply("they spoke of 0 to 3"), Reply("a6"))
        later = await ask(engine, "q6", model="gpt")
        asked = provider.openai[-2]["messages"][-1]["content"]
        assert ("they spoke of 0 and 1" in asked, "user: q0" in asked, "user: q3" in asked) == (True, False, True)
        assert opening(provider).startswith(f"{summary.HEADER}\nthey spoke of 0 to 3\n\n")
        path = await engine.store.path(later.id)
        said = [block["text"] for one in path for message in one.input for block in message.content]
        assert said == [f"q{number}" for number in range(7)]
        assert turn.evidence.window_summary == "they spoke of 0 and 1"
        assert any("they spoke of 0 and 1" in line.says for line in explain.beside(turn.evidence, None))
    assert provider.refused == []


async def test_a_summary_is_bounded_and_a_model_that_makes_none_answers_all_the_same(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models(of_models={"gpt": {"window": "2 turns", "window_summary": True}}, cli_retries=0)
    long = "word " * (summary.PIECE // 5)
    async with running(settings) as engine:
        brought = [
            message for number in range(6) for message in (Message.user(f"{number} {long}"), Message.assistant("a"))
        ]
        provider.next(*[Reply(f"summary {number} " + "x" * summary.LONGEST) for number in range(summary.MOST_CALLS)])
        turn = await ask(engine, *brought, Message.user("q"), model="gpt")
        assert len(provider.openai) == summary.MOST_CALLS + 1
        assert max(len(one["messages"][-1]["content"]) for one in provider.openai[:-1]) < 1.5 * summary.PIECE
        assert len(turn.evidence.window_summary or "") == summary.LONGEST
        assert [note.code for note in turn.evidence.notes] == ["outside_window", "not_summarised"]
        provider.next(Reply(status=500), Reply("an answer"))
        without = await ask(engine, *brought, Message.user("q"), agent="b", model="gpt")
    assert (without.status, without.evidence.window_summary) == ("completed", None)
    assert [(note.code, note.count) for note in without.evidence.notes] == [
        ("outside_window", 5),
        ("not_summarised", 5),
    ]


async def test_a_request_says_its_own_window(with_models: Callable[..., Settings], provider: Provider) -> None:
    async with running(with_models()) as engine:
        for number in range(12):
            await ask(engine, f"q{number}", model="gpt")
        turn = await ask(engine, "last", model="gpt", window=Window(4, "turns"))
    asked = [said for role, said in texts(provider.openai[-1])[1:] if role == "user"]
    assert (asked[-1], len(asked) <= 4, turn.evidence.notes[0].count) == ("last", True, 13 - len(asked))


async def test_claude_has_a_window_too(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    """Of 500 turns that a client brought: cut once in 5 turns, with the sealed thoughts that a cut makes void."""
    settings = with_models(claude_bin=claude_2, profiles={"short": Profile(window=TEN)}, profile="short")
    async with running(settings) as engine:
        await ask(engine, *history(500), Message.user("q500"), model="sonnet")
        broken, before, voided = 0, upstream.requests[-1], []
        for number in range(12):
            upstream.next(Thought(f"b{number}", thinking=f"thought {number}"))
            turn = await ask(engine, f"more {number}")
            now = upstream.requests[-1]
            told = claude_told(now.messages)
            assert told[-1] == ("user", f"more {number}")
            assert len([role for role, _ in told if role == "user"]) <= 10
            assert told[0][0] == "user"
            broken += now.prefix_kept(before) < 1.0
            before = now
            voided += [note.count for note in turn.evidence.notes if note.code == "thinking_left_out"]
            assert turn.evidence.notes[0].code == "outside_window"
        assert broken <= 3
        assert voided
        assert [why for _, why in upstream.refused] == []
        session = await engine.store.session(turn.session_id or "")
        assert session is not None
        Path(session.transcript).unlink()  # noqa: ASYNC240 - and it is the same after a repair
        await ask(engine, "again", window=Window(100, "turns"))
        again = claude_told(upstream.requests[-1].messages)
        assert again[-len(told) - 1 : -1] == [*told[1:], ("assistant", "b11")]


async def test_a_window_of_one_request_to_claude_is_that_requests_alone(
    with_models: Callable[..., Settings], upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2)) as engine:
        for number in range(7):
            await ask(engine, f"q{number}")
        await ask(engine, "narrow", window=Window(4, "turns"))
        narrow = [said for role, said in claude_told(upstream.requests[-1].messages) if role == "user"]
        await ask(engine, "wide")
        wide = [said for role, said in claude_told(upstream.requests[-1].messages) if role == "user"]
    assert narrow == ["q4", "q5", "q6", "narrow"] or (len(narrow) <= 4 and narrow[-1] == "narrow")
    assert wide == [*(f"q{number}" for number in range(7)), "narrow", "wide"]


def test_a_request_carries_its_options() -> None:
    assert request("hello", window=TEN).options.as_json() == {"window": "10 turns"}
