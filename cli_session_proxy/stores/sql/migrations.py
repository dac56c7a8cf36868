"""From an older schema to this one: small named steps in a list, and a copy aside before the first.

A new file is made from `tables` at once; `MIGRATIONS[0]` leads from version 1 to 2, the next from 2 to 3. A step that
an older program could not live with waits until no other proxy is on the store. Who waits for a large store is told how
far it is (`TellStep`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Double, Integer, Row, bindparam, case, false, func, inspect, select

from ...domain import former
from ...domain.evidence import Evidence
from ...domain.models import PLAIN, REPAIR_REASONS, Placed
from ...errors import StoreUnavailable
from ..base import TellStep
from .database import Database
from .rows import TOTALS, dumps, loads, size
from .tables import (
    COMING_IN,
    MOVED_TO,
    agents,
    cancels,
    conversations,
    findings,
    followers,
    forgotten,
    image_refs,
    images,
    items,
    leases,
    links,
    meta,
    metadata,
    mirrored,
    proxies,
    sessions,
    spent,
    turns,
)

# So much is done, of so much.
Step = Iterator[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step to the next version. `apply` runs inside the transaction of the whole migration; one that takes long
    yields how far it is.

    `alone`: it changes what older programs read and write, so no proxy may be on the store.
    """

    name: str
    apply: Callable[[Connection], Step | None]
    alone: bool = False


def _stateful_wires(conn: Connection) -> None:
    """What OpenAI's Responses and Conversations keep: a column of `turns`, and two tables."""
    if turns.c.call.name not in {column["name"] for column in inspect(conn).get_columns(turns.name)}:
        conn.exec_driver_sql(f'ALTER TABLE {turns.name} ADD COLUMN "{turns.c.call.name}" TEXT')
    metadata.create_all(conn, tables=[conversations, items])


def _leases(conn: Connection) -> None:
    """Who may write an agent, and who waits for the answers of other proxies' turns."""
    metadata.create_all(conn, tables=[proxies, leases, followers])


def _typed_turns(conn: Connection) -> Step:
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
    total = sum(conn.scalar(select(func.count()).select_from(table)) or 0 for table in (turns, links))
    seq = done = 0
    while found := conn.execute(_FORMER_TURNS, {"after": seq}).all():
        conn.execute(_TYPED, [_typed(row) for row in found])
        seq, done = found[-1].seq, done + len(found)
        yield done, total
    n = 0
    while why := conn.execute(_FORMER_LINKS, {"after": n}).all():
        coded = [(row.n, former.detail(row.reason, loads(row.detail))) for row in why]
        conn.execute(_CODED, [{"of": n, "coded": dumps(detail)} for n, detail in coded])
        n, done = why[-1].n, done + len(why)
        yield done, total


def _fallbacks(conn: Connection) -> None:
    """Who answers in whose place, and until when.

    Older programs write turns without it and read past it: to them nobody stands in for anybody.
    """
    there = {column["name"] for column in inspect(conn).get_columns(turns.name)}
    if turns.c.fallback.name not in there:
        conn.exec_driver_sql(f"ALTER TABLE {turns.name} ADD COLUMN {turns.c.fallback.name} TEXT")


def _limit_waits(conn: Connection) -> None:
    """Until when turns wait for a limit of the provider's. Older programs take them for turns that wait in a lane."""
    there = {column["name"] for column in inspect(conn).get_columns(turns.name)}
    if turns.c.limit_wait.name not in there:
        conn.exec_driver_sql(f"ALTER TABLE {turns.name} ADD COLUMN {turns.c.limit_wait.name} TEXT")


def _newest_of_a_history(conn: Connection) -> None:
    """Very many strangers may share an opening: the newest of them are found in the index, without sorting them all."""
    (index,) = [index for index in turns.indexes if index.name == "turns_path_hash"]
    index.drop(conn, checkfirst=True)
    index.create(conn)


def _whereabouts(conn: Connection) -> None:
    """Where proxies are reached, where an agent's files are, and which turns another proxy wants to end.

    Older programs write neither, so nobody passes anything on to them.
    """
    for column in (proxies.c.address, leases.c.home):
        if column.name not in {one["name"] for one in inspect(conn).get_columns(column.table.name)}:
            conn.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {column.name} TEXT")
    metadata.create_all(conn, tables=[cancels])


