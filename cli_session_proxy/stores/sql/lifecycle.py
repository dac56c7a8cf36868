"""A turn's way through the store, in its order: arrival, accept, agent_state, begin, commit.

Each is the body of one transaction. Asking for a result costs a round trip to the server. So independent statements run
first and their results are asked for together, with the commit if no write follows (`Driver.commit_next`). The
conditions of `begin` are part of its statements, so that nothing has to be undone after a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Text,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    update,
)

from ...domain.budgets import Budget
from ...domain.evidence import Evidence
from ...domain.forms import ImageCutter, replace
from ...domain.models import ANSWERED, JSON, REPAIR_REASONS, Agent, Link, Record, Session, Status, Turn
from ...errors import LeaseLost, NotFound, StoreUnavailable
from ..base import BEGIN_FIELDS, COMPOSED_FIELDS, ENDED, AgentState, Home, KeptTurn, KeyTaken, Lease, PathChanged
from . import rows, side_data, spending
from .database import Cursor, InsertNew, Prepared, Values
from .leases import LOCK_LEASE
from .rows import UNFINISHED, unfinished
from .tables import agents, frames, idempotency_keys, leases, links, records, sessions, turns

_LINE = itemgetter("line")
# All fields of a turn after `id` and `seq`. A copy of a turn made with these takes half as long as `replace`.
_fields_after_seq = attrgetter(*Turn.__slots__[2:])
_end_values = attrgetter(*ENDED)

# One statement reads three rows, in one snapshot and one round trip. Its columns are those of a turn, of its agent, and
# of the session that ends at the turn, in this order.
_JOINED_AGENT = tuple(column.label(f"agents_{column.name}") for column in rows.AGENT)
_AGENT_AT, _SESSION_FROM = len(rows.TURN), len(rows.TURN) + len(rows.AGENT)
_same = agents.alias("same")
_LATEST_SAME_REQUEST = (
    select(turns.c.seq)
    .join(_same, _same.c.key == turns.c.agent_key)
    .where(_same.c.owner == bindparam("of_owner"), turns.c.fingerprint == bindparam("same"))
    .order_by(turns.c.seq.desc())
    .limit(1)
    .correlate(None)
    .scalar_subquery()
)
_request = select(literal_column("1").label("one")).subquery("request")
_ARRIVAL = Prepared(
    select(*rows.TURN, *_JOINED_AGENT).select_from(
        _request.outerjoin(turns, turns.c.seq == _LATEST_SAME_REQUEST).outerjoin(
            agents, and_(agents.c.owner == bindparam("of_owner"), agents.c.agent_id == bindparam("named"))
        )
    )
)
NEWEST_SESSION = (
    select(sessions.c.n)
    .where(sessions.c.agent_key == bindparam("of_agent"))
    .order_by(sessions.c.created_at.desc(), sessions.c.n.desc())
    .limit(1)
)


_other = turns.alias("other")
_others = exists().where(
    unfinished(_other, agents.c.key), _other.c.instance.is_distinct_from(bindparam("excluding", type_=Text))
)


def _state_query(parent: ColumnElement[Any]) -> Prepared:
    joined_session = sessions.alias("joined_session")
    ending = NEWEST_SESSION.where(sessions.c.tip_turn_id == turns.c.id).correlate(turns).scalar_subquery()
    session = (joined_session.c[column.name].label(f"sessions_{column.name}") for column in rows.SESSION)
    is_parent = and_(turns.c.id == parent, turns.c.agent_key == agents.c.key)
    joined = agents.outerjoin(turns, is_parent).outerjoin(joined_session, joined_session.c.n == ending)
    query = select(*rows.TURN, *_JOINED_AGENT, *session, _others.label("others")).select_from(joined)
    return Prepared(query.where(agents.c.key == bindparam("of_agent")))


_AT_HEAD = _state_query(agents.c.head)
_AT_TURN = _state_query(bindparam("turn_id", type_=Text))

_COMPOSED_COLUMNS = (*COMPOSED_FIELDS, "images", "bytes")
_begin_values, _composed_values = attrgetter(*BEGIN_FIELDS), attrgetter(*COMPOSED_FIELDS)
_INSERT_TURN = Prepared(turns.insert())
_INSERT_RECORD = Prepared(records.insert())
_INSERT_LINK = Prepared(links.insert())
_INSERT_SESSION = Prepared(InsertNew(sessions))
_TAKE_KEY = Prepared(InsertNew(idempotency_keys))
_THIS_TURN = turns.update().where(turns.c.id == bindparam("turn_id"))
UPDATE_TURN = Prepared(_THIS_TURN)
SET_DELIVERY = Prepared(_THIS_TURN.where(turns.c.delivery != "delivered"))
UPDATE_SESSION = Prepared(
    sessions.update().where(sessions.c.id == bindparam("session_id"), sessions.c.agent_key == bindparam("of_agent"))
)
THIS_AGENT = agents.update().where(agents.c.key == bindparam("of_agent"))
# Never goes back: a later turn may have been written first. It is set even if it stays the same, because that locks the
# agent's row: so the agent's turns get their `seq` in the order of their commits.
_LAST_AT = case((agents.c.last_at < bindparam("now"), bindparam("now")), else_=agents.c.last_at)
# Adds to the agent's totals, in the statement that locks its row anyway. `added_…`: how much.
_TOTALS_ADDED = {name: agents.c[name] + bindparam(f"added_{name}") for name in rows.TOTALS}
_NOTHING_ADDED = {f"added_{name}": 0 for name in rows.TOTALS}
ADD_TOTALS = Prepared(THIS_AGENT.values(**_TOTALS_ADDED))
TOUCH_AGENT = Prepared(THIS_AGENT.values(last_at=_LAST_AT, **_TOTALS_ADDED))

# The statuses that an agent's `failures` counts.
FAILURES: frozenset[Status] = frozenset({"failed", "refused"})
# Reads a turn to change it: PostgreSQL locks its row, SQLite has locked the file.
LOCK_TURN = Prepared(select(*rows.TURN).where(turns.c.id == bindparam("turn_id")).with_for_update(key_share=True))
LOCK_STATE = Prepared(
    select(turns.c.agent_key, turns.c.status, turns.c.placed, turns.c.instance, turns.c.delivery)
    .where(turns.c.id == bindparam("turn_id"))
    .with_for_update(key_share=True)
)
# Changes the turn only under the lease, whose row is locked by then. `_open_list`: the JSON list of attempts without
# its closing bracket, to which the new attempt is appended.
_no_attempts = turns.c.attempts == "[]"
_open_list = func.substr(turns.c.attempts, 1, func.length(turns.c.attempts) - 1, type_=Text)
_BEGIN = Prepared(
    _THIS_TURN.where(
        or_(*(turns.c.status == status for status in sorted(UNFINISHED))),
        exists().where(
            leases.c.agent_key == turns.c.agent_key,
            # Two agents' leases may have equal epochs: granted in the same millisecond.
            leases.c.agent_key == bindparam("of_agent"),
            leases.c.epoch == bindparam("at_epoch"),
            leases.c.holder == bindparam("of_holder"),
        ),
    ).values(attempts=case((_no_attempts, "["), else_=_open_list + ",") + bindparam("attempt", type_=Text) + "]")
)
# Matches the turn if `_BEGIN` has changed it.
_BEGUN_TURN = turns.c.id == bindparam("turn_id"), turns.c.frame_uuid == bindparam("sent")
# Records the uuid of each frame that we sent, of every attempt.
_RECORD_FRAME = Prepared(
    InsertNew(frames).from_select(
        ["agent_key", "uuid"], select(turns.c.agent_key, turns.c.frame_uuid).where(*_BEGUN_TURN)
    )
)
# Notes the host that has the agent's files.
_SET_HOME = Prepared(leases.update().where(leases.c.agent_key == bindparam("of_agent"), exists().where(*_BEGUN_TURN)))


class TooLarge(Exception):
    """The result is too large to be read on the event loop (raised if a `limit` in bytes is given)."""


# --- before a turn begins


def arrival(
    conn: Connection, owner: str, fingerprint: str, agent_id: str | None, *, limit: int | None = None
) -> tuple[Turn | None, Agent | None]:
    row = _ARRIVAL.one(conn, {"of_owner": owner, "named": agent_id, "same": fingerprint})
    assert row is not None
    named = None if row.agents_key is None else rows.agent(row[_AGENT_AT:])
    return _joined_turn(conn, row, limit), named


def agent_state(
    conn: Connection, agent_key: int, parent_id: str | None, *, at_head: bool, limit: int | None = None
) -> AgentState | None:
    values = {"of_agent": agent_key, "excluding": None}
    row = _AT_HEAD.one(conn, values) if at_head else _AT_TURN.one(conn, values | {"turn_id": parent_id})
    return None if row is None else _state(conn, row, limit)


def _state(conn: Connection, row: Row[Any], limit: int | None) -> AgentState:
    session = None if row.sessions_id is None else rows.session(row[_SESSION_FROM:])
    return AgentState(rows.agent(row[_AGENT_AT:]), _joined_turn(conn, row, limit), session, bool(row.others))


def _joined_turn(conn: Connection, row: Row[Any], limit: int | None) -> Turn | None:
    """The turn in a joined row, which begins with its columns; None if these are empty."""
    if row.id is None:
        return None
    if limit is not None and rows.are_large(row, limit=limit):
        raise TooLarge
    (turn,) = rows.loaded_turns(conn, [row])
    return turn


# --- accept


def accept(
    conn: Connection,
    turn: Turn,
    *,
    idempotency_key: str | None = None,
    idempotency_until: float | None = None,
    replaces: str | None = None,
    budgets: Sequence[Budget] = (),
    limit: int,
) -> tuple[Turn, AgentState | None]:
    """Store a queued turn. The agent's state is None if it has more than `limit` bytes: read it separately."""
    if budgets:
        spending.request(conn, budgets, turn.id, turn.created_at)
    inserted = insert(conn, turn, ())
    if idempotency_key is not None:
        key = idempotency_keys.c
        conn.execute(idempotency_keys.delete().where(key.until <= turn.created_at))  # all that have expired
        if replaces is not None:
            conn.execute(idempotency_keys.delete().where(key.turn_id == replaces))
        owner = conn.scalar(select(agents.c.owner).where(agents.c.key == turn.agent_key))
        new = {"owner": owner, "key": idempotency_key, "turn_id": turn.id, "until": idempotency_until}
        if not _TAKE_KEY.run(conn, new).rowcount:
            taken = select(key.turn_id).where(key.owner == owner, key.key == idempotency_key)
            raise KeyTaken(conn.execute(taken).scalar_one())
    where: Values = {"of_agent": turn.agent_key, "excluding": turn.instance}
    if turn.placed.at_head:
        statement, query = _AT_HEAD, _AT_HEAD.run(conn, where, last=True)
    else:
        statement, query = _AT_TURN, _AT_TURN.run(conn, {**where, "turn_id": turn.parent_id}, last=True)
    turn = Turn(turn.id, inserted.lastrowid or 0, *_fields_after_seq(turn))
    row = statement.first(query)
    try:
        return turn, None if row is None else _state(conn, row, limit)
    except TooLarge:
        return turn, None


