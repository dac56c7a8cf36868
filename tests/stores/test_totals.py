"""What the list of agents shows of each is kept beside it: whatever happens, it is what a sum of all rows would be."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cli_session_proxy.domain.models import Agent, Link, Message, Placed, Record, Session, Status, Turn
from cli_session_proxy.errors import StoreUnavailable
from cli_session_proxy.stores.base import ChainPart, NewChain, ReportStep, WholeTurn
from cli_session_proxy.stores.sqlite.store import SqliteStore
from cli_session_proxy_store_conformance.samples import (
    IMAGE,
    a_begin,
    a_commit,
    a_lease,
    a_session,
    a_turn,
    accepted,
    an_agent,
    gathered,
    imported_turns,
    turn_of,
)

T = TypeVar("T")

SUMS = """
    SELECT agent.agent_id,
        (SELECT count(*) FROM turns WHERE agent_key = agent.key) turns,
        (SELECT count(*) FROM sessions WHERE agent_key = agent.key) sessions,
        (SELECT count(*) FROM links WHERE agent_key = agent.key AND reason IN ('rebuilt', 'moved')) repairs,
        (SELECT status FROM turns WHERE agent_key = agent.key ORDER BY seq DESC LIMIT 1) state,
        (SELECT coalesce(sum(cost_usd), 0) FROM turns WHERE agent_key = agent.key) cost,
        (SELECT coalesce(sum(bytes), 0) FROM turns WHERE agent_key = agent.key) + (
            SELECT coalesce(sum(size), 0) FROM images WHERE sha256 IN (
                SELECT sha256 FROM image_refs WHERE agent_key = agent.key
            )
        ) bytes,
        (SELECT count(*) FROM turns WHERE agent_key = agent.key AND status IN ('failed', 'refused')) failures,
        (SELECT count(*) FROM turns WHERE agent_key = agent.key AND json_extract(placed, '$.side')) side
    FROM agents agent
"""


def sums(path: Path) -> dict[str, tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as conn:
        return {name: (*row, cost) for name, *row, cost in _cost_last(conn.execute(SUMS))}


def _cost_last(found: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for name, turns, sessions, repairs, state, cost, size, failures, side in found:
        yield name, turns, sessions, repairs, state, size, failures, 0 < turns == side, pytest.approx(cost)


async def told(store: SqliteStore) -> dict[str, tuple[Any, ...]]:
    return {
        row.agent.agent_id: (
            row.turns, row.sessions, row.repairs, row.state, row.bytes, row.failures, row.side, row.cost_usd,
        )
        async for row in store.summaries()
    }  # fmt: skip


def an_image(n: int) -> dict[str, Any]:
    data = f"{n:08}{IMAGE}"[: len(IMAGE)]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


NAMES = st.sampled_from(["a", "b"])
PICTURES = st.lists(st.integers(0, 3), max_size=2)


class OneStore(RuleBasedStateMachine):
    """Turns of two agents: asked, answered, refused, failed, repeated, imported, adopted, rewound, deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "chains.sqlite3"
        self.store = SqliteStore(self.path)
        self.run(self.store.open())
        self.number = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def agent(self, name: str) -> Agent:
        return self.run(an_agent(self.store, name))

    def next(self) -> str:
        self.number += 1
        return f"{self.number}"

    def those(self, name: str, *statuses: Status) -> Sequence[Turn]:
        return [turn for turn in self.run(gathered(self.store.turns(self.agent(name).key))) if turn.status in statuses]

    @rule(name=NAMES, side=st.booleans(), pictures=PICTURES)
    def ask(self, name: str, side: bool, pictures: list[int]) -> None:
        content = ({"type": "text", "text": "what is it?"}, *map(an_image, pictures))
        more: dict[str, Any] = {"placed": Placed("new", side=side), "input": (Message("user", content),)}
        self.run(accepted(self.store, a_turn(self.agent(name), f"t{self.next()}", **more)))

    @rule(
        name=NAMES,
        status=st.sampled_from(["completed", "requires_action", "refused"]),
        cost=st.sampled_from([None, 0.0, 0.1, 2.5]),
        reasons=st.lists(st.sampled_from(["started", "rebuilt", "moved", "branched"]), max_size=2),
        pictures=PICTURES,
        moves=st.booleans(),
    )
    def answer(
        self, name: str, status: Status, cost: float | None, reasons: list[Any], pictures: list[int], moves: bool
    ) -> None:
        for turn in self.those(name, "queued", "running")[:1]:
            session = f"s-{name}-{self.number % 3}"
            self.run(self.store.begin(**a_begin(turn, session)))
            said = ({"type": "text", "text": "it is teal"}, *map(an_image, pictures))
            links = tuple(Link(None, session, turn.id, reason, {}, 1.0) for reason in reasons)
            more = {"status": status, "cost_usd": cost, "output": said, "links": links, "move_head": moves}
            self.run(self.store.commit(**a_commit(turn, self.agent(name), session, **more)))

    @rule(name=NAMES, status=st.sampled_from(["failed", "cancelled"]))
    def fail(self, name: str, status: Status) -> None:
        for turn in self.those(name, "queued", "running", "failed", "cancelled")[-1:]:
            self.run(self.store.fail(turn.id, status, {"code": "x"}, (), {}, 9.0, lease=a_lease(turn.agent_key)))

    @rule(name=NAMES)
    def ask_again(self, name: str) -> None:
        for turn in self.those(name, "failed", "cancelled")[:1]:
            self.run(self.store.requeue(turn.id, None))

    @rule(name=NAMES, count=st.integers(1, 3), adopted=st.booleans())
    def bring_in(self, name: str, count: int, adopted: bool) -> None:
        agent, mark = self.agent(name), self.next()
        new = imported_turns(agent, count, renamed=f"{mark}-")
        if adopted:
            session = a_session(agent, f"s-{name}-0", new[-1].turn.id)
            why = [Link(None, session.id, new[0].turn.id, "adopted", {}, 1.0)]
            self.run(self.store.adopt(a_lease(agent.key), new, session, why))
        else:
            self.run(self.store.import_turns(new))

    @rule(name=NAMES)
    def rewind(self, name: str) -> None:
        if not self.those(name, "queued", "running"):
            self.run(self.store.rewind(a_lease(self.agent(name).key), None))

    @rule(statuses=st.lists(st.sampled_from(["completed", "failed", "cancelled", "refused"]), max_size=4))
    def bring_in_a_chain(self, statuses: list[Status]) -> None:
        mark = self.next()
        parts: list[ChainPart] = [
            WholeTurn(
                Turn(f"{mark}-{n}", 0, 0, None, status, "opus", (Message.user("x"),), 1.0, cost_usd=0.3),
                (Record(f'{{"data": "{IMAGE}"}}'),),
            )
            for n, status in enumerate(statuses)
        ]
        parts.append(Session(f"00000000-0000-4000-8000-{int(mark):012}", 0, None, "", "2", 1.0))
        new = NewChain("local", f"c{mark}", f"c{mark}", True, 1.0, 2.0, lambda: None)
        self.run(self.store.import_chain(new, parts))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.run(self.store.delete_agent(self.agent(name).key))

    @invariant()
    def the_totals_are_the_sums(self) -> None:
        assert self.run(told(self.store)) == sums(self.path)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()


