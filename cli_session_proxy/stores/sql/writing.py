"""The store's write transactions that not every turn runs. Those of every turn are in `lifecycle`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Row, bindparam, case, cast, func, or_, select, union_all

from ...domain.budgets import Budget
from ...domain.deliveries import counts
from ...domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    ON_PATH,
    Agent,
    Delivery,
    LimitWait,
    Link,
    Placed,
    Session,
    Status,
    Turn,
)
from ...errors import SessionBusy, StoreUnavailable
from ..base import Expiry, Lease, MirroredLines, WholeTurn
from . import reading, rows, side_data, spending
from .database import Cursor, InsertNew, Prepared
from .leases import forget_cancel
from .lifecycle import (
    ADD_TOTALS,
    FAILURES,
    LOCK_STATE,
    LOCK_TURN,
    SET_DELIVERY,
    THIS_AGENT,
    TOUCH_AGENT,
    UPDATE_SESSION,
    UPDATE_TURN,
    check_status,
    insert,
    lock_lease,
    mark_session_dirty,
    open_session,
    save_links,
    totals_added,
)
from .rows import UNFINISHED
from .tables import (
    LAST_DELETED,
    PROBE,
    agents,
    cancels,
    conversations,
    followers,
    forgotten,
    frames,
    idempotency_keys,
    image_refs,
    images,
    items,
    leases,
    links,
    meta,
    mirrored,
    records,
    sessions,
    turns,
)

# An agent's key is the store's clock in microseconds. If the clock went back, it is the last key plus one. No key is
# given twice, also if the newest agents were lost: a backup was put back, or a standby that lacked them was promoted.
# Otherwise a proxy that still serves a request for a lost agent would store its turn with another agent.
_KEYS = union_all(
    select(func.max(agents.c.key).label("key")),
    select(cast(meta.c.value, BigInteger)).where(meta.c.name == LAST_DELETED),
)
_LAST_KEY = select(func.coalesce(func.max(_KEYS.subquery().c.key), 0)).scalar_subquery()
_MICROSECONDS = cast(func.store_clock(type_=Double) * 1_000_000, BigInteger)
_INSERT_AGENT = Prepared(
    InsertNew(agents).values(key=case((_LAST_KEY < _MICROSECONDS, _MICROSECONDS), else_=_LAST_KEY + 1))
)
_INSERT_META = Prepared(InsertNew(meta))
_INSERT_FORGOTTEN = Prepared(InsertNew(forgotten))
# Seconds after which rows of `forgotten` are deleted: no sum reads older ones.
FORGOTTEN_KEPT = 90 * 86_400.0
_SET_HEAD = Prepared(THIS_AGENT)  # an update of one agent, whose values are given when it runs
_FAILED: frozenset[Status] = FINISHED - ANSWERED
_NOT_ANSWERED: frozenset[Status] = UNFINISHED | _FAILED
_NOT_RUNNING: frozenset[Status] = _NOT_ANSWERED - {"running"}  # no lease is needed to end such a turn
# A turn that continues this one: it is running, or on a path.
_CONTINUATION = Prepared(
    select(turns.c.id)
    .where(turns.c.parent_id == bindparam("of_turn"), or_(*(turns.c.status == one for one in ("running", *ON_PATH))))
    .limit(1)
)


def probe(conn: Connection, value: str) -> None:
    """Write a row. `value` differs each time, so that the file changes."""
    if not conn.execute(meta.update().where(meta.c.name == PROBE).values(value=value)).rowcount:
        _INSERT_META.run(conn, {"name": PROBE, "value": value})


def ensure_agent(conn: Connection, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
    values = {"owner": owner, "agent_id": agent_id, "dir": dir, "named": named, "created_at": now, "last_at": now}
    while (agent := reading.agent(conn, owner, agent_id)) is None:
        if not _INSERT_AGENT.run(conn, values).rowcount:  # else another agent got this key in the same microsecond
            other = conn.execute(select(agents.c.owner, agents.c.agent_id).where(agents.c.dir == dir)).first()
            if other is not None and tuple(other) != (owner, agent_id):
                raise StoreUnavailable(f"the directory {dir} belongs to another agent: choose another name")
    return agent


def delete_agent(conn: Connection, key: int, expiry: Expiry | None = None) -> bool:
    if expiry is not None:
        # Each accepted turn writes this row, so the lock keeps new turns out until the agent is deleted.
        conn.execute(select(agents.c.key).where(agents.c.key == key).with_for_update())
        if not reading.expired_agents(conn, expiry, only=key):
            return False
        _remember_cost(conn, key)
    # First the lease, as in every write under one: in another order this and `take_over` could wait for each other.
    conn.execute(leases.delete().where(leases.c.agent_key == key))
    own_turns = select(turns.c.id).where(turns.c.agent_key == key)
    for table in (followers, cancels, idempotency_keys, records):
        conn.execute(table.delete().where(table.c.turn_id.in_(own_turns)))
    for table in (links, sessions, frames, items, conversations, mirrored, turns):
        conn.execute(table.delete().where(table.c.agent_key == key))
    # Images to which no other agent refers are deleted, too. They come last, and are locked before it is looked: until
    # then another agent may refer to one.
    of_agent = select(image_refs.c.sha256).where(image_refs.c.agent_key == key)
    locked = select(images.c.sha256).where(images.c.sha256.in_(of_agent)).order_by(images.c.sha256)
    conn.execute(locked.with_for_update())
    other = image_refs.alias()
    shared = select(other.c.sha256).where(other.c.sha256 == image_refs.c.sha256, other.c.agent_key != key)
    unshared = list(conn.scalars(of_agent.where(~shared.exists())))
    conn.execute(image_refs.delete().where(image_refs.c.agent_key == key))
    for part in rows.chunks(unshared):
        conn.execute(images.delete().where(images.c.sha256.in_(part)))
    is_last = conn.scalar(select(_LAST_KEY)) == key
    conn.execute(agents.delete().where(agents.c.key == key))
    if is_last:
        conn.execute(meta.delete().where(meta.c.name == LAST_DELETED))
        _INSERT_META.run(conn, {"name": LAST_DELETED, "value": str(key)})
    return True


def _remember_cost(conn: Connection, key: int) -> None:
    """If the agent is a one-shot, add its cost to the sum for its owner, model and hour. No content is kept."""
    model = func.coalesce(turns.c.answered_by, turns.c.model)
    last = select(model).where(turns.c.agent_key == agents.c.key).order_by(turns.c.seq.desc()).limit(1)
    spent = select(agents.c.owner, agents.c.last_at, agents.c.cost_usd, last.scalar_subquery().label("model"))
    is_one_shot = agents.c.named.is_(False), or_(agents.c.turns == 1, reading.ASKED_ONCE)
    row = conn.execute(spent.where(agents.c.key == key, *is_one_shot)).first()
    if row is None or row.model is None:
        return
    columns = forgotten.c
    conn.execute(forgotten.delete().where(columns.at < row.last_at - FORGOTTEN_KEPT))
    sum_key = {"at": row.last_at // reading.HOUR * reading.HOUR, "owner": row.owner, "model": row.model}
    _INSERT_FORGOTTEN.run(conn, {**sum_key, "turns": 0, "cost_usd": 0.0})
    conn.execute(
        forgotten.update()
        .where(*(columns[name] == value for name, value in sum_key.items()))
        .values(turns=columns.turns + 1, cost_usd=columns.cost_usd + row.cost_usd)
    )


# --- turns ---


def import_turns(conn: Connection, turns: Sequence[WholeTurn], head: str | None = None) -> None:
    for item in turns:
        insert(conn, item.turn, item.records)
    if head is not None:
        set_head(conn, _lock_turn(conn, head, query=LOCK_STATE).agent_key, head)


def adopt(
    conn: Connection,
    lease: Lease,
    turns: Sequence[WholeTurn],
    session: Session,
    links: Sequence[Link],
    became_turns: MirroredLines | None = None,
) -> Turn:
    lock_lease(conn, lease)
    last = turns[-1].turn.id
    import_turns(conn, turns, last)
    save_session(conn, session, links)
    if became_turns is not None:
        side_data.consume_lines(conn, lease.agent_key, became_turns.key, became_turns.lines)
    (turn,) = rows.loaded_turns(conn, [_lock_turn(conn, last)])
    return turn


def rewind(conn: Connection, lease: Lease, to: str | None) -> None:
    lock_lease(conn, lease)
    if reading.unfinished_of(conn, lease.agent_key):
        raise SessionBusy("a turn of this agent waits or runs: wait for its end, or cancel it, then rewind")
    set_head(conn, lease.agent_key, to)


def fail(
    conn: Connection,
    turn_id: str,
    status: Status,
    error: JSON,
    attempts: Sequence[JSON],
    timings: JSON,
    finished_at: float,
    *,
    lease: Lease | None = None,
    instance: str | None = None,
) -> Turn:
    if status not in _FAILED:
        raise ValueError(f"fail of {turn_id} as {status}")
    if lease is not None:
        lock_lease(conn, lease)
    row = _lock_turn(conn, turn_id, _NOT_ANSWERED if lease is not None else _NOT_RUNNING)
    if instance not in (None, row.instance):
        raise StoreUnavailable(
            f"turn {turn_id} was sent again to another proxy, which has it now",
            detail={"turn_id": turn_id, "status": row.status},
        )
    ended = {
        "status": status,
        "error": error,
        "attempts": tuple(attempts),
        "timings": timings,
        "finished_at": finished_at,
        "limit_wait": None,
    }
    (turn,) = rows.loaded_turns(conn, [row], **ended)
    columns = ended | {
        "error": rows.dumps(error),
        "attempts": rows.dumps(attempts),
        "timings": rows.dumps(timings),
    }
    UPDATE_TURN.run(conn, {"turn_id": turn_id, **columns})
    mark_session_dirty(conn, turn.session_id)
    new_failures = (status in FAILURES) - (row.status in FAILURES)
    TOUCH_AGENT.run(conn, totals_added(turn.agent_key, failures=new_failures) | {"now": finished_at})
    return turn


def requeue(
    conn: Connection, turn_id: str, instance: str | None, budgets: Sequence[Budget] = (), now: float = 0.0
) -> Turn:
    if budgets:
        spending.request(conn, budgets, turn_id, now, is_new=False)
    row = _lock_turn(conn, turn_id, _FAILED)
    cleared = ("error", "session_id", "continuity", "frame_uuid", "started_at", "finished_at")
    changes = {"status": "queued", "delivery": "pending", "instance": instance, **dict.fromkeys(cleared)}
    (turn,) = rows.loaded_turns(conn, [row], **changes)
    forget_cancel(conn, turn_id)  # it was for the last attempt
    UPDATE_TURN.run(conn, {"turn_id": turn_id, **changes})
    if row.status in FAILURES:
        ADD_TOTALS.run(conn, totals_added(turn.agent_key, failures=-1))
    return turn


def postpone(
    conn: Connection,
    lease: Lease,
    turn_id: str,
    wait: LimitWait,
    attempts: Sequence[JSON],
    timings: JSON,
    *,
    behind: Collection[str] = (),
) -> Turn:
    lock_lease(conn, lease)
    row = _lock_turn(conn, turn_id, UNFINISHED)
    (turn,) = rows.loaded_turns(
        conn, [row], status="queued", attempts=tuple(attempts), timings=timings, limit_wait=wait, started_at=None
    )
    wait_json = rows.limit_wait(wait)
    columns = {"attempts": rows.dumps(attempts), "timings": rows.dumps(timings), "started_at": None}
    UPDATE_TURN.run(conn, {"turn_id": turn_id, "status": "queued", "limit_wait": wait_json, **columns})
    mark_session_dirty(conn, turn.session_id)
    for other in behind:
        conn.execute(
            turns.update().where(turns.c.id == other, turns.c.status == "queued", turns.c.instance == row.instance),
            {"limit_wait": wait_json},
        )
    return turn


def take_over(conn: Connection, lease: Lease, turn_id: str, instance: str) -> Turn | None:
    lock_lease(conn, lease)
    row = LOCK_TURN.one(conn, {"turn_id": turn_id})
    if row is None or row.status != "queued" or row.limit_wait is None:
        return None
    # Its clients were at the other proxy. One that retries gets this turn, unless it has its answer or its id.
    changes = {"instance": instance, "delivery": "delivered" if row.delivery == "delivered" else "uncertain"}
    (turn,) = rows.loaded_turns(conn, [row], **changes)
    forget_cancel(conn, turn_id)  # it was for the turn's last proxy
    UPDATE_TURN.run(conn, {"turn_id": turn_id, **changes})
    return turn


def set_delivery(conn: Connection, turn_id: str, delivery: Delivery, by: str | None) -> Cursor | None:
    """None: nothing to change. `rowcount` is 0 if it is already `delivered`, or there is no such turn."""
    if delivery != "delivered":  # which always counts, without a look at the turn
        row = _lock_turn(conn, turn_id, query=LOCK_STATE)
        is_own = by is None or row.instance in (None, by)
        continued = partial(_is_continued, conn, turn_id)
        if not counts(delivery, now=row.delivery, status=row.status, is_own=is_own, is_continued=continued):
            return None
    return SET_DELIVERY.run(conn, {"turn_id": turn_id, "delivery": delivery})


def doubt(
    conn: Connection, agent_key: int, instances: Collection[str], turn_id: str | None, fingerprint: str | None
) -> None:
    which = turns.c.id == turn_id
    if turn_id is None:
        latest = select(func.max(turns.c.seq)).where(turns.c.agent_key == agent_key, turns.c.fingerprint == fingerprint)
        which = turns.c.seq == latest.scalar_subquery()
    may_be_on_path = turns.c.status.in_(sorted(UNFINISHED | ON_PATH))
    pending = turns.c.delivery == "pending", turns.c.instance.in_(sorted(instances))
    its_turn = which, turns.c.agent_key == agent_key
    conn.execute(turns.update().where(*its_turn, may_be_on_path, *pending).values(delivery="uncertain"))


def hand_on(conn: Connection, turn_id: str, by: str, to: str) -> None:
    conn.execute(
        turns.update()
        .where(turns.c.id == turn_id, turns.c.delivery == "pending", turns.c.instance == by)
        .values(instance=to)
    )


def claim(conn: Connection, turn_id: str, instance: str | None) -> bool:
    """Claim the answer for a client that asks for it again. False if the conversation went on without it, e.g. after a
    rewind. It did not if the answer is the head or has a child, or if clients name the path themselves. An answer that
    arrived can always be given again.

    A queued turn takes the path when it begins. A running one that is no child of an undelivered answer has begun
    without it.
    """
    row = _lock_turn(conn, turn_id, ON_PATH, LOCK_STATE)
    placed, undelivered = Placed.from_json(rows.loads(row.placed)), row.delivery == "undelivered"
    # A client that names what it continues does not depend on the head; a side call never is the head.
    needs_no_head = placed.rule in ("id", "history") or (placed.side and not undelivered)
    if row.delivery != "delivered" and not needs_no_head and not _is_continued(conn, turn_id):
        head = conn.scalar(select(agents.c.head).where(agents.c.key == row.agent_key))
        unfinished = reading.unfinished_of(conn, row.agent_key) if undelivered else ()
        if head != turn_id or any(turn.status == "running" for turn in unfinished):
            return False
    if row.delivery != "delivered":
        # Who asked for it before may have it, or may note later that its client left.
        delivery = "pending" if undelivered else "uncertain"
        UPDATE_TURN.run(conn, {"turn_id": turn_id, "delivery": delivery, "instance": instance})
    return True


def _is_continued(conn: Connection, turn_id: str) -> bool:
    """Whether a running turn or one on a path continues this answer."""
    return _CONTINUATION.one(conn, {"of_turn": turn_id}) is not None


def set_head(conn: Connection, agent_key: int, turn_id: str | None) -> None:
    if turn_id is not None:
        turn = _lock_turn(conn, turn_id, query=LOCK_STATE)
        if turn.agent_key != agent_key:
            raise ValueError(f"{turn_id} is a turn of agent {turn.agent_key}, not of {agent_key}")
    _SET_HEAD.run(conn, {"of_agent": agent_key, "head": turn_id})


def save_session(conn: Connection, session: Session, links: Sequence[Link] = ()) -> None:
    this = {"session_id": session.id, "of_agent": session.agent_key}
    if not UPDATE_SESSION.run(conn, this | rows.session_values(session)).rowcount:
        open_session(conn, session)
    if links:
        save_links(conn, session.agent_key, links)


# --- pieces ---


def _lock_turn(
    conn: Connection, turn_id: str, statuses: frozenset[Status] | None = None, query: Prepared = LOCK_TURN
) -> Row[Any]:
    """Lock the turn's row and return it. Raises an error if there is none, or if it has none of these statuses (None:
    any). `query`: `LOCK_STATE` reads only a few columns."""
    return check_status(turn_id, statuses, query.one(conn, {"turn_id": turn_id}))
