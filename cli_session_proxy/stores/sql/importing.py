"""Transactions of `import_chain`: a chain from elsewhere, in many small steps. Only the last makes it visible.

In one transaction 20,000 turns would hold SQLite's write lock for 10 s, and every other agent's turn would fail on it.
A running import claims its name (`Database.claim`). Leftovers whose name nobody claims are of a program that died.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sqlalchemy import Connection, bindparam, select, update

from ...domain.limits import is_session_id
from ...domain.models import FINISHED, Agent, Conversation, Item, Link, Session
from ...errors import InvalidRequest, NotFound
from ..base import ChainPart, NewChain, WholeTurn
from . import lifecycle, reading, rows, side_data, writing
from .database import Database, InsertNew, Prepared
from .tables import COMING, agents, frames, items, mirrored, sessions, turns

# Made once: a statement that is built anew for each turn costs more than its execution.
_AGENT_OF = select(turns.c.agent_key).where(turns.c.id == bindparam("turn_id"))
# The uuid of a sent frame, so that its record is recognised as ours.
_INSERT_FRAME = Prepared(InsertNew(frames))

# The size of one transaction: turns, bytes of records. Other writers wait for at most one transaction.
PIECE_TURNS = 100
PIECE_BYTES = 1024 * 1024
# The longest pause after a transaction, in seconds.
PAUSE = 0.2


def clear(conn: Connection, database: Database) -> None:
    """Remove leftovers of imports whose program died: their turn ids would block the next try."""
    for key, name in conn.execute(select(agents.c.key, agents.c.agent_id).where(agents.c.owner == COMING)).all():
        release = database.claim(name)
        if release is not None:  # else its import still runs in another program
            try:
                drop(conn, key)
            finally:
                release()


def drop(conn: Connection, key: int) -> bool:
    """Remove what an import has stored so far. False if the chain is visible. Then the import has ended, even if its
    program does not know that, and the chain may have new turns."""
    hidden = select(agents.c.key).where(agents.c.key == key, agents.c.owner == COMING).with_for_update()
    return conn.scalar(hidden) is not None and writing.delete_agent(conn, key)


def begin(conn: Connection, new: NewChain, name: str) -> Agent:
    """The hidden agent that receives the parts."""
    _agent_without_turns(conn, new)  # refuse now what `finish` would refuse at the end
    return writing.ensure_agent(conn, COMING, name, f"{COMING}-{name}", named=True, now=time.time())


def pieces(parts: Iterable[ChainPart]) -> Iterator[list[ChainPart]]:
    """The parts of a chain in pieces of one transaction each."""
    piece: list[ChainPart] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += sum(len(record.line) for record in part.records) if isinstance(part, WholeTurn) else 0
        if len(piece) >= PIECE_TURNS or size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


class ChainImport:
    """One import. `agent`: the hidden agent that receives the parts. Each method is a transaction, run once."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        # Turns that were stored before their parent, with its id: a parent may be later in the order of acceptance,
        # because it was adopted while its child waited in the lane.
        self._without_parent: list[tuple[str, str]] = []

    def store(self, conn: Connection, piece: Sequence[ChainPart]) -> None:
        """Store some parts of the chain. All turns come before other parts, so their parents are set at the first of
        those."""
        for part in piece:
            if isinstance(part, WholeTurn):
                self._store_turn(conn, part)
            else:
                self._set_parents(conn)
                self._store_about_turns(conn, part)

    def _store_turn(self, conn: Connection, part: WholeTurn) -> None:
        turn = replace(part.turn, agent_key=self.agent.key)
        _check_session_id(turn.session_id)
        if turn.status not in FINISHED:
            raise _unsound(f"turn {turn.id} is not finished")
        if _agent_of(conn, turn.id) is not None:
            raise _unsound(f"turn {turn.id} is in this store already")
        if turn.parent_id is not None and _agent_of(conn, turn.parent_id) != self.agent.key:
            self._without_parent.append((turn.id, turn.parent_id))
            turn = replace(turn, parent_id=None)
        lifecycle.insert(conn, turn, part.records)
        if turn.frame_uuid is not None:
            _INSERT_FRAME.run(conn, {"agent_key": self.agent.key, "uuid": turn.frame_uuid})

    def _store_about_turns(self, conn: Connection, part: Session | Link | Conversation | Item) -> None:
        if isinstance(part, Conversation):
            side_data.save_conversation(conn, self.agent.key, part)
            return
        turn_id = part.tip_turn_id if isinstance(part, Session) else part.turn_id
        if turn_id is not None and _agent_of(conn, turn_id) != self.agent.key:
            raise _unsound(f"a session, a link or an item names turn {turn_id}, which is not there")
        if isinstance(part, Item):
            if conn.scalar(select(items.c.id).where(items.c.id == part.id)) is not None:
                raise _unsound(f"item {part.id} is in this store already")
            data = rows.dumps(part.data)
            values = {"id": part.id, "agent_key": self.agent.key, "data": data, "turn_id": part.turn_id}
            conn.execute(items.insert(), values)
        elif isinstance(part, Session):
            _check_session_id(part.id)
            if conn.scalar(select(sessions.c.id).where(sessions.c.id == part.id)) is not None:
                raise _unsound(f"session {part.id} is in this store already")
            writing.save_session(conn, replace(part, agent_key=self.agent.key))
        else:
            _check_session_id(part.from_session)
            _check_session_id(part.to_session)
            lifecycle.save_links(conn, self.agent.key, [part])

    def _set_parents(self, conn: Connection) -> None:
        """Give turns that were stored before their parent this parent: it is stored by now."""
        for turn_id, parent_id in self._without_parent:
            if _agent_of(conn, parent_id) != self.agent.key:
                raise _unsound(f"turn {turn_id} continues {parent_id}, which is not there")
            conn.execute(update(turns).where(turns.c.id == turn_id).values(parent_id=parent_id))
        self._without_parent.clear()

    def finish(self, conn: Connection, new: NewChain) -> Agent:
        """Make the chain visible: the agent gets its name."""
        self._set_parents(conn)  # `store` does it only if other parts follow the turns
        empty = _agent_without_turns(conn, new)
        if empty is not None:
            # What it has beside turns becomes the imported agent's.
            for table in (items, mirrored):
                of_empty = table.update().where(table.c.agent_key == empty.key)
                conn.execute(of_empty.values(agent_key=self.agent.key))
            conversation = side_data.conversation(conn, empty.key)
            if conversation is not None and side_data.conversation(conn, self.agent.key) is None:
                side_data.save_conversation(conn, self.agent.key, conversation)
            writing.delete_agent(conn, empty.key)
        head = new.head()
        try:
            writing.set_head(conn, self.agent.key, head)
        except (NotFound, ValueError):
            raise _unsound(f"its head {head} is not one of its turns") from None
        # It counts as active now, so that `retention_days` does not delete a freshly imported old conversation.
        values = {"owner": new.owner, "agent_id": new.agent_id, "dir": new.dir, "named": new.named}
        times = {"created_at": new.created_at, "last_at": new.now}
        conn.execute(update(agents).where(agents.c.key == self.agent.key).values(**values, **times))
        return Agent(self.agent.key, new.owner, new.agent_id, new.dir, new.named, head, new.created_at)


