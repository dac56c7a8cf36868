"""The bodies of the store's write transactions: each runs whole, under the write lock, or changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Row, bindparam, case, or_, select, update

from ...domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    ON_PATH,
    REPAIR_REASONS,
    Agent,
    Delivery,
    Link,
    Placed,
    Record,
    Session,
    Status,
    Turn,
)
from ...errors import NotFound, SessionBusy, StoreUnavailable
from ..base import Commit, ImportedTurn, KeyTaken, Lease, NewTurn, PathChanged, Taken, TurnStart
from . import conversing, leases, mirroring, reading, rows
from .database import Cursor, InsertNew, Prepared, firsts
from .rows import Cutter
from .tables import PROBE, agents, frames, idempotency_keys, links, meta, records, sessions, turns

_LINE = itemgetter("line")
_INSERT_TURN = Prepared(turns.insert())
_INSERT_RECORD = Prepared(records.insert())
_INSERT_LINK = Prepared(links.insert())
_INSERT_SESSION = Prepared(InsertNew(sessions))
_INSERT_FRAME = Prepared(InsertNew(frames))
_INSERT_AGENT = Prepared(InsertNew(agents))
_INSERT_META = Prepared(InsertNew(meta))
_TAKE_KEY = Prepared(InsertNew(idempotency_keys))
_THIS_TURN = turns.update().where(turns.c.id == bindparam("turn_id"))
_UPDATE_TURN = Prepared(_THIS_TURN)
_SET_DELIVERY = Prepared(_THIS_TURN.where(turns.c.delivery != "delivered"))
_UPDATE_SESSION = Prepared(
    sessions.update().where(sessions.c.id == bindparam("session_id"), sessions.c.agent_key == bindparam("of_agent"))
)
_THIS_AGENT = agents.update().where(agents.c.key == bindparam("of_agent"))
# Something of a later time may have been written meanwhile. The row is locked all the same: turns of an agent get
# their `seq` in the order in which they are committed.
_LAST_AT = case((agents.c.last_at < bindparam("now"), bindparam("now")), else_=agents.c.last_at)
# Its totals grow in the statement that locks it anyway. `more_…`: by so much.
_GROWN = {name: agents.c[name] + bindparam(f"more_{name}") for name in rows.TOTALS}
_NOTHING_MORE = {f"more_{name}": 0 for name in rows.TOTALS}
_COUNT = Prepared(_THIS_AGENT.values(**_GROWN))
_ACTIVE = Prepared(_THIS_AGENT.values(last_at=_LAST_AT, **_GROWN))
_NEW_HEAD = Prepared(_THIS_AGENT.values(last_at=_LAST_AT, **_GROWN))
_MOVE_HEAD = Prepared(_THIS_AGENT)

_UNFINISHED: frozenset[Status] = frozenset({"queued", "running"})
# What an agent's `failures` counts.
_LOST: frozenset[Status] = frozenset({"failed", "refused"})
_FAILED: frozenset[Status] = FINISHED - ANSWERED
_NOT_ANSWERED: frozenset[Status] = _UNFINISHED | _FAILED
_NEVER_BEGUN: frozenset[Status] = _NOT_ANSWERED - {"running"}
# Read to be changed: PostgreSQL locks the row, SQLite has locked the file.
_WHOLE = Prepared(select(*rows.TURN).where(turns.c.id == bindparam("turn_id")).with_for_update(key_share=True))
_STATE = Prepared(
    select(turns.c.agent_key, turns.c.status, turns.c.placed, turns.c.attempts, turns.c.instance, turns.c.delivery)
    .where(turns.c.id == bindparam("turn_id"))
    .with_for_update(key_share=True)
)
_CHILD = Prepared(
    select(turns.c.id)
    .where(turns.c.parent_id == bindparam("of_turn"), or_(*(turns.c.status == one for one in ("running", *ON_PATH))))
    .limit(1)
)


def probe(conn: Connection, said: str) -> None:
    """A page of the file is written, whatever it held."""
    if not conn.execute(meta.update().where(meta.c.name == PROBE).values(value=said)).rowcount:
        _INSERT_META.run(conn, {"name": PROBE, "value": said})


def ensure_agent(conn: Connection, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
    found = reading.agent(conn, owner, agent_id)
    if found is None:
        values = {"owner": owner, "agent_id": agent_id, "dir": dir, "named": named, "created_at": now, "last_at": now}
        _INSERT_AGENT.run(conn, values)
        found = reading.agent(conn, owner, agent_id)
    if found is None:
        raise StoreUnavailable(f"the directory {dir} belongs to another agent: choose another name")
    return found


def delete_agent(conn: Connection, key: int) -> None:
    own = select(turns.c.id).where(turns.c.agent_key == key)
    leases.forget(conn, key, own)
    conn.execute(idempotency_keys.delete().where(idempotency_keys.c.turn_id.in_(own)))
    conn.execute(records.delete().where(records.c.turn_id.in_(own)))
    conn.execute(links.delete().where(links.c.agent_key == key))
    conn.execute(sessions.delete().where(sessions.c.agent_key == key))
    conn.execute(frames.delete().where(frames.c.agent_key == key))
    conversing.forget(conn, key)
    mirroring.forget(conn, key)
    rows.forget_images(conn, key)
    conn.execute(turns.delete().where(turns.c.agent_key == key))
    conn.execute(agents.delete().where(agents.c.key == key))


# --- the life of a turn ---


def accept(conn: Connection, new: NewTurn) -> tuple[Turn, Cursor]:
    """The turn without its seq, which is asked for when it is committed: a server is gone to and back once."""
    turn = Turn(
        new.id, 0, new.agent_key, new.parent_id, "queued", new.model, tuple(new.input), new.created_at, new.system,
        new.effort, new.profile, placed=new.placed, options=new.options, origin=new.origin, fingerprint=new.fingerprint,
        instance=new.instance, call=new.call,
    )  # fmt: skip
    inserted = insert(conn, turn, ())
    if new.idempotency_key is not None:
        _take_key(conn, new)
    if new.takes:
        conversing.take(conn, new.agent_key, new.takes, new.id)
    return turn, inserted


def _take_key(conn: Connection, new: NewTurn) -> None:
    """The key belongs to this turn from now on; expired keys of everybody are dropped on the way."""
    key = idempotency_keys.c
    conn.execute(idempotency_keys.delete().where(key.until <= new.created_at))
    if new.replaces is not None:
        conn.execute(idempotency_keys.delete().where(key.turn_id == new.replaces))
    owner = conn.scalar(select(agents.c.owner).where(agents.c.key == new.agent_key))
    taking = {"owner": owner, "key": new.idempotency_key, "turn_id": new.id, "until": new.idempotency_until}
    if not _TAKE_KEY.run(conn, taking).rowcount:
        raise KeyTaken(
            conn.execute(select(key.turn_id).where(key.owner == owner, key.key == new.idempotency_key)).scalar_one()
        )


def insert(conn: Connection, turn: Turn, lines: Iterable[Record]) -> Cursor:
    """Store a whole turn with its records; the agent is active from now. Its seq is the cursor's `lastrowid`."""
    cutter = Cutter()
    values = rows.turn_values(cutter, turn)
    records = [rows.record_values(cutter, turn.id, n, record) for n, record in enumerate(lines)]
    values["bytes"] += sum(map(len, map(_LINE, records)))
    more = {
        "turns": 1, "side": int(turn.placed.side), "failures": int(turn.status in _LOST),
        "cost_usd": turn.cost_usd or 0.0, "bytes": values["bytes"],
    }  # fmt: skip
    _active(conn, turn.agent_key, turn.created_at, **more)
    inserted = _INSERT_TURN.run(conn, values)
    _INSERT_RECORD.run_each(conn, records)
    if cutter.images:
        _count(conn, turn.agent_key, bytes=rows.save_images(conn, turn.agent_key, cutter.images))
    return inserted


