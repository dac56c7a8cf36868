"""What every `Store` must do, as plain async functions: run each of `CONTRACTS` with a factory.

    @pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
    async def test_contract(contract, tmp_path):
        await contract(lambda: MyStore(tmp_path / "store"))

Every call of the factory gives another store object, not yet open, on one and the same database, which is
empty at the start of a contract. A broken rule is an `AssertionError`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from ..models import Block, Link, Message, Record, Session, Turn
from ..stores.base import Arrival, Begun, ImportedTurn, KeyTaken, NewTurn, Standing
from .store_samples import (
    StoreFactory,
    a_begin,
    a_commit,
    a_session,
    a_turn,
    an_agent,
    complete,
    gathered,
    imported_turns,
    opened,
    raised,
    turn_of,
)

Contract = Callable[[StoreFactory], Awaitable[None]]

# Two kinds of trouble in one text: half a surrogate pair, and what needs more than one byte.
AWKWARD = '\ud800 né 漢字 \U0001f600 \u0000 \\ "'
IMAGE = "iVBORw0KGgo" + "Ab+/" * 40 + "=="


# --- agents ---


async def an_agent_is_made_once(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        both = await asyncio.gather(an_agent(one), an_agent(two), an_agent(one))
        assert both[0] == both[1] == both[2]
        assert both[0].head is None
        assert both[0].named
        assert await two.agent_by_key(both[0].key) == both[0]
        assert await two.agent("local", "other") is None


async def owners_never_meet(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        mine = await an_agent(store, "same", "me", named=False)
        theirs = await an_agent(store, "same", "them", named=False)
        assert mine.key != theirs.key
        await store.accept(a_turn(theirs, "t1", fingerprint="f", idempotency_key="k", idempotency_until=99.0))
        await store.commit(a_commit(await turn_of(store, "t1"), theirs, path_hash="h"))
        assert await store.turn_by_key("me", "k", 20.0) is None
        assert await store.turn_by_fingerprint("me", "f") is None
        assert await store.turns_by_hash("me", ["h"]) == []
        assert await store.turns_by_hash("me", ["h"], theirs.key) == []
        assert [turn.id for turn in await store.turns_by_hash("them", ["h"])] == ["t1"]
        assert [row.agent.key for row in await gathered(store.summaries("me"))] == [mine.key]
        own = await store.accept(a_turn(mine, "t2", idempotency_key="k", idempotency_until=99.0))
        found = await store.turn_by_key("me", "k", 20.0)
        assert found is not None
        assert found.id == own.id


# --- the life of a turn ---


async def a_turn_keeps_all_it_was_given(factory: StoreFactory) -> None:
    source: Block = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    asked = (
        Message("user", ({"type": "image", "source": source}, {"type": "text", "text": AWKWARD})),
        Message.assistant("x"),
    )
    async with opened(factory) as store:
        agent = await an_agent(store)
        new = NewTurn(
            "t1", agent.key, "opus", asked, 10.0, system=AWKWARD, effort="high", profile="p", reason={"why": AWKWARD},
            origin="chat", fingerprint="f", instance="i",
        )  # fmt: skip
        accepted = await store.accept(new)
        assert accepted == await store.turn("t1")
        assert (accepted.status, accepted.input, accepted.system) == ("queued", asked, AWKWARD)
        assert (accepted.effort, accepted.profile, accepted.instance) == ("high", "p", "i")
        await store.begin(a_begin(accepted))
        running = await turn_of(store, "t1")
        assert (running.status, running.session_id, running.frame_uuid) == ("running", "s1", "frame-t1")
        assert (running.attempts, running.started_at, running.instance) == (({"n": 1},), 12.0, "i")
        done = a_commit(
            running, agent, output=({"type": "image", "source": source},), tools=({"source": source},), reason={"c": 1}
        )
        committed = await store.commit(done)
        assert committed == await store.turn("t1")
        assert committed.output == done.output
        assert committed.tools == done.tools
        assert committed.input == asked
        assert committed.reason == {"why": AWKWARD, "begun": True, "c": 1}
        assert (committed.usage, committed.cost_usd) == (done.usage, 0.25)
        assert (committed.path_hash, committed.depth, committed.finished_at) == ("hash-t1", 1, 13.0)


async def a_commit_moves_everything_at_once(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as other:
        agent = await an_agent(store)
        link = Link(None, "s1", "t1", "started", {"evidence": AWKWARD}, 13.0)
        await complete(store, agent, "t1", links=(link,))
        chain = await other.chain(agent.key)
        assert chain is not None
        assert chain.agent.head == "t1"
        assert chain.sessions == (a_session(agent, "s1", "t1"),)
        assert chain.links == (link,)
        assert await other.records("t1") == [Record('{"r": "t1"}')]
        await complete(store, agent, "t2", "t1", move_head=False)
        again = await other.agent_by_key(agent.key)
        assert again is not None
        assert again.head == "t1"
        assert await other.chain(agent.key + 1) is None


async def a_failed_commit_leaves_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        turn = await store.accept(a_turn(agent, "t1"))
        await store.begin(a_begin(turn))
        before = await turn_of(store, "t1")
        bad = Link(None, "s1", "no such turn", "started", {}, 13.0)
        error = await raised(store.commit(a_commit(turn, agent, links=(bad,))))
        assert error is not None
        assert await turn_of(store, "t1") == before
        assert await store.records("t1") == []
        assert await store.session("s1") is None
        chain = await store.chain(agent.key)
        assert chain is not None
        assert (chain.agent.head, chain.sessions, chain.links) == (None, (), ())
        assert (await store.commit(a_commit(turn, agent))).status == "completed"


async def an_acknowledged_turn_is_not_written_over(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        assert await raised(store.commit(a_commit(done, agent, output=()))) is not None
        assert await raised(store.fail("t1", "failed", {"code": "x"}, (), {}, 20.0)) is not None
        assert await raised(store.begin(a_begin(done))) is not None
        assert await raised(store.requeue("t1", None)) is not None
        assert await turn_of(store, "t1") == done


async def a_failed_turn_dirties_its_session_and_leaves_the_head(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        turn = await store.accept(a_turn(agent, "t2", "t1"))
        await store.begin(a_begin(turn))
        failed = await store.fail("t2", "failed", {"code": "upstream_error"}, ({"n": 1},), {"total": 1}, 20.0)
        assert failed == await store.turn("t2")
        assert (failed.status, failed.error, failed.finished_at) == ("failed", {"code": "upstream_error"}, 20.0)
        session = await store.session("s1")
        assert session is not None
        assert (session.mark, session.tip_turn_id) == (None, "t1")
        after = await store.agent_by_key(agent.key)
        assert after is not None
        assert after.head == "t1"


async def a_requeued_turn_keeps_its_place(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        first = await store.accept(a_turn(agent, "t2", "t1"))
        await store.begin(a_begin(first))
        await store.fail("t2", "cancelled", {"code": "turn_cancelled"}, ({"n": 1},), {}, 20.0)
        await store.accept(a_turn(agent, "t3", "t1"))
        again = await store.requeue("t2", "other")
        assert again == await store.turn("t2")
        assert (again.seq, again.parent_id, again.status) == (first.seq, "t1", "queued")
        assert (again.error, again.finished_at, again.instance) == (None, None, "other")
        await store.begin(a_begin(again))
        assert (await turn_of(store, "t2")).attempts == ({"n": 1}, {"n": 1})
        assert (await store.commit(a_commit(again, agent))).status == "completed"


async def the_frames_of_every_attempt_are_known(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        turn = await store.accept(a_turn(agent, "t1"))
        for frame in ("f1", "f2", "f2"):
            await store.begin(Begun(turn.id, None, "s1", frame, "started", {}, 12.0, {}))
        assert await store.own_frames(agent.key, ["f1", "f2", "f3"]) == {"f1", "f2"}
        assert await store.own_frames(other.key, ["f1"]) == set()
        assert await store.own_frames(agent.key, []) == set()


async def an_idempotency_key_belongs_to_one_turn(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await an_agent(one)
        news = [a_turn(agent, f"t{n}", idempotency_key="k", idempotency_until=50.0) for n in range(4)]
        results = await asyncio.gather(
            *(store.accept(new) for store, new in zip((one, two, one, two), news, strict=True)), return_exceptions=True
        )
        won = [result for result in results if isinstance(result, Turn)]
        assert len(won) == 1
        taken = [result for result in results if isinstance(result, KeyTaken)]
        assert [error.turn_id for error in taken] == [won[0].id] * 3
        assert [turn.id for turn in await gathered(one.turns(agent.key))] == [won[0].id]
        assert await one.turn_by_key("local", "k", 49.0) == won[0]
        assert await one.turn_by_key("local", "k", 50.0) is None
        late = await one.accept(a_turn(agent, "late", at=51.0, idempotency_key="k", idempotency_until=99.0))
        assert await two.turn_by_key("local", "k", 52.0) == late


# --- order and search ---


async def acceptance_is_one_order_for_all(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await an_agent(one)
        turns = await asyncio.gather(
            *(store.accept(a_turn(agent, f"{name}{n}")) for n in range(20) for name, store in (("x", one), ("y", two)))
        )
        assert len({turn.seq for turn in turns}) == 40
        last = await one.accept(a_turn(agent, "last"))
        assert last.seq > max(turn.seq for turn in turns)
        streamed = [turn.seq for turn in await gathered(two.turns(agent.key))]
        assert streamed == sorted(streamed)
        assert len(streamed) == 41
        assert [turn.id for turn in await gathered(two.turns(agent.key, after_seq=streamed[-2]))] == ["last"]
        await two.delete_agent(agent.key)
        reborn = await an_agent(one)
        assert reborn.key != agent.key
        assert (await one.accept(a_turn(reborn, "first"))).seq > last.seq


def _outline(turn: Turn) -> tuple[object, ...]:
    return turn.seq, turn.id, turn.parent_id, turn.status, turn.model, turn.session_id, turn.created_at, turn.input


async def long_chains_stream_whole(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, count = await an_agent(store), 250
        await store.import_turns(imported_turns(agent, count), head=f"i{count - 1}")
        ids = [f"i{n}" for n in range(count)]
        whole, brief = [await gathered(store.turns(agent.key, brief=brief)) for brief in (False, True)]
        assert [turn.id for turn in whole] == ids
        assert [_outline(turn) for turn in brief] == [_outline(turn) for turn in whole]
        assert not any(turn.output for turn in brief)
        assert [turn.id for turn in await store.path(ids[-1])] == ids
        assert [record.line for record in await store.records(ids[-1])] == [f'{{"n": {n}}}' for n in range(count)]
        assert len(await store.turns_by_hash("local", [f"h{n}" for n in range(1200)], agent.key)) == count


async def turns_are_paged_newest_first_with_their_links(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        for n in range(5):
            link = Link(None, "s1", f"t{n}", "rebuilt" if n else "started", {"n": n}, float(n))
            await complete(store, agent, f"t{n}", f"t{n - 1}" if n else None, links=(link,))
            await complete(store, other, f"x{n}", session="s2")
        first = await store.page(agent.key, before_seq=None, limit=2)
        assert [turn.id for turn in first.turns] == ["t4", "t3"]
        assert sorted(link.turn_id or "" for link in first.links) == ["t3", "t4"]
        assert (first.newest, first.total, first.link_counts) == (5, 5, {"started": 1, "rebuilt": 4})
        rest = await store.page(agent.key, before_seq=first.turns[-1].seq, limit=9)
        assert [turn.id for turn in rest.turns] == ["t2", "t1", "t0"]
        assert (rest.newest, rest.total) == (3, 5)
        past = await store.page(agent.key, before_seq=rest.turns[-1].seq, limit=9)
        assert (past.turns, past.links, past.newest) == ((), (), 0)
        assert [link.turn_id for link in await store.repairs(agent.key, limit=3)] == ["t4", "t3", "t2"]
        assert len(await store.repairs(agent.key, limit=99)) == 4


async def an_import_is_all_or_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        good, bad = imported_turns(agent, 2)
        orphan = ImportedTurn(
            "o", agent.key, "no such turn", "sonnet", bad.input, bad.output, (), 2.0, None, 1
        )  # fmt: skip
        assert await raised(store.import_turns([good, bad, orphan])) is not None
        assert await gathered(store.turns(agent.key)) == []
        await store.import_turns([good, bad], head="i1")
        turn = await turn_of(store, "i1")
        assert (turn.status, turn.delivery, turn.origin) == ("completed", "delivered", "imported")
        found = await store.agent_by_key(agent.key)
        assert found is not None
        assert found.head == "i1"


async def a_path_is_one_branch_of_the_tree(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for turn_id, parent in (("t1", None), ("t2", "t1"), ("t3", "t1"), ("t4", "t3")):
            await complete(store, agent, turn_id, parent)
        assert [turn.id for turn in await store.path("t4")] == ["t1", "t3", "t4"]
        assert [record.line for record in await store.records("t4")] == [f'{{"r": "{n}"}}' for n in ("t1", "t3", "t4")]
        assert [turn.id for turn in await store.children("t1")] == ["t2", "t3"]
        assert await store.path("none") == []
        assert await store.records("none") == []


async def history_finds_only_what_it_may(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        named, anonymous = await an_agent(store, "n"), await an_agent(store, "h", named=False)
        await complete(store, named, "t1", path_hash="h")
        await complete(store, anonymous, "t2", session="s2", path_hash="h")
        await store.accept(a_turn(anonymous, "t3"))
        assert [turn.id for turn in await store.turns_by_hash("local", ["h", "g"])] == ["t2"]
        assert [turn.id for turn in await store.turns_by_hash("local", ["h"], named.key)] == ["t1"]
        assert await store.turns_by_hash("local", []) == []


async def the_deepest_known_hash_decides(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        for owner in ("me", "them"):
            agent = await an_agent(store, "a", owner, named=False)
            for depth in range(40):
                turn_id, parent = f"{owner}{depth}", f"{owner}{depth - 1}" if depth else None
                await complete(store, agent, turn_id, parent, session=f"{owner}s", path_hash=f"{owner[0]}{depth}")
        known = [f"m{depth}" for depth in range(40)]
        for depth in (1, 2, 3, 17, 39, 40):
            foreign = [f"x{n}" for n in range(7)]
            for path in (known[:depth], [*known[:depth], *foreign]):
                found = await store.deepest("me", path)
                assert found is not None
                assert found.id == f"me{depth - 1}"
        assert await store.deepest("me", []) is None
        assert await store.deepest("me", ["x1", "x2"]) is None
        assert await store.deepest("them", known) is None


async def of_turns_on_one_path_a_head_wins_then_the_newest_that_arrived(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store, "a", named=False), await an_agent(store, "b", named=False)
        for number in range(3):
            await complete(store, agent, f"t{number}", session=f"s{number}", path_hash="h")
        await complete(store, other, "lost", session="s9", path_hash="h")
        await store.set_delivery("lost", "undelivered")

        async def found() -> str | None:
            turn = await store.deepest("local", ["h"])
            return turn.id if turn else None

        await store.set_head(agent.key, "t0")
        await store.set_head(other.key, None)
        assert await found() == "t0"
        await store.set_head(agent.key, None)
        assert await found() == "t2"


async def a_fingerprint_finds_the_latest(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for turn_id in ("t1", "t2", "t3"):
            await store.accept(a_turn(agent, turn_id, fingerprint="other" if turn_id == "t3" else "f"))
        await store.fail("t2", "failed", {}, (), {}, 20.0)
        found = await store.turn_by_fingerprint("local", "f")
        assert found is not None
        assert found.id == "t2"


async def what_is_open_is_listed(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        running = await store.accept(a_turn(agent, "t2"))
        await store.begin(a_begin(running))
        await store.accept(a_turn(agent, "t3"))
        assert [turn.id for turn in await gathered(store.unfinished())] == ["t2", "t3"]
        assert [turn.id for turn in await store.pending_deliveries()] == ["t1"]
        await store.set_delivery(done.id, "delivered")
        assert await store.pending_deliveries() == []
        assert (await turn_of(store, "t1")).delivery == "delivered"


# --- sessions, images, the end ---


async def a_session_belongs_to_one_agent_for_ever(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        one, two = await an_agent(store, "a"), await an_agent(store, "b")
        await complete(store, one, "t1")
        newer = a_session(one, "s2", "t1")
        await store.save_session(newer, [Link("s1", "s2", "t1", "rebuilt", {}, 12.0)])
        assert await store.session_at(one.key, "t1") == newer
        assert await store.session_at(two.key, "t1") is None
        assert await raised(store.save_session(a_session(two, "s1", None))) is not None
        assert await store.session("s1") == a_session(one, "s1", "t1")
        moved = Session("s2", one.key, None, "/elsewhere", "2.2", 11.0, None)
        await store.save_session(moved)
        assert await store.session("s2") == moved


async def one_read_tells_what_a_request_meets(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        assert await store.arrival("local", "f", "a") == Arrival(None, None)
        agent = await an_agent(store, "a")
        first = await store.accept(a_turn(agent, "t1", fingerprint="f"))
        latest = await store.accept(a_turn(agent, "t2", fingerprint="f"))
        assert latest.seq > first.seq
        assert await store.arrival("local", "f", "a") == Arrival(latest, agent)
        assert await store.arrival("local", "f", None) == Arrival(latest, None)
        assert await store.arrival("another", "f", "a") == Arrival(None, None)


async def one_read_tells_where_an_agent_stands(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store, "a")
        assert await store.standing(agent.key, None, at_head=True) == Standing(agent, None, None)
        first = await complete(store, agent, "t1")
        second = await complete(store, agent, "t2", parent="t1")
        at_head = await store.standing(agent.key, "t1", at_head=True)
        assert at_head is not None
        assert at_head == Standing(at_head.agent, second, await store.session_at(agent.key, second.id))
        assert at_head.agent == await store.agent_by_key(agent.key)
        assert at_head.session is not None
        behind = await store.standing(agent.key, "t1", at_head=False)
        assert behind is not None
        assert behind.parent == first
        fresh = await store.standing(agent.key, None, at_head=False)
        assert fresh is not None
        assert (fresh.parent, fresh.session) == (None, None)
        assert await store.standing(agent.key + 1, "t1", at_head=True) is None


async def record_lines_come_back_verbatim(factory: StoreFactory) -> None:
    lines = (
        json.dumps({"message": {"source": {"type": "base64", "data": IMAGE}}, "again": {"data": IMAGE}}),
        '{ "base64" :\t"' + IMAGE + '", "data":"' + IMAGE + '"}',
        json.dumps({"text": AWKWARD}),
        AWKWARD,
        "not json at all " + IMAGE,
        "",
    )
    records = tuple(Record(line, f"u{n}", synthetic=n == 1) for n, line in enumerate(lines))
    async with opened(factory) as store, opened(factory) as other:
        await complete(store, await an_agent(store), "t1", records=records)
        assert await other.records("t1") == list(records)


async def deleting_an_agent_leaves_the_others_whole(factory: StoreFactory) -> None:
    source = {"type": "image", "source": {"type": "base64", "data": IMAGE}}
    async with opened(factory) as store:
        gone, kept = await an_agent(store, "gone"), await an_agent(store, "kept")
        await complete(store, gone, "t1", output=(source,), links=(Link(None, "s1", "t1", "started", {}, 1.0),))
        await complete(store, gone, "t2", "t1")
        await store.accept(a_turn(gone, "t3", idempotency_key="k", idempotency_until=99.0))
        stays = await complete(store, kept, "t4", session="s2", output=(source,))
        await store.delete_agent(gone.key)
        assert await store.agent("local", "gone") is None
        assert await gathered(store.turns(gone.key)) == []
        assert await store.session("s1") is None
        assert await store.turn_by_key("local", "k", 20.0) is None
        assert await store.own_frames(gone.key, ["frame-t1"]) == set()
        assert await turn_of(store, "t4") == stays
        assert await store.session("s2") is not None
        await store.delete_agent(gone.key)


async def the_head_stays_within_its_agent(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        one, two = await an_agent(store, "a"), await an_agent(store, "b")
        await complete(store, one, "t1")
        assert await raised(store.set_head(two.key, "t1")) is not None
        await store.set_head(one.key, None)
        found = await store.agent("local", "a")
        assert found is not None
        assert found.head is None


async def summaries_come_last_active_first(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        idle, busy = await an_agent(store, "idle"), await an_agent(store, "busy")
        await complete(store, busy, "t1", links=(Link("s1", "s1", "t1", "rebuilt", {}, 1.0),))
        await store.accept(a_turn(busy, "t2", at=30.0))
        first, second = await gathered(store.summaries())
        assert (first.agent.key, second.agent.key) == (busy.key, idle.key)
        assert (first.turns, first.sessions, first.repairs, first.state) == (2, 1, 1, "queued")
        assert (first.cost_usd, first.last_at) == (0.25, 30.0)
        assert first.bytes > 0
        assert (second.turns, second.state, second.bytes) == (0, None, 0)
        assert [agent.key for agent in await store.expired_agents(30.0)] == [idle.key]
        assert {agent.key for agent in await store.expired_agents(31.0)} == {idle.key, busy.key}


async def a_restart_forgets_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        await store.accept(a_turn(agent, "t2", "t1"))
    async with opened(factory) as store:
        assert await store.turn("t1") == done
        assert [turn.id for turn in await gathered(store.unfinished())] == ["t2"]
        found = await store.agent("local", "a")
        assert found is not None
        assert found.head == "t1"
        assert (await store.accept(a_turn(agent, "t3"))).seq > done.seq


CONTRACTS: tuple[Contract, ...] = (
    an_agent_is_made_once,
    owners_never_meet,
    a_turn_keeps_all_it_was_given,
    a_commit_moves_everything_at_once,
    a_failed_commit_leaves_nothing,
    an_acknowledged_turn_is_not_written_over,
    a_failed_turn_dirties_its_session_and_leaves_the_head,
    a_requeued_turn_keeps_its_place,
    the_frames_of_every_attempt_are_known,
    an_idempotency_key_belongs_to_one_turn,
    acceptance_is_one_order_for_all,
    long_chains_stream_whole,
    turns_are_paged_newest_first_with_their_links,
    an_import_is_all_or_nothing,
    a_path_is_one_branch_of_the_tree,
    history_finds_only_what_it_may,
    a_fingerprint_finds_the_latest,
    what_is_open_is_listed,
    a_session_belongs_to_one_agent_for_ever,
    one_read_tells_what_a_request_meets,
    one_read_tells_where_an_agent_stands,
    record_lines_come_back_verbatim,
    deleting_an_agent_leaves_the_others_whole,
    the_head_stays_within_its_agent,
    summaries_come_last_active_first,
    a_restart_forgets_nothing,
)
