"""The full-text index in the store's own database: one table, `search`, with a GIN index over its words.

It is a cache, like the file beside a SQLite store: no turn waits for it or writes to it. A search first updates it,
newest turns first, in short transactions on a connection of its own. An index of another version is rebuilt. Rows are
deleted with their turns.

Words are split here, not by the server's parser, which takes `/etc/motd` or `ada-17` for one word: runs of letters and
digits, without accents and case, as in a SQLite store.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, cast, column, exists, func, literal, select, table
from sqlalchemy.dialects.postgresql import TSQUERY, TSVECTOR
from sqlalchemy.exc import DBAPIError

from ...domain.models import ANSWERED
from ...domain.searching import Found, Indexed, Search
from ..sql import searching
from ..sql.searching import PARTS, SNIPPET, Ranked
from ..sql.tables import agents, turns
from .database import READ, PostgresqlDatabase, code_of

# Raise it when the indexed content changes.
VERSION = "1"
# The server's limits: the last position of a word, positions per word, and bytes of all words of a turn.
LAST_PLACE = 16383
PLACES = 255
ALL_WORDS = 1_000_000
# Characters of a word; the server takes 2,046 bytes.
LONGEST_WORD = 200
# Advisory lock: one program at a time fills the index. Any unused number.
FILLING = 0x636C695F66696C6C
CANCELED = "57014"

# A turn that was answered never changes again.
_ENDED = ", ".join(f"'{status}'" for status in sorted(ANSWERED))
_SCHEMA = f"""
    DROP TABLE IF EXISTS search;
    CREATE TABLE search (
        seq bigint PRIMARY KEY REFERENCES turns (seq) ON DELETE CASCADE, status text NOT NULL, words tsvector NOT NULL
    );
    CREATE INDEX search_words ON search USING gin (words);
    CREATE INDEX search_open ON search (seq) WHERE status NOT IN ({_ENDED});
    COMMENT ON TABLE search IS '{VERSION}'
"""
# The index can be rebuilt, so its writes do not wait for the disk. Its turns cannot be deleted meanwhile.
_FILL = f"""
    BEGIN; SET LOCAL synchronous_commit = off; SET LOCAL lock_timeout = '10s'; SELECT pg_advisory_xact_lock({FILLING})
"""
_CHANGED = f"""
    SELECT search.seq FROM search JOIN turns ON turns.seq = search.seq
    WHERE search.status NOT IN ({_ENDED}) AND search.status <> turns.status ORDER BY search.seq DESC
"""  # noqa: S608 - statuses of our own
_INSERT_WORDS = """
    INSERT INTO search VALUES (%(seq)s, %(status)s, %(words)s::tsvector)
    ON CONFLICT (seq) DO UPDATE SET status = excluded.status, words = excluded.words