def import_turns(conn: Connection, imported: Sequence[ImportedTurn], head: str | None) -> None:
    for item in imported:
        insert(conn, item.as_turn(), item.records)
    if head is not None:
        set_head(conn, _need(conn, head, None, _STATE).agent_key, head)


def adopt(
    conn: Connection,
    lease: Lease,
    theirs: Sequence[ImportedTurn],
    session: Session,
    why: Sequence[Link],
    taken: Taken | None,
) -> Turn:
    leases.check(lease, *firsts(conn, leases.held(lease)))
    import_turns(conn, theirs, theirs[-1].id)
    save_session(conn, session, why)
    if taken is not None:
        mirroring.take(conn, lease.agent_key, taken.key, taken.lines)
    (turn,) = rows.loaded_turns(conn, [_need(conn, theirs[-1].id, None)])
    return turn


def rewind(conn: Connection, lease: Lease, to: str | None) -> None:
    leases.check(lease, *firsts(conn, leases.held(lease)))
    if reading.waiting(conn, lease.agent_key):
        raise SessionBusy("a turn of this agent waits or runs: wait for its end, or cancel it, then rewind")
    set_head(conn, lease.agent_key, to)


def begin(conn: Connection, begun: TurnStart) -> None:
    held, state = firsts(conn, leases.held(begun.lease), (_STATE, {"turn_id": begun.turn_id}))
    leases.check(begun.lease, held)
    if state is None:  # not its agent's deletion: that takes the lease along
        raise StoreUnavailable("the server of the store stopped before it had kept this turn", retry_after=1.0)
    row = _allowed(begun.turn_id, _UNFINISHED, state)
    for turn_id in begun.left_off:
        before = _STATE.one(conn, {"turn_id": turn_id})
        if before is not None and before.delivery != "undelivered":
            raise PathChanged(turn_id)
    note_frame(conn, row.agent_key, begun.frame_uuid)
    if begun.home is not None:
        leases.move(conn, row.agent_key, begun.home)
    kept = {} if begun.system is None else {"system": rows.dumps(begun.system)}
    _update(
        conn,
        begun.turn_id,
        **kept,
        status="running",
        parent_id=begun.parent_id,
        session_id=begun.session_id,
        frame_uuid=begun.frame_uuid,
        continuity=begun.continuity,
        evidence=rows.dumps(begun.evidence.as_json()),
        started_at=begun.started_at,
        attempts=rows.dumps([*rows.loads(row.attempts), begun.attempt]),
        instance=row.instance if begun.instance is None else begun.instance,
    )


