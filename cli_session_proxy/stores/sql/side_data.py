"""Transactions on what the store keeps beside the turns: `Findings`, `Mirrors`, and data of OpenAI's Conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, Row, case, func, literal, select, update

from ...domain.models import JSON, Conversation, Item, Record
from ...errors import InvalidRequest
from ..base import Finding, MirrorKey, PathChanged
from .damaged import reads, undamaged
from .database import InsertNew, Prepared
from .rows import dumps, loads
from .tables import agents, conversations, findings, items, meta, mirrored, records, turns

# --- findings: named results about a subject

_NOW = func.store_clock(type_=Double)
# Seconds after which a finding is deleted, when the next one is stored: a bit more than a year.
FINDINGS_KEPT = 400 * 86400.0


def claim_finding(conn: Connection, subject: str, name: str, seconds: float) -> bool:
    now = _lock_findings(conn)
    of = findings.c.subject == subject, findings.c.name == name
    existing = conn.execute(select(findings.c.until).where(*of)).first()
    if existing is not None and (existing.until is None or existing.until > now):
        return False
    conn.execute(findings.delete().where(*of))
    row = {"subject": subject, "name": name, "found": "{}", "at": now, "until": now + seconds}
    conn.execute(findings.insert(), row)
    return True


def keep_findings(conn: Connection, subject: str, found: Mapping[str, JSON]) -> None:
    now = _lock_findings(conn)
    conn.execute(findings.delete().where(findings.c.subject == subject, findings.c.name.in_(list(found))))
    conn.execute(findings.delete().where(findings.c.at < now - FINDINGS_KEPT))
    rows = [{"subject": subject, "name": name, "found": dumps(one), "at": now} for name, one in found.items()]
    if rows:
        conn.execute(findings.insert(), rows)


def findings_of(conn: Connection, subject: str | None = None) -> list[Finding]:
    query = select(findings).where(findings.c.until.is_(None))
    if subject is not None:
        query = query.where(findings.c.subject == subject)
    return undamaged(_finding, conn.execute(query.order_by(findings.c.at, findings.c.subject, findings.c.name)))


@reads(*findings.c)
def _finding(row: Any) -> Finding:
    return Finding(row.subject, row.name, dict(loads(row.found)), row.at)


def _lock_findings(conn: Connection) -> float:
    """Lock a row that every store has, so that writers take turns. Returns the store's time."""
    conn.execute(select(meta.c.value).where(meta.c.name == "schema_version").with_for_update())
    return float(conn.scalar(select(_NOW)) or 0.0)


# --- mirrors: transcripts of sessions that an application runs itself

# Line 0 of a transcript is empty: it marks that there is one, with the time of the last write. Lines that became turns
# are deleted here.

# How many latest turns are searched for lines that come twice: a batch is sent again within seconds.
RECENT = 100


def mirror(conn: Connection, agent_key: int, key: MirrorKey, lines: Sequence[Record]) -> None:
    now = time.time()
    # A lock, so that two writers of one transcript take turns.
    conn.execute(select(agents.c.key).where(agents.c.key == agent_key).with_for_update())
    of_key = _is_transcript(agent_key, key)
    base = {"agent_key": agent_key, "project": key.project, "session_id": key.session_id, "subpath": key.subpath}
    last = conn.scalar(select(func.max(mirrored.c.n)).where(of_key))
    if last is None:
        last = 0
        conn.execute(mirrored.insert(), {**base, "n": 0, "at": now, "uuid": None, "line": b""})
    else:
        conn.execute(mirrored.update().where(of_key, mirrored.c.n == 0).values(at=now))
    known: set[str] = set()
    if any(line.uuid for line in lines):
        known.update(conn.scalars(select(mirrored.c.uuid).where(of_key, mirrored.c.uuid.is_not(None))))
        if not key.subpath:
            of_session = turns.c.agent_key == agent_key, turns.c.session_id == key.session_id
            newest = select(turns.c.id).where(*of_session).order_by(turns.c.seq.desc()).limit(RECENT)
            of_turns = records.c.turn_id.in_(list(conn.scalars(newest))), records.c.uuid.is_not(None)
            known.update(conn.scalars(select(records.c.uuid).where(*of_turns)))
    new: list[dict[str, Any]] = []
    for line in lines:
        if line.uuid in known:
            continue
        if line.uuid is not None:
            known.add(line.uuid)
        last += 1
        data = line.line.encode("utf-8", "surrogatepass")
        new.append({**base, "n": last, "at": now, "uuid": line.uuid, "line": data})
    if new:
        conn.execute(mirrored.insert(), new)


def mirrored_lines(conn: Connection, agent_key: int, key: MirrorKey) -> list[Record] | None:
    rows = conn.execute(select(mirrored).where(_is_transcript(agent_key, key)).order_by(mirrored.c.n)).all()
    return [Record(row.line.decode("utf-8", "surrogatepass"), row.uuid) for row in rows if row.n] if rows else None


