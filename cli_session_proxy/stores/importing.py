"""The body of `import_chain`: a chain from elsewhere, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import Connection, bindparam, select, update

from ..errors import InvalidRequest, NotFound
from ..models import FINISHED, Agent, Link, Session
from . import reading, writing
from .base import ChainPart, NewChain, WholeTurn
from .tables import agents, frames, sessions, turns

# Made once: a statement that is built anew for each turn costs more than its execution.
_EXISTS = select(turns.c.seq).where(turns.c.id == bindparam("turn_id"))


def import_chain(conn: Connection, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
    agent = writing.ensure_agent(conn, new.owner, new.agent_id, new.dir, named=new.named, now=new.created_at)
    if conn.scalar(select(turns.c.id).where(turns.c.agent_key == agent.key).limit(1)) is not None:
        raise InvalidRequest(
            f"agent {new.agent_id!r} has turns already: choose another with --agent-id, or delete it first",
            param="agent_id",
        )
    # A turn that waited in its lane may have a parent that was adopted meanwhile, and is later in the order.
    later: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, WholeTurn):
            _turn(conn, agent, part, later)
        else:
            _explain(conn, agent, part, later)
    _hang(conn, later)
    head = new.head()
    try:
        writing.set_head(conn, agent.key, head)
    except (NotFound, ValueError):
        raise _unsound(f"its head {head} is none of its turns") from None
    # Active now: an old conversation that was just brought in must not be forgotten by `retention_days` at once.
    times = {"created_at": new.created_at, "last_at": new.now}
    conn.execute(update(agents).where(agents.c.key == agent.key).values(**times))
    return replace(agent, head=head, created_at=new.created_at)


def _turn(conn: Connection, agent: Agent, part: WholeTurn, later: list[tuple[str, str]]) -> None:
    turn = replace(part.turn, agent_key=agent.key)
    if turn.status not in FINISHED:
        raise _unsound(f"turn {turn.id} is not finished")
    if _exists(conn, turn.id):
        raise _unsound(f"turn {turn.id} is in this store already")
    if turn.parent_id is not None and not _exists(conn, turn.parent_id):
        later.append((turn.id, turn.parent_id))
        turn = replace(turn, parent_id=None)
    writing.insert_whole(conn, turn, part.records)
    if turn.frame_uuid is not None and not reading.own_frames(conn, agent.key, [turn.frame_uuid]):
        conn.execute(frames.insert(), {"agent_key": agent.key, "uuid": turn.frame_uuid})


def _explain(conn: Connection, agent: Agent, part: Session | Link, later: list[tuple[str, str]]) -> None:
    """A session or a link; the turns are complete from here on."""
    _hang(conn, later)
    turn_id = part.tip_turn_id if isinstance(part, Session) else part.turn_id
    if turn_id is not None and not _exists(conn, turn_id):
        raise _unsound(f"a session or a link names turn {turn_id}, which is not there")
    if isinstance(part, Session):
        if conn.scalar(select(sessions.c.id).where(sessions.c.id == part.id)) is not None:
            raise _unsound(f"session {part.id} is in this store already")
        writing.save_session(conn, replace(part, agent_key=agent.key), [])
    else:
        writing.save_links(conn, agent.key, [part])


def _hang(conn: Connection, later: list[tuple[str, str]]) -> None:
    for turn_id, parent_id in later:
        if not _exists(conn, parent_id):
            raise _unsound(f"turn {turn_id} continues {parent_id}, which is not there")
        conn.execute(update(turns).where(turns.c.id == turn_id).values(parent_id=parent_id))
    later.clear()


def _exists(conn: Connection, turn_id: str) -> bool:
    return conn.scalar(_EXISTS, {"turn_id": turn_id}) is not None


def _unsound(why: str) -> InvalidRequest:
    return InvalidRequest(f"the chain cannot be taken in: {why}; nothing was changed")
