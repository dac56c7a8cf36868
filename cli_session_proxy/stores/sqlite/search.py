"""The full-text index: a separate file beside the database, `<database>.search`, with SQLite's FTS5.

It is a cache. No turn waits for it: a search first updates it, newest turns first, in short transactions on its own
file. Another version of it, or a broken file, is rebuilt.

    words   rowid = turns.seq; what was asked, answered, done by tools, and noted by the client, without secrets
    docs    each indexed turn, with its status at that time: a turn with another status now is indexed again

A deleted agent is removed from the index, too, after it was removed from the chains. Turns are indexed under the
index's write lock, so an indexer that comes later finds nothing of the agent.

Connections live for one call. Nothing here runs on the event loop.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, NullPool, and_, column, create_engine, func, literal_column, select, table, text

from ...domain.searching import Found, Indexed, Search
from ...errors import StoreUnavailable
from ..sql import searching
from ..sql.searching import PARTS, SNIPPET, Ranked
from ..sql.tables import agents, turns
from .file import ADVICE, ERRORS, cause_of, driver_of

T = TypeVar("T")

# Raise it when the indexed content changes: an index of another version is rebuilt.
VERSION = 3
# Steps of SQLite's virtual machine between two checks of the time limit for ranking.
CHECK_EVERY = 1000
# How often an index is rebuilt for one call; if it is broken again, the disk is bad.
TRIES = 2
OPENS, CLOSES = "\x02", "\x03"  # around a match in a snippet

_SCHEMA = f"""
    CREATE VIRTUAL TABLE search.words USING fts5(
        input, output, tools, metadata, tokenize = "unicode61 remove_diacritics 2"
    );
    CREATE TABLE search.docs (
        seq INTEGER PRIMARY KEY, agent_key INTEGER NOT NULL, turn_id TEXT NOT NULL, status TEXT NOT NULL
    );
    CREATE INDEX search.docs_agent ON docs (agent_key);
    PRAGMA search.user_version = {VERSION};
"""
_words = table("words", column("rowid"), column("rank"), schema="search")
_docs = table("docs", column("seq"), column("turn_id"), column("status"), schema="search")
_STALE = (
    select(turns.c.seq)
    .outerjoin(_docs, _docs.c.seq == turns.c.seq)
    .where(_docs.c.status.is_distinct_from(turns.c.status))
    .order_by(turns.c.seq.desc())
)
_SNIPPETS = [f"snippet(words, {n}, '{OPENS}', '{CLOSES}', '…', {SNIPPET})" for n in range(len(PARTS))]


class SearchIndex:
    """The index of one database. `busy_timeout`: seconds that a write waits for another proxy."""

    def __init__(self, database: Path, busy_timeout: float) -> None:
        self._database = database
        self._file = database.with_name(f"{database.name}.search")
        self._busy_timeout = busy_timeout
        self._engine = create_engine("sqlite://", creator=self._connected, poolclass=NullPool, hide_parameters=True)

    def index(self, seconds: float) -> Indexed:
        """Index new and changed turns, for about so many seconds. Raises `StoreUnavailable`."""
        return self._with(lambda conn: _index(conn, seconds))

    def search(self, wanted: Search) -> Found:
        """Search the index and the ids. Raises `StoreUnavailable`."""
        return self._with(lambda conn: searching.search(conn, wanted, lambda limit: _by_words(conn, wanted, limit)))

    def forget(self, agent_key: int) -> None:
        """Remove a deleted agent. Raises `StoreUnavailable`."""
        if not self._file.exists():
            return

        def work(conn: Connection) -> None:
            with _writing(conn) as driver:
                left = driver.execute("SELECT seq FROM docs WHERE agent_key = ?", (agent_key,)).fetchall()
                _remove_turns(driver, left)
            if left:
                _overwrite_deleted(driver)

        self._with(work)

    def remove(self) -> None:
        """Remove the index file: the next search creates it again. For one that is broken, or of an earlier store."""
        for end in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + end).unlink(missing_ok=True)

    def _with(self, work: Callable[[Connection], T]) -> T:
        for left in reversed(range(TRIES)):
            try:
                with self._engine.connect() as conn:
                    return work(conn)
            except ERRORS as exc:
                cause, code = cause_of(exc)
                if left and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    self.remove()
                    continue
                advice = ADVICE[code] if code == sqlite3.SQLITE_FULL else "remove the file, it is made anew"
                raise StoreUnavailable(f"the search index {self._file} cannot be used ({cause}): {advice}") from exc
        raise AssertionError("the last try returns or raises")

    def _connected(self) -> sqlite3.Connection:
        """A read-only connection to the chains, with the index attached; it is created if there is none."""
        chains = f"{self._database.absolute().as_uri()}?mode=ro"
        conn = sqlite3.connect(
            chains, timeout=self._busy_timeout, isolation_level=None, uri=True, check_same_thread=False
        )
        try:
            # Half a surrogate pair is not valid UTF-8: show it as "?".
            conn.text_factory = lambda raw: raw.decode("utf-8", "replace")
            conn.execute("ATTACH ? AS search", (f"{self._file.absolute().as_uri()}?mode=rwc",))
            for pragma in ("secure_delete=ON", "journal_mode=WAL", "synchronous=NORMAL"):
                conn.execute(f"PRAGMA search.{pragma}")
            if conn.execute("PRAGMA search.user_version").fetchone() != (VERSION,):
                former = "DROP TABLE IF EXISTS search.words; DROP TABLE IF EXISTS search.docs"
                conn.executescript(f"BEGIN IMMEDIATE; {former}; {_SCHEMA} COMMIT")
        except BaseException:
            conn.close()
            raise
        return conn


def _index(conn: Connection, seconds: float) -> Indexed:
    """Index new and changed turns, in short transactions, until the time is over."""
    until = time.monotonic() + seconds
    with _writing(conn) as driver:
        # An agent whose deletion was interrupted between the chains and the index.
        left = driver.execute("SELECT seq FROM docs WHERE seq NOT IN (SELECT seq FROM turns)").fetchall()
        _remove_turns(driver, left)
    if left:
        _overwrite_deleted(driver)
    stale = list(conn.scalars(_STALE))
    total = conn.scalar(select(func.count()).select_from(turns)) or 0
    done = 0
    while done < len(stale) and (done == 0 or time.monotonic() < until):
        piece = stale[done : done + searching.PIECE]
        with _writing(conn) as driver:
            for turn in searching.texts(conn, piece):
                driver.execute("DELETE FROM words WHERE rowid = ?", (turn.seq,))
                new = "INSERT INTO words (rowid, input, output, tools, metadata) VALUES (?, ?, ?, ?, ?)"
                driver.execute(new, (turn.seq, *turn.texts))
                doc = turn.seq, turn.agent_key, turn.id, turn.status
                driver.execute("INSERT OR REPLACE INTO docs VALUES (?, ?, ?, ?)", doc)
        done += len(piece)
    return Indexed(total - len(stale) + done, total)


@contextmanager
def _writing(conn: Connection) -> Iterator[sqlite3.Connection]:
    """A transaction with the index's write lock. The chains are read as of the time of the lock."""
    driver = driver_of(conn)
    driver.execute("BEGIN IMMEDIATE")
    try:
        yield driver
        driver.execute("COMMIT")
    except BaseException:
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise


def _remove_turns(driver: sqlite3.Connection, seqs: list[Any]) -> None:
    driver.executemany("DELETE FROM words WHERE rowid = ?", seqs)
    driver.executemany("DELETE FROM docs WHERE seq = ?", seqs)


def _overwrite_deleted(driver: sqlite3.Connection) -> None:
    """Overwrite deleted words: FTS5 only marks them, so merge its segments and clear the freed pages."""
    driver.execute("INSERT INTO words (words) VALUES ('optimize')")
    driver.execute("PRAGMA search.wal_checkpoint(TRUNCATE)")


def _by_words(conn: Connection, criteria: Search, limit: int) -> Sequence[Ranked]:
    """Ordered by rank, then newest first."""
    match = " ".join('"' + word.replace('"', '""') + '"' for word in criteria.words)
    if not criteria.text.rstrip().endswith('"'):
        match += " *"  # the last word may still be typed
    fits = (
        select(turns.c.seq)
        .select_from(_words)
        .join(_docs, _docs.c.seq == _words.c.rowid)
        .join(turns, and_(turns.c.seq == _docs.c.seq, turns.c.id == _docs.c.turn_id))
        .join(agents, agents.c.key == turns.c.agent_key)
        .where(text("words MATCH :match").bindparams(match=match), *searching.fits(criteria))
        .limit(limit)
    )
    driver = driver_of(conn)
    try:
        with _interrupted_after(driver, searching.RANKING):
            # Select the turns first: else a snippet of every match would be made before sorting.
            best = list(conn.scalars(fits.order_by(_words.c.rank, turns.c.seq.desc())))
            # The `+` forces one pass over all matches; by rowid a prefix would be looked up for each turn.
            marks = ", ".join("?" * len(best))
            cut = f"SELECT rowid, {', '.join(_SNIPPETS)} FROM words WHERE words MATCH ? AND +rowid IN ({marks})"
            snippets = {seq: parts for seq, *parts in driver.execute(cut, (match, *best))}
    except ERRORS as exc:
        if cause_of(exc)[1] != sqlite3.SQLITE_INTERRUPT:
            raise
        # Too many turns match to rank them: take the newest, in index order, without sorting.
        newest = fits.add_columns(*map(literal_column, _SNIPPETS)).order_by(_words.c.rowid.desc())
        snippets = {seq: parts for seq, *parts in conn.execute(newest)}
        best = list(snippets)
    ranked = []
    for seq in best:
        parts = zip(PARTS, snippets.get(seq, ()), strict=False)
        part, marked = max(parts, key=lambda part: part[1].count(OPENS), default=(None, ""))
        pieces = tuple(piece for opened in marked.split(OPENS) for piece in opened.split(CLOSES))
        ranked.append(Ranked(seq, part, pieces))
    return ranked


@contextmanager
def _interrupted_after(driver: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Interrupts the statements of the connection when the time is over."""
    until = time.monotonic() + seconds
    driver.set_progress_handler(lambda: time.monotonic() > until, CHECK_EVERY)
    try:
        yield
    finally:
        driver.set_progress_handler(None, 0)
