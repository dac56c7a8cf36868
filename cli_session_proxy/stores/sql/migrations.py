"""Migrates a store from an older schema to this one: a list of named steps, and a backup before the first.

A new database is created from `tables` directly. A step converts any older version to its own. A step whose
result older programs could not use is refused while another proxy is on the store. `ReportStep` reports the progress on
a large store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Double, Integer, Row, bindparam, case, false, func, inspect, select
from sqlalchemy.schema import CreateColumn

from ...domain import legacy
from ...domain.evidence import Evidence
from ...domain.models import PLAIN, REPAIR_REASONS, Placed
from ...errors import StoreUnavailable
from ..base import ReportStep
from .database import Database
from .rows import dumps, loads, size
from .tables import (
    COMING_IN,
    MOVED_TO,
    agents,
    image_refs,
    images,
    leases,
    links,
    meta,
    metadata,
    proxies,
    sessions,
    turns,
)

_SCHEMA_VERSION = select(meta.c.value).where(meta.c.name == "schema_version")

# Yields (rows done, rows in all).
Step = Iterator[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, from any older version to version `to`. `apply` runs inside the transaction of the whole migration, and
    yields its progress if it is long.

    `exclusive`: refused while another proxy is on the store, because an older program could not use the result.
    """

    name: str
    apply: Callable[[Connection], Step | None]
    to: int
    exclusive: bool = False


def _from_0_1(conn: Connection) -> Step:
    """From the schema of 0.1, or of any state between it and 0.2, to that of 0.2. Existing tables and columns stay."""
    metadata.create_all(conn)
    for table in (turns, agents, proxies, leases):
        existing = {column["name"] for column in inspect(conn).get_columns(table.name)}
        for column in table.columns:
            if column.name not in existing and column is not turns.c.evidence:  # `_split_reasons` renames `reason`
                conn.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {CreateColumn(column).compile(conn)}")
    # The index got a second column: many chains of unnamed clients may begin alike, and the newest of them is found
    # without sorting them all.
    (index,) = [index for index in turns.indexes if index.name == "turns_path_hash"]
    index.drop(conn, checkfirst=True)
    index.create(conn)
    yield from _split_reasons(conn)
    # Compute the totals that are stored with each agent from now on.
    total = conn.scalar(select(func.count()).select_from(turns)) or 0
    done = 0
    for key in conn.scalars(select(agents.c.key)).all():
        totals = conn.execute(_TOTALS, {"agent": key}).one()._asdict()
        conn.execute(agents.update().where(agents.c.key == key).values(totals))
        done += totals["turns"]
        yield done, total


def _split_reasons(conn: Connection) -> Step:
    """Split the JSON object `reason` of each turn into `placed`, `options` and `evidence`. Sentences become codes, in
    links too."""
    if turns.c.evidence.name in {column["name"] for column in inspect(conn).get_columns(turns.name)}:
        return  # a state between 0.1 and 0.2 that has the new columns
    # Renamed, not added, so that short columns stay before long ones.
    conn.exec_driver_sql(f"ALTER TABLE {turns.name} RENAME COLUMN reason TO {turns.c.evidence.name}")
    total = sum(conn.scalar(select(func.count()).select_from(table)) or 0 for table in (turns, links))
    last_turn = last_link = done = 0
    while batch := conn.execute(_NEXT_TURNS, {"after": last_turn}).all():
        conn.execute(_UPDATE_TURN, [_split(row) for row in batch])
        last_turn, done = batch[-1].seq, done + len(batch)
        yield done, total
    while link_batch := conn.execute(_NEXT_LINKS, {"after": last_link}).all():
        details = [(row.n, legacy.link_detail(row.reason, loads(row.detail))) for row in link_batch]
        conn.execute(_UPDATE_LINK, [{"link": n, "new_detail": dumps(detail)} for n, detail in details])
        last_link, done = link_batch[-1].n, done + len(link_batch)
        yield done, total