def insert(conn: Connection, turn: Turn, lines: Iterable[Record]) -> Cursor:
    """Store a turn with its records, and update its agent. Its seq is the cursor's `lastrowid`."""
    cutter = ImageCutter()
    values = rows.turn_values(cutter, turn)
    records = [rows.record_values(cutter, turn.id, n, record) for n, record in enumerate(lines)]
    values["bytes"] += sum(map(len, map(_LINE, records)))
    totals = totals_added(
        turn.agent_key, turns=1, side=int(turn.placed.side), failures=int(turn.status in FAILURES),
        cost_usd=turn.cost_usd or 0.0, bytes=values["bytes"],
    )  # fmt: skip
    TOUCH_AGENT.run(conn, totals | {"now": turn.created_at})
    inserted = _INSERT_TURN.run(conn, values)
    _INSERT_RECORD.run_each(conn, records)
    if cutter.images:
        ADD_TOTALS.run(conn, totals_added(turn.agent_key, bytes=rows.save_images(conn, turn.agent_key, cutter.images)))
    return inserted


# --- begin


def begin(
    conn: Connection,
    lease: Lease,
    turn: Turn,
    attempt: JSON,
    *,
    system: str | None = None,
    left_off: Sequence[str] = (),
    home: Home | None = None,
    takes: Sequence[tuple[str, str]] | None = None,
) -> None:
    if left_off or takes is not None:
        lock_lease(conn, lease)
    for turn_id in left_off:
        before = LOCK_STATE.one(conn, {"turn_id": turn_id})
        if before is not None and before.delivery != "undelivered":
            raise PathChanged(turn_id)
    if takes is not None:  # the prompt is composed only now
        stored = check_status(turn.id, UNFINISHED, LOCK_TURN.one(conn, {"turn_id": turn.id}))
        side_data.take_items(conn, stored.agent_key, takes)
        fields = dict(zip(COMPOSED_FIELDS, _composed_values(turn), strict=True))
        (composed,) = rows.loaded_turns(conn, [stored], **fields)
        cutter = ImageCutter()
        columns = rows.turn_values(cutter, composed)
        UPDATE_TURN.run(conn, {"turn_id": turn.id, **{name: columns[name] for name in _COMPOSED_COLUMNS}})
        added = columns["bytes"] - stored.bytes
        if cutter.images:
            added += rows.save_images(conn, stored.agent_key, cutter.images)
        ADD_TOTALS.run(conn, totals_added(stored.agent_key, bytes=added))
    lease_query = LOCK_LEASE.run(conn, {"of_agent": lease.agent_key})
    state_query = LOCK_STATE.run(conn, {"turn_id": turn.id})
    values: dict[str, Any] = {
        **dict(zip(BEGIN_FIELDS, _begin_values(turn), strict=True)),
        "turn_id": turn.id,
        "at_epoch": lease.epoch,
        "of_holder": lease.holder,
        "of_agent": lease.agent_key,
        "status": "running",
        "evidence": rows.dumps(turn.evidence.as_json()),
        "attempt": rows.dumps(attempt),
        "limit_wait": None,
    }
    if system is not None:
        values["system"] = rows.dumps(system)
    update = _BEGIN.run(conn, values)
    which = {"turn_id": turn.id, "sent": turn.frame_uuid}
    if home is not None:
        place = rows.dumps({"host": home.host, "address": home.address})
        _SET_HOME.run(conn, {**which, "of_agent": lease.agent_key, "home": place})
    _RECORD_FRAME.run(conn, which, last=True)
    lease_row, row = LOCK_LEASE.first(lease_query), LOCK_STATE.first(state_query)
    check_lease(lease, lease_row)
    if row is None:  # not because the agent was deleted: then `check_lease` had found no lease
        why = "the server of the store stopped before it had kept this turn"
        raise StoreUnavailable(why, retry_after=1.0, detail={"status": None})  # "status": the store did answer
    check_status(turn.id, UNFINISHED, row)
    if not update.rowcount:
        raise ValueError(f"begin of {turn.id} under a lease of agent {lease.agent_key}")


