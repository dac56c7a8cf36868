"""Placement over a real store: random trees of several agents and owners, and histories that look like them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from cli_session_proxy.aside.pool import Aside
from cli_session_proxy.backends.base import Backend
from cli_session_proxy.domain import lineage
from cli_session_proxy.domain.models import Agent, Message, TurnRequest
from cli_session_proxy.engine.placement import Placement
from cli_session_proxy.stores.base import Store
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import a_finished_turn

# Few words, so that strangers say the same things.
WORD = st.sampled_from(["a", "b"])
SAID = st.tuples(WORD, WORD)
# (owner, name): None has its history found by what it says
WHO = st.sampled_from([("me", None), ("me", "ada"), ("me", "bob"), ("them", None), ("them", "ada")])


@dataclass(frozen=True)
class Grown:
    """A turn of the truth: whose, in which agent, and the whole conversation that ends with it."""

    id: str
    who: tuple[str, str | None]
    agent: Agent
    path: tuple[tuple[str, str], ...]
    hash: str


async def nobody(_one: object) -> bool:
    return False


@asynccontextmanager
async def placing() -> AsyncIterator[tuple[Store, Placement]]:
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "chains.sqlite3")
        await store.open()
        try:
            yield (
                store,
                Placement(
                    store,
                    cast(Backend, None),
                    Aside(),
                    instance="p",
                    idempotency_hours=24.0,
                    is_gone=nobody,
                    was_left=nobody,
                    clock=time.time,
                ),
            )  # placing a turn needs no backend
        finally:
            await store.close()


async def grow(store: Store, forest: list[tuple[tuple[str, str | None], int, tuple[str, str]]]) -> list[Grown]:
    """Each entry adds a turn: under an earlier turn of the same agent, or as the root of one."""
    grown: list[Grown] = []
    for number, (who, under, said) in enumerate(forest):
        own = [turn for turn in grown if turn.who == who]
        above = own[under % (len(own) + 1) - 1] if under % (len(own) + 1) else None
        agent = above.agent if above else await new_agent(store, who, number)
        path_hash = lineage.path_hash(
            above.hash if above else None, [Message.user(said[0])], Message.assistant(said[1]).content
        )
        turn = Grown(f"t{number}", who, agent, (*(above.path if above else ()), said), path_hash)
        await store.import_turns(
            [
                a_finished_turn(
                    turn.id, agent.key, above.id if above else None, "m", (Message.user(said[0]),),
                    Message.assistant(said[1]).content, (), 0.0, path_hash, len(turn.path),
                )
            ]
        )  # fmt: skip
        grown.append(turn)
    return grown


async def new_agent(store: Store, who: tuple[str, str | None], number: int) -> Agent:
    owner, name = who
    agent_id = name or f"auto_{number}"
    return await store.ensure_agent(owner, agent_id, f"d-{owner}-{agent_id}", named=name is not None, now=0.0)


async def check(
    forest: list[tuple[tuple[str, str | None], int, tuple[str, str]]],
    who: tuple[str, str | None],
    history: list[tuple[str, str]],
) -> None:
    async with placing() as (store, placement):
        grown = await grow(store, forest)
        messages = [message for asked, said in history for message in (Message.user(asked), Message.assistant(said))]
        request = TurnRequest("m", (*messages, Message.user("new")), "f", owner=who[0], agent_id=who[1])
        agent, own, imported = await placement.place(request)
    true = [turn for turn in grown if turn.who == who and turn.path == tuple(history[: len(turn.path)])]
    deepest = max((len(turn.path) for turn in true), default=0)
    found = next((turn for turn in grown if turn.id == own.parent_id), None)
    assert (len(found.path) if found else 0) == deepest
    assert own.placed.matched == 2 * deepest
    assert agent.owner == who[0]
    if found:
        assert found in true
        assert found.agent.key == agent.key
    else:
        assert who[1] is not None or agent.key not in {turn.agent.key for turn in grown}
    assert len(imported) == 2 * (len(history) - deepest)
    assert own.input == (Message.user("new"),)


@settings(max_examples=40, deadline=None)  # a store on disk each
@given(st.lists(st.tuples(WHO, st.integers(0, 20), SAID), max_size=12), WHO, st.lists(SAID, min_size=1, max_size=6))
def test_a_history_finds_its_deepest_true_ancestor_and_nobody_elses(
    forest: list[tuple[tuple[str, str | None], int, tuple[str, str]]],
    who: tuple[str, str | None],
    history: list[tuple[str, str]],
) -> None:
    asyncio.run(check(forest, who, history))