def mirrored_transcripts(conn: Connection, agent_key: int, project: str) -> list[tuple[MirrorKey, float]]:
    """The agent's transcripts in this project, each with the time of its last write; the latest comes last."""
    first_lines = mirrored.c.agent_key == agent_key, mirrored.c.project == project, mirrored.c.n == 0
    rows = conn.execute(select(mirrored).where(*first_lines).order_by(mirrored.c.at))
    return [(MirrorKey(row.project, row.session_id, row.subpath), row.at) for row in rows]


def consume_lines(conn: Connection, agent_key: int, key: MirrorKey, count: int) -> None:
    """Delete the transcript's first `count` lines, which became turns."""
    lines = _is_transcript(agent_key, key) & (mirrored.c.n > 0)  # line 0 stays: it marks the transcript
    consumed = list(conn.scalars(select(mirrored.c.n).where(lines).order_by(mirrored.c.n).limit(count)))
    conn.execute(mirrored.delete().where(lines, mirrored.c.n <= max(consumed, default=0)))


def _is_transcript(agent_key: int, key: MirrorKey) -> ColumnElement[bool]:
    of_session = (mirrored.c.project == key.project) & (mirrored.c.session_id == key.session_id)
    return (mirrored.c.agent_key == agent_key) & of_session & (mirrored.c.subpath == key.subpath)


# --- OpenAI's Conversations: metadata, items that a client wrote itself, removed items

# Characters of the items that a client wrote itself, in one conversation: all are in memory when one is looked for.
MOST_WRITTEN = 256 * 1024 * 1024

_INSERT_CONVERSATION = Prepared(InsertNew(conversations))
_removed = conversations.c.removed
# The list of removed items without its "]", for one more: SQLite and PostgreSQL have no common function for that.
_REMOVED_OPEN = case((_removed == "[]", "["), else_=func.substr(_removed, 1, func.length(_removed) - 1) + ",")
_read_conversation = reads(*conversations.c)(
    lambda row: Conversation(dict(json.loads(row.metadata)), tuple(map("".__add__, json.loads(row.removed))))
)


def conversation(conn: Connection, agent_key: int) -> Conversation | None:
    row = conn.execute(select(conversations).where(conversations.c.agent_key == agent_key)).one_or_none()
    return None if row is None else _read_conversation(row)


def save_conversation(conn: Connection, agent_key: int, data: Conversation) -> None:
    """Store an imported conversation."""
    _ensure_conversation(conn, agent_key)
    values = {"metadata": dumps(data.metadata), "removed": dumps(data.removed)}
    conn.execute(update(conversations).where(conversations.c.agent_key == agent_key).values(values))


def annotate(conn: Connection, agent_key: int, metadata: JSON) -> None:
    """Replace the conversation's metadata."""
    _ensure_conversation(conn, agent_key)
    of_agent = conversations.c.agent_key == agent_key
    conn.execute(update(conversations).where(of_agent).values(metadata=dumps(metadata)))


def take_out(conn: Connection, agent_key: int, item_id: str) -> None:
    """Remove an item: a hand-written one that no turn has yet is deleted, any other is listed as removed. Each
    statement works on the current rows, so concurrent writes are safe."""
    delete_item = items.delete().where(items.c.agent_key == agent_key, items.c.id == item_id)
    if conn.execute(delete_item.where(items.c.turn_id.is_(None))).rowcount:
        return
    _ensure_conversation(conn, agent_key)
    removed = _REMOVED_OPEN + literal(dumps(item_id)) + "]"
    conn.execute(update(conversations).where(conversations.c.agent_key == agent_key).values(removed=removed))


def _ensure_conversation(conn: Connection, agent_key: int) -> None:
    _INSERT_CONVERSATION.run(conn, {"agent_key": agent_key, "metadata": "{}", "removed": "[]"})


def add_items(conn: Connection, agent_key: int, new: Sequence[Item]) -> None:
    if not new:
        return
    texts = [dumps(one.data) for one in new]
    written = conn.scalar(select(func.sum(func.length(items.c.data))).where(items.c.agent_key == agent_key)) or 0
    if written + sum(map(len, texts)) > MOST_WRITTEN:
        raise InvalidRequest(
            f"a conversation holds {MOST_WRITTEN} characters of added items at most: begin another one", param="items"
        )
    added = zip(new, texts, strict=True)
    conn.execute(items.insert(), [{"id": one.id, "agent_key": agent_key, "data": text} for one, text in added])


@reads(*items.c)
def item(row: Row[Any]) -> Item:
    return Item(row.id, dict(json.loads(row.data)), row.turn_id)


def take_items(conn: Connection, agent_key: int, taken: Sequence[tuple[str, str]]) -> None:
    """Assign each item to its turn. `PathChanged` if one was removed."""
    for item_id, turn_id in taken:
        this_item = items.c.agent_key == agent_key, items.c.id == item_id
        if not conn.execute(update(items).where(*this_item).values(turn_id=turn_id)).rowcount:
            raise PathChanged(item_id)


def add_to_call(conn: Connection, turn_id: str, more: JSON) -> None:
    this_turn = turns.c.id == turn_id
    known = conn.scalar(select(turns.c.call).where(this_turn).with_for_update(key_share=True))
    conn.execute(update(turns).where(this_turn).values(call=dumps({**json.loads(known or "{}"), **more})))
