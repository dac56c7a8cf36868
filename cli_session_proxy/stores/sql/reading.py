"""The store's reads: the bodies of read transactions, each on one snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    Select,
    Text,
    and_,
    bindparam,
    case,
    false,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    true,
    tuple_,
)

from ...domain.models import (
    ANSWERED,
    FINISHED,
    MARKED_REASONS,
    ON_PATH,
    ONCE,
    REPAIR_REASONS,
    Agent,
    Chain,
    ChainSummary,
    Item,
    Link,
    Record,
    Session,
    Status,
    Turn,
)
from ...domain.times import LAST_TIME
from ...errors import ContextTooLong
from ..base import Expiry, Forgotten, Tree, TurnFacts, TurnOutline, TurnPage
from . import leases, rows, side_data
from .damaged import reads, undamaged
from .database import Prepared
from .lifecycle import NEWEST_SESSION, TooLarge
from .rows import chunks, unfinished
from .tables import (
    COMING,
    PROBE,
    agents,
    conversations,
    forgotten,
    frames,
    idempotency_keys,
    items,
    links,
    meta,
    mirrored,
    records,
    sessions,
    turns,
)

# Turns per page of a stream: an input may have images of many MB.
PAGE = 100
# And how many bytes of turns, where it holds several: not many turns with documents of 20 MB.
PAGE_BYTES = 16 * 1024 * 1024

# How many of the newest turns with equal paths are looked at: very many unnamed chains may begin alike.
CANDIDATES = 8

# Statuses in which an agent may expire.
ENDED = (*FINISHED, "requires_action")

# Rows for sums and charts per read: a few milliseconds.
FACTS = 500

# Up to so many turn numbers are counted one by one, 0.3 ms each in a chain of 20,000.
FEW = 50

# Seconds covered by one row of `forgotten`.
HOUR = 3600.0

# A cursor in the stream of summaries: (last_at, key) of the last row.
Position = tuple[float, int]

_TURN = select(*rows.TURN)
# Of a turn's row, without its images: the calls of tools and their results may be longer than the messages.
_CHARACTERS = reduce(add, (func.coalesce(func.length(of), 0) for of in rows.TURN if of.type.python_type is str))
_BEHIND = and_(turns.c.agent_key == bindparam("of_agent"), turns.c.seq > bindparam("after"))
_OF_AGENT = _TURN.where(_BEHIND).order_by(turns.c.seq)
_OUTLINES_OF_AGENT = select(*rows.OUTLINE).where(_BEHIND).order_by(turns.c.seq)

_AGENT = Prepared(
    select(*rows.AGENT).where(agents.c.owner == bindparam("of_owner"), agents.c.agent_id == bindparam("named"))
)
# Without agents that are being imported: they have no directory yet.
_AGENT_BY_KEY = Prepared(select(*rows.AGENT).where(agents.c.key == bindparam("of_agent"), agents.c.owner != COMING))
# For speed only an agent's last turn is looked at.
_STATE = (
    select(turns.c.status)
    .where(turns.c.agent_key == agents.c.key)
    .order_by(turns.c.seq.desc())
    .limit(1)
    .scalar_subquery()
    .label("state")
)
_SUMMED_UP = (*rows.AGENT, agents.c.last_at, *(agents.c[name] for name in rows.TOTALS), _STATE)
_SUMMARY: Select[Any] = select(*_SUMMED_UP).order_by(agents.c.last_at.desc(), agents.c.key.desc()).limit(PAGE)
# A client may come back to these: unfinished, adopted or imported turns; a stored response or interaction, or another
# id that its wire gave out (`store`); a conversation.
_AWAITED = (
    select(turns.c.seq)
    .where(
        turns.c.agent_key == agents.c.key,
        or_(
            turns.c.status.not_in(ENDED),
            turns.c.origin.in_(("adopted", "imported")),
            turns.c.call.like('%"store":true%'),
        ),
    )
    .exists()
)
_TALKED = select(conversations.c.agent_key).where(conversations.c.agent_key == agents.c.key).exists()
_BUSY = select(turns.c.seq).where(turns.c.agent_key == agents.c.key, turns.c.status.not_in(ENDED)).exists()
ASKED_ONCE = agents.c.agent_id.startswith(f"{ONCE}_", autoescape=True)
_ONCE = and_(agents.c.named.is_(false()), ASKED_ONCE, not_(_BUSY))
ONE_SHOT = and_(agents.c.named.is_(false()), agents.c.turns == 1, not_(_AWAITED), not_(_TALKED))
_TURN_BY_ID = Prepared(_TURN.where(turns.c.id == bindparam("turn_id")))
_SESSION_AT = Prepared(
    select(*rows.SESSION).where(
        sessions.c.n == NEWEST_SESSION.where(sessions.c.tip_turn_id == bindparam("turn_id")).scalar_subquery()
    )
)
_EXCLUDING = bindparam("excluding", type_=Text)
_UNFINISHED_OF = Prepared(
    _TURN.where(
        unfinished(turns, bindparam("of_agent", type_=BigInteger)),
        or_(_EXCLUDING.is_(None), turns.c.instance.is_distinct_from(_EXCLUDING)),
    ).order_by(turns.c.seq)
)


def probed(conn: Connection) -> str | None:
    value: str | None = conn.scalar(select(meta.c.value).where(meta.c.name == PROBE))
    return value


# --- agents ---


def owned_by(owner: str | None) -> ColumnElement[bool]:
    """A condition for agents: those of this owner, or of all owners. Never those that are being imported."""
    return agents.c.owner != COMING if owner is None else agents.c.owner == owner


def agent(conn: Connection, owner: str, agent_id: str) -> Agent | None:
    row = _AGENT.one(conn, {"of_owner": owner, "named": agent_id})
    return None if row is None else rows.agent(row)


def agent_by_key(conn: Connection, key: int) -> Agent | None:
    row = _AGENT_BY_KEY.one(conn, {"of_agent": key})
    return None if row is None else rows.agent(row)


def named_by(conn: Connection, agent_key: int) -> list[str]:
    of_turns = select(turns.c.id.label("named")).where(turns.c.agent_key == agent_key)
    others = select(sessions.c.id).where(sessions.c.agent_key != agent_key, sessions.c.id == turns.c.session_id)
    is_used = turns.c.session_id.is_not(None) & ~others.exists()
    used = select(turns.c.session_id).where(turns.c.agent_key == agent_key, is_used)
    of_sessions = select(sessions.c.id).where(sessions.c.agent_key == agent_key)
    return list(conn.scalars(of_turns.union(used, of_sessions)))


def expired_agents(conn: Connection, expiry: Expiry, *, only: int | None = None) -> list[Agent]:
    kinds = (true(), expiry.before), (ONE_SHOT, expiry.one_shots), (_ONCE, expiry.once)
    expired = [and_(kind, agents.c.last_at < before) for kind, before in kinds if before is not None]
    query = select(*rows.AGENT).where(or_(false(), *expired), owned_by(None))
    if only is not None:
        query = query.where(agents.c.key == only)
    matches = undamaged(rows.agent, conn.execute(query.order_by(agents.c.last_at, agents.c.key)))
    return [agent for agent in matches if expiry.version in (None, version(conn, agent.key))]


def version(conn: Connection, agent_key: int) -> str | None:
    """A digest of the agent's row, which every turn changes, and of rows that change without it."""
    row = conn.execute(select(agents).where(agents.c.key == agent_key)).first()
    if row is None:
        return None
    state = turns.c.status, turns.c.delivery
    queries: list[Executable] = [
        select(*state, func.count()).where(turns.c.agent_key == agent_key).group_by(*state).order_by(*state),
        select(conversations).where(conversations.c.agent_key == agent_key),
    ]
    for table in (items, links, sessions, mirrored):
        queries.append(select(func.count(), func.max(table.c.n)).where(table.c.agent_key == agent_key))
    results = [[*row], *([[*one] for one in conn.execute(query)] for query in queries)]
    return hashlib.sha256(json.dumps(results).encode()).hexdigest()