def note_frame(conn: Connection, agent_key: int, uuid: str) -> None:
    """Every frame that was sent, of every attempt, is known as ours."""
    _INSERT_FRAME.run(conn, {"agent_key": agent_key, "uuid": uuid})


def commit(conn: Connection, done: Commit) -> Turn:
    refused = done.status == "refused"
    if done.status not in ANSWERED or refused is (done.session is not None) or (refused and done.move_head):
        raise ValueError(f"commit of {done.turn_id} as {done.status}")
    known = None if done.session is None else _update_session(conn, done.session)
    held, whole = firsts(conn, leases.held(done.lease), (_WHOLE, {"turn_id": done.turn_id}))
    leases.check(done.lease, held)
    row = _allowed(done.turn_id, _UNFINISHED, whole)
    if done.session is not None and done.session.agent_key != row.agent_key:
        raise ValueError(f"commit of {done.turn_id} with a session of agent {done.session.agent_key}")
    (turn,) = rows.loaded_turns(conn, [row])
    turn = replace(
        turn, status=done.status, output=tuple(done.output), stop_reason=done.stop_reason, usage=done.usage,
        cost_usd=done.cost_usd, tools=tuple(done.tools), timings=done.timings, attempts=tuple(done.attempts),
        session_id=row.session_id if done.session is None else done.session.id, path_hash=done.path_hash,
        depth=done.depth, delivery=done.delivery,
        finished_at=done.finished_at, evidence=done.evidence, stop_sequence=done.stop_sequence, backend=done.backend,
        answered_by=done.answered_by, fallback=done.fallback,
    )  # fmt: skip
    cutter = Cutter()
    values = rows.answer_values(cutter, turn, row)
    records = [rows.record_values(cutter, turn.id, n, record) for n, record in enumerate(done.records)]
    values["bytes"] += sum(map(len, map(_LINE, records)))
    _INSERT_RECORD.run_each(conn, records)
    _update(conn, turn.id, **values)
    more = {
        "failures": int(refused), "cost_usd": (turn.cost_usd or 0.0) - (row.cost_usd or 0.0),
        "bytes": values["bytes"] - row.bytes + rows.save_images(conn, turn.agent_key, cutter.images),
    }  # fmt: skip
    if done.session is not None and known is not None:
        _save_session(conn, done.session, known, done.links)
    else:
        _spoil_session(conn, turn.session_id)
    if done.move_head:
        _NEW_HEAD.run(conn, {**_more(turn.agent_key, more), "now": done.finished_at, "head": turn.id})
    else:
        _active(conn, turn.agent_key, done.finished_at, **more)
    return turn