def note(conn: Connection, lease: Lease, turn_id: str, evidence: Evidence) -> None:
    lock_lease(conn, lease)
    check_status(turn_id, frozenset({"running"}), LOCK_STATE.one(conn, {"turn_id": turn_id}))
    UPDATE_TURN.run(conn, {"turn_id": turn_id, "evidence": rows.dumps(evidence.as_json())})


# --- commit


def commit(
    conn: Connection,
    lease: Lease,
    ended: Turn,
    kept: KeptTurn | None,
    *,
    move_head: bool = True,
    budgets: Sequence[Budget] = (),
    limit: int | None = None,
) -> Turn:
    """Raises `TooLarge` if more than `limit` bytes of the turn are stored so far."""
    session = None if kept is None else kept.session
    refused = ended.status == "refused"
    # Every answer has a session. A refused turn is on no path: no session ends at it, and the head stays.
    is_consistent = (session is None and not move_head) if refused else session is not None
    if ended.status not in ANSWERED or not is_consistent:
        raise ValueError(f"commit of {ended.id} as {ended.status}")
    if budgets:
        spending.turn(conn, budgets, ended.usage, ended.cost_usd, ended.finished_at or 0.0)
    session_update = None
    if session is not None:
        session_key = {"session_id": session.id, "of_agent": session.agent_key}
        # Before the lease is checked, because that saves a round trip. A refusal rolls this back.
        session_update = UPDATE_SESSION.run(conn, session_key | rows.session_values(session))
    lease_query = LOCK_LEASE.run(conn, {"of_agent": lease.agent_key})
    turn_query = LOCK_TURN.run(conn, {"turn_id": ended.id})
    lease_row, turn_row = LOCK_LEASE.first(lease_query), LOCK_TURN.first(turn_query)
    check_lease(lease, lease_row)
    row = check_status(ended.id, UNFINISHED, turn_row)
    if session is not None and session.agent_key != row.agent_key:
        raise ValueError(f"commit of {ended.id} with a session of agent {session.agent_key}")
    if limit is not None and rows.are_large(row, limit=limit):
        raise TooLarge
    if row.delivery in ("delivered", "uncertain") and ended.delivery != "delivered":
        ended = replace(ended, delivery=row.delivery)
    session_id = row.session_id if session is None else session.id
    (turn,) = rows.loaded_turns(conn, [row], session_id=session_id, **dict(zip(ENDED, _end_values(ended), strict=True)))
    cutter = ImageCutter()
    values = rows.answer_values(cutter, turn, row)
    records = [rows.record_values(cutter, turn.id, n, record) for n, record in enumerate(kept.records if kept else ())]
    values["bytes"] += sum(map(len, map(_LINE, records)))
    _INSERT_RECORD.run_each(conn, records)
    UPDATE_TURN.run(conn, {"turn_id": turn.id, **values})
    added = values["bytes"] - row.bytes
    if cutter.images:
        added += rows.save_images(conn, turn.agent_key, cutter.images)
    if session is None or session_update is None:  # refused: its session's transcript may have the refused request
        mark_session_dirty(conn, turn.session_id)
    elif not session_update.rowcount:  # there is no such session yet
        open_session(conn, session)
    if kept is not None and kept.links:
        save_links(conn, turn.agent_key, kept.links)
    cost = (turn.cost_usd or 0.0) - (row.cost_usd or 0.0)
    totals = totals_added(turn.agent_key, failures=int(refused), cost_usd=cost, bytes=added) | {"now": turn.finished_at}
    TOUCH_AGENT.run(conn, totals | {"head": turn.id} if move_head else totals)
    return turn