def one_shots(conn: Connection, owner: str | None, *, since: float, until: float) -> tuple[int, float]:
    totals = select(func.count(), func.coalesce(func.sum(agents.c.cost_usd), 0.0)).where(
        ONE_SHOT, agents.c.last_at >= since, agents.c.last_at < until, owned_by(owner),
        agents.c.cost_usd < LAST_TIME,  # see `damaged`
    )  # fmt: skip
    number, cost = conn.execute(totals).one()
    deleted = forgotten_since(conn, owner, since)
    return number + sum(row.turns for row in deleted), cost + sum(row.cost_usd for row in deleted)


def forgotten_since(conn: Connection, owner: str | None, since: float) -> list[Forgotten]:
    query = select(forgotten).where(forgotten.c.at > since - HOUR)
    query = query if owner is None else query.where(forgotten.c.owner == owner)
    return undamaged(_forgotten, conn.execute(query.order_by(*forgotten.primary_key)))


@reads(*forgotten.c)
def _forgotten(row: Any) -> Forgotten:
    return Forgotten(**row._asdict())


def chain(conn: Connection, agent_key: int) -> Chain | None:
    agent = agent_by_key(conn, agent_key)
    if agent is None:
        return None
    of_sessions = conn.execute(select(*rows.SESSION).where(sessions.c.agent_key == agent_key).order_by(sessions.c.n))
    of_links = conn.execute(select(links).where(links.c.agent_key == agent_key).order_by(links.c.n))
    return Chain(agent, tuple(undamaged(rows.session, of_sessions)), tuple(undamaged(rows.link, of_links)))


