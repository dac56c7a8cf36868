"""Transactions of `Findings`: named results about a subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Double, func, select

from ...domain.models import JSON
from ..base import Finding
from .damaged import reads, sound
from .rows import dumps, loads
from .tables import findings, meta

_NOW = func.store_clock(type_=Double)
# Seconds after which a finding is deleted, when the next one is stored: a bit more than a year.
KEPT = 400 * 86400.0


def claim_finding(conn: Connection, subject: str, name: str, seconds: float) -> bool:
    now = _alone(conn)
    of = findings.c.subject == subject, findings.c.name == name
    existing = conn.execute(select(findings.c.until).where(*of)).first()
    if existing is not None and (existing.until is None or existing.until > now):
        return False
    conn.execute(findings.delete().where(*of))
    row = {"subject": subject, "name": name, "found": "{}", "at": now, "until": now + seconds}
    conn.execute(findings.insert(), row)
    return True


def keep_findings(conn: Connection, subject: str, found: Mapping[str, JSON]) -> None:
    now = _alone(conn)
    conn.execute(findings.delete().where(findings.c.subject == subject, findings.c.name.in_(list(found))))
    conn.execute(findings.delete().where(findings.c.at < now - KEPT))
    rows = [{"subject": subject, "name": name, "found": dumps(one), "at": now} for name, one in found.items()]
    if rows:
        conn.execute(findings.insert(), rows)


def all_of(conn: Connection, subject: str | None = None) -> list[Finding]:
    query = select(findings).where(findings.c.until.is_(None))
    if subject is not None:
        query = query.where(findings.c.subject == subject)
    return sound(_finding, conn.execute(query.order_by(findings.c.at, findings.c.subject, findings.c.name)))


@reads(*findings.c)
def _finding(row: Any) -> Finding:
    return Finding(row.subject, row.name, dict(loads(row.found)), row.at)


def _alone(conn: Connection) -> float:
    """Lock a row that every store has, so that writers take turns. Returns the store's time."""
    conn.execute(select(meta.c.value).where(meta.c.name == "schema_version").with_for_update())
    return float(conn.scalar(select(_NOW)) or 0.0)
