"""The life of a turn, and that nothing of it is lost."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from cli_session_proxy.domain.approvals import Approval
from cli_session_proxy.domain.evidence import Evidence, ExternalOrigin, Repair, StreamCut
from cli_session_proxy.domain.models import (
    Block,
    Fallback,
    LimitWait,
    Link,
    Message,
    Placed,
    Record,
    Tool,
    ToolChoice,
    Turn,
    TurnOptions,
)
from cli_session_proxy.domain.options import Parameters, Window
from cli_session_proxy.errors import LeaseLost
from cli_session_proxy.stores.base import AgentState, KeyTaken

from .samples import (
    AWKWARD,
    IMAGE,
    StoreFactory,
    a_begin,
    a_commit,
    a_lease,
    a_session,
    a_turn,
    accepted,
    an_agent,
    complete,
    gathered,
    opened,
    raised,
    turn_of,
)

PLACED = Placed("history", messages=3, matched=0, imported=2, diverged_at=0, delta=True)
OPTIONS = TurnOptions(
    {"schema": {"title": AWKWARD}}, (Tool("t", AWKWARD, strict=True),), ToolChoice("required", ("t",)), (AWKWARD,),
    Parameters(seed=7), {"conversation_id": AWKWARD, "n": 1}, Window(40, "turns"),
)  # fmt: skip
FALLBACK = Fallback("sonnet", "gpt", "rate_limited", 99.5, here=False)
WAIT = LimitWait(99.5, 9.5, AWKWARD, 2)
EVIDENCE = Evidence(
    ExternalOrigin("adoption", "s0", AWKWARD), "t0", "/x", AWKWARD, Repair("left_path", 2, "t0"),
    Repair("rewritten", 3, found="missing", also_at=("/y",)), True, -9, ("touched",), AWKWARD, ({"error": AWKWARD},),
    (StreamCut(1, 2),), {"trigger": AWKWARD}, True, "transcript", {"x": AWKWARD},
)  # fmt: skip


async def a_turn_keeps_all_it_was_given(factory: StoreFactory) -> None:
    source: Block = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    asked = (
        Message("user", ({"type": "image", "source": source}, {"type": "text", "text": AWKWARD})),
        Message.assistant("x"),
    )
    async with opened(factory) as store:
        agent = await an_agent(store)
        new = a_turn(
            agent, "t1", model="opus", input=asked, system=AWKWARD, effort="high", profile="p", placed=PLACED,
            options=OPTIONS, origin="chat", fingerprint="f", instance="i",
        )  # fmt: skip
        turn = await accepted(store, new)
        assert turn == await store.turn("t1")
        assert (turn.status, turn.input, turn.system) == ("queued", asked, AWKWARD)
        assert (turn.effort, turn.profile, turn.instance) == ("high", "p", "i")
        await store.begin(**a_begin(turn))
        running = await turn_of(store, "t1")
        assert running.evidence == Evidence(sandbox="/x")
        assert (running.status, running.session_id, running.frame_uuid) == ("running", "s1", "frame-t1")
        assert (running.attempts, running.started_at, running.instance) == (({"n": 1},), 12.0, "i")
        done = a_commit(
            running,
            agent,
            output=({"type": "image", "source": source},),
            tools=({"source": source},),
            evidence=EVIDENCE,
            stop_sequence=AWKWARD,
            backend="b",
            answered_by="m",
            fallback=FALLBACK,
        )
        committed = await store.commit(**done)
        assert committed == await store.turn("t1")
        assert committed.output == done["turn"].output
        assert committed.tools == done["turn"].tools
        assert committed.input == asked
        assert (committed.placed, committed.options, committed.evidence) == (PLACED, OPTIONS, EVIDENCE)
        assert (committed.stop_sequence, committed.backend, committed.answered_by) == (AWKWARD, "b", "m")
        assert committed.fallback == FALLBACK
        assert (committed.usage, committed.cost_usd) == (done["turn"].usage, 0.25)
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
        turn = await accepted(store, a_turn(agent, "t1"))
        await store.begin(**a_begin(turn))
        before = await turn_of(store, "t1")
        bad = Link(None, "s1", "no such turn", "started", {}, 13.0)
        error = await raised(store.commit(**a_commit(turn, agent, links=(bad,))))
        assert error is not None
        assert await turn_of(store, "t1") == before
        assert await store.records("t1") == []
        assert await store.session("s1") is None
        chain = await store.chain(agent.key)
        assert chain is not None
        assert (chain.agent.head, chain.sessions, chain.links) == (None, (), ())
        assert (await store.commit(**a_commit(turn, agent))).status == "completed"


async def what_a_running_turn_has_to_show_is_there_before_it_ends_and_after_it_failed(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as other:
        agent = await an_agent(store)
        turn = await accepted(store, a_turn(agent, "t1"))
        lease = a_lease(agent.key)
        assert await raised(store.note(lease, "t1", Evidence(left_off="t0"))) is not None  # it waits
        await store.begin(**a_begin(turn))
        before = await turn_of(store, "t1")
        noted = Evidence(approvals=(Approval("appr_1", "Bash", AWKWARD, 12.5),))
        await store.note(lease, "t1", noted)
        assert await turn_of(other, "t1") == replace(before, evidence=noted)
        failed = await store.fail("t1", "failed", {"code": "x"}, (), {}, 20.0, lease=lease)
        assert failed.evidence == noted
        assert await raised(store.note(lease, "t1", Evidence())) is not None
        assert await raised(store.note(lease, "t9", Evidence())) is not None
        await complete(store, agent, "t2")
        assert await raised(store.note(lease, "t2", noted)) is not None


async def an_acknowledged_turn_is_not_written_over(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        assert await raised(store.commit(**a_commit(done, agent, output=()))) is not None
        assert await raised(store.fail("t1", "failed", {"code": "x"}, (), {}, 20.0)) is not None
        assert await raised(store.begin(**a_begin(done))) is not None
        assert await raised(store.requeue("t1", None)) is not None
        assert await turn_of(store, "t1") == done


async def a_failed_turn_dirties_its_session_and_leaves_the_head(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        turn = await accepted(store, a_turn(agent, "t2", "t1"))
        await store.begin(**a_begin(turn))
        failed = await store.fail(
            "t2", "failed", {"code": "upstream_error"}, ({"n": 1},), {"total": 1}, 20.0, lease=a_lease(agent.key)
        )
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
        first = await accepted(store, a_turn(agent, "t2", "t1"))
        await store.begin(**a_begin(first))
        await store.fail("t2", "cancelled", {"code": "turn_cancelled"}, ({"n": 1},), {}, 20.0, lease=a_lease(agent.key))
        await accepted(store, a_turn(agent, "t3", "t1"))
        again = await store.requeue("t2", "other")
        assert again == await store.turn("t2")
        assert (again.seq, again.parent_id, again.status) == (first.seq, "t1", "queued")
        assert (again.error, again.finished_at, again.instance) == (None, None, "other")
        await store.begin(**a_begin(again))
        assert (await turn_of(store, "t2")).attempts == ({"n": 1}, {"n": 1})
        assert (await store.commit(**a_commit(again, agent))).status == "completed"


async def a_turn_that_waits_for_a_limit_keeps_its_place_until_it_begins_again(factory: StoreFactory) -> None:
    async with opened(factory) as store, opened(factory) as other:
        agent = await an_agent(store)
        await complete(store, agent, "t1")
        first = await accepted(store, a_turn(agent, "t2", "t1", instance="here"))
        await store.begin(**a_begin(first))
        for name, instance in (("t3", "here"), ("t4", "there")):
            await accepted(store, a_turn(agent, name, "t1", instance=instance))
        lease = a_lease(agent.key)
        waits = await store.postpone(lease, "t2", WAIT, ({"n": 1},), {"queued": 1.0}, behind=("t1", "t3", "t4"))
        assert waits == await other.turn("t2")
        assert (waits.seq, waits.status, waits.limit_wait, waits.attempts) == (first.seq, "queued", WAIT, ({"n": 1},))
        stand = [(turn.id, turn.limit_wait) for turn in await other.unfinished_of(agent.key)]
        assert stand == [("t2", WAIT), ("t3", WAIT), ("t4", None)]
        assert (await turn_of(store, "t1")).limit_wait is None
        session = await store.session("s1")
        assert session is not None
        assert session.mark is None
        await store.begin(**a_begin(waits))
        assert (await turn_of(store, "t2")).limit_wait is None
        ended = await store.fail("t3", "cancelled", {"code": "x"}, (), {}, 3.0)
        assert (ended.limit_wait, (await turn_of(store, "t3")).limit_wait) == (None, None)
        late = await accepted(store, a_turn(agent, "t5", "t1", limit_wait=WAIT))
        assert (late.limit_wait, (await turn_of(store, "t5")).limit_wait) == (WAIT, WAIT)


async def a_turn_that_waits_is_taken_over_by_the_leases_holder_alone(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        for name in ("t1", "t2", "t3"):
            await accepted(store, a_turn(agent, name, instance="here"))
        lease = a_lease(agent.key)
        for name in ("t1", "t3"):
            await store.postpone(lease, name, WAIT, (), {})
        await store.set_delivery("t3", "delivered")  # one in the background, whose client has its id
        known = await store.take_over(lease, "t3", "there")
        assert known is not None
        assert (known.instance, known.delivery) == ("there", "delivered")
        taken = await store.take_over(lease, "t1", "there")
        assert taken == await store.turn("t1")
        assert taken is not None
        assert (taken.instance, taken.limit_wait, taken.status) == ("there", WAIT, "queued")
        assert taken.delivery == "uncertain"  # its clients were the other proxy's
        assert await store.take_over(lease, "t2", "there") is None  # it waits for no limit
        await store.begin(**a_begin(taken))
        assert await store.take_over(lease, "t1", "here") is None  # it runs
        stale = replace(lease, epoch=lease.epoch - 1)
        assert isinstance(await raised(store.take_over(stale, "t2", "there")), LeaseLost)
        assert isinstance(await raised(store.postpone(stale, "t1", WAIT, (), {})), LeaseLost)


async def the_frames_of_every_attempt_are_known(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "b")
        turn = await accepted(store, a_turn(agent, "t1"))
        for frame in ("f1", "f2", "f2"):
            await store.begin(**a_begin(turn, frame_uuid=frame))
        assert await store.own_frames(agent.key, ["f1", "f2", "f3"]) == {"f1", "f2"}
        assert await store.own_frames(other.key, ["f1"]) == set()
        assert await store.own_frames(agent.key, []) == set()


async def an_idempotency_key_belongs_to_one_turn(factory: StoreFactory) -> None:
    async with opened(factory) as one, opened(factory) as two:
        agent = await an_agent(one)
        news = [a_turn(agent, f"t{n}", idempotency_key="k", idempotency_until=50.0) for n in range(4)]
        results = await asyncio.gather(
            *(accepted(store, new) for store, new in zip((one, two, one, two), news, strict=True)),
            return_exceptions=True,
        )
        won = [result for result in results if isinstance(result, Turn)]
        assert len(won) == 1
        taken = [result for result in results if isinstance(result, KeyTaken)]
        assert [error.turn_id for error in taken] == [won[0].id] * 3
        assert [turn.id for turn in await gathered(one.turns(agent.key))] == [won[0].id]
        assert await one.turn_by_key("local", "k", 49.0) == won[0]
        assert await one.turn_by_key("local", "k", 50.0) is None
        late = await accepted(one, a_turn(agent, "late", at=51.0, idempotency_key="k", idempotency_until=99.0))
        assert await two.turn_by_key("local", "k", 52.0) == late


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


async def a_restart_forgets_nothing(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        done = await complete(store, agent, "t1")
        await accepted(store, a_turn(agent, "t2", "t1"))
    async with opened(factory) as store:
        assert await store.turn("t1") == done
        assert [turn.id for turn in await gathered(store.unfinished())] == ["t2"]
        found = await store.agent("local", "a")
        assert found is not None
        assert found.head == "t1"
        assert (await accepted(store, a_turn(agent, "t3"))).seq > done.seq


async def turns_that_wait_are_those_of_every_proxy_or_of_all_but_one(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent, other = await an_agent(store), await an_agent(store, "other")
        for name, instance in (("t1", "here"), ("t2", "there"), ("t3", None)):
            await accepted(store, a_turn(agent, name, instance=instance))
        await accepted(store, a_turn(other, "t4", instance="there"))
        await store.fail("t3", "cancelled", {"code": "x"}, (), {}, 3.0)
        await accepted(store, a_turn(agent, "t5"))
        for but, ids in ((None, ["t1", "t2", "t5"]), ("here", ["t2", "t5"]), ("there", ["t1", "t5"])):
            assert [turn.id for turn in await store.unfinished_of(agent.key, excluding=but)] == ids


async def a_turn_that_continues_a_named_one_stands_there_with_the_newest_session_of_it(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        empty = await store.agent_state(agent.key, None, at_head=True)
        assert empty is not None
        assert (empty.agent, empty.parent, empty.session) == (agent, None, None)
        first = await complete(store, agent, "t1", session="s1")
        await store.save_session(a_session(agent, "s2", "t1", at=20.0))
        assert (await store.agent_state(agent.key, None, at_head=True)) == AgentState(
            replace(agent, head="t1"), first, a_session(agent, "s2", "t1", at=20.0)
        )
        last = await complete(store, agent, "t2", "t1", session="s2")
        stands: list[tuple[str | None, bool, Turn | None, str | None]] = [
            (None, True, last, "s2"),
            ("t1", False, first, "s1"),
            ("t2", False, last, "s2"),
            ("nothing", False, None, None),
            (None, False, None, None),
        ]
        for parent, at_head, found, session in stands:
            now = await store.agent_state(agent.key, parent, at_head=at_head)
            assert now is not None
            assert (now.agent.head, now.parent) == ("t2", found)
            assert (now.session.id if now.session else None) == session
        assert await store.agent_state(agent.key + 99, None, at_head=True) is None


async def a_turn_that_is_accepted_is_told_how_its_agent_stands(factory: StoreFactory) -> None:
    async with opened(factory) as store:
        agent = await an_agent(store)
        first, state = await store.accept(**a_turn(agent, "t1", placed=Placed("head"), instance="here"))
        assert state == AgentState(agent, None, None)
        assert not state.others
        await store.begin(**a_begin(first))
        done = await store.commit(**a_commit(first, agent))
        for name, placed, instance in (("t2", Placed("head"), "here"), ("t3", Placed("id"), "there")):
            turn, state = await store.accept(**a_turn(agent, name, "t1", placed=placed, instance=instance))
            assert turn == await store.turn(name)
            assert state == await store.agent_state(agent.key, "t1", at_head=True)
            assert state == AgentState(replace(agent, head="t1"), done, a_session(agent, "s1", "t1"))
            assert state.others is (name == "t3")
        _, lost = await store.accept(**a_turn(agent, "t4", placed=Placed("id"), instance="there"))
        assert lost == AgentState(replace(agent, head="t1"), None, None)
        assert lost.others
