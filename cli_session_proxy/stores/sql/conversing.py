"""The bodies of the transactions behind OpenAI's Conversations: notes, items written by hand, items taken out."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import Connection, and_, or_, select, update

from ...domain.models import ANSWERED, FINISHED, JSON, Conversation, Item
from . import rows
from .database import InsertNew, Prepared
from .tables import conversations, items, turns

_INSERT_CONVERSATION = Prepared(InsertNew(conversations))


def conversation(conn: Connection, agent_key: int) -> Conversation | None:
    row = conn.execute(select(conversations).where(conversations.c.agent_key == agent_key)).one_or_none()
    return None if row is None else Conversation(json.loads(row.metadata), tuple(json.loads(row.removed)))


def save_conversation(conn: Connection, agent_key: int, data: Conversation) -> None:
    values = {"metadata": rows.dumps(data.metadata), "removed": rows.dumps(data.removed)}
    if not conn.execute(update(conversations).where(conversations.c.agent_key == agent_key).values(values)).rowcount:
        _INSERT_CONVERSATION.run(conn, {"agent_key": agent_key, **values})


def add_items(conn: Connection, agent_key: int, new: Sequence[Item]) -> None:
    if new:
        conn.execute(items.insert(), [{"id": i.id, "agent_key": agent_key, "data": rows.dumps(i.data)} for i in new])


def put_item(conn: Connection, agent_key: int, item: Item) -> None:
    """One that comes from another store, with the turn that took it in."""
    values = {"id": item.id, "agent_key": agent_key, "data": rows.dumps(item.data), "turn_id": item.turn_id}
    conn.execute(items.insert(), values)


def items_of(conn: Connection, agent_key: int) -> list[Item]:
    found = conn.execute(select(items).where(items.c.agent_key == agent_key).order_by(items.c.n))
    return [Item(row.id, json.loads(row.data), row.turn_id) for row in found]


def pending_items(conn: Connection, agent_key: int) -> list[Item]:
    """Items that no turn has taken in; those of a turn that failed are pending again."""
    lost = sorted(FINISHED - ANSWERED)
    query = select(items).outerjoin(turns, turns.c.id == items.c.turn_id).where(items.c.agent_key == agent_key)
    free = or_(items.c.turn_id.is_(None), turns.c.status.in_(lost))
    found = conn.execute(query.where(free).order_by(items.c.n))
    return [Item(row.id, json.loads(row.data)) for row in found]


def remove_item(conn: Connection, agent_key: int, item_id: str) -> bool:
    gone = conn.execute(items.delete().where(items.c.agent_key == agent_key, items.c.id == item_id))
    return bool(gone.rowcount)


def take(conn: Connection, agent_key: int, ids: Sequence[str], turn_id: str) -> None:
    """These items belong to the turn that is just accepted."""
    own = and_(items.c.agent_key == agent_key, items.c.id.in_(ids))
    conn.execute(update(items).where(own).values(turn_id=turn_id))


def hand_over(conn: Connection, source: int, target: int) -> None:
    """What was written by hand for an agent without turns belongs to the one that takes its name."""
    conn.execute(update(items).where(items.c.agent_key == source).values(agent_key=target))
    notes = conversation(conn, source)
    if notes is not None and conversation(conn, target) is None:
        save_conversation(conn, target, notes)


def set_call(conn: Connection, turn_id: str, call: JSON) -> None:
    conn.execute(update(turns).where(turns.c.id == turn_id).values(call=rows.dumps(call)))


def forget(conn: Connection, agent_key: int) -> None:
    """Before the agent's turns are deleted."""
    conn.execute(items.delete().where(items.c.agent_key == agent_key))
    conn.execute(conversations.delete().where(conversations.c.agent_key == agent_key))
