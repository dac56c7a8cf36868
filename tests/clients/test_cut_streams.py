"""The provider's stream is cut in mid-answer: what the client has, what the chain has and what the model is shown next
are the same words, on every wire, and no history forks by it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from cli_session_proxy.domain.lineage import answer_text
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export.formats import FORMATS
from turnfault.provider.script import TOOL_RESULT, Cut, Reply, ToolUse
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..cutting import held, let_go
from ..every_wire import proxied, the_one_chain
from .full_history import JOIN, RESULT, TOOL, WIRES, historian

LONG = "These are the words of an attempt that is never finished, as its stream is cut."
ANSWER = "And this is the answer as a whole."
THOUGHT = "Let me think about that for a while."
FIRST = "A first block that is finished."
CALL = f"mcp__client__{TOOL}"
WRITES = (CALL, {"city": "a city with a rather long name, in many pieces"})
KEPT = 0.97

# How the first attempt goes until it is cut, and the answer after it.
CUTS = {
    "in the first text": (Cut(3, Reply(LONG)), Reply(ANSWER)),
    "in a later text": (
        Cut(6, Reply([{"type": "text", "text": FIRST}, {"type": "text", "text": LONG}])),
        Reply(ANSWER),
    ),
    "in the thinking": (Cut(2, Reply(LONG, thinking=THOUGHT)), Reply(ANSWER, thinking="Again.")),
    "behind the thinking": (Cut(8, Reply(LONG, thinking=THOUGHT)), Reply(ANSWER, thinking="Again.")),
}
# Where the first call is whole, it is made, and the CLI asks for nothing more.
AGAIN = ToolUse([(CALL, {"city": "Rome"})], text=ANSWER)
WITH_CALLS: dict[str, tuple[Cut, list[Reply]]] = {
    "in the text": (Cut(3, ToolUse([(CALL, {"city": "A"})], text=LONG)), [AGAIN]),
    "in a call": (Cut(6, ToolUse([WRITES], text=FIRST)), [AGAIN]),
    "behind a call": (Cut(9, ToolUse([(CALL, {"city": "A"}), WRITES], text=FIRST)), []),
}


def words(seen: Seen) -> str:
    """The model's own words in a request, as the model reads them."""
    said = [text for role, text in seen.texts() if role == "assistant" and not text.startswith("tool_use: ")]
    return JOIN.join(text.strip() for text in said)


async def told(engine: Engine) -> str:
    (agent,) = [row.agent async for row in engine.store.summaries("local")]
    return "".join([piece async for piece in FORMATS["markdown"].write(engine.store, agent, sandbox="")])


# What every run tries: each cut, each wire, either CLI, streamed and whole.
QUICK = {
    ("in the first text", "chat", True, "claude_2"),
    ("in the first text", "messages", True, "claude_1"),
    ("in a later text", "responses", True, "claude_2"),
    ("in a later text", "ollama", False, "claude_2"),
    ("in the thinking", "generate", True, "claude_2"),
    ("behind the thinking", "interactions", True, "claude_2"),
}


def _cases() -> Iterator[object]:
    """The whole matrix. All but `QUICK` of it is `full`."""
    for case in product(CUTS, WIRES, (True, False), ("claude_2", "claude_1")):
        where, wire, stream, cli = case
        name = f"{where}-{wire}-{'streamed' if stream else 'whole'}-{cli}"
        yield pytest.param(*case, id=name, marks=() if case in QUICK else pytest.mark.full)


def _cases_with_calls() -> Iterator[object]:
    """Each cut on each wire; in every run each cut once, on a wire of its own."""
    for (at, where), (number, wire), stream in product(enumerate(WITH_CALLS), enumerate(WIRES), (True, False)):
        quick = number == at and stream is (at != 1)
        name = f"{where}-{wire}-{'streamed' if stream else 'whole'}"
        yield pytest.param(where, wire, stream, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("where", "wire", "stream", "claude"), list(_cases()), indirect=["claude"])
@pytest.mark.sample(3)
async def test_an_answer_is_the_same_words_for_client_chain_and_model(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, where: str, wire: str, stream: bool
) -> None:
    cut, answer = held(CUTS[where][0]), CUTS[where][1]
    upstream.next(cut, answer)
    async with (
        proxied(make_settings(claude_bin=claude)) as (engine, root),
        historian(wire, root, stream=stream) as client,
        let_go(cut, engine=engine, stream=stream),
    ):
        await client.ask("hello")
        assert cut.event.is_set()
        has, before = client.words, upstream.requests[-1]
        assert has.endswith(ANSWER)
        if not stream:
            assert LONG[:8] not in has
        await client.ask("list")
        first, second = await the_one_chain(engine, 2)
        assert answer_text(first.output) == has
        assert words(upstream.requests[-1]) == has
        assert (second.placed.rule, second.placed.diverged_at) == ("history", None)
        assert second.continuity in ("warm", "resumed")
        assert upstream.requests[-1].prefix_kept(before) >= KEPT
        assert "The provider's stream was cut" in await told(engine)


@pytest.mark.parametrize(("where", "wire", "stream"), list(_cases_with_calls()))
@pytest.mark.sample(1)
async def test_only_calls_of_the_chain_come_out(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, where: str, wire: str, stream: bool
) -> None:
    first_try, again = WITH_CALLS[where]
    cut = held(first_try)
    upstream.next(cut, *again)
    async with (
        proxied(make_settings(claude_bin=claude_2)) as (engine, root),
        historian(wire, root, stream=stream, tools=True) as client,
        let_go(cut, engine=engine, stream=stream),
    ):
        await client.ask("hello")
        assert cut.event.is_set()
        has, before = client.words, upstream.requests[-1]
        assert len(client.calls) == 1
        upstream.next(Reply("Thanks."))
        await client.bring()
        first, second = await the_one_chain(engine, 2)
        assert [block["type"] for block in first.output].count("tool_use") == 1
        assert answer_text(first.output) == has
        shown = upstream.requests[-1]
        assert words(shown) == has
        assert len([text for _, text in shown.texts() if text.startswith(TOOL_RESULT) and RESULT in text]) == 1
        assert second.placed.diverged_at is None
        assert shown.prefix_kept(before) >= KEPT
        await client.ask("list")
        assert (await the_one_chain(engine, 3))[-1].continuity in ("warm", "resumed")
        assert upstream.requests[-1].prefix_kept(shown) >= KEPT
        assert words(upstream.requests[-1]) == JOIN.join((has, "Thanks."))