def fail(
    conn: Connection,
    turn_id: str,
    status: Status,
    *,
    error: JSON,
    attempts: Sequence[JSON],
    timings: JSON,
    at: float,
    lease: Lease | None,
) -> Turn:
    if status not in _FAILED:
        raise ValueError(f"fail of {turn_id} as {status}")
    if lease is not None:
        leases.check(lease, *firsts(conn, leases.held(lease)))
    allowed = _NOT_ANSWERED if lease is not None else _NEVER_BEGUN
    row = _need(conn, turn_id, allowed)
    (turn,) = rows.loaded_turns(conn, [row])
    turn = replace(turn, status=status, error=error, attempts=tuple(attempts), timings=timings, finished_at=at)
    _update(
        conn,
        turn_id,
        status=status,
        error=rows.dumps(error),
        attempts=rows.dumps(attempts),
        timings=rows.dumps(timings),
        finished_at=at,
    )
    _spoil_session(conn, turn.session_id)
    _active(conn, turn.agent_key, at, failures=(status in _LOST) - (row.status in _LOST))
    return turn


def requeue(conn: Connection, turn_id: str, instance: str | None) -> Turn:
    row = _need(conn, turn_id, _FAILED)
    (turn,) = rows.loaded_turns(conn, [row])
    leases.forget_cancel(conn, turn_id)  # it was the end of the attempt before
    turn = replace(
        turn, status="queued", error=None, session_id=None, continuity=None, frame_uuid=None, started_at=None,
        finished_at=None, delivery="pending", instance=instance,
    )  # fmt: skip
    cleared = ("error", "session_id", "continuity", "frame_uuid", "started_at", "finished_at")
    _update(conn, turn_id, status="queued", delivery="pending", instance=instance, **dict.fromkeys(cleared))
    if row.status in _LOST:
        _count(conn, turn.agent_key, failures=-1)
    return turn


def set_delivery(conn: Connection, turn_id: str, delivery: Delivery, by: str | None) -> Cursor | None:
    """None: it stays as it is. A `rowcount` of 0: it is `delivered`, or there is no such turn."""
    if delivery == "undelivered" and (_is_continued(conn, turn_id) or _is_claimed(conn, turn_id, by)):
        return None
    return _SET_DELIVERY.run(conn, {"turn_id": turn_id, "delivery": delivery})


def claim(conn: Connection, turn_id: str, instance: str | None) -> bool:
    """Only while the conversation goes on from this answer: as the head, from a child, or where clients name the path.

    A turn that waits looks at the path when it begins; one that runs, and is no child, has begun without this answer.
    """
    row = _need(conn, turn_id, ON_PATH, _STATE)
    named = Placed.from_json(rows.loads(row.placed)).names_path
    if row.delivery == "undelivered" and not named and not _is_continued(conn, turn_id):
        head = conn.scalar(select(agents.c.head).where(agents.c.key == row.agent_key))
        if head != turn_id or any(turn.status == "running" for turn in reading.waiting(conn, row.agent_key)):
            return False
    if row.delivery != "delivered":
        _update(conn, turn_id, delivery="pending", instance=instance)
    return True


