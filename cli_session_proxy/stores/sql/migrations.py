"""From an older schema to this one: small named steps in a list, and a copy aside before the first.

A new file is made from `tables` at once; `MIGRATIONS[0]` leads from version 1 to 2, the next from 2 to 3. A step that
an older program could not live with waits until no other proxy is on the store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Double, Row, bindparam, false, func, inspect, select

from ...domain import former
from ...domain.evidence import Evidence
from ...domain.models import PLAIN, Placed
from ...errors import StoreUnavailable
from .database import Database
from .rows import dumps, loads, size
from .tables import (
    COMING_IN,
    MOVED_TO,
    conversations,
    followers,
    items,
    leases,
    links,
    meta,
    metadata,
    mirrored,
    proxies,
    turns,
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step to the next version. `apply` runs inside the transaction of the whole migration.

    `alone`: it changes what older programs read and write, so no proxy may be on the store.
    """

    name: str
    apply: Callable[[Connection], None]
    alone: bool = False


def _stateful_wires(conn: Connection) -> None:
    """What OpenAI's Responses and Conversations keep: a column of `turns`, and two tables."""
    if turns.c.call.name not in {column["name"] for column in inspect(conn).get_columns(turns.name)}:
        conn.exec_driver_sql(f'ALTER TABLE {turns.name} ADD COLUMN "{turns.c.call.name}" TEXT')
    metadata.create_all(conn, tables=[conversations, items])


def _leases(conn: Connection) -> None:
    """Who may write an agent, and who waits for the answers of other proxies' turns."""
    metadata.create_all(conn, tables=[proxies, leases, followers])


def _typed_turns(conn: Connection) -> None:
    """Of each turn one object, `reason`, becomes `placed`, `options` and `evidence`; sentences become codes."""
    there = {column["name"] for column in inspect(conn).get_columns(turns.name)}
    for column in (turns.c.stop_sequence, turns.c.backend, turns.c.answered_by):
        if column.name not in there:
            conn.exec_driver_sql(f"ALTER TABLE {turns.name} ADD COLUMN {column.name} TEXT")
    for column in (turns.c.placed, turns.c.options):
        if column.name not in there:
            conn.exec_driver_sql(f"ALTER TABLE {turns.name} ADD COLUMN {column.name} TEXT NOT NULL DEFAULT '{{}}'")
    if turns.c.evidence.name in there:
        return
    # In its place: the short columns stand before the long ones.
    conn.exec_driver_sql(f"ALTER TABLE {turns.name} RENAME COLUMN reason TO {turns.c.evidence.name}")
    seq = 0
    while found := conn.execute(_FORMER_TURNS, {"after": seq}).all():
        conn.execute(_TYPED, [_typed(row) for row in found])
        seq = found[-1].seq
    n = 0
    while why := conn.execute(_FORMER_LINKS, {"after": n}).all():
        coded = [(row.n, former.detail(row.reason, loads(row.detail))) for row in why]
        conn.execute(_CODED, [{"of": n, "coded": dumps(detail)} for n, detail in coded])
        n = why[-1].n


def _fallbacks(conn: Connection) -> None:
    """Who answers in whose place, and until when.

    Older programs write turns without it and read past it: to them nobody stands in for anybody.
    """
    there = {column["name"] for column in inspect(conn).get_columns(turns.name)}
    if turns.c.fallback.name not in there:
        conn.exec_driver_sql(f"ALTER TABLE {turns.name} ADD COLUMN {turns.c.fallback.name} TEXT")


def _wider_indexes(conn: Connection) -> None:
    """The newest of many strangers who share an opening, and the sums of an agent, are read from an index alone."""
    for index in turns.indexes:
        if index.name in ("turns_path_hash", "turns_agent"):
            index.drop(conn, checkfirst=True)
            index.create(conn)


def _typed(row: Row[Any, Any, Any, Any]) -> dict[str, Any]:
    old = loads(row.evidence)
    try:
        reason = former.reason(old)
    except former.MALFORMED:  # 0.1 took it from a file without a look at it: it decides nothing, and stays to be seen
        reason = former.Reason(Placed(), PLAIN, Evidence(other=old), None)
    attempts = [former.attempt(attempt, reason.evidence.output_refused) for attempt in loads(row.attempts)]
    texts = {
        "new_placed": dumps(reason.placed.as_json()),
        "new_options": dumps(reason.options.as_json()),
        "new_evidence": dumps(reason.evidence.as_json()),
        "new_attempts": dumps(attempts),
        "new_stop_sequence": None if reason.stop_sequence is None else dumps(reason.stop_sequence),
    }
    grown = size(*texts.values()) - size(row.evidence, row.attempts)
    return {"of": row.seq, "new_bytes": row.bytes + grown, **texts}