"""
_docs = table("search", column("seq"), column("words", TSVECTOR))
_RANK = func.ts_rank
_WORD = re.compile(r"[^\W_](?:[^\W_]|[\u0300-\u036f])*")


def prepare(conn: Connection) -> None:
    """Create the index, unless this version exists."""
    version = conn.exec_driver_sql("SELECT obj_description(to_regclass('search'), 'pg_class')").scalar()
    if version != VERSION:
        conn.exec_driver_sql(_SCHEMA)


def index(database: PostgresqlDatabase, seconds: float) -> Indexed:
    """Index new and changed turns, for about so many seconds. Raises `StoreUnavailable`."""
    until = time.monotonic() + seconds
    with database.connection() as conn:
        changed = list(conn.exec_driver_sql(_CHANGED).scalars())
        for at in range(0, len(changed), searching.PIECE):
            _index_turns(conn, select(turns.c.seq).where(turns.c.seq.in_(changed[at : at + searching.PIECE])))
        total = conn.scalar(select(func.count()).select_from(turns)) or 0
        done = conn.scalar(select(func.count()).select_from(_docs)) or 0
        below = None
        while done < total:
            new = select(turns.c.seq).where(~exists().where(_docs.c.seq == turns.c.seq))
            new = new if below is None else new.where(turns.c.seq < below)
            taken = _index_turns(conn, new.order_by(turns.c.seq.desc()).limit(min(searching.PIECE, total - done)))
            done += len(taken)
            if not taken or time.monotonic() >= until:
                break
            below = min(taken)
    return Indexed(min(done, total), total)


def _index_turns(conn: Connection, which: Select[Any]) -> list[int]:
    """Index some turns in one transaction. Returns their `seq`s."""
    conn.exec_driver_sql(_FILL)
    # The lock only prevents their deletion: turns go on. One that is being deleted is skipped.
    seqs = list(conn.scalars(which.with_for_update(read=True, key_share=True, skip_locked=True, of=turns)))
    new = [
        {"seq": turn.seq, "status": turn.status, "words": _vector(turn.texts)} for turn in searching.texts(conn, seqs)
    ]
    if new:
        conn.exec_driver_sql(_INSERT_WORDS, new)
    conn.exec_driver_sql("COMMIT")
    return seqs


def search(database: PostgresqlDatabase, wanted: Search) -> Found:
    """Search the index and the ids. Raises `StoreUnavailable`."""
    with database.connection() as conn:
        conn.exec_driver_sql("; ".join(READ))
        return searching.search(conn, wanted, lambda limit: _by_words(conn, wanted, limit))


class _Phrase(NamedTuple):
    """Adjacent words. `goes_on`: the last one may be only the beginning of a word."""

    words: tuple[str, ...]
    goes_on: bool

    def is_at(self, words: Sequence[str], at: int) -> bool:
        last = at + len(self.words) - 1
        if last >= len(words) or tuple(words[at:last]) != self.words[:-1]:
            return False
        return words[last].startswith(self.words[-1]) if self.goes_on else words[last] == self.words[-1]


def _by_words(conn: Connection, criteria: Search, limit: int) -> list[Ranked]:
    """Ordered by rank, then newest first."""
    texts = [tuple(_folded(found[0]) for found in _WORD.finditer(word)) for word in criteria.words]
    still_typed = not criteria.text.rstrip().endswith('"')
    phrases = [_Phrase(words, still_typed and n == len(texts)) for n, words in enumerate(texts, 1) if words]
    if not phrases:
        return []
    asked = " & ".join(
        "(" + " <-> ".join(map(_quoted, phrase.words)) + (":*" if phrase.goes_on else "") + ")" for phrase in phrases
    )
    query = cast(literal(asked), TSQUERY)
    fits = (
        select(turns.c.seq)
        .select_from(_docs)
        .join(turns, turns.c.seq == _docs.c.seq)
        .join(agents, agents.c.key == turns.c.agent_key)
        .where(_docs.c.words.op("@@")(query), *searching.fits(criteria))
        .limit(limit)
    )
    try:
        conn.exec_driver_sql(f"SAVEPOINT ranked; SET LOCAL statement_timeout = {max(1, int(searching.RANKING * 1000))}")
        best = list(conn.scalars(fits.order_by(_RANK(_docs.c.words, query, 1).desc(), turns.c.seq.desc())))
        conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
    except DBAPIError as exc:
        if code_of(exc) != CANCELED:
            raise
        # Too many turns match to rank them: take the newest, in index order, without sorting.
        conn.exec_driver_sql("ROLLBACK TO ranked; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")
        best = list(conn.scalars(fits.order_by(_docs.c.seq.desc())))
    ranked: dict[int, Ranked] = {}
    for turn in searching.texts(conn, best):
        snippets = [(*_snippet(text, phrases), part) for part, text in zip(PARTS, turn.texts, strict=True)]
        score, pieces, part = max(snippets, key=lambda snippet: snippet[0])
        ranked[turn.seq] = Ranked(turn.seq, part, pieces) if score else Ranked(turn.seq)
    return [ranked[seq] for seq in best]


# --- words


def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()[:LONGEST_WORD]
    letters = (letter for letter in unicodedata.normalize("NFKD", word) if not unicodedata.combining(letter))
    return "".join(letters).casefold()[:LONGEST_WORD]


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _vector(texts: Iterable[str]) -> str:
    """The words of a turn with their positions, as text of a tsvector. A gap keeps phrases from spanning two texts."""
    places: dict[str, list[str]] = {}
    place, room = 0, ALL_WORDS
    for text in texts:
        place += 1
        for found in _WORD.finditer(text):
            word = _folded(found[0])
            place += 1
            known = places.get(word)
            if known is None:
                room -= len(word.encode()) + 4
                if room < 0:
                    continue
                known = places[word] = []
            if place <= LAST_PLACE and len(known) < PLACES:
                known.append(str(place))
                room -= 2
    return " ".join(f"{_quoted(word)}:{','.join(at)}" if at else _quoted(word) for word, at in places.items())


def _snippet(text: str, phrases: Sequence[_Phrase]) -> tuple[int, tuple[str, ...]]:
    """The `SNIPPET` adjacent words with the most matches, and how many these are. See `Hit.snippet`."""
    spans = [found.span() for found in _WORD.finditer(text)]
    words = [_folded(text[start:end]) for start, end in spans]
    marks = [(at, n) for at in range(len(words)) for n, phrase in enumerate(phrases) if phrase.is_at(words, at)]
    if not marks:
        return 0, ()
    best, first, last = 0, 0, 0
    low = 0
    for high, (at, _) in enumerate(marks):
        while at - marks[low][0] >= SNIPPET:
            low += 1
        inside = marks[low : high + 1]
        score = SNIPPET * len({n for _, n in inside}) + len(inside)
        if score > best:
            best, first, last = score, marks[low][0], at
    begin = max(0, first - (SNIPPET - (last - first + 1)) // 2)
    end = min(len(words), begin + SNIPPET)
    pieces = list(_pieces(text, spans, [mark for mark in marks if begin <= mark[0] < end], phrases, begin, end))
    return best, tuple(pieces)


def _pieces(
    text: str, spans: Sequence[tuple[int, int]], marks: Sequence[tuple[int, int]], phrases: Sequence[_Phrase],
    begin: int, end: int,
) -> Iterator[str]:  # fmt: skip
    """The text from word `begin` to `end`, in pieces; every second one is a match."""
    done = spans[begin][0] if begin else 0
    cut = "…" if begin else ""
    for at, n in marks:
        start, stop = spans[at][0], spans[at + len(phrases[n].words) - 1][1]
        if start >= done:
            yield cut + text[done:start]
            yield text[start:stop]
            done, cut = stop, ""
    yield text[done:] if end == len(spans) else text[done : max(done, spans[end - 1][1])] + "…"
