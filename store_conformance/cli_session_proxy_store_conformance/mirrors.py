"""Transcripts that an application writes by itself: verbatim, in order, until turns take them over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from cli_session_proxy.domain.models import Agent, Link, Message, Record, Session
from cli_session_proxy.stores.base import ChainPart, MirroredLines, MirrorKey, NewChain, Store

from .samples import AWKWARD, StoreFactory, a_finished_turn, a_lease, a_turn, accepted, an_agent, opened

SESSION_ID = "00000000-0000-4000-8000-000000000001"
KEY = MirrorKey("project", SESSION_ID)


def _line(name: str) -> Record:
    return Record(f'{{"uuid":"{name}"}}', name)


async def _lines(store: Store, agent: Agent, key: MirrorKey = KEY) -> list[str] | None:
    found = await store.mirrored(agent.key, key)
    return None if found is None else [record.line for record in found]


async def mirrored_lines_come_back_in_order_once_and_under_their_own_key(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as beside:
        agent, other = await an_agent(store), await an_agent(store, "b")
        sub = MirrorKey("project", SESSION_ID, "subagents/agent-1")
        note = Record(f'{{"note":"{AWKWARD.encode("unicode_escape").decode()}"}}')
        await store.mirror(agent.key, KEY, [note, _line("one"), note])
        await beside.mirror(agent.key, KEY, [_line("one"), _line("two"), note])
        await store.mirror(agent.key, sub, [_line("one")])
        assert await _lines(store, agent) == [one.line for one in (note, _line("one"), note, _line("two"), note)]
        assert await _lines(store, agent, sub) == [_line("one").line]
        for nothing in (MirrorKey("elsewhere", SESSION_ID), MirrorKey("project", SESSION_ID, "subagents/agent-2")):
            assert await _lines(store, agent, nothing) is None
        assert await _lines(store, other) is None
        assert {key for key, at in await store.mirrors(agent.key, "project") if at > 1e9} == {KEY, sub}
        assert await store.mirrors(agent.key, "elsewhere") == await store.mirrors(other.key, "project") == []
        await store.delete_agent(agent.key)
        again = await an_agent(store)
        assert await _lines(store, again) is None


async def two_writers_of_one_transcript_lose_and_double_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as beside:
        agent = await an_agent(store)
        batches = [[_line(f"{batch}-{number}") for number in range(3)] for batch in range(10)]
        both = [*zip(batches, [store, beside] * 5, strict=True), *zip(batches, [beside, store] * 5, strict=True)]
        await asyncio.gather(*(one.mirror(agent.key, KEY, batch) for batch, one in both))
        found = await _lines(store, agent)
        assert found is not None
        assert sorted(found) == sorted(line.line for batch in batches for line in batch)
        for batch in batches:
            at = found.index(batch[0].line)
            assert found[at : at + 3] == [line.line for line in batch]


async def what_turns_take_over_is_mirrored_no_more_and_known_when_it_comes_again(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await store.mirror(agent.key, KEY, [_line("one"), _line("two"), _line("three")])
        turn = a_finished_turn(
            "t1", agent.key, None, "sonnet", (Message.user("hi"),), (), (_line("one"), _line("two")), 5.0, None, 0,
            session_id=SESSION_ID,
        )  # fmt: skip
        session = Session(SESSION_ID, agent.key, "t1", "", "", 5.0)
        link = Link(SESSION_ID, SESSION_ID, "t1", "adopted", {}, 5.0)
        taken = await store.adopt(a_lease(agent.key), [turn], session, [link], MirroredLines(KEY, 2))
        assert taken.id == "t1"
        assert await _lines(store, agent) == [_line("three").line]
        await store.mirror(agent.key, KEY, [_line("two"), _line("three"), _line("four")])
        assert await _lines(store, agent) == [_line("three").line, _line("four").line]
        (found,) = await store.mirrors(agent.key, "project")
        assert found[0] == KEY


async def a_chain_that_takes_the_name_of_an_empty_agent_has_its_mirrors(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        empty = await store.ensure_agent("local", "a", "a", named=True, now=1.0)
        await store.mirror(empty.key, KEY, [_line("one")])

        def parts() -> Iterator[ChainPart]:
            yield from ()

        agent = await store.import_chain(NewChain("local", "a", "a", True, 1.0, 2.0, lambda: None), parts())
        assert await _lines(store, agent) == [_line("one").line]
        assert (await accepted(store, a_turn(agent, "t1"))).agent_key == agent.key