def _agent_without_turns(conn: Connection, new: NewChain) -> Agent | None:
    """The agent of this name; None if there is none. Raises `InvalidRequest` if it has turns."""
    agent = reading.agent(conn, new.owner, new.agent_id)
    if agent is None:
        return None
    # Each accepted turn writes this row: the lock keeps turns out that would be deleted with the agent.
    conn.execute(select(agents.c.key).where(agents.c.key == agent.key).with_for_update())
    if conn.scalar(select(turns.c.id).where(turns.c.agent_key == agent.key).limit(1)) is not None:
        raise InvalidRequest(
            f"agent {new.agent_id!r} has turns already: choose another with --agent-id, or delete it first",
            param="agent_id",
        )
    return agent


def _check_session_id(session_id: str | None) -> None:
    """Before a session id is stored: file names are made of it later."""
    if session_id is not None and not is_session_id(session_id):
        raise _unsound(f"{session_id[:80]!r} is no session id")


def _agent_of(conn: Connection, turn_id: str) -> int | None:
    """The key of the turn's agent. Imported parts may only refer to turns of their own agent."""
    key: int | None = conn.scalar(_AGENT_OF, {"turn_id": turn_id})
    return key


def _unsound(why: str) -> InvalidRequest:
    return InvalidRequest(f"the chain cannot be imported: {why}; nothing was changed")