def _totals(conn: Connection) -> Step:
    """What a list of agents shows of each, kept with the agent: summed up here once."""
    there = {column["name"] for column in inspect(conn).get_columns(agents.name)}
    for name in TOTALS:
        if name not in there:
            kind = agents.c[name].type.compile(conn.dialect)
            conn.exec_driver_sql(f"ALTER TABLE {agents.name} ADD COLUMN {name} {kind} NOT NULL DEFAULT 0")
    total = conn.scalar(select(func.count()).select_from(turns)) or 0
    done = 0
    for key in conn.scalars(select(agents.c.key)).all():
        summed = conn.execute(_SUMMED, {"of_agent": key}).one()._asdict()
        conn.execute(agents.update().where(agents.c.key == key).values(summed))
        done += summed["turns"]
        yield done, total


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


def _of_agent(column: Any, table: Any) -> Any:
    return func.coalesce(select(column).where(table.c.agent_key == bindparam("of_agent")).scalar_subquery(), 0)


def _number_of(condition: Any) -> Any:
    return func.sum(case((condition, 1), else_=0), type_=Integer)


_DRAWN = select(images.c.size).where(images.c.sha256 == image_refs.c.sha256).scalar_subquery()
_SUMMED = select(
    _of_agent(func.count(), turns).label("turns"),
    _of_agent(_number_of(turns.c.placed.like('%"side":true%')), turns).label("side"),
    _of_agent(_number_of(turns.c.status.in_(("failed", "refused"))), turns).label("failures"),
    _of_agent(func.sum(turns.c.cost_usd), turns).label("cost_usd"),
    (_of_agent(func.sum(turns.c.bytes), turns) + _of_agent(func.sum(_DRAWN), image_refs)).label("bytes"),
    _of_agent(func.count(), sessions).label("sessions"),
    _of_agent(_number_of(links.c.reason.in_(sorted(REPAIR_REASONS))), links).label("repairs"),
)

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
    Migration("the newest of many turns with one history", _newest_of_a_history),
    Migration("whereabouts", _whereabouts),
    Migration("totals of agents", _totals, alone=True),
    Migration("findings", lambda conn: metadata.create_all(conn, tables=[findings])),
    Migration("one-shots that were forgotten", lambda conn: metadata.create_all(conn, tables=[forgotten])),
    Migration("budgets", lambda conn: metadata.create_all(conn, tables=[spent])),
    Migration("waiting for limits", _limit_waits),
)


def prepare(conn: Connection, database: Database, tell: TellStep, migrations: Sequence[Migration] = MIGRATIONS) -> None:
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
        _migrate(conn, database, version, migrations, tell)
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


def _migrate(
    conn: Connection, database: Database, version: int, migrations: Sequence[Migration], tell: TellStep
) -> None:
    others = _others(conn, database) if any(step.alone for step in migrations[version - 1 :]) else []
    if others:
        raise StoreUnavailable(
            f"the store {database.name} has to be brought from schema version {version} to {1 + len(migrations)}, and "
            f"{' and '.join(others)} of an older program {'is' if len(others) == 1 else 'are'} on it: stop every proxy "
            "on this store, then start again",
            detail={"found": version, "known": 1 + len(migrations), "proxies": others},
        )
    database.back_up(version, lambda done, total: tell("a copy of the store", done, total))
    for step in migrations[version - 1 :]:
        for done, total in step.apply(conn) or ():
            tell(step.name, done, total)
    newest = str(1 + len(migrations))
    conn.execute(meta.update().where(meta.c.name == "schema_version").values(value=newest))


def _others(conn: Connection, database: Database) -> list[str]:
    """The proxies on this store that live: by the kernel where it can tell, else by their heartbeat."""
    here, living = socket.gethostname(), database.living()
    others = [f"proxy {name[:8]} on this host ({here})" for name in sorted(living or ())]
    if proxies.name in inspect(conn).get_table_names():
        # Only what every version of the table has.
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
