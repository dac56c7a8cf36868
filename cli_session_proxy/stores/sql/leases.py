"""Transactions of leases: which proxy may write an agent, and which proxies respond.

A lease ends when its holder releases it, or when the holder's heartbeat has expired and another proxy takes it. The
epoch increases with each new holder, and is at least the store's clock (milliseconds), so that a store restored from a
backup grants no epoch again that was granted after that backup. Times come from the database's function `store_clock()`
(see `database`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Connection, Double, Integer, Text, bindparam, func, literal, select, union_all

from ...domain.models import CancelledBy
from ..base import Facts, Granted, HeldLease, Home, Lease, LeaseHeld, PeerRequests, Proxy, Whereabouts
from . import migrations, rows
from .damaged import reads, undamaged
from .database import InsertNew, Prepared
from .tables import FACTS, cancels, followers, leases, meta, proxies

# A grant renews the heartbeat only if less than this share of the lease is left: a waiting proxy asks very often.
FRESH = 0.7

_NOW = func.store_clock(type_=Double)
_THIS_PROXY = proxies.c.id == bindparam("of_proxy")
_BEAT = Prepared(proxies.update().where(_THIS_PROXY).values(until=_NOW + bindparam("lease")))
_JOIN = Prepared(InsertNew(proxies).values(until=_NOW + bindparam("lease")))
_CLOCK = Prepared(select(_NOW.label("now")))
_LEFT = Prepared(select((proxies.c.until - _NOW).label("seconds")).where(_THIS_PROXY))
# Locks the row until the end of the transaction: no lease is granted during a write under it.
LOCK_LEASE = Prepared(
    select(leases.c.epoch, leases.c.holder, leases.c.wanted)
    .where(leases.c.agent_key == bindparam("of_agent"))
    .with_for_update(key_share=True)
)
_FIRST_GRANT = Prepared(InsertNew(leases))
_CHANGE = Prepared(leases.update().where(leases.c.agent_key == bindparam("of_agent")))
_RELEASE = Prepared(
    leases.update()
    .where(
        leases.c.agent_key == bindparam("of_agent"),
        leases.c.epoch == bindparam("at_epoch"),
        leases.c.holder == bindparam("of_proxy"),
    )
    .values(holder=None, wanted=None)
)
_FOLLOW = Prepared(InsertNew(followers))
_CANCEL = Prepared(InsertNew(cancels))
_RESPONDS = proxies.c.until > _NOW
_WHEREABOUTS = (
    select(leases.c.agent_key, leases.c.home, proxies.c.id, proxies.c.address)
    .select_from(leases.outerjoin(proxies, (proxies.c.id == leases.c.holder) & _RESPONDS))
    .where(leases.c.agent_key == bindparam("of_agent"))
)
# All requests to a proxy, in one statement.
_ASKED = union_all(
    select(leases.c.agent_key, literal(None, Text).label("turn_id"), literal(None, Text).label("by")).where(
        leases.c.holder == bindparam("of_proxy"), leases.c.wanted.is_not(None)
    ),
    select(literal(None, Integer), cancels.c.turn_id, cancels.c.by).where(cancels.c.proxy == bindparam("of_proxy")),
)


def clock(conn: Connection) -> float:
    now: float = _CLOCK.one(conn, {}).now  # type: ignore[union-attr]  # it has one row
    return now


def beat(conn: Connection, proxy: Proxy, *, at_least: float = 1.0) -> None:
    """A heartbeat: the proxy counts as responding for `proxy.lease` seconds from now. Skipped if more than the share
    `at_least` of that time is left. If more than all of it is left, the clock went back: then it is not skipped."""
    left = _LEFT.one(conn, {"of_proxy": proxy.id})
    if left is None:
        migrations.refuse_newer(conn)
        _JOIN.run(conn, {"id": proxy.id, "host": proxy.host, "lease": proxy.lease, "address": proxy.address})
    elif not at_least * proxy.lease < left.seconds <= proxy.lease:
        _BEAT.run(conn, {"of_proxy": proxy.id, "lease": proxy.lease})


def renew(conn: Connection, proxy: Proxy) -> list[HeldLease]:
    beat(conn, proxy)
    held = conn.execute(select(leases).where(leases.c.holder == proxy.id))
    return [HeldLease(Lease(row.agent_key, proxy.id, row.epoch), row.wanted) for row in held]


def responds(conn: Connection, proxy_id: str) -> bool:
    left = _LEFT.one(conn, {"of_proxy": proxy_id})
    return left is not None and left.seconds > 0


def acquire(
    conn: Connection,
    agent_key: int,
    proxy: Proxy,
    dead: Collection[str],
    *,
    awake: Callable[[], bool],
    asks: bool,
    ring: Callable[[Connection, str], None],
) -> Granted | LeaseHeld:
    """`ring` notifies the holder of the request."""
    beat(conn, proxy, at_least=FRESH)
    row = LOCK_LEASE.one(conn, {"of_agent": agent_key})
    if row is None:
        first = Lease(agent_key, proxy.id, _epoch(conn, 0))
        if _FIRST_GRANT.run(conn, {"agent_key": agent_key, "epoch": first.epoch, "holder": proxy.id}).rowcount:
            return Granted(first, None)
        row = LOCK_LEASE.one(conn, {"of_agent": agent_key})  # another proxy was faster
        assert row is not None
    if row.holder == proxy.id:
        return Granted(Lease(agent_key, proxy.id, row.epoch), None)
    if row.holder is not None and row.holder not in dead and (responds(conn, row.holder) or not awake()):
        if asks and row.wanted is None:
            _CHANGE.run(conn, {"of_agent": agent_key, "wanted": proxy.id})
            ring(conn, row.holder)
        return LeaseHeld(row.holder)
    new = Lease(agent_key, proxy.id, _epoch(conn, row.epoch))
    _CHANGE.run(conn, {"of_agent": agent_key, "epoch": new.epoch, "holder": proxy.id, "wanted": None})
    return Granted(new, row.holder)


def _epoch(conn: Connection, former: int) -> int:
    """The epoch of the next grant."""
    return max(former + 1, int(clock(conn) * 1000))


def release(conn: Connection, lease: Lease) -> None:
    _RELEASE.run(conn, {"of_agent": lease.agent_key, "at_epoch": lease.epoch, "of_proxy": lease.holder})


def asked(conn: Connection, proxy_id: str) -> PeerRequests:
    requests = conn.execute(_ASKED, {"of_proxy": proxy_id}).all()
    return PeerRequests(
        tuple(row.agent_key for row in requests if row.turn_id is None),
        tuple((row.turn_id, row.by) for row in requests if row.turn_id is not None),
    )


def cancel(
    conn: Connection, turn_id: str, proxy_id: str, by: CancelledBy, ring: Callable[[Connection, str], None]
) -> None:
    _CANCEL.run(conn, {"turn_id": turn_id, "proxy": proxy_id, "by": by})
    ring(conn, proxy_id)


def forget_cancel(conn: Connection, turn_id: str) -> None:
    conn.execute(cancels.delete().where(cancels.c.turn_id == turn_id))


def whereabouts(conn: Connection, agent_key: int) -> Whereabouts:
    row = conn.execute(_WHEREABOUTS, {"of_agent": agent_key}).one_or_none()
    return Whereabouts() if row is None else _place(row)


@reads(leases.c.agent_key, leases.c.home, proxies.c.id, proxies.c.address)
def _place(row: Any) -> Whereabouts:
    return Whereabouts(row.id, row.address, None if row.home is None else Home(**rows.loads(row.home)))


def proxy(conn: Connection, proxy_id: str) -> Proxy | None:
    left = (proxies.c.until - _NOW).label("left")
    query = select(proxies.c.host, proxies.c.address, left).where(proxies.c.id == proxy_id, _RESPONDS)
    row = conn.execute(query).one_or_none()
    return None if row is None else Proxy(proxy_id, row.host, row.left, row.address)


def addresses(conn: Connection) -> frozenset[str]:
    query = select(proxies.c.address).where(proxies.c.address.is_not(None), _RESPONDS)
    return frozenset(conn.scalars(query))


def holders(conn: Connection, agent_keys: Collection[int]) -> dict[int, Any]:
    """The responding holders of these agents' leases: rows with `host` and `address`."""
    query = (
        select(leases.c.agent_key, proxies.c.host, proxies.c.address)
        .join(proxies, proxies.c.id == leases.c.holder)
        .where(leases.c.agent_key.in_(agent_keys), _RESPONDS)
    )
    return {row.agent_key: row for row in conn.execute(query)}


