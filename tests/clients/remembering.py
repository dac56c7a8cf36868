"""A served engine, and what every client that sends its whole history must get from it.

How a history is recognised is the core's business, and the CLI never learns which client it came from: so the clients
talk to `served_without_cli`, and one of them, with the longest conversation, to `served`, which has the real CLI.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..serving import serving
from ..talking import running
from ..without_cli import running_without_cli

TURNS = 10


def facts(turns: int = TURNS) -> list[str]:
    """What is said in each turn; the answer to each is in `answer_to`."""
    return [f"Remember: number {n} is {n * 7}" for n in range(turns)]


def answer_to(turn: int) -> str:
    return f"Noted: number {turn} is {turn * 7}."


@dataclass(frozen=True)
class Served:
    """`url` is what clients take as their base URL."""

    url: str
    engine: Engine
    upstream: Upstream

    async def assert_one_chain(self, texts: list[str]) -> None:
        """One agent, one session, one message a turn; the model saw every turn once and the cache held."""
        (chain,) = [summary async for summary in self.engine.store.summaries()]
        turns = [turn async for turn in self.engine.store.turns(chain.agent.key)]
        assert [turn.parent_id for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
        assert [[block.get("text") for message in turn.input for block in message.content] for turn in turns] == [
            [text] for text in texts
        ]
        assert [turn.continuity for turn in turns] == ["started"] + ["warm"] * (len(texts) - 1)
        assert [turn.placed.rule for turn in turns] == ["new"] + ["history"] * (len(texts) - 1)
        assert [turn.placed.matched for turn in turns] == [2 * n for n in range(len(texts))]
        assert not any(turn.placed.diverged_at is not None for turn in turns)
        assert chain.sessions == 1
        assert chain.agent.head == turns[-1].id
        self._assert_upstream(texts)

    def _assert_upstream(self, texts: list[str]) -> None:
        requests = self.upstream.requests
        assert len(requests) == len(texts)
        assert requests[-1].user_texts() == texts
        roles = [message["role"] for message in requests[-1].messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(texts) - 1) + ["user"]
        kept = [now.prefix_kept(before) for before, now in pairwise(requests)]
        assert kept == [1.0] * (len(texts) - 1)


@asynccontextmanager
async def served(settings: Settings, upstream: Upstream) -> AsyncIterator[Served]:
    async with running(settings) as engine, serving(engine, settings) as url:
        yield Served(url, engine, upstream)


@asynccontextmanager
async def served_without_cli(settings: Settings, upstream: Upstream) -> AsyncIterator[Served]:
    async with running_without_cli(settings, upstream) as engine, serving(engine, settings) as url:
        yield Served(url, engine, upstream)