# --- shared with other writes


def lock_lease(conn: Connection, lease: Lease) -> None:
    """Lock the lease until the end of the transaction. Raises `LeaseLost` unless the writer still holds it."""
    check_lease(lease, LOCK_LEASE.one(conn, {"of_agent": lease.agent_key}))


def check_lease(lease: Lease, row: Row[Any] | None) -> None:
    """As `lock_lease`, for a caller that has run `LOCK_LEASE` in the write's transaction. `row`: its result."""
    if row is None or row.epoch != lease.epoch or row.holder != lease.holder:
        raise LeaseLost(
            "another proxy has taken this agent over, and nothing of this turn was kept here: send it again",
            retry_after=1.0,
            detail={"epoch": lease.epoch, "now": None if row is None else row.epoch},
        )


def check_status(turn_id: str, statuses: frozenset[Status] | None, row: Row[Any] | None) -> Row[Any]:
    """The turn's row. Raises an error unless its status is one of `statuses` (None: any): an acknowledged turn is never
    overwritten."""
    if row is None:
        raise NotFound(f"no turn {turn_id} in the store: its agent may have been deleted")
    if statuses is not None and row.status not in statuses:
        raise StoreUnavailable(
            f"turn {turn_id} is {row.status}, not {' or '.join(sorted(statuses))}: another proxy on this store has "
            "ended or taken it; send the request again",
            detail={"turn_id": turn_id, "status": row.status},
        )
    return row