def _split(row: Row[Any, Any, Any, Any]) -> dict[str, Any]:
    """The parameters of `_UPDATE_TURN` for this turn."""
    old = loads(row.evidence)
    try:
        reason = legacy.split_reason(old)
    except legacy.MALFORMED:  # 0.1 imported it without a check: it is shown, but never used
        reason = legacy.SplitReason(Placed(), PLAIN, Evidence(other=old), None)
    attempts = [legacy.attempt(attempt, reason.evidence.output_refused) for attempt in loads(row.attempts)]
    texts = {
        "new_placed": dumps(reason.placed.as_json()),
        "new_options": dumps(reason.options.as_json()),
        "new_evidence": dumps(reason.evidence.as_json()),
        "new_attempts": dumps(attempts),
        "new_stop_sequence": None if reason.stop_sequence is None else dumps(reason.stop_sequence),
    }
    grown = size(*texts.values()) - size(row.evidence, row.attempts)
    return {"turn": row.seq, "new_bytes": row.bytes + grown, **texts}


def _in_agent(column: Any, table: Any) -> Any:
    """An aggregate over the agent's rows of this table; 0 if it has none."""
    return func.coalesce(select(column).where(table.c.agent_key == bindparam("agent")).scalar_subquery(), 0)


def _count_where(condition: Any) -> Any:
    return func.sum(case((condition, 1), else_=0), type_=Integer)


_IMAGE_SIZE = select(images.c.size).where(images.c.sha256 == image_refs.c.sha256).scalar_subquery()
_TOTALS = select(
    _in_agent(func.count(), turns).label("turns"),
    _in_agent(_count_where(turns.c.placed.like('%"side":true%')), turns).label("side"),
    _in_agent(_count_where(turns.c.status.in_(("failed", "refused"))), turns).label("failures"),
    _in_agent(func.sum(turns.c.cost_usd), turns).label("cost_usd"),
    (_in_agent(func.sum(turns.c.bytes), turns) + _in_agent(func.sum(_IMAGE_SIZE), image_refs)).label("bytes"),
    _in_agent(func.count(), sessions).label("sessions"),
    _in_agent(_count_where(links.c.reason.in_(sorted(REPAIR_REASONS))), links).label("repairs"),
)

BATCH = 1000  # rows
_NEXT_TURNS = (
    select(turns.c.seq, turns.c.bytes, turns.c.evidence, turns.c.attempts)
    .where(turns.c.seq > bindparam("after"))
    .order_by(turns.c.seq)
    .limit(BATCH)
)
_CHANGED = ("placed", "options", "evidence", "attempts", "stop_sequence", "bytes")
_UPDATE_TURN = (
    turns.update().where(turns.c.seq == bindparam("turn")).values({name: bindparam(f"new_{name}") for name in _CHANGED})
)
_NEXT_LINKS = (
    select(links.c.n, links.c.reason, links.c.detail)
    .where(links.c.n > bindparam("after"))
    .order_by(links.c.n)
    .limit(BATCH)
)
_UPDATE_LINK = links.update().where(links.c.n == bindparam("link")).values(detail=bindparam("new_detail"))


# 0.1 wrote version 2. Versions 3 to 12 were never released: 13 is the first that has all of these changes.
MIGRATIONS: tuple[Migration, ...] = (Migration("from 0.1", _from_0_1, to=13, exclusive=True),)


def newest(migrations: Sequence[Migration] = MIGRATIONS) -> int:
    return migrations[-1].to if migrations else 1