TestOneStore = OneStore.TestCase
TestOneStore.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


async def filled(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    try:
        agent = await an_agent(store)
        await accepted(store, a_turn(agent, "t1", placed=Placed("new", side=True)))
        turn = await turn_of(store, "t1")
        await store.begin(**a_begin(turn))
        link = Link(None, "s1", "t1", "rebuilt", {}, 1.0)
        await store.commit(**a_commit(turn, agent, output=(an_image(1),), links=(link,)))
        await accepted(store, a_turn(agent, "t2"))
        await store.fail("t2", "failed", {"code": "x"}, (), {}, 9.0)
        await an_agent(store, "empty")
    finally:
        await store.close()


def as_before(path: Path) -> None:
    """Without the totals, as a version before them has it."""
    with closing(sqlite3.connect(path)) as conn:
        for name in ("turns", "side", "failures", "cost_usd", "bytes", "sessions", "repairs"):
            conn.execute(f"ALTER TABLE agents DROP COLUMN {name}")
        conn.execute("DELETE FROM proxies")
        conn.execute("UPDATE meta SET value = '8' WHERE name = 'schema_version'")
        conn.commit()


async def test_an_older_store_is_summed_up_once_and_who_waits_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    await filled(path)
    expected = sums(path)
    await asyncio.to_thread(as_before, path)
    heard: list[tuple[str, int, int]] = []

    @contextmanager
    def progress() -> Iterator[ReportStep]:
        yield lambda step, done, total: heard.append((step, done, total))

    store = SqliteStore(path, progress=progress)
    await store.open()
    try:
        assert await told(store) == expected
    finally:
        await store.close()
    assert heard[-1] == ("from 0.1", 2, 2)
    pages = [(done, total) for step, done, total in heard if step == "a copy of the store"]
    assert pages
    assert all(0 < done <= total for done, total in pages)


async def test_a_store_that_another_proxy_uses_is_not_summed_up_under_it(tmp_path: Path) -> None:
    path = tmp_path / "chains.sqlite3"
    await filled(path)
    await asyncio.to_thread(as_before, path)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("INSERT INTO proxies (id, host, until) VALUES ('another', 'elsewhere', 9e9)")
        conn.commit()
    with pytest.raises(StoreUnavailable, match="stop every proxy"):
        await SqliteStore(path).open()
