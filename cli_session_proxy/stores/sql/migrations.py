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

from ...domain import former
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

# Yields (rows done, rows in all).
Step = Iterator[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, from any older version to version `to`. `apply` runs inside the transaction of the whole migration, and
    yields its progress if it is long.

    `alone`: older programs could not use the result, so no proxy may be on the store.
    """

    name: str
    apply: Callable[[Connection], Step | None]
    to: int
    alone: bool = False


def _from_0_1(conn: Connection) -> Step:
    """From the schema of 0.1, or of any state between it and 0.2, to that of 0.2. Existing tables and columns stay."""
    metadata.create_all(conn)
    for table in (turns, agents, proxies, leases):
        existing = {column["name"] for column in inspect(conn).get_columns(table.name)}
        for column in table.columns:
            if column.name not in existing and column is not turns.c.evidence:  # `_typed_turns` renames `reason` to it
                conn.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {CreateColumn(column).compile(conn)}")
    # Very many unnamed chains may begin alike: with its new second column this index finds the newest without sorting
    # them all.
    (index,) = [index for index in turns.indexes if index.name == "turns_path_hash"]
    index.drop(conn, checkfirst=True)
    index.create(conn)
    yield from _typed_turns(conn)
    # Compute the totals that are stored with each agent from now on.
    total = conn.scalar(select(func.count()).select_from(turns)) or 0
    done = 0
    for key in conn.scalars(select(agents.c.key)).all():
        totals = conn.execute(_TOTALS, {"of_agent": key}).one()._asdict()
        conn.execute(agents.update().where(agents.c.key == key).values(totals))
        done += totals["turns"]
        yield done, total


def _typed_turns(conn: Connection) -> Step:
    """Split each turn's object `reason` into `placed`, `options` and `evidence`; sentences become codes."""
    if turns.c.evidence.name in {column["name"] for column in inspect(conn).get_columns(turns.name)}:
        return  # this state between 0.1 and 0.2 has them already
    # Renamed, not added, so that short columns stay before long ones.
    conn.exec_driver_sql(f"ALTER TABLE {turns.name} RENAME COLUMN reason TO {turns.c.evidence.name}")
    total = sum(conn.scalar(select(func.count()).select_from(table)) or 0 for table in (turns, links))
    last_turn = last_link = done = 0
    while batch := conn.execute(_FORMER_TURNS, {"after": last_turn}).all():
        conn.execute(_TYPED, [_typed(row) for row in batch])
        last_turn, done = batch[-1].seq, done + len(batch)
        yield done, total
    while reasons := conn.execute(_FORMER_LINKS, {"after": last_link}).all():
        coded = [(row.n, former.detail(row.reason, loads(row.detail))) for row in reasons]
        conn.execute(_CODED, [{"of": n, "coded": dumps(detail)} for n, detail in coded])
        last_link, done = reasons[-1].n, done + len(reasons)
        yield done, total


def _typed(row: Row[Any, Any, Any, Any]) -> dict[str, Any]:
    """The parameters of `_TYPED` for this turn."""
    old = loads(row.evidence)
    try:
        reason = former.reason(old)
    except former.MALFORMED:  # imported by 0.1 without a check: shown, never used
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


def _of_agent(column: Any, table: Any) -> Any:
    """A value over the agent's rows of this table; 0 if it has none."""
    return func.coalesce(select(column).where(table.c.agent_key == bindparam("of_agent")).scalar_subquery(), 0)


def _number_of(condition: Any) -> Any:
    return func.sum(case((condition, 1), else_=0), type_=Integer)


_IMAGE_SIZE = select(images.c.size).where(images.c.sha256 == image_refs.c.sha256).scalar_subquery()
_TOTALS = select(
    _of_agent(func.count(), turns).label("turns"),
    _of_agent(_number_of(turns.c.placed.like('%"side":true%')), turns).label("side"),
    _of_agent(_number_of(turns.c.status.in_(("failed", "refused"))), turns).label("failures"),
    _of_agent(func.sum(turns.c.cost_usd), turns).label("cost_usd"),
    (_of_agent(func.sum(turns.c.bytes), turns) + _of_agent(func.sum(_IMAGE_SIZE), image_refs)).label("bytes"),
    _of_agent(func.count(), sessions).label("sessions"),
    _of_agent(_number_of(links.c.reason.in_(sorted(REPAIR_REASONS))), links).label("repairs"),
)

# Rows per batch.
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


# 0.1 wrote version 2. Versions 3 to 12 were never released; 13 was the first with all of it.
MIGRATIONS: tuple[Migration, ...] = (Migration("from 0.1", _from_0_1, to=13, alone=True),)


def newest(migrations: Sequence[Migration] = MIGRATIONS) -> int:
    return migrations[-1].to if migrations else 1


def prepare(
    conn: Connection, database: Database, tell: ReportStep, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Create the schema in an empty database, migrate an older one, refuse a newer or a foreign one.

    Runs inside `Database.open`: of two programs that open it at once, one does it and the other finds it done.
    """
    known = newest(migrations)
    version = version_of(conn, database.name)
    if version is None:
        metadata.create_all(conn)
        conn.execute(meta.insert(), {"name": "schema_version", "value": str(known)})
    elif version > known:
        raise StoreUnavailable(
            f"the store {database.name} has schema version {version}, this program knows up to {known}: "
            "upgrade cli-session-proxy, or choose another --var",
            detail={"found": version, "known": known},
        )
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
    # SQLite begins a write on a read-only file without an error; a write of no rows raises it now, not at a turn
    conn.execute(meta.update().where(false()).values(value=""))


def moved(name: str, place: str) -> StoreUnavailable:
    """The error for a moved store; a proxy that still uses the old one gets it at a write."""
    return StoreUnavailable(
        f"the store {name} was moved to {place}: start the proxy with that store (`store`, or --var), and send this "
        "again",
        detail={"moved_to": place},
    )


def _migrate(conn: Connection, database: Database, version: int, steps: Sequence[Migration], tell: ReportStep) -> None:
    others = _others(conn, database) if any(step.alone for step in steps) else []
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
    conn.execute(meta.update().where(meta.c.name == "schema_version").values(value=str(newest(steps))))


def _others(conn: Connection, database: Database) -> list[str]:
    """The live proxies on this store, by the kernel if it knows, else by heartbeats."""
    here, living = socket.gethostname(), database.living()
    others = [f"proxy {name[:8]} on this host ({here})" for name in sorted(living or ())]
    if proxies.name in inspect(conn).get_table_names():
        # Only columns that every version of the table has.
        beating = select(proxies.c.id, proxies.c.host).where(proxies.c.until > func.store_clock(type_=Double))
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