def prepare(
    conn: Connection, database: Database, tell: ReportStep, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Create the schema in an empty database, migrate an older one, refuse a newer one or that of another program.

    Runs inside `Database.open`: if two programs open a database at once, the second finds it prepared.
    """
    known = newest(migrations)
    version = version_of(conn, database.name)
    if version is None:
        metadata.create_all(conn)
        conn.execute(meta.insert(), {"name": "schema_version", "value": str(known)})
    elif version > known:
        raise _newer(f"the store {database.name}", version, known)
    else:  # refuse a store that was moved away, and one into which a move is not complete
        for name, value in conn.execute(select(meta).where(meta.c.name.in_([MOVED_TO, COMING_IN]))).all():
            if name == MOVED_TO:
                raise moved(database.name, value)
            raise StoreUnavailable(
                f"a move into the store {database.name} has not ended: run the same `migrate` again, or choose another "
                "place"
            )
    if version is not None and version < known:
        _migrate(conn, database, version, [step for step in migrations if step.to > version], tell)
    # SQLite reports a read-only file only when a statement writes. This one changes no row: it reports it now, not at a
    # turn.
    conn.execute(meta.update().where(false()).values(value=""))


def refuse_newer(conn: Connection) -> None:
    """For a proxy that the store does not know (any more). Raises `StoreUnavailable` if a newer program has migrated
    the schema meanwhile: this proxy was paused, and did not count as one that is on the store."""
    version = str(conn.scalar(_SCHEMA_VERSION))[:20]
    if version.isdecimal() and int(version) > newest():
        raise _newer("the store", int(version), newest())


def _newer(store: str, version: int, known: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{store} has schema version {version}, this program knows up to {known}: upgrade cli-session-proxy, or choose "
        "another --var",
        detail={"found": version, "known": known},
    )


def moved(name: str, place: str) -> StoreUnavailable:
    """The error for a moved store; a proxy that still uses the old one gets it at a write."""
    return StoreUnavailable(
        f"the store {name} was moved to {place}: start the proxy with that store (`store`, or --var), and send this "
        "again",
        detail={"moved_to": place},
    )


def _migrate(conn: Connection, database: Database, version: int, steps: Sequence[Migration], tell: ReportStep) -> None:
    is_exclusive = any(step.exclusive for step in steps)
    others = _others(conn, database) if is_exclusive else []
    if others:
        raise StoreUnavailable(
            f"the store {database.name} has to be brought from schema version {version} to {newest(steps)}, and "
            f"{' and '.join(others)} of an older program {'is' if len(others) == 1 else 'are'} on it: stop every proxy "
            "on this store, then start again",
            detail={"found": version, "known": newest(steps), "proxies": others},
        )
    database.back_up(version, lambda done, total: tell("a copy of the store", done, total))
    for step in steps:
        for done, total in step.apply(conn) or ():
            tell(step.name, done, total)
    if is_exclusive:  # a proxy that is paused now has lost its leases when it wakes, and is unknown: `refuse_newer`
        conn.execute(leases.update().values(epoch=leases.c.epoch + 1))
        conn.execute(proxies.delete())
    conn.execute(meta.update().where(meta.c.name == "schema_version").values(value=str(newest(steps))))


def _others(conn: Connection, database: Database) -> list[str]:
    """The live proxies on this store. Those of this host are known by their locks if the database has them; all others
    by their heartbeats."""
    host, living = socket.gethostname(), database.living()
    others = [f"proxy {name[:8]} on this host ({host})" for name in sorted(living or ())]
    if proxies.name in inspect(conn).get_table_names():
        # Only columns that every version of the table has.
        beating = select(proxies.c.id, proxies.c.host).where(proxies.c.until > func.store_clock(type_=Double))
        if living is not None:
            beating = beating.where(proxies.c.host != host)
        others += [f"proxy {row.id[:8]} on {row.host}" for row in conn.execute(beating).all()]
    return others


def version_of(conn: Connection, name: str) -> int | None:
    """The schema's version; None for an empty database."""
    names = inspect(conn).get_table_names()
    if not names:
        return None
    text = None
    if meta.name in names:
        text = conn.scalar(_SCHEMA_VERSION)
    if text is None or not text.isdecimal() or int(text) < 1:
        raise StoreUnavailable(f"{name} is a database of another program: move it away or choose another --var")
    return int(text)