def summaries(
    conn: Connection, owner: str | None, after: Position | None, since: float | None
) -> tuple[list[ChainSummary], Position | None]:
    """A page of summaries, last active first, and the next page's cursor (None: there is none)."""
    page = _SUMMARY.where(owned_by(owner))
    if since is not None:
        page = page.where(or_(agents.c.last_at >= since, not_(ONE_SHOT)))
    if after is not None:
        page = page.where(tuple_(agents.c.last_at, agents.c.key) < tuple_(*map(literal, after)))
    of_agents = conn.execute(page).all()
    held = leases.holders(conn, [row.key for row in of_agents])
    running = set(conn.scalars(select(turns.c.agent_key).where(turns.c.status == "running")))
    summed = undamaged(partial(_summary, held=held, running=running), of_agents)
    return summed, (of_agents[-1].last_at, of_agents[-1].key) if len(of_agents) == PAGE else None


@reads(*_SUMMED_UP)
def _summary(row: Any, held: dict[int, Any], running: set[int]) -> ChainSummary:
    return ChainSummary(
        rows.agent(row), row.turns, row.sessions, row.repairs,
        "running" if row.state == "queued" and row.key in running else row.state,
        row.cost_usd, row.bytes, row.last_at,
        side=0 < row.turns == row.side, failures=row.failures,
        host=held[row.key].host if row.key in held else None,
        address=held[row.key].address if row.key in held else None,
    )  # fmt: skip


# --- turns ---


def _turns(conn: Connection, query: Select[Any]) -> list[Turn]:
    return rows.loaded_turns(conn, conn.execute(query).all())


def _first(conn: Connection, query: Select[Any]) -> Turn | None:
    first = _turns(conn, query.limit(1))
    return first[0] if first else None


def turn(conn: Connection, turn_id: str) -> Turn | None:
    loaded = rows.loaded_turns(conn, _TURN_BY_ID.all(conn, {"turn_id": turn_id}))
    return loaded[0] if loaded else None


def turn_by_key(conn: Connection, owner: str, idempotency_key: str, now: float) -> Turn | None:
    taken = idempotency_keys.c
    query = _TURN.join(idempotency_keys, taken.turn_id == turns.c.id)
    query = query.where(taken.owner == owner, taken.key == idempotency_key)
    return _first(conn, query.where(or_(taken.until.is_(None), taken.until > now)))