def silent(conn: Connection, seconds: float) -> list[str]:
    return list(conn.scalars(select(proxies.c.id).where(proxies.c.until < _NOW - seconds)))


def introduce(conn: Connection, proxy_id: str, facts: Facts) -> None:
    named = FACTS + proxy_id
    conn.execute(meta.delete().where(meta.c.name == named))
    conn.execute(meta.insert().values(name=named, value=json.dumps(facts)))


def hosts(conn: Connection) -> list[tuple[str, Facts]]:
    query = (
        select(proxies.c.host, meta.c.name, meta.c.value)
        .join(meta, meta.c.name == literal(FACTS) + proxies.c.id)
        .where(proxies.c.until > _NOW)
        .order_by(proxies.c.host, proxies.c.id)
    )
    return undamaged(_host, conn.execute(query))


@reads(proxies.c.host, meta.c.name, meta.c.value)
def _host(row: Any) -> tuple[str, Facts]:
    return row.host, {name: str(value) for name, value in json.loads(row.value).items()}


def resign(conn: Connection, proxy_id: str) -> None:
    conn.execute(meta.delete().where(meta.c.name == FACTS + proxy_id))
    conn.execute(leases.update().where(leases.c.holder == proxy_id).values(holder=None, wanted=None))
    conn.execute(followers.delete().where(followers.c.proxy == proxy_id))
    conn.execute(cancels.delete().where(cancels.c.proxy == proxy_id))
    conn.execute(proxies.delete().where(proxies.c.id == proxy_id))


# --- clients at other proxies that wait for a turn's answer ---


def follow(conn: Connection, turn_id: str, proxy_id: str) -> None:
    _FOLLOW.run(conn, {"turn_id": turn_id, "proxy": proxy_id})


def unfollow(conn: Connection, turn_id: str, proxy_id: str) -> None:
    conn.execute(followers.delete().where(followers.c.turn_id == turn_id, followers.c.proxy == proxy_id))


def followers_of(conn: Connection, turn_id: str) -> list[str]:
    return list(conn.scalars(select(followers.c.proxy).where(followers.c.turn_id == turn_id)))