# Rows that are read and written at once.
PIECE = 1000
_FORMER_TURNS = (
    select(turns.c.seq, turns.c.bytes, turns.c.evidence, turns.c.attempts)
    .where(turns.c.seq > bindparam("after"))
    .order_by(turns.c.seq)
    .limit(PIECE)
)
_SPLIT = ("placed", "options", "evidence", "attempts", "stop_sequence", "bytes")
_TYPED = (
    turns.update().where(turns.c.seq == bindparam("of")).values({name: bindparam(f"new_{name}") for name in _SPLIT})
)
_FORMER_LINKS = (
    select(links.c.n, links.c.reason, links.c.detail)
    .where(links.c.n > bindparam("after"))
    .order_by(links.c.n)
    .limit(PIECE)
)
_CODED = links.update().where(links.c.n == bindparam("of")).values(detail=bindparam("coded"))


MIGRATIONS: tuple[Migration, ...] = (
    Migration("stateful wires", _stateful_wires),
    Migration("leases", _leases),
    Migration("typed turns", _typed_turns, alone=True),
    Migration("fallbacks", _fallbacks),
    Migration("the Agent SDK's sessions", lambda conn: metadata.create_all(conn, tables=[mirrored])),
    Migration("wider indexes", _wider_indexes),
)


def prepare(conn: Connection, database: Database, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Create the schema in an empty database, migrate an older one, refuse a newer or a foreign one.

    Runs inside `Database.open`: of two programs that open it at once, one does it and the other finds it done.
    """
    newest = 1 + len(migrations)
    version = version_of(conn, database.name)
    if version is None:
        metadata.create_all(conn)
        conn.execute(meta.insert(), {"name": "schema_version", "value": str(newest)})
    elif version > newest:
        raise StoreUnavailable(
            f"the store {database.name} has schema version {version}, this program knows up to {newest}: "
            "upgrade cli-session-proxy, or choose another --var",
            detail={"found": version, "known": newest},
        )
    else:
        _refuse_moved(conn, database.name)
    if version is not None and version < newest:
        _migrate(conn, database, version, migrations)
    # SQLite begins a write on a read-only file without a word; a write of no rows speaks up now, not at a turn
    conn.execute(meta.update().where(false()).values(value=""))


def _refuse_moved(conn: Connection, name: str) -> None:
    """Raises `StoreUnavailable` where the store is elsewhere by now, or is not whole yet."""
    marks = conn.execute(select(meta).where(meta.c.name.in_([MOVED_TO, COMING_IN])))
    for mark, value in marks.all():
        if mark == MOVED_TO:
            raise moved(name, value)
        raise StoreUnavailable(
            f"a move into the store {name} has not ended: run the same `migrate` again, or choose another place"
        )


def moved(name: str, place: str) -> StoreUnavailable:
    """Also what a write of a proxy meets that is still on the old store."""
    return StoreUnavailable(
        f"the store {name} was moved to {place}: start the proxy with that store (`store`, or --var), and send this "
        "again",
        detail={"moved_to": place},
    )


def _migrate(conn: Connection, database: Database, version: int, migrations: Sequence[Migration]) -> None:
    others = _others(conn, database) if any(step.alone for step in migrations[version - 1 :]) else []
    if others:
        raise StoreUnavailable(
            f"the store {database.name} has to be brought from schema version {version} to {1 + len(migrations)}, and "
            f"{' and '.join(others)} of an older program {'is' if len(others) == 1 else 'are'} on it: stop every proxy "
            "on this store, then start again",
            detail={"found": version, "known": 1 + len(migrations), "proxies": others},
        )
    database.back_up(version)
    for step in migrations[version - 1 :]:
        step.apply(conn)
    newest = str(1 + len(migrations))
    conn.execute(meta.update().where(meta.c.name == "schema_version").values(value=newest))


def _others(conn: Connection, database: Database) -> list[str]:
    """The proxies on this store that live: by the kernel where it can tell, else by their heartbeat."""
    here, living = socket.gethostname(), database.living()
    others = [f"proxy {name[:8]} on this host ({here})" for name in sorted(living or ())]
    if proxies.name in inspect(conn).get_table_names():
        beating = select(proxies).where(proxies.c.until > func.store_clock(type_=Double))
        if living is not None:
            beating = beating.where(proxies.c.host != here)
        others += [f"proxy {row.id[:8]} on {row.host}" for row in conn.execute(beating).all()]
    return others


def version_of(conn: Connection, name: str) -> int | None:
    """The schema's version; None for an empty database."""
    names = inspect(conn).get_table_names()
    if not names:
        return None
    text = None
    if meta.name in names:
        text = conn.scalar(select(meta.c.value).where(meta.c.name == "schema_version"))
    if text is None or not text.isdecimal() or int(text) < 1:
        raise StoreUnavailable(f"{name} is a database of another program: move it away or choose another --var")
    return int(text)
