"""Transactions of `Mirrors`: transcripts of sessions that an application runs itself.

Line 0 of a transcript is empty: it marks that there is one, with the time of the last write. Lines that became turns
are deleted here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from ...domain.models import Record
from ..base import MirrorKey
from .tables import agents, mirrored, records, turns

# How many latest turns are searched for lines that come twice: a batch is sent again within seconds.
RECENT = 100


def mirror(conn: Connection, agent_key: int, key: MirrorKey, lines: Sequence[Record]) -> None:
    now = time.time()
    # A lock, so that two writers of one transcript take turns.
    conn.execute(select(agents.c.key).where(agents.c.key == agent_key).with_for_update())
    of_key = _is_of(agent_key, key)
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


def lines(conn: Connection, agent_key: int, key: MirrorKey) -> list[Record] | None:
    rows = conn.execute(select(mirrored).where(_is_of(agent_key, key)).order_by(mirrored.c.n)).all()
    return [Record(row.line.decode("utf-8", "surrogatepass"), row.uuid) for row in rows if row.n] if rows else None


def listed(conn: Connection, agent_key: int, project: str) -> list[tuple[MirrorKey, float]]:
    """The agent's transcripts in this project, each with the time of its last write; the latest comes last."""
    first_lines = mirrored.c.agent_key == agent_key, mirrored.c.project == project, mirrored.c.n == 0
    rows = conn.execute(select(mirrored).where(*first_lines).order_by(mirrored.c.at))
    return [(MirrorKey(row.project, row.session_id, row.subpath), row.at) for row in rows]


def consume(conn: Connection, agent_key: int, key: MirrorKey, count: int) -> None:
    """Delete the transcript's first `count` lines, which became turns."""
    lines = _is_of(agent_key, key) & (mirrored.c.n > 0)  # line 0 stays: it marks the transcript
    consumed = list(conn.scalars(select(mirrored.c.n).where(lines).order_by(mirrored.c.n).limit(count)))
    conn.execute(mirrored.delete().where(lines, mirrored.c.n <= max(consumed, default=0)))


def _is_of(agent_key: int, key: MirrorKey) -> ColumnElement[bool]:
    of_session = (mirrored.c.project == key.project) & (mirrored.c.session_id == key.session_id)
    return (mirrored.c.agent_key == agent_key) & of_session & (mirrored.c.subpath == key.subpath)