def deepest(conn: Connection, owner: str, path_hashes: Sequence[str], agent_key: int | None = None) -> Turn | None:
    head = case((agents.c.head == turns.c.id, 1), else_=0).label("head")
    # Answered turns of one agent, or of the owner's unnamed agents (without `X-Chain: none`), newest first.
    answered = select(turns.c.seq, head).join(agents, agents.c.key == turns.c.agent_key)
    answered = answered.where(agents.c.owner == owner, turns.c.status.in_(sorted(ANSWERED)))
    unnamed = and_(agents.c.named.is_(False), not_(ASKED_ONCE))
    answered = answered.where(unnamed if agent_key is None else turns.c.agent_key == agent_key)
    newest_first = answered.order_by(turns.c.seq.desc())
    # Which of several turns with an equal path is preferred: see `Store.deepest`.
    rank = case((turns.c.status == "refused", -1), (turns.c.delivery == "undelivered", 0), else_=1)

    def is_stored(index: int) -> bool:
        return conn.execute(newest_first.where(turns.c.path_hash == path_hashes[index]).limit(1)).first() is not None

    def preferred(index: int) -> Turn | None:
        newest = newest_first.where(turns.c.path_hash == path_hashes[index]).limit(CANDIDATES).subquery()
        query = _TURN.join(newest, newest.c.seq == turns.c.seq)
        return _first(conn, query.order_by(newest.c.head.desc(), rank.desc(), turns.c.seq.desc()))

    last = preferred(-1) if path_hashes else None
    if last is not None:  # nearly always the last one is stored
        return last
    if len(path_hashes) < 2 or not is_stored(0):
        return None
    # If one is stored, all before it are. Look near the end first, where most edits are; then bisect.
    low, high, step = 1, len(path_hashes) - 1, 1
    while low < high:
        middle = max((low + high + 1) // 2, high + 1 - step)
        low, high = (middle, high) if is_stored(middle - 1) else (low, middle - 1)
        step *= 2
    return preferred(low - 1)


def own_frames(conn: Connection, agent_key: int, uuids: Sequence[str]) -> set[str]:
    query = select(frames.c.uuid).where(frames.c.agent_key == agent_key)
    return {uuid for part in chunks(list(uuids)) for uuid in conn.scalars(query.where(frames.c.uuid.in_(part)))}


def children(conn: Connection, turn_id: str) -> list[tuple[str, Status]]:
    query = select(turns.c.id, turns.c.status).where(turns.c.parent_id == turn_id).order_by(turns.c.seq)
    return [(row.id, row.status) for row in conn.execute(query)]


def pending_deliveries(conn: Connection, agent_key: int | None = None) -> list[Turn]:
    query = _TURN.where(turns.c.delivery == "pending", turns.c.status.in_(sorted(ON_PATH)))
    if agent_key is not None:
        query = query.where(turns.c.agent_key == agent_key)
    return undamaged(partial(rows.turn, conn=conn), conn.execute(query.order_by(turns.c.seq)).all())


# A page in the order of acceptance, and behind which place the next one begins (None: there is none).


def page_of_agent(conn: Connection, agent_key: int, after_seq: int) -> tuple[list[Turn], int | None]:
    on_page, following = _within(conn, _OF_AGENT, PAGE_BYTES, of_agent=agent_key, after=after_seq)
    return undamaged(partial(rows.turn, conn=conn), on_page, rows.damaged_turn), following


def page_of_outlines(conn: Connection, agent_key: int, after_seq: int) -> tuple[list[TurnOutline], int | None]:
    on_page, following = _within(conn, _OUTLINES_OF_AGENT, PAGE_BYTES, of_agent=agent_key, after=after_seq)
    return undamaged(rows.turn_outline, on_page, rows.damaged_outline), following


def _within(
    conn: Connection, query: Select[Any], most_bytes: int, limit: int = PAGE, **parameters: Any
) -> tuple[Sequence[Any], int | None]:
    """The first rows of turns with `most_bytes` together, one at least; and behind which place the rest begins.
    `parameters`: of the query."""
    cut_out: ColumnElement[Any] = turns.c.images if query.selected_columns.contains_column(turns.c.images) else null()
    sizes = rows.with_images(
        conn, conn.execute(query.with_only_columns(turns.c.bytes, cut_out).limit(limit), parameters)
    )
    count, total = 0, 0
    for size in sizes:
        total += size
        if count and total > most_bytes:
            break
        count += 1
    within = conn.execute(query.limit(count), parameters).all() if count else []
    return within, within[-1].seq if within and (count < len(sizes) or count == limit) else None


def page(
    conn: Connection,
    agent_key: int,
    *,
    before_seq: int | None,
    limit: int,
    newest: int | None = None,
    most_bytes: int | None = None,
) -> TurnPage:
    of_agent = turns.c.agent_key == agent_key
    if newest is not None:
        at = conn.scalar(select(turns.c.seq).where(of_agent).order_by(turns.c.seq).offset(newest - 1).limit(1))
        before_seq = None if at is None else at + 1
    query = _TURN.where(of_agent) if before_seq is None else _TURN.where(of_agent, turns.c.seq < before_seq)
    newest_first = query.order_by(turns.c.seq.desc()).limit(limit)
    if most_bytes is None:
        on_page = conn.execute(newest_first).all()
    else:
        on_page, _ = _within(conn, newest_first, most_bytes, limit)
    turns_of_page = undamaged(partial(rows.turn, conn=conn), on_page, rows.damaged_turn)
    # Filter by agent, too: most have few links, and a lookup for each turn of the page takes longer.
    agent_links = select(links).where(links.c.agent_key == agent_key).order_by(links.c.n)
    links_of_page: list[Link] = []
    for part in chunks([turn.id for turn in turns_of_page]):
        links_of_page += undamaged(rows.link, conn.execute(agent_links.where(links.c.turn_id.in_(part))))
    totals = select(agents.c.turns, agents.c.cost_usd).where(agents.c.key == agent_key)
    total, cost = conn.execute(totals).one_or_none() or (0, 0.0)
    first = (
        conn.scalar(select(func.count()).where(of_agent, turns.c.seq <= turns_of_page[0].seq)) if turns_of_page else 0
    )
    reasons = select(links.c.reason, func.count().label("number")).where(links.c.agent_key == agent_key)
    counts = {row.reason: row.number for row in conn.execute(reasons.group_by(links.c.reason))}
    return TurnPage(tuple(turns_of_page), tuple(links_of_page), first or 0, total, counts, cost)


def tree(conn: Connection, agent_key: int, *, after: int = 0) -> Tree:
    of_agent = turns.c.agent_key == agent_key
    shown = of_agent
    if after:
        last = conn.scalar(select(turns.c.seq).where(of_agent).order_by(turns.c.seq).offset(after - 1).limit(1))
        if last is None:
            return Tree((), ())
        shown = and_(of_agent, turns.c.seq > last)
    parents = list(range(after, after + (conn.scalar(select(func.count()).where(shown)) or 0)))
    # Nearly every turn continues the one before it, so the database selects only the rest: 20,000 rows in Python
    # would block all requests for 80 ms.
    previous_id = func.lag(turns.c.id).over(order_by=turns.c.seq)
    number = func.row_number().over(order_by=turns.c.seq)
    each = select(number.label("number"), turns.c.parent_id, previous_id.label("previous_id")).where(shown).subquery()
    branching = conn.execute(
        select(each.c.number, each.c.parent_id).where(each.c.parent_id.is_distinct_from(each.c.previous_id))
    ).all()
    marks = select(links.c.turn_id).where(links.c.agent_key == agent_key, links.c.reason.in_(sorted(MARKED_REASONS)))
    marked = [turn_id for turn_id in conn.scalars(marks.distinct()) if turn_id is not None]
    needed = [row.parent_id for row in branching if row.parent_id is not None] + marked
    if len(needed) > FEW:
        every = conn.scalars(select(turns.c.id).where(of_agent).order_by(turns.c.seq))
        numbers = {turn_id: number for number, turn_id in enumerate(every, 1)}
    else:
        numbers = places(conn, agent_key, needed)
    for row in branching:
        parents[row.number - 1] = numbers.get(row.parent_id, 0)
    shown_marks = sorted(numbers[turn_id] for turn_id in marked if numbers.get(turn_id, 0) > after)
    return Tree(tuple(parents), tuple(shown_marks))


def places(conn: Connection, agent_key: int, turn_ids: Sequence[str]) -> dict[str, int]:
    of_agent = turns.c.agent_key == agent_key
    numbers = {}
    for part in chunks(list(dict.fromkeys(turn_ids))):
        for row in conn.execute(select(turns.c.id, turns.c.seq).where(of_agent, turns.c.id.in_(part))).all():
            numbers[row.id] = conn.scalar(select(func.count()).where(of_agent, turns.c.seq <= row.seq)) or 0
    return numbers


def facts(
    conn: Connection, *, owner: str | None, since: float, before: int | None, limit: int
) -> tuple[list[TurnFacts], int | None]:
    """The newest first, and before which place the rest comes (None: there is none)."""
    query = select(*rows.SUMMED).join(agents, agents.c.key == turns.c.agent_key)
    query = query.where(owned_by(owner), turns.c.created_at >= since)
    if before is not None:
        query = query.where(turns.c.seq < before)
    newest = conn.execute(query.order_by(turns.c.seq.desc()).limit(limit)).all()
    repaired: dict[str, int] = {}
    for part in chunks([row.id for row in newest if isinstance(row.id, str)]):
        counted = select(links.c.turn_id, func.count().label("number")).where(
            links.c.turn_id.in_(part), links.c.reason.in_(sorted(REPAIR_REASONS))
        )
        repaired |= {row.turn_id: row.number for row in conn.execute(counted.group_by(links.c.turn_id))}
    return undamaged(partial(rows.facts, repairs=repaired), newest), newest[-1].seq if len(newest) == limit else None


def repairs(conn: Connection, agent_key: int, *, limit: int) -> list[Link]:
    query = select(links).where(links.c.agent_key == agent_key, links.c.reason != "started")
    return undamaged(rows.link, conn.execute(query.order_by(links.c.n.desc()).limit(limit)))


def page_of_unfinished(conn: Connection, after_seq: int) -> tuple[list[Turn], int | None]:
    query = _TURN.where(turns.c.status.in_(("queued", "running")), turns.c.seq > after_seq)
    on_page, following = _within(conn, query.order_by(turns.c.seq), PAGE_BYTES)
    return undamaged(partial(rows.turn, conn=conn), on_page), following


def unfinished_of(
    conn: Connection, agent_key: int, excluding: str | None = None, *, limit: int | None = None
) -> list[Turn]:
    of_turns = _UNFINISHED_OF.all(conn, {"of_agent": agent_key, "excluding": excluding})
    if limit is not None and rows.are_large(*of_turns, limit=limit):
        raise TooLarge
    return rows.loaded_turns(conn, of_turns)


# --- paths ---


def _ancestors(turn_id: str) -> CTE:
    """The turn and its ancestors. UNION, not UNION ALL, so that even a cycle of parents ends."""
    start = select(turns.c.id, turns.c.parent_id).where(turns.c.id == turn_id).cte("ancestors", recursive=True)
    return start.union(select(turns.c.id, turns.c.parent_id).join(start, turns.c.id == start.c.parent_id))


def _in_order(turn_id: str, parents: dict[str, str | None]) -> Iterable[str]:
    """The ids from the root to `turn_id`."""
    ids: dict[str, None] = {}
    at: str | None = turn_id
    while at is not None and at in parents and at not in ids:
        ids[at] = None
        at = parents[at]
    return reversed(ids)


# Most bytes of a path's records, with their images. A larger transcript is not loaded (`transcript.entries`); reading
# 850 MB took 3 GB of memory and 3 s of the event loop, at each turn.
MOST_OF_A_PATH = 512 * 1024 * 1024


def _refuse_larger(size: int, most: int, of: str) -> None:
    if size > most:
        raise ContextTooLong(
            f"this conversation has {size:,} bytes of {of}, and {most:,} are the most: rewind it to an earlier turn, "
            "or start a new one"
        )


def ancestors(conn: Connection, turn_id: str) -> list[str]:
    found = _ancestors(turn_id)
    return [*_in_order(turn_id, {row.id: row.parent_id for row in conn.execute(select(found.c.id, found.c.parent_id))})]


class ToBeCounted(Exception):
    """A path has more bytes than are read without being counted (`held`)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _is_counted(size: int, uncounted: int | None) -> None:
    if uncounted is not None and size > uncounted:
        raise ToBeCounted(size)


def path(conn: Connection, turn_id: str, *, uncounted: int | None = None) -> list[Turn]:
    """`uncounted`: raise `ToBeCounted` if it has more bytes."""
    above = _ancestors(turn_id)
    on = above.c.id == turns.c.id
    # Their `bytes` are those of the records, too.
    sizes = rows.with_images(conn, conn.execute(select(turns.c.bytes, turns.c.images).join(above, on)))
    _refuse_larger(sum(sizes), 2 * MOST_OF_A_PATH, "turns and records")
    _is_counted(sum(sizes), uncounted)
    return _on_path(turn_id, _turns(conn, _TURN.join(above, on)))


def path_texts(conn: Connection, turn_id: str, most: int | None = None, *, uncounted: int | None = None) -> list[Turn]:
    above = _ancestors(turn_id)
    on = above.c.id == turns.c.id
    messages = func.length(turns.c.input) + func.length(turns.c.output)
    sizes = select(func.sum(messages), func.sum(_CHARACTERS)).select_from(turns).join(above, on)
    of_messages, of_turns = conn.execute(sizes).one()
    _refuse_larger(of_messages or 0, MOST_OF_A_PATH if most is None else most, "messages")
    _refuse_larger(of_turns or 0, 2 * MOST_OF_A_PATH, "turns")
    _is_counted(of_turns or 0, uncounted)
    found = conn.execute(_TURN.join(above, on)).all()
    return _on_path(turn_id, [rows.turn(row, conn, images=False) for row in found])


def _on_path(turn_id: str, of_turns: Iterable[Turn]) -> list[Turn]:
    found = {turn.id: turn for turn in of_turns}
    return [found[at] for at in _in_order(turn_id, {turn.id: turn.parent_id for turn in found.values()})]


def path_records(conn: Connection, turn_id: str, *, uncounted: int | None = None) -> list[Record]:
    above = _ancestors(turn_id)
    on = above.c.id == records.c.turn_id
    size = conn.scalar(select(func.sum(func.length(records.c.line))).select_from(records).join(above, on)) or 0
    _refuse_larger(size, MOST_OF_A_PATH, "records")
    cut_out = conn.scalars(select(records.c.images).join(above, on).where(records.c.images.is_not(None)))
    size += sum(rows.with_images(conn, ((0, images) for images in cut_out)))
    _refuse_larger(size, MOST_OF_A_PATH, "records")
    _is_counted(size, uncounted)
    lines = conn.execute(select(records).join(above, on).order_by(records.c.turn_id, records.c.n)).all()
    by_turn: dict[str, list[Record]] = {}
    for line, record in zip(lines, rows.loaded_records(conn, lines), strict=True):
        by_turn.setdefault(line.turn_id, []).append(record)
    return [record for at in ancestors(conn, turn_id) for record in by_turn.get(at, ())]


def own_records(conn: Connection, turn_id: str) -> list[Record]:
    lines = conn.execute(select(records).where(records.c.turn_id == turn_id).order_by(records.c.n)).all()
    return rows.loaded_records(conn, lines)


def items_of(conn: Connection, agent_key: int, *, uncounted: int | None = None) -> list[Item]:
    return _items(conn, items.c.agent_key == agent_key, uncounted)


def _items(conn: Connection, wanted: ColumnElement[bool], uncounted: int | None) -> list[Item]:
    if uncounted is not None:
        _is_counted(conn.scalar(select(func.sum(func.length(items.c.data))).where(wanted)) or 0, uncounted)
    return list(map(side_data.item, conn.execute(select(items).where(wanted).order_by(items.c.n))))


def items_off(conn: Connection, agent_key: int, tip: str | None, *, uncounted: int | None = None) -> list[Item]:
    of_agent = wanted = items.c.agent_key == agent_key
    if tip is not None:
        off: ColumnElement[bool] = items.c.turn_id.is_(None)
        some_taken = select(items.c.n).where(of_agent, items.c.turn_id.is_not(None)).limit(1)
        if conn.scalar(some_taken) is not None:  # else no item depends on the path
            off = or_(off, items.c.turn_id.not_in(select(_ancestors(tip).c.id)))
        wanted = and_(of_agent, off)
    return _items(conn, wanted, uncounted)


# --- sessions ---


def session(conn: Connection, session_id: str) -> Session | None:
    row = conn.execute(select(*rows.SESSION).where(sessions.c.id == session_id)).one_or_none()
    return None if row is None else rows.session(row)


def session_at(conn: Connection, agent_key: int, turn_id: str) -> Session | None:
    row = _SESSION_AT.one(conn, {"of_agent": agent_key, "turn_id": turn_id})
    return None if row is None else rows.session(row)
