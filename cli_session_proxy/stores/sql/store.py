"""The store on SQL: every method one transaction, handed to a `Database` as a plain function.

`lifecycle`, `writing`, `reading`, `leases`, `side_data` and `importing` have the transactions, `tables` the schema,
`rows` the conversions, `migrations` the steps from older schemas. None of them depends on the database.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from ... import logs
from ...domain.limits import size_of
from ...domain.models import (
    JSON,
    Agent,
    CancelledBy,
    ChainSummary,
    Delivery,
    Turn,
)
from ...errors import LeaseLost, NotFound, StoreUnavailable
from ...tasks import uninterrupted
from ..base import (
    AgentState,
    ChainPart,
    Expiry,
    Granted,
    KeptTurn,
    Lease,
    LeaseHeld,
    MigrationProgress,
    NewChain,
    Proxy,
    ReportStep,
    Store,
    TurnFacts,
    TurnOutline,
)
from ..held import UNCOUNTED, about_to_read
from . import importing, leases, lifecycle, migrations, reading, side_data, spending, writing
from .database import Database, Urgency, Work
from .migrations import MIGRATIONS, Migration

log = logs.get(__name__)

T = TypeVar("T")
Ordered = TypeVar("Ordered", Turn, TurnOutline)

# Up to so many characters of an input, or of an answer with its records, are written on the event loop; and up to so
# many records.
SMALL = 32 * 1024
FEW = 20

# A turn with more bytes is read on a thread: more than 0.5 ms. One with images may have many MB.
LARGE = 256 * 1024
# Seconds between two log lines on the progress of a migration.
REPORT_EVERY = 5.0


@contextmanager
def logged() -> Iterator[ReportStep]:
    """Logs the progress of a migration."""
    last = time.monotonic()

    def report(step: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            log.info("store_migrating", step=step, done=done, total=total)

    yield report


P = ParamSpec("P")
Method = Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]


def _read(work: Callable[Concatenate[Connection, P], T], *, quick: bool = False) -> Method[P, T]:
    """A method that calls `work` with its arguments, in a read transaction of its own. `quick`: see `Database.read`."""

    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._db.read(lambda conn: work(conn, *args, **kwargs), quick=quick)

    return method


def _counted(work: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """The same for a path: what is large is counted first (`held`). Raises `QueueFull`."""

    async def method(self: SqlStore, /, *args: Any, **kwargs: Any) -> T:
        try:
            return await self._db.read(lambda conn: work(conn, *args, **kwargs, uncounted=UNCOUNTED))
        except reading.ToBeCounted as large:
            await about_to_read(large.size)
        read = asyncio.ensure_future(self._db.read(lambda conn: work(conn, *args, **kwargs)))
        try:
            return await asyncio.shield(read)
        except asyncio.CancelledError:  # the thread reads on: it is counted until then
            read.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await asyncio.wait({read})
            raise

    return method


def _write(
    work: Callable[Concatenate[Connection, P], T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False
) -> Method[P, T]:
    """A method that calls `work` in a write transaction. A `LeaseLost` is counted. `quick`: see `Database.write`."""

    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._under_lease(lambda conn: work(conn, *args, **kwargs), urgency, quick=quick)

    return method


class SqlStore(Store):
    """`Store` on one database.

    A write whose caller is cancelled is committed as a whole or not at all: only a read can tell which.
    """

    def __init__(
        self, database: Database, migrations: Sequence[Migration] = MIGRATIONS, progress: MigrationProgress = logged
    ) -> None:
        self._db = database
        self._migrations = migrations
        self._progress = progress

    # Methods that run one function in a transaction.

    agent = _read(reading.agent)
    agent_by_key = _read(reading.agent_by_key)
    named_by = _read(reading.named_by)
    expired_agents = _read(reading.expired_agents)
    version = _read(reading.version)
    one_shots = _read(reading.one_shots)
    forgotten = _read(reading.forgotten_since)
    spent = _read(spending.of_accounts)
    spend = _write(spending.turn)
    chain = _read(reading.chain)

    turn = _read(reading.turn)
    turn_by_key = _read(reading.turn_by_key)
    deepest = _read(reading.deepest)
    own_frames = _read(reading.own_frames)
    children = _read(reading.children)
    ancestors = _read(reading.ancestors)
    path = _counted(reading.path)
    path_texts = _counted(reading.path_texts)
    records = _counted(reading.path_records)
    own_records = _read(reading.own_records)
    page = _read(reading.page)
    tree = _read(reading.tree)
    places = _read(reading.places)
    repairs = _read(reading.repairs)
    pending_deliveries = _read(reading.pending_deliveries)
    import_turns = _write(writing.import_turns)
    requeue = _write(writing.requeue)
    postpone = _write(writing.postpone)
    take_over = _write(writing.take_over)
    claim = _write(writing.claim)
    doubt = _write(writing.doubt)
    fail = _write(writing.fail)
    note = _write(lifecycle.note)
    adopt = _write(writing.adopt)
    rewind = _write(writing.rewind)

    session = _read(reading.session)
    session_at = _read(reading.session_at)
    save_session = _write(writing.save_session)

    conversation = _read(side_data.conversation)
    items = _counted(reading.items_of)
    items_off = _counted(reading.items_off)
    add_to_call = _write(side_data.add_to_call)
    annotate = _write(side_data.annotate)
    add_items = _write(side_data.add_items)
    take_out = _write(side_data.take_out)

    mirror = _write(side_data.mirror)
    mirrored = _read(side_data.mirrored_lines)
    mirrors = _read(side_data.mirrored_transcripts)

    claim_finding = _write(side_data.claim_finding)
    keep_findings = _write(side_data.keep_findings)
    findings = _read(side_data.findings_of)

    clock = _read(leases.clock, quick=True)
    renew = _write(leases.renew, Urgency.JOURNAL, quick=True)
    release = _write(leases.release, Urgency.JOURNAL, quick=True)
    asked = _read(leases.asked, quick=True)
    forget_cancel = _write(leases.forget_cancel, Urgency.JOURNAL)
    hand_on = _write(writing.hand_on, Urgency.LATER)
    follow = _write(leases.follow, Urgency.JOURNAL)
    unfollow = _write(leases.unfollow, Urgency.JOURNAL)
    followers = _read(leases.followers_of)
    whereabouts = _read(leases.whereabouts, quick=True)
    proxy = _read(leases.proxy, quick=True)
    addresses = _read(leases.addresses, quick=True)
    responds = _read(leases.responds, quick=True)
    silent = _read(leases.silent)
    introduce = _write(leases.introduce, Urgency.JOURNAL)
    resign = _write(leases.resign, Urgency.JOURNAL)
    hosts = _read(leases.hosts)

    async def open(self) -> None:
        await self._db.open(self.prepare)

    def prepare(self, conn: Connection) -> None:
        """Create or migrate the schema, in a transaction that excludes other programs."""
        with self._progress() as report:
            migrations.prepare(conn, self._db, report, self._migrations)
        importing.clear(conn, self._db)

    async def close(self) -> None:
        await self._db.close()

    async def probe(self) -> None:
        written = uuid.uuid4().hex
        await self._db.write(lambda conn: writing.probe(conn, written))
        if await self._db.read(reading.probed) is None:
            raise StoreUnavailable(f"the store {self._db.name} loses what is written to it: see `doctor`")

    # agents

    async def ensure_agent(self, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
        existing = await self.agent(owner, agent_id)
        if existing is not None:
            return existing
        return await self._db.write(lambda conn: writing.ensure_agent(conn, owner, agent_id, dir, named=named, now=now))

    async def delete_agent(self, key: int, expiry: Expiry | None = None) -> bool:
        return await self._deleted(lambda conn: writing.delete_agent(conn, key, expiry))

    async def _deleted(self, work: Work[bool]) -> bool:
        deleted = await self._db.write(work, alone=True)
        if deleted:
            await self._db.purge()
        return deleted

    async def forget_copies(self, agent: Agent) -> None:
        await asyncio.to_thread(self._db.forget_copies, agent.owner, agent.agent_id)

    async def summaries(self, owner: str | None = None, *, since: float | None = None) -> AsyncIterator[ChainSummary]:
        more, after = True, None
        while more:
            page, after = await self._db.read(partial(reading.summaries, owner=owner, after=after, since=since))
            for summary in page:
                yield summary
            more = after is not None

    # the life of a turn

    async def arrival(self, owner: str, fingerprint: str, agent_id: str | None) -> tuple[Turn | None, Agent | None]:
        return await self._quickly(partial(lifecycle.arrival, owner=owner, fingerprint=fingerprint, agent_id=agent_id))

    async def agent_state(self, agent_key: int, parent_id: str | None, *, at_head: bool) -> AgentState | None:
        return await self._quickly(
            partial(lifecycle.agent_state, agent_key=agent_key, parent_id=parent_id, at_head=at_head)
        )

    async def _quickly(self, read: Callable[..., T]) -> T:
        """A quick read on the event loop. If the result is large, it is read again on a thread."""
        try:
            return await self._db.read(partial(read, limit=LARGE), quick=True)
        except lifecycle.TooLarge:
            return await self._db.read(read)

    # turns

    async def accept(self, turn: Turn, *, durable: bool = False, **beside: Any) -> tuple[Turn, AgentState | None]:
        # If a server loses it, `begin` notices before anything is sent to a model.
        urgency = Urgency.DURABLE if durable else Urgency.AHEAD
        work = partial(lifecycle.accept, turn=turn, limit=LARGE, **beside)
        return await self._db.write(work, urgency, quick=not durable and _is_small(turn))

    async def import_chain(self, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
        name = uuid.uuid4().hex
        release = await asyncio.to_thread(self._db.claim, name)
        assert release is not None  # nobody else knows the name
        try:
            started = importing.ChainImport(await self._db.write(lambda conn: importing.begin(conn, new, name)))
            try:
                pieces = importing.pieces(parts)
                while piece := await asyncio.to_thread(next, pieces, None):
                    began = time.monotonic()
                    await self._db.write(partial(started.store, piece=piece), alone=True)
                    # Other programs try to lock every 100 ms at the latest: leave it free half of the time.
                    await asyncio.sleep(min(time.monotonic() - began, importing.PAUSE))
                # Not cancellable from here on: the chain may already be visible, and have new turns.
                finish = self._db.write(lambda conn: started.finish(conn, new), alone=True)
                return await uninterrupted(asyncio.ensure_future(finish))
            except BaseException:
                try:
                    dropping = self._deleted(lambda conn: importing.drop(conn, started.agent.key))
                    await uninterrupted(asyncio.ensure_future(dropping))
                except StoreUnavailable as exc:  # the next program that opens the store removes the leftovers
                    log.warning("import_left", agent_key=started.agent.key, error=exc.message)
                raise
        finally:
            await uninterrupted(asyncio.ensure_future(asyncio.to_thread(release)))

    async def _under_lease(self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False) -> T:
        """A write under a lease. Counts it if it is refused because another proxy has the lease."""
        try:
            return await self._db.write(work, urgency, quick=quick)
        except LeaseLost as exc:
            self.stale_writes += 1
            log.warning("stale_write_refused", **exc.detail)
            raise

    async def begin(self, lease: Lease, turn: Turn, attempt: JSON, **beside: Any) -> None:
        work = partial(lifecycle.begin, lease=lease, turn=turn, attempt=attempt, **beside)
        await self._under_lease(work, Urgency.JOURNAL, quick=beside.get("takes") is None)

    async def commit(self, lease: Lease, turn: Turn, kept: KeptTurn | None, **beside: Any) -> Turn:
        work = partial(lifecycle.commit, lease=lease, ended=turn, kept=kept, **beside)
        # Small ones are written on the event loop. What a program reports that imitates the CLI is in no record.
        lines = () if kept is None else kept.records
        contents = (*turn.output, *turn.tools, *turn.evidence.retries, turn.evidence.compacted)
        most = SMALL - sum([len(record.line) for record in lines])
        if len(lines) <= FEW and size_of(contents, most) is not None:
            with suppress(lifecycle.TooLarge):
                return await self._under_lease(partial(work, limit=LARGE), quick=True)
        return await self._under_lease(work)

    async def set_delivery(
        self, turn_id: str, delivery: Delivery, *, by: str | None = None, soon: bool = False
    ) -> None:
        urgency = Urgency.LATER if soon else Urgency.DURABLE
        work = partial(writing.set_delivery, turn_id=turn_id, delivery=delivery, by=by)
        written = await self._db.write(work, urgency)
        if written is not None and not written.rowcount and await self.turn(turn_id) is None:
            raise NotFound(f"no turn {turn_id} in the store: its agent may have been deleted")

    # leases

    async def acquire(
        self,
        agent_key: int,
        proxy: Proxy,
        *,
        dead: Collection[str] = (),
        awake: Callable[[], bool] = lambda: True,
        asks: bool = True,
    ) -> Granted | LeaseHeld:
        work = partial(
            leases.acquire, agent_key=agent_key, proxy=proxy, dead=dead, awake=awake, asks=asks, ring=self._db.ring
        )
        return await self._db.write(work, Urgency.JOURNAL, quick=True)

    async def cancel(self, turn_id: str, proxy_id: str, by: CancelledBy) -> None:
        work = partial(leases.cancel, turn_id=turn_id, proxy_id=proxy_id, by=by, ring=self._db.ring)
        await self._db.write(work, Urgency.JOURNAL)

    def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        return self._paged(partial(reading.page_of_agent, agent_key=agent_key), after_seq)

    def outlines(self, agent_key: int) -> AsyncIterator[TurnOutline]:
        return self._paged(partial(reading.page_of_outlines, agent_key=agent_key))

    def unfinished(self) -> AsyncIterator[Turn]:
        return self._paged(reading.page_of_unfinished)

    async def _paged(
        self, read: Callable[..., tuple[list[Ordered], int | None]], after_seq: int = 0
    ) -> AsyncIterator[Ordered]:
        after: int | None = after_seq
        while after is not None:
            page, after = await self._db.read(partial(read, after_seq=after))
            page.reverse()
            while page:  # none is kept here
                yield page.pop()

    async def facts(self, owner: str | None, *, since: float, limit: int) -> list[TurnFacts]:
        # In several reads, so that running turns can read between them.
        collected: list[TurnFacts] = []
        before: int | None = None
        while len(collected) < limit:
            most = min(reading.FACTS, limit - len(collected))
            read = partial(reading.facts, owner=owner, since=since, before=before, limit=most)
            piece, before = await self._db.read(read)
            collected += piece
            if before is None:
                break
        return collected

    async def size(self) -> int | None:
        return await asyncio.to_thread(self._db.size)

    async def unfinished_of(self, agent_key: int, *, excluding: str | None = None) -> list[Turn]:
        return await self._quickly(partial(reading.unfinished_of, agent_key=agent_key, excluding=excluding))


def _is_small(turn: Turn) -> bool:
    """Whether it can be serialised on the event loop, in well under a millisecond."""
    if turn.call is not None:
        return False
    size = len(turn.system or "")
    for message in turn.input:
        for block in message.content:
            if block.get("type") != "text":
                return False
            size += len(block["text"])
    return size < SMALL
