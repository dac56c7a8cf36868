"""Transactions for OpenAI's Conversations: metadata, items that a client wrote itself, removed items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, func, literal, select, update

from ...domain.models import JSON, Conversation, Item
from ...errors import InvalidRequest
from ..base import PathChanged
from . import rows
from .database import InsertNew, Prepared
from .tables import conversations, items, turns

# Characters of the items that a client wrote itself, in one conversation: all are in memory when one is looked for.
MOST_WRITTEN = 256 * 1024 * 1024

_INSERT_CONVERSATION = Prepared(InsertNew(conversations))
_removed = conversations.c.removed
_more_removed = case((_removed == "[]", "["), else_=func.substr(_removed, 1, func.length(_removed) - 1) + ",")


def conversation(conn: Connection, agent_key: int) -> Conversation | None:
    row = conn.execute(select(conversations).where(conversations.c.agent_key == agent_key)).one_or_none()
    return None if row is None else Conversation(json.loads(row.metadata), tuple(json.loads(row.removed)))


def save_conversation(conn: Connection, agent_key: int, data: Conversation) -> None:
    """Store an imported one."""
    _ensure(conn, agent_key)
    values = {"metadata": rows.dumps(data.metadata), "removed": rows.dumps(data.removed)}
    conn.execute(update(conversations).where(conversations.c.agent_key == agent_key).values(values))


def annotate(conn: Connection, agent_key: int, metadata: JSON) -> None:
    _ensure(conn, agent_key)
    of_agent = conversations.c.agent_key == agent_key
    conn.execute(update(conversations).where(of_agent).values(metadata=rows.dumps(metadata)))


def take_out(conn: Connection, agent_key: int, item_id: str) -> None:
    """Remove an item. Each statement works on the current rows, so concurrent writes are safe."""
    delete_item = items.delete().where(items.c.agent_key == agent_key, items.c.id == item_id)
    if conn.execute(delete_item.where(items.c.turn_id.is_(None))).rowcount:
        return
    _ensure(conn, agent_key)
    more = _more_removed + literal(rows.dumps(item_id)) + "]"
    conn.execute(update(conversations).where(conversations.c.agent_key == agent_key).values(removed=more))


def _ensure(conn: Connection, agent_key: int) -> None:
    _INSERT_CONVERSATION.run(conn, {"agent_key": agent_key, "metadata": "{}", "removed": "[]"})


def add_items(conn: Connection, agent_key: int, new: Sequence[Item]) -> None:
    if not new:
        return
    texts = [rows.dumps(one.data) for one in new]
    held = conn.scalar(select(func.sum(func.length(items.c.data))).where(items.c.agent_key == agent_key)) or 0
    if held + sum(map(len, texts)) > MOST_WRITTEN:
        raise InvalidRequest(
            f"a conversation holds {MOST_WRITTEN} characters of added items at most: begin another one", param="items"
        )
    added = zip(new, texts, strict=True)
    conn.execute(items.insert(), [{"id": one.id, "agent_key": agent_key, "data": text} for one, text in added])


def items_of(conn: Connection, agent_key: int) -> list[Item]:
    written = conn.execute(select(items).where(items.c.agent_key == agent_key).order_by(items.c.n))
    return list(map(item, written))


def item(row: Row[Any]) -> Item:
    return Item(row.id, json.loads(row.data), row.turn_id)


def take(conn: Connection, agent_key: int, taken: Sequence[tuple[str, str]]) -> None:
    """Assign each item to its turn. `PathChanged` if one was removed."""
    for item_id, turn_id in taken:
        this_item = items.c.agent_key == agent_key, items.c.id == item_id
        if not conn.execute(update(items).where(*this_item).values(turn_id=turn_id)).rowcount:
            raise PathChanged(item_id)


def add_to_call(conn: Connection, turn_id: str, more: JSON) -> None:
    this_turn = turns.c.id == turn_id
    known = conn.scalar(select(turns.c.call).where(this_turn).with_for_update(key_share=True))
    conn.execute(update(turns).where(this_turn).values(call=rows.dumps({**json.loads(known or "{}"), **more})))
