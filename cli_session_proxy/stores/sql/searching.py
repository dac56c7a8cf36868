"""The part of a search that is the same on every database: a turn's texts, names and parts of ids, filters, and hits.

Each database has its own index of words (`sqlite.search`, `postgresql.search`): a cache of the chains, which indexes
what `texts` returns and ranks turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, Text, bindparam, exists, func, or_, select

from ... import redact
from ...domain.models import REPAIR_REASONS
from ...domain.searching import SHORTEST_PART, Found, Hit, HitKind, Part, Search
from ...errors import DamagedRow
from . import rows
from .damaged import reads, undamaged
from .reading import ONE_SHOT, owned_by
from .tables import agents, links, sessions, turns

# Turns indexed per transaction: a few milliseconds, so that concurrent searches take turns.
PIECE = 100
# Characters that are indexed of each part of a turn, and that are read of its JSON for this.
LONGEST = 200_000
READ = 4 * LONGEST
# The characters of turn and session ids: for a word with any other, ids are not searched.
_OF_AN_ID = re.compile(r"[0-9A-Za-z_-]+")
# Words of a snippet.
SNIPPET = 24
# Seconds for ranking all matches; after that the newest are shown instead.
RANKING = 1.5
PARTS: tuple[Part, ...] = ("input", "output", "tools", "metadata")

# Turns whose texts are in memory at the same time.
AT_ONCE = 10
_TEXTS_OF_TURNS = select(
    turns.c.seq, turns.c.agent_key, turns.c.id, turns.c.status,
    *(func.substr(turns.c[name], 1, READ, type_=Text).label(name) for name in PARTS[:3]), turns.c.options,
).where(turns.c.seq.in_(bindparam("seqs", expanding=True)))  # fmt: skip

# Keys of strings that are not searched, because they only describe a block. In a call's input all strings are.
_NOT_SEARCHED = frozenset({
    "type", "id", "tool_use_id", "role", "media_type", "sha256", "data", "signature", "thinking",
})  # fmt: skip
# Tokens of JSON: a string, with its colon if it is a key; a bracket; the quote of a string that is cut off.
_TOKEN = re.compile(r'"((?:[^"\\]++|\\.)*+)"(\s*+:)?|[\[\]{}"]')

_HIT = (
    *rows.AGENT, turns.c.id, turns.c.session_id, turns.c.status, turns.c.model, turns.c.continuity, turns.c.cost_usd,
    turns.c.created_at, turns.c.seq,
)  # fmt: skip


class Ranked(NamedTuple):
    """A turn that matches. `snippet`: see `Hit`."""

    seq: int
    part: Part | None = None
    snippet: tuple[str, ...] = ()


# Finds the best turns with the searched words, at most so many.
ByWords = Callable[[int], Sequence[Ranked]]


class SearchText(NamedTuple):
    """`texts`: one for each of `PARTS`, without secrets, and valid UTF-8."""

    seq: int
    agent_key: int
    id: str
    status: str
    texts: tuple[str, ...]


def texts(conn: Connection, seqs: Sequence[int]) -> Iterator[SearchText]:
    """The texts by which these turns can be found. The turns are in any order."""

    def without_texts(row: Any, _: DamagedRow) -> SearchText:
        """For a damaged row: no word finds it, and it is not read again at the next indexing."""
        return SearchText(row.seq, row.agent_key, row.id, row.status, ("",) * len(PARTS))

    for at in range(0, len(seqs), AT_ONCE):
        batch = conn.execute(_TEXTS_OF_TURNS, {"seqs": seqs[at : at + AT_ONCE]}).all()
        yield from undamaged(_search_text, batch, without_texts)


@reads(*_TEXTS_OF_TURNS.selected_columns)
def _search_text(row: Any) -> SearchText:
    parts = (*map(_strings_of, row[4:7]), _metadata(row.options))
    clean = (part.replace("\0", " ").encode("utf-8", "replace").decode() for part in parts)
    return SearchText(row.seq, row.agent_key, row.id, row.status, tuple(map(redact.text, clean)))


def _strings_of(text: str) -> str:
    """The searchable strings of a JSON text, one a line. It is scanned, not decoded: it may have MB, and be cut off."""
    strings: list[str] = []
    size = 0
    open_inputs: list[bool] = []  # for each open object or list, outermost first: whether it is part of a call's input
    key = ""
    for token in _TOKEN.finditer(text):
        quoted, colon = token.groups()
        if quoted is None:  # no string
            if token[0] in "[{":
                open_inputs.append(key.startswith("input") or (bool(open_inputs) and open_inputs[-1]))
            elif token[0] == '"' or not open_inputs:  # a string that is cut off, or the end
                break
            else:
                open_inputs.pop()
            key = ""
            continue
        if token.end() == len(text) and open_inputs:
            break  # the JSON is cut off after this string, which may be a key
        string = rows.loads(token[0].rstrip(" :")) if "\\" in quoted else quoted
        if colon is not None:
            key = string
        elif key not in _NOT_SEARCHED or (open_inputs and open_inputs[-1]):
            strings.append(string)
            size += len(string) + 1
            key = ""
            if size > LONGEST:
                break
    return "\n".join(strings)[:LONGEST]


def _metadata(options: str) -> str:
    """The metadata of a request, one entry a line: `user_id: …` is found by its name and by its value."""

    def lines(key: Any, value: Any) -> Iterator[str]:
        if isinstance(value, dict | list):
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from lines(name, inner)
        elif value is not None:
            yield f"{key}: {value if isinstance(value, str) else json.dumps(value)}"

    if '"metadata"' not in options:  # most requests have none: then nothing is parsed
        return ""
    return "\n".join(lines("", rows.loads(options).get("metadata")))[:LONGEST]


# --- looking


def search(conn: Connection, criteria: Search, by_words: ByWords) -> Found:
    """Search agents, sessions and turns by name or id, then turns by words."""
    of_owner = owned_by(criteria.owner)
    newest_agents = select(*rows.AGENT, agents.c.last_at).where(of_owner).order_by(agents.c.last_at.desc())
    agent_rows = conn.execute(newest_agents).all()
    hits: list[Hit] = []
    if criteria.words and not criteria.is_filtered:
        words = [word.casefold() for word in criteria.words]
        for hit in undamaged(_agent_hit, agent_rows):
            if all(word in hit.agent.agent_id.casefold() for word in words):
                hits.append(hit)
    hits += _by_id(conn, criteria)
    places_left = criteria.limit - len(hits)
    if places_left > 0 and criteria.words:
        ranked_turns = by_words(places_left)
        query = _join_agents(select(*_HIT)).where(turns.c.seq.in_([ranked.seq for ranked in ranked_turns]))
        row_of = {row[-1]: row for row in conn.execute(query)}  # by `seq`, the last column of `_HIT`
        for ranked in ranked_turns:
            read = partial(_hit, conn=conn, kind="words", part=ranked.part, snippet=ranked.snippet)
            hits += undamaged(read, (row_of[ranked.seq],))
    elif places_left > 0 and criteria.is_filtered:  # no words rank the turns: the newest come first
        newest = _join_agents(select(*_HIT)).where(*fits(criteria)).order_by(turns.c.seq.desc()).limit(places_left)
        hits += undamaged(partial(_hit, conn=conn, kind="words"), conn.execute(newest).all())
    one_shots = conn.scalar(select(func.count()).select_from(agents).where(of_owner, ONE_SHOT)) or 0
    total = conn.scalar(select(func.sum(agents.c.turns)).where(of_owner)) or 0
    return Found(tuple(hits[: criteria.limit]), len(agent_rows), int(total), one_shots)


def fits(criteria: Search) -> list[ColumnElement[bool]]:
    """Conditions for turns and their agents."""
    conditions = [owned_by(criteria.owner)]
    if criteria.since is not None:
        conditions.append(turns.c.created_at >= criteria.since)
    if criteria.until is not None:
        conditions.append(turns.c.created_at < criteria.until)
    if criteria.model is not None:
        conditions.append(or_(turns.c.model == criteria.model, turns.c.answered_by == criteria.model))
    if criteria.status is not None:
        conditions.append(turns.c.status == criteria.status)
    if criteria.min_cost is not None:
        conditions.append(turns.c.cost_usd >= criteria.min_cost)
    if criteria.repaired:
        conditions.append(exists().where(links.c.turn_id == turns.c.id, links.c.reason.in_(sorted(REPAIR_REASONS))))
    return conditions


def _join_agents(query: Select[Any]) -> Select[Any]:
    return query.join(agents, agents.c.key == turns.c.agent_key)


@reads(*rows.AGENT, agents.c.last_at)
def _agent_hit(row: Any) -> Hit:
    agent = rows.agent(row)
    return Hit("agent", agent, row.last_at, agent.head)


def _by_id(conn: Connection, criteria: Search) -> Iterator[Hit]:
    """Sessions and turns whose id contains one of the words."""
    if len(criteria.words) != 1 or len(criteria.words[0]) < SHORTEST_PART or not _OF_AN_ID.fullmatch(criteria.words[0]):
        return
    part = criteria.words[0]
    of_sessions = _join_agents(select(*_HIT, sessions.c.id).join(turns, turns.c.id == sessions.c.tip_turn_id))
    of_sessions = of_sessions.where(sessions.c.id.icontains(part, autoescape=True)).order_by(sessions.c.n.desc())
    # All ids are read, because the word may be anywhere in one. For turns only the index is read: rows are long.
    matching = select(turns.c.id).where(turns.c.id.icontains(part, autoescape=True))
    of_turns = _join_agents(select(*_HIT, turns.c.session_id)).where(turns.c.id.in_(matching))
    of_turns = of_turns.order_by(turns.c.seq.desc())
    kinds: tuple[tuple[HitKind, Select[Any]], ...] = (("session", of_sessions), ("turn", of_turns))
    for kind, query in kinds:
        matches = conn.execute(query.where(*fits(criteria)).limit(criteria.limit)).all()
        yield from undamaged(partial(_hit, conn=conn, kind=kind), matches)


@reads(*_HIT)
def _hit(row: Sequence[Any], /, conn: Connection, kind: HitKind, **more: Any) -> Hit:
    """A hit from a row of `_HIT`, which the id of a session may follow. The turn's number is queried here, only for
    hits that are shown."""
    turn_id, session_id, status, model, continuity, cost, at, seq, *other = row[len(rows.AGENT) :]
    place = select(func.count()).select_from(turns).where(turns.c.agent_key == row[0], turns.c.seq <= seq)
    session = other[0] if other else session_id
    return Hit(
        kind, rows.agent(row), at, turn_id, conn.scalar(place), status=status, model=model, continuity=continuity,
        cost_usd=cost, session_id=session, **more,
    )  # fmt: skip
