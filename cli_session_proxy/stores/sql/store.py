"""The store on SQL: every method one transaction, handed to a `Database` as a plain function.

`way`, `writing`, `reading`, `leases`, `conversing` and `importing` hold what the transactions do, `tables` the schema,
`rows` the forms, `migrations` the way from older schemas. None of them knows which database it is.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from ... import logs
from ...domain.models import (
    JSON,
    Agent,
    CancelledBy,
    Chain,
    ChainSummary,
    Conversation,
    Delivery,
    Item,
    Link,
    Record,
    Session,
    Status,
    Turn,
)
from ...errors import LeaseLost, NotFound, StoreUnavailable
from ...tasks import uninterrupted
from ..base import (
    Accepted,
    AgentState,
    ChainPart,
    Commit,
    Facts,
    Finding,
    Granted,
    HeldLease,
    ImportedTurn,
    Lease,
    LeaseHeld,
    MirrorKey,
    NewChain,
    NewTurn,
    PeerRequests,
    Proxy,
    RequestMatch,
    Store,
    Taken,
    Telling,
    TellStep,
    Tree,
    TurnFacts,
    TurnOutline,
    TurnPage,
    TurnStart,
    Whereabouts,
)
from . import conversing, finding, importing, leases, migrations, mirroring, reading, way, writing
from .database import Database, Urgency, Work
from .migrations import MIGRATIONS, Migration

log = logs.get(__name__)

T = TypeVar("T")

# Characters of an input, or of an answer with its records, up to which it is written on the event loop; records, too.
SMALL = 32 * 1024
FEW = 20

# Bytes of a turn from which it is read on a thread: 0.5 ms; one with images may have many MB.
LARGE = 256 * 1024


# Seconds between two lines of a log on how far a migration is.
OFTEN = 5.0


@contextmanager
def logged() -> Iterator[TellStep]:
    said = time.monotonic()

    def tell(step: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > OFTEN:
            said = time.monotonic()
            log.info("store_migrating", step=step, done=done, total=total)

    yield tell


class SqlStore(Store):
    """`Store` on one database.

    A caller that is cancelled in a write leaves all of that write or nothing; which of both, only a read tells.
    """

    def __init__(
        self, database: Database, migrations: Sequence[Migration] = MIGRATIONS, telling: Telling = logged
    ) -> None:
        self._db = database
        self._migrations = migrations
        self._telling = telling

    async def open(self) -> None:
        await self._db.open(self.prepare)

    def prepare(self, conn: Connection) -> None:
        """Make the schema, or bring it up to date. Inside of a transaction that nobody else makes one in."""
        with self._telling() as tell:
            migrations.prepare(conn, self._db, tell, self._migrations)
        importing.clear(conn, self._db)

    async def close(self) -> None:
        await self._db.close()

    async def probe(self) -> None:
        said = uuid.uuid4().hex
        await self._db.write(lambda conn: writing.probe(conn, said))
        if await self._db.read(reading.probed) is None:
            raise StoreUnavailable(f"the store {self._db.name} does not keep what it is given: see `doctor`")

    # agents

    async def agent(self, owner: str, agent_id: str) -> Agent | None:
        return await self._db.read(lambda conn: reading.agent(conn, owner, agent_id))

    async def agent_by_key(self, key: int) -> Agent | None:
        return await self._db.read(lambda conn: reading.agent_by_key(conn, key))

    async def ensure_agent(self, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
        found = await self.agent(owner, agent_id)
        if found is not None:
            return found
        return await self._db.write(lambda conn: writing.ensure_agent(conn, owner, agent_id, dir, named=named, now=now))

    async def delete_agent(self, key: int) -> None:
        await self._db.write(lambda conn: writing.delete_agent(conn, key), alone=True)
        await self._db.purge()

    async def forget_copies(self, agent: Agent) -> None:
        await asyncio.to_thread(self._db.forget_copies, agent.owner, agent.agent_id)

    async def named_by(self, agent_key: int) -> list[str]:
        return await self._db.read(lambda conn: reading.named_by(conn, agent_key))

    async def summaries(self, owner: str | None = None, *, folded: float | None = None) -> AsyncIterator[ChainSummary]:
        page, after = await self._page_of_summaries(owner, None, folded)
        while True:
            for summary in page:
                yield summary
            if after is None:
                return
            page, after = await self._page_of_summaries(owner, after, folded)

    async def _page_of_summaries(
        self, owner: str | None, after: reading.Position | None, folded: float | None
    ) -> tuple[list[ChainSummary], reading.Position | None]:
        return await self._db.read(lambda conn: reading.summaries(conn, owner, after, folded))

    # a turn's way

    async def arrival(self, owner: str, fingerprint: str, agent_id: str | None) -> RequestMatch:
        return await self._quickly(partial(way.arrival, owner=owner, fingerprint=fingerprint, agent_id=agent_id))

    async def standing(self, agent_key: int, parent_id: str | None, *, at_head: bool) -> AgentState | None:
        return await self._quickly(partial(way.standing, agent_key=agent_key, parent_id=parent_id, at_head=at_head))

    async def _quickly(self, read: Callable[..., T]) -> T:
        """A quick read, unless what is found is large: it then goes the way of all other reads."""
        try:
            return await self._db.read(partial(read, limit=LARGE), quick=True)
        except way.TooLarge:
            return await self._db.read(read)

    # turns

    async def accept(self, new: NewTurn) -> Turn:
        return (await self.accept_next(new)).turn

    async def accept_next(self, new: NewTurn) -> Accepted:
        # `begin` finds out where it was lost, before anything is said to a model.
        urgency = Urgency.DURABLE if new.promised else Urgency.AHEAD
        quick = not new.promised and _is_small(new)
        return await self._db.write(partial(way.accept, new=new, limit=LARGE), urgency, quick=quick)

    async def import_turns(self, turns: Sequence[ImportedTurn], head: str | None = None) -> None:
        await self._db.write(lambda conn: writing.import_turns(conn, turns, head))

    async def adopt(
        self,
        lease: Lease,
        turns: Sequence[ImportedTurn],
        session: Session,
        links: Sequence[Link],
        taken: Taken | None = None,
    ) -> Turn:
        return await self._under_lease(lambda conn: writing.adopt(conn, lease, turns, session, links, taken))

    async def rewind(self, lease: Lease, to: str | None) -> None:
        await self._under_lease(lambda conn: writing.rewind(conn, lease, to))

    async def import_chain(self, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
        name = uuid.uuid4().hex
        claim = await asyncio.to_thread(self._db.claim, name)
        assert claim is not None  # nobody else knows the name
        try:
            return await self._bring_in(name, new, parts)
        finally:
            await uninterrupted(asyncio.ensure_future(asyncio.to_thread(claim.release)))

    async def _bring_in(self, name: str, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
        coming = importing.Coming(await self._db.write(lambda conn: importing.begin(conn, new, name)))
        try:
            pieces = importing.pieces(parts)
            while piece := await asyncio.to_thread(next, pieces, None):
                began = time.monotonic()
                await self._db.write(partial(coming.take, piece=piece), alone=True)
                # Another program asks for the lock every 100 ms at the latest: half of the time it is free.
                await asyncio.sleep(min(time.monotonic() - began, importing.PAUSE))
            # Not cancelled from here on: the chain may be visible already, with new turns behind it.
            finish = self._db.write(lambda conn: coming.finish(conn, new), alone=True)
            return await uninterrupted(asyncio.ensure_future(finish))
        except BaseException:
            await uninterrupted(asyncio.ensure_future(self._give_up(coming.agent)))
            raise

    async def _give_up(self, agent: Agent) -> None:
        try:
            await self.delete_agent(agent.key)
        except StoreUnavailable as exc:
            log.warning("import_left", agent_key=agent.key, error=exc.message)

    async def _under_lease(self, work: Work[T], urgency: Urgency = Urgency.DURABLE, *, quick: bool = False) -> T:
        """A write that is refused, and counted, where its lease is another's by now."""
        try:
            return await self._db.write(work, urgency, quick=quick)
        except LeaseLost as exc:
            self.stale_writes += 1
            log.warning("stale_write_refused", **exc.detail)
            raise

    async def begin(self, begun: TurnStart) -> None:
        await self._under_lease(partial(way.begin, begun=begun), Urgency.JOURNAL, quick=begun.said is None)

    async def commit(self, commit: Commit) -> Turn:
        if self._db.has_server and _is_small_commit(commit):
            try:
                return await self._under_lease(partial(way.commit, done=commit, limit=LARGE), quick=True)
            except way.TooLarge:
                pass
        return await self._under_lease(partial(way.commit, done=commit))

    async def fail(
        self,
        turn_id: str,
        status: Status,
        error: JSON,
        attempts: Sequence[JSON],
        timings: JSON,
        finished_at: float,
        *,
        lease: Lease | None = None,
        instance: str | None = None,
    ) -> Turn:
        return await self._under_lease(
            lambda conn: writing.fail(
                conn, turn_id, status, error=error, attempts=attempts, timings=timings, at=finished_at, lease=lease,
                instance=instance,
            )
        )  # fmt: skip

    async def requeue(self, turn_id: str, instance: str | None) -> Turn:
        return await self._db.write(lambda conn: writing.requeue(conn, turn_id, instance))

    async def set_delivery(
        self, turn_id: str, delivery: Delivery, *, by: str | None = None, soon: bool = False
    ) -> None:
        urgency = Urgency.LATER if soon else Urgency.DURABLE
        work = partial(writing.set_delivery, turn_id=turn_id, delivery=delivery, by=by)
        written = await self._db.write(work, urgency)
        if written is not None and not written.rowcount and await self.turn(turn_id) is None:
            raise NotFound(f"no turn {turn_id} in the store: its agent may have been deleted")

    async def claim(self, turn_id: str, instance: str | None) -> bool:
        return await self._db.write(lambda conn: writing.claim(conn, turn_id, instance))

    async def follow(self, turn_id: str, proxy_id: str) -> None:
        await self._db.write(lambda conn: leases.follow(conn, turn_id, proxy_id), Urgency.JOURNAL)

    async def unfollow(self, turn_id: str, proxy_id: str) -> None:
        await self._db.write(lambda conn: leases.unfollow(conn, turn_id, proxy_id), Urgency.JOURNAL)

    async def followers(self, turn_id: str) -> list[str]:
        return await self._db.read(lambda conn: leases.followers_of(conn, turn_id))

    # leases

    async def clock(self) -> float:
        return await self._db.read(leases.clock, quick=True)

    async def renew(self, proxy: Proxy) -> list[HeldLease]:
        return await self._db.write(lambda conn: leases.renew(conn, proxy), Urgency.JOURNAL, quick=True)

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

    async def release(self, lease: Lease) -> None:
        await self._db.write(lambda conn: leases.release(conn, lease), Urgency.JOURNAL, quick=True)

    async def asked(self, proxy_id: str) -> PeerRequests:
        return await self._db.read(lambda conn: leases.asked(conn, proxy_id), quick=True)

    async def cancel(self, turn_id: str, proxy_id: str, by: CancelledBy) -> None:
        work = partial(leases.cancel, turn_id=turn_id, proxy_id=proxy_id, by=by, ring=self._db.ring)
        await self._db.write(work, Urgency.JOURNAL)

    async def forget_cancel(self, turn_id: str) -> None:
        await self._db.write(lambda conn: leases.forget_cancel(conn, turn_id), Urgency.JOURNAL)

    async def whereabouts(self, agent_key: int) -> Whereabouts:
        return await self._db.read(lambda conn: leases.whereabouts(conn, agent_key), quick=True)

    async def proxy(self, proxy_id: str) -> Proxy | None:
        return await self._db.read(lambda conn: leases.proxy(conn, proxy_id), quick=True)

    async def addresses(self) -> frozenset[str]:
        return await self._db.read(leases.addresses, quick=True)

    async def responds(self, proxy_id: str) -> bool:
        return await self._db.read(lambda conn: leases.responds(conn, proxy_id), quick=True)

    async def silent(self, seconds: float) -> list[str]:
        return await self._db.read(lambda conn: leases.silent(conn, seconds))

    async def introduce(self, proxy_id: str, facts: Facts) -> None:
        await self._db.write(lambda conn: leases.introduce(conn, proxy_id, facts), Urgency.JOURNAL)

    async def hosts(self) -> list[tuple[str, Facts]]:
        return await self._db.read(leases.hosts)

    async def resign(self, proxy_id: str) -> None:
        await self._db.write(lambda conn: leases.resign(conn, proxy_id), Urgency.JOURNAL)

    async def turn(self, turn_id: str) -> Turn | None:
        return await self._db.read(lambda conn: reading.turn(conn, turn_id))

    async def turn_by_key(self, owner: str, idempotency_key: str, now: float) -> Turn | None:
        return await self._db.read(lambda conn: reading.turn_by_key(conn, owner, idempotency_key, now))

    async def deepest(self, owner: str, path_hashes: Sequence[str], agent_key: int | None = None) -> Turn | None:
        return await self._db.read(lambda conn: reading.deepest(conn, owner, path_hashes, agent_key))

    async def own_frames(self, agent_key: int, uuids: Sequence[str]) -> set[str]:
        return await self._db.read(lambda conn: reading.own_frames(conn, agent_key, uuids))

    async def children(self, turn_id: str) -> list[Turn]:
        return await self._db.read(lambda conn: reading.children(conn, turn_id))

    async def path(self, turn_id: str) -> list[Turn]:
        return await self._db.read(lambda conn: reading.path(conn, turn_id))

    async def records(self, turn_id: str) -> list[Record]:
        return await self._db.read(lambda conn: reading.path_records(conn, turn_id))

    async def own_records(self, turn_id: str) -> list[Record]:
        return await self._db.read(lambda conn: reading.own_records(conn, turn_id))

    async def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        while page := await self._db.read(partial(reading.page_of_agent, agent_key=agent_key, after_seq=after_seq)):
            for turn in page:
                yield turn
            after_seq = page[-1].seq

    async def outlines(self, agent_key: int) -> AsyncIterator[TurnOutline]:
        seq = 0
        while page := await self._db.read(partial(reading.page_of_outlines, agent_key=agent_key, after_seq=seq)):
            for outline in page:
                yield outline
            seq = page[-1].seq

    async def page(self, agent_key: int, *, before_seq: int | None, limit: int, newest: int | None = None) -> TurnPage:
        return await self._db.read(lambda conn: reading.page_back(conn, agent_key, before_seq, limit, newest))

    async def tree(self, agent_key: int, *, after: int = 0) -> Tree:
        return await self._db.read(lambda conn: reading.tree(conn, agent_key, after))

    async def places(self, agent_key: int, turn_ids: Sequence[str]) -> dict[str, int]:
        return await self._db.read(lambda conn: reading.places(conn, agent_key, turn_ids))

    async def facts(self, owner: str | None, *, since: float, limit: int) -> list[TurnFacts]:
        # In pieces, each a read of its own: the turns that run meanwhile read between them.
        found: list[TurnFacts] = []
        before: int | None = None
        while len(found) < limit:
            most = min(reading.FACTS, limit - len(found))
            piece = await self._db.read(partial(reading.facts, owner=owner, since=since, before=before, limit=most))
            found += piece
            if len(piece) < most:
                break
            before = piece[-1].seq
        return found

    async def size(self) -> int | None:
        return await asyncio.to_thread(self._db.size)

    async def repairs(self, agent_key: int, *, limit: int) -> list[Link]:
        return await self._db.read(lambda conn: reading.repairs(conn, agent_key, limit))

    async def unfinished(self) -> AsyncIterator[Turn]:
        after_seq = 0
        while page := await self._db.read(partial(reading.page_of_unfinished, after_seq=after_seq)):
            for turn in page:
                yield turn
            after_seq = page[-1].seq

    async def waiting(self, agent_key: int, *, but: str | None = None) -> list[Turn]:
        return await self._quickly(partial(reading.waiting, agent_key=agent_key, but=but))

    async def pending_deliveries(self) -> list[Turn]:
        return await self._db.read(reading.pending_deliveries)

    # sessions and links

    async def session(self, session_id: str) -> Session | None:
        return await self._db.read(lambda conn: reading.session(conn, session_id))

    async def session_at(self, agent_key: int, turn_id: str) -> Session | None:
        return await self._db.read(lambda conn: reading.session_at(conn, agent_key, turn_id))

    async def save_session(self, session: Session, links: Sequence[Link] = ()) -> None:
        await self._db.write(lambda conn: writing.save_session(conn, session, links))

    async def chain(self, agent_key: int) -> Chain | None:
        return await self._db.read(lambda conn: reading.chain(conn, agent_key))

    # conversations

    async def set_call(self, turn_id: str, call: JSON) -> None:
        await self._db.write(lambda conn: conversing.set_call(conn, turn_id, call))

    async def conversation(self, agent_key: int) -> Conversation | None:
        return await self._db.read(lambda conn: conversing.conversation(conn, agent_key))

    async def annotate(self, agent_key: int, metadata: JSON) -> None:
        await self._db.write(lambda conn: conversing.annotate(conn, agent_key, metadata))

    async def add_items(self, agent_key: int, new: Sequence[Item]) -> None:
        await self._db.write(lambda conn: conversing.add_items(conn, agent_key, new))

    async def items(self, agent_key: int) -> list[Item]:
        return await self._db.read(lambda conn: conversing.items_of(conn, agent_key))

    async def items_off(self, agent_key: int, tip: str | None) -> list[Item]:
        return await self._db.read(lambda conn: reading.items_off(conn, agent_key, tip))

    async def take_out(self, agent_key: int, item_id: str) -> None:
        await self._db.write(lambda conn: conversing.take_out(conn, agent_key, item_id))

    # the Agent SDK's sessions

    async def mirror(self, agent_key: int, key: MirrorKey, lines: Sequence[Record]) -> None:
        now = time.time()
        await self._db.write(lambda conn: mirroring.mirror(conn, agent_key, key, lines, now))

    async def mirrored(self, agent_key: int, key: MirrorKey) -> list[Record] | None:
        return await self._db.read(lambda conn: mirroring.lines(conn, agent_key, key))

    async def mirrors(self, agent_key: int, project: str) -> list[tuple[MirrorKey, float]]:
        return await self._db.read(lambda conn: mirroring.listed(conn, agent_key, project))

    async def expired_agents(
        self,
        before: float | None,
        one_shots: float | None = None,
        once: float | None = None,
        *,
        only: int | None = None,
    ) -> list[Agent]:
        return await self._db.read(lambda conn: reading.expired_agents(conn, before, one_shots, once, only))

    async def one_shots(self, owner: str | None, *, since: float, until: float) -> tuple[int, float]:
        return await self._db.read(lambda conn: reading.one_shots(conn, owner, since, until))

    # what was found out

    async def claim_finding(self, subject: str, name: str, seconds: float) -> bool:
        return await self._db.write(lambda conn: finding.claim(conn, subject, name, seconds))

    async def keep_findings(self, subject: str, found: Mapping[str, JSON]) -> None:
        await self._db.write(lambda conn: finding.keep(conn, subject, found))

    async def findings(self, subject: str | None = None) -> list[Finding]:
        return await self._db.read(lambda conn: finding.all_of(conn, subject))


def _is_small(new: NewTurn) -> bool:
    """It can be made JSON on the event loop, in well under a millisecond."""
    if new.call is not None:
        return False
    size = len(new.system or "")
    for message in new.input:
        for block in message.content:
            if block.get("type") != "text":
                return False
            size += len(block["text"])
    return size < SMALL


def _is_small_commit(commit: Commit) -> bool:
    """As above; all that was said and done stands in its records, if it has any."""
    size = sum(len(record.line) for record in commit.records)
    size += sum(len(block.get("text", "")) for block in commit.output)
    return size < SMALL and len(commit.records) <= FEW