def _is_continued(conn: Connection, turn_id: str) -> bool:
    """A turn goes on from this one's answer: it runs, or it is on a path."""
    return _CHILD.one(conn, {"of_turn": turn_id}) is not None


def _is_claimed(conn: Connection, turn_id: str, by: str | None) -> bool:
    """Another proxy gives this answer to its own client by now."""
    return by is not None and _need(conn, turn_id, None, _STATE).instance not in (None, by)


def set_head(conn: Connection, agent_key: int, turn_id: str | None) -> None:
    if turn_id is not None:
        turn = _need(conn, turn_id, None, _STATE)
        if turn.agent_key != agent_key:
            raise ValueError(f"{turn_id} is a turn of agent {turn.agent_key}, not of {agent_key}")
    _MOVE_HEAD.run(conn, {"of_agent": agent_key, "head": turn_id})


def save_session(conn: Connection, session: Session, new: Sequence[Link]) -> None:
    _save_session(conn, session, _update_session(conn, session), new)


def save_links(conn: Connection, agent_key: int, new: Sequence[Link]) -> None:
    _INSERT_LINK.run_each(conn, [rows.link_values(agent_key, link) for link in new])
    repairs = sum(link.reason in REPAIR_REASONS for link in new)
    if repairs:
        _count(conn, agent_key, repairs=repairs)


# --- pieces ---


def _update(conn: Connection, turn_id: str, **values: Any) -> None:
    _UPDATE_TURN.run(conn, {"turn_id": turn_id, **values})


def _update_session(conn: Connection, session: Session) -> Cursor:
    """What is known of a session that is there already; its `rowcount` tells whether it is."""
    changes = rows.session_values(session)
    named = {"session_id": changes.pop("id"), "of_agent": changes.pop("agent_key")}
    return _UPDATE_SESSION.run(conn, named | changes)


def _save_session(conn: Connection, session: Session, updated: Cursor, new: Sequence[Link]) -> None:
    if not updated.rowcount:
        if not _INSERT_SESSION.run(conn, rows.session_values(session)).rowcount:
            raise StoreUnavailable(f"session {session.id} belongs to another agent for ever: start a new one")
        _count(conn, session.agent_key, sessions=1)
    if new:
        save_links(conn, session.agent_key, new)


def _spoil_session(conn: Connection, session_id: str | None) -> None:
    """Its transcript may hold what is on no path: it is verified before its next use."""
    if session_id is not None:
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(mark=None))


def _active(conn: Connection, agent_key: int, at: float, **more: float) -> None:
    """Something of the agent was written at this time; it has so much more."""
    _ACTIVE.run(conn, {**_more(agent_key, more), "now": at})


def _count(conn: Connection, agent_key: int, **more: float) -> None:
    _COUNT.run(conn, _more(agent_key, more))


def _more(agent_key: int, more: Mapping[str, float]) -> dict[str, float]:
    return {"of_agent": agent_key, **_NOTHING_MORE, **{f"more_{name}": number for name, number in more.items()}}


def _need(conn: Connection, turn_id: str, allowed: frozenset[Status] | None, columns: Prepared = _WHOLE) -> Row[Any]:
    """The turn's row, in one of the allowed statuses: an acknowledged turn is never written over."""
    return _allowed(turn_id, allowed, columns.one(conn, {"turn_id": turn_id}))


def _allowed(turn_id: str, allowed: frozenset[Status] | None, row: Row[Any] | None) -> Row[Any]:
    if row is None:
        raise NotFound(f"no turn {turn_id} in the store: its agent may have been deleted")
    if allowed is not None and row.status not in allowed:
        wanted = " or ".join(sorted(allowed))
        raise StoreUnavailable(
            f"turn {turn_id} is {row.status}, not {wanted}: another proxy on this store has ended or taken it; "
            "send the request again",
            detail={"turn_id": turn_id, "status": row.status},
        )
    return row
