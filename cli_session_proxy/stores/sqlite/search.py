"""The index of all that was said: a file of its own beside the database, `<database>.search`, on SQLite's FTS5.

It is a cache as a transcript is one. No turn waits for it: it is brought up to date by who searches, newest turns
first, in short transactions on its own file. Another version of it, or a broken file, is made anew.

    words   rowid = turns.seq; what was asked, answered, done by tools, and noted by the client, without secrets
    docs    each of these turns, with its status when it was taken in: with another one by now it is taken in again

What is deleted leaves the index with the agent. A piece is read from the chains under the index's write lock, and an
agent leaves the chains first: whoever writes an index after that finds nothing of it to write.

Connections live for one call. Nothing here runs on the event loop.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ... import redact
from ...domain.models import REPAIR_REASONS, Agent
from ...domain.searching import SHORTEST_PART, Found, Hit, HitKind, Indexed, Part, Search
from ...errors import StoreUnavailable
from ..sql.tables import COMING

T = TypeVar("T")

# Raise it when what is taken into the index changes: an index of another version is made anew.
VERSION = 2
# Turns that are taken in at once: a few milliseconds, so that searches side by side take turns.
PIECE = 100
# Characters of each part of a turn that can be found.
LONGEST = 200_000
# Words around the found ones.
SNIPPET = 24
# Seconds for putting all that fits in the order of rank; then the newest are shown. LOOK: steps of SQLite's machine
# between two looks at the clock.
RANKING = 1.5
LOOK = 1000
# How often an index is made anew for one call; a disk that spoils it again is no matter of the index.
TRIES = 2
OPENS, CLOSES = "\x02", "\x03"
PARTS: tuple[Part, ...] = ("input", "output", "tools", "metadata")

_SCHEMA = f"""
    CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(
        input, output, tools, metadata, tokenize = "unicode61 remove_diacritics 2"
    );
    CREATE TABLE IF NOT EXISTS docs (
        seq INTEGER PRIMARY KEY, agent_key INTEGER NOT NULL, turn_id TEXT NOT NULL, status TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS docs_agent ON docs (agent_key);
    PRAGMA user_version = {VERSION};
"""
# What names a block's kind and its place is not what it says; inside of a call's own input everything is.
_NAMES = "'type', 'id', 'tool_use_id', 'role', 'media_type', 'sha256', 'data', 'signature', 'thinking'"


def _said(column: str) -> str:
    return f"""(
        SELECT substr(group_concat(atom, char(10)), 1, {LONGEST}) FROM json_tree(turn.{column})
        WHERE type = 'text' AND (key NOT IN ({_NAMES}) OR path LIKE '%.input%')
    )"""


# What a client noted of its request, each note with its name: `user_id: …` is found by either.
_NOTED = f"""(
    SELECT substr(group_concat(key || ': ' || atom, char(10)), 1, {LONGEST})
    FROM json_tree(turn.options, '$.metadata') WHERE atom IS NOT NULL
)"""
_STALE = "chains.turns turn LEFT JOIN docs ON docs.seq = turn.seq WHERE docs.status IS NOT turn.status"
_NEW = f"""
    SELECT turn.seq, turn.agent_key, turn.id, turn.status, {_said("input")}, {_said("output")}, {_said("tools")},
    {_NOTED}
    FROM chains.turns turn WHERE turn.seq = ?
"""
_AGENT = "agent.key, agent.owner, agent.agent_id, agent.dir, agent.named, agent.head, agent.created_at"
_HIT = f"""
    {_AGENT}, turn.id, turn.session_id, turn.status, turn.model, turn.continuity, turn.cost_usd, turn.created_at,
    turn.seq
"""
_NUMBER = "SELECT count(*) FROM chains.turns WHERE agent_key = ? AND seq <= ?"
_OF = "JOIN chains.agents agent ON agent.key = turn.agent_key"
_REPAIRED = ", ".join(f"'{reason}'" for reason in sorted(REPAIR_REASONS))


class SearchIndex:
    """The index of one database. `busy_timeout`: seconds that a write waits for another proxy's."""

    def __init__(self, database: Path, busy_timeout: float) -> None:
        self._database = database
        self._file = database.with_name(f"{database.name}.search")
        self._busy_timeout = busy_timeout

    def index(self, seconds: float) -> Indexed:
        """Take in turns that are new or have changed, for about so long. Raises `StoreUnavailable`."""
        return self._with(lambda conn: self._index(conn, seconds))

    def search(self, wanted: Search) -> Found:
        """Look through what the index holds, and through the ids. Raises `StoreUnavailable`."""
        return self._with(lambda conn: _search(conn, wanted))

    def forget(self, agent_key: int) -> None:
        """Leave nothing of an agent that has left the chains. Raises `StoreUnavailable`."""
        if not self._file.exists():
            return

        def work(conn: sqlite3.Connection) -> None:
            with _writing(conn):
                left = conn.execute("SELECT seq FROM docs WHERE agent_key = ?", (agent_key,)).fetchall()
                _remove(conn, left)
            if left:
                _wipe(conn)

        self._with(work)

    def _with(self, work: Callable[[sqlite3.Connection], T]) -> T:
        for left in reversed(range(TRIES)):
            try:
                with self._opened() as conn:
                    return work(conn)
            except sqlite3.Error as exc:
                code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
                if left and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    for end in ("", "-wal", "-shm"):
                        self._file.with_name(self._file.name + end).unlink(missing_ok=True)
                    continue
                raise StoreUnavailable(
                    f"the search index {self._file} cannot be used ({exc}): remove the file, it is made anew"
                ) from exc
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The index, new where there is none, with the chains attached for reading."""
        with closing(sqlite3.connect(self._file, timeout=self._busy_timeout, isolation_level=None, uri=True)) as conn:
            # A model's half surrogate pair is no UTF-8: it is shown as "?".
            conn.text_factory = lambda raw: raw.decode("utf-8", "replace")
            conn.execute("PRAGMA secure_delete=ON")
            conn.execute("PRAGMA journal_mode=WAL")
            conn.execute("PRAGMA synchronous=NORMAL")
            conn.execute("ATTACH ? AS chains", (f"{self._database.absolute().as_uri()}?mode=ro",))
            if conn.execute("PRAGMA user_version").fetchone() != (VERSION,):
                conn.executescript(f"BEGIN IMMEDIATE; DROP TABLE IF EXISTS words; DROP TABLE IF EXISTS docs; {_SCHEMA}")
                conn.execute("COMMIT")
            yield conn

    def _index(self, conn: sqlite3.Connection, seconds: float) -> Indexed:
        until = time.monotonic() + seconds
        with _writing(conn):
            # An agent whose deletion was cut short between the chains and the index.
            gone = "SELECT seq FROM docs WHERE seq NOT IN (SELECT seq FROM chains.turns)"
            left = conn.execute(gone).fetchall()
            _remove(conn, left)
        if left:
            _wipe(conn)
        stale = conn.execute(f"SELECT turn.seq FROM {_STALE} ORDER BY turn.seq DESC").fetchall()
        (total,) = conn.execute("SELECT count(*) FROM chains.turns").fetchone()
        done = 0
        while done < len(stale) and (done == 0 or time.monotonic() < until):
            piece = stale[done : done + PIECE]
            with _writing(conn):
                for number in piece:
                    for seq, agent_key, turn_id, status, *said in conn.execute(_NEW, number):
                        shown = [redact.text(text or "") for text in said]
                        conn.execute("DELETE FROM words WHERE rowid = ?", (seq,))
                        conn.execute(
                            "INSERT INTO words (rowid, input, output, tools, metadata) VALUES (?, ?, ?, ?, ?)",
                            (seq, *shown),
                        )
                        conn.execute(
                            "INSERT OR REPLACE INTO docs VALUES (?, ?, ?, ?)", (seq, agent_key, turn_id, status)
                        )
            done += len(piece)
        return Indexed(total - len(stale) + done, total)


@contextmanager
def _writing(conn: sqlite3.Connection) -> Iterator[None]:
    """A transaction with the index's write lock; the chains are read as they are when it is taken."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def _remove(conn: sqlite3.Connection, seqs: list[Any]) -> None:
    conn.executemany("DELETE FROM words WHERE rowid = ?", seqs)
    conn.executemany("DELETE FROM docs WHERE seq = ?", seqs)


def _wipe(conn: sqlite3.Connection) -> None:
    """FTS5 notes beside its words that some are deleted; merged into one, they are gone, and what was freed is zero."""
    conn.execute("INSERT INTO words (words) VALUES ('optimize')")
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")


# --- looking ---


def _search(conn: sqlite3.Connection, wanted: Search) -> Found:
    theirs, values = _theirs(wanted)
    agents: list[tuple[Any, ...]] = conn.execute(
        f"SELECT {_AGENT}, agent.last_at FROM chains.agents agent WHERE {theirs} ORDER BY agent.last_at DESC", values
    ).fetchall()
    (turns,) = conn.execute(f"SELECT count(*) FROM chains.turns turn {_OF} WHERE {theirs}", values).fetchone()
    hits = [*_by_name(agents, wanted), *_by_id(conn, wanted)]
    hits += _by_words(conn, wanted, wanted.limit - len(hits)) if len(hits) < wanted.limit else []
    return Found(tuple(hits[: wanted.limit]), len(agents), turns)


def _by_name(agents: list[tuple[Any, ...]], wanted: Search) -> Iterator[Hit]:
    words = [word.casefold() for word in wanted.words]
    if not words or wanted.is_filtered:
        return
    for *row, last_at in agents:
        agent = _agent(row)
        if all(word in agent.agent_id.casefold() for word in words):
            yield Hit("agent", agent, last_at, agent.head)


def _by_id(conn: sqlite3.Connection, wanted: Search) -> Iterator[Hit]:
    """Sessions and turns that one word is a part of the id of."""
    if len(wanted.words) != 1 or len(wanted.words[0]) < SHORTEST_PART:
        return
    where, values = _fits(wanted)
    part = "%" + wanted.words[0].replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    session = f"""
        SELECT {_HIT}, session.id FROM chains.sessions session
        JOIN chains.turns turn ON turn.id = session.tip_turn_id {_OF}
        WHERE session.id LIKE ? ESCAPE '\\' AND {where} ORDER BY session.n DESC LIMIT ?
    """
    turn = f"""
        SELECT {_HIT}, turn.session_id FROM chains.turns turn {_OF}
        WHERE turn.id LIKE ? ESCAPE '\\' AND {where} ORDER BY turn.seq DESC LIMIT ?
    """
    kinds: tuple[tuple[HitKind, str], ...] = (("session", session), ("turn", turn))
    for kind, statement in kinds:
        for *row, session_id in conn.execute(statement, (part, *values, wanted.limit)):
            yield _hit(conn, kind, row, session_id=session_id)


def _by_words(conn: sqlite3.Connection, wanted: Search, limit: int) -> Iterator[Hit]:
    """By rank, then the newest; the newest alone where there are no words."""
    where, values = _fits(wanted)
    if not wanted.words:
        if wanted.is_filtered:
            newest = f"SELECT {_HIT} FROM chains.turns turn {_OF} WHERE {where} ORDER BY turn.seq DESC LIMIT ?"
            yield from (_hit(conn, "words", row) for row in conn.execute(newest, (*values, limit)))
        return
    match = " ".join('"' + word.replace('"', '""') + '"' for word in wanted.words)
    if not wanted.text.rstrip().endswith('"'):
        match += " *"  # the last word may still be typed
    fits = f"""
        FROM words JOIN docs ON docs.seq = words.rowid
        JOIN chains.turns turn ON turn.seq = docs.seq AND turn.id = docs.turn_id {_OF}
        WHERE words MATCH ? AND {where}
    """
    cut = ", ".join(f"snippet(words, {n}, '{OPENS}', '{CLOSES}', '…', {SNIPPET})" for n in range(len(PARTS)))
    try:
        with _no_longer_than(conn, RANKING):
            # The turns first: a snippet of every turn that fits would be made before they are sorted.
            ranked = f"SELECT {_HIT} {fits} ORDER BY words.rank, turn.seq DESC LIMIT ?"
            best = conn.execute(ranked, (match, *values, limit)).fetchall()
            # In one pass over what fits, thus the `+`: for each rowid a prefix would be looked up anew.
            those = ", ".join("?" * len(best))
            shown = f"SELECT rowid, {cut} FROM words WHERE words MATCH ? AND +rowid IN ({those})"
            snippets = {seq: parts for seq, *parts in conn.execute(shown, (match, *(row[-1] for row in best)))}
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        # Very many turns fit. The newest come in the order of the index: nothing has to be sorted, or read to its end.
        newest = f"SELECT {_HIT}, {cut} {fits} ORDER BY words.rowid DESC LIMIT ?"
        found = conn.execute(newest, (match, *values, limit)).fetchall()
        best = [row[: -len(PARTS)] for row in found]
        snippets = {row[-1 - len(PARTS)]: row[-len(PARTS) :] for row in found}
    for row in best:
        parts = snippets.get(row[-1], ())
        part, text = max(zip(PARTS, parts, strict=False), key=lambda one: one[1].count(OPENS), default=(None, ""))
        pieces = tuple(piece for marked in text.split(OPENS) for piece in marked.split(CLOSES))
        yield _hit(conn, "words", row, part=part, snippet=pieces)


@contextmanager
def _no_longer_than(conn: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Interrupts the statements of the connection when the time is over."""
    until = time.monotonic() + seconds
    conn.set_progress_handler(lambda: time.monotonic() > until, LOOK)
    try:
        yield
    finally:
        conn.set_progress_handler(None, 0)


def _theirs(wanted: Search) -> tuple[str, tuple[Any, ...]]:
    if wanted.owner is None:
        return "agent.owner <> ?", (COMING,)
    return "agent.owner = ?", (wanted.owner,)


def _fits(wanted: Search) -> tuple[str, tuple[Any, ...]]:
    theirs, values = _theirs(wanted)
    repaired = f"EXISTS (SELECT 1 FROM chains.links link WHERE link.turn_id = turn.id AND link.reason IN ({_REPAIRED}))"
    asked: tuple[tuple[Any, str], ...] = (
        (wanted.since, "turn.created_at >= ?"),
        (wanted.until, "turn.created_at < ?"),
        (wanted.model, "? IN (turn.model, turn.answered_by)"),
        (wanted.status, "turn.status = ?"),
        (wanted.min_cost, "turn.cost_usd >= ?"),
    )
    given = [(value, test) for value, test in asked if value is not None]
    tests = [theirs, *(test for _, test in given), *([repaired] if wanted.repaired else [])]
    return " AND ".join(tests), (*values, *(value for value, _ in given))


def _agent(row: Sequence[Any]) -> Agent:
    key, owner, agent_id, folder, named, head, created_at = row
    return Agent(key, owner, agent_id, folder, bool(named), head, created_at)


def _hit(conn: sqlite3.Connection, kind: HitKind, row: Sequence[Any], **more: Any) -> Hit:
    """From a row of the columns of `_HIT`. The turn's number is asked for here: of those that are shown, not of all."""
    turn_id, session_id, status, model, continuity, cost, at, seq = row[7:]
    (number,) = conn.execute(_NUMBER, (row[0], seq)).fetchone()
    told = {"session_id": session_id, **more}
    return Hit(
        kind, _agent(row[:7]), at, turn_id, number, status=status, model=model, continuity=continuity, cost_usd=cost,
        **told,
    )  # fmt: skip