def totals_added(agent_key: int, **more: float) -> dict[str, float]:
    """Values for `ADD_TOTALS` and `TOUCH_AGENT`: what to add to the agent's totals."""
    return {"of_agent": agent_key, **_NOTHING_ADDED, **{f"added_{name}": number for name, number in more.items()}}


def open_session(conn: Connection, session: Session) -> None:
    new = {"id": session.id, "agent_key": session.agent_key, **rows.session_values(session)}
    if not _INSERT_SESSION.run(conn, new).rowcount:
        raise StoreUnavailable(f"session {session.id} belongs to another agent for ever: start a new one")
    ADD_TOTALS.run(conn, totals_added(session.agent_key, sessions=1))


def mark_session_dirty(conn: Connection, session_id: str | None) -> None:
    """The session's transcript may hold records that are on no path: it is verified before its next use."""
    if session_id is not None:
        conn.execute(update(sessions).where(sessions.c.id == session_id).values(mark=None))


def save_links(conn: Connection, agent_key: int, new: Sequence[Link]) -> None:
    values = [link.as_json() | {"agent_key": agent_key, "detail": rows.dumps(link.detail)} for link in new]
    _INSERT_LINK.run_each(conn, values)
    repairs = sum(link.reason in REPAIR_REASONS for link in new)
    if repairs:
        ADD_TOTALS.run(conn, totals_added(agent_key, repairs=repairs))
