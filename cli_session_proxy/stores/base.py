"""The contract of a store, which keeps the chains.

- Every method is one transaction: all of it is durable when it returns, or nothing is.
- A failed write raises `StoreUnavailable` and leaves the store as it was; it never loses an earlier commit. With
`in_doubt` in its `detail` a server was lost meanwhile: the write is there whole or not at all, and only a read tells.
- Two stores on one database see each other's commits; concurrent writers wait, bounded, then `StoreUnavailable`.
- Rows belong to an owner: no method that takes an owner ever returns another owner's rows.
- Images are kept once by hash and come back verbatim, in inputs, outputs and records alike.

Not its business: which turn continues which (continuity), order within an agent (lanes), files (transcript).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..domain.budgets import Budget, Spent
from ..domain.evidence import Evidence
from ..domain.models import (
    JSON,
    Agent,
    CancelledBy,
    Chain,
    ChainSummary,
    Conversation,
    Delivery,
    Item,
    LimitWait,
    Link,
    LinkReason,
    Message,
    Record,
    Session,
    Status,
    Turn,
    Usage,
)
from ..domain.searching import Found, Indexed, Search

# Seconds between polls for what other proxies request of this one, if the database has no notifications.
ASKED_POLL = 0.05


class ReportStep(Protocol):
    def __call__(self, step: str, done: int, total: int) -> None:
        """Progress of a step of a migration: `done` of `total`. Called on a thread of the store."""


# Returns a context manager for the time in which a store is opened. Its value is called with a migration's progress.
MigrationProgress = Callable[[], AbstractContextManager[ReportStep]]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy as the store knows it. `lease`: the seconds for which its leases last after a heartbeat.

    `address`: where other proxies reach it; None if they cannot.
    """

    id: str
    host: str
    lease: float
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """The host that has an agent's files. `host`: its name, and path and id of its `var` directory. `address`: where a
    proxy on that host is reached."""

    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Who may write an agent now, and where its files are.

    `holder`: the id of the proxy that has the lease, if that proxy responds. `address`: where the holder is reached.
    `home`: the host on which the agent's last turn with tools ran.
    """

    holder: str | None = None
    address: str | None = None
    home: Home | None = None


@dataclass(frozen=True, slots=True)
class PeerRequests:
    """What other proxies request of this one. `leases`: the keys of agents whose leases it should hand over. `cancels`:
    the ids of turns that it should end, each with who asked for it."""

    leases: tuple[int, ...] = ()
    cancels: tuple[tuple[str, CancelledBy], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.cancels)


# Values by name that have to be the same on every host that shares a store.
Facts = dict[str, str]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one agent's turns and sessions. Each new holder gets a higher `epoch`, even after the store
    was restored from a backup: no epoch is granted twice."""

    agent_key: int
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The proxy got the lease. `taken_from`: the last holder, if that did not release the lease: then its unfinished
    turns and its processes have to be settled."""

    lease: Lease
    taken_from: str | None


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Another proxy, the `holder`, has the lease and responds. It was asked to hand the lease over."""

    holder: str


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that the proxy holds. `wanted`: the id of another proxy that requests the lease."""

    lease: Lease
    wanted: str | None


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A finished turn with its transcript records: a client's history, an adopted session, a chain from another store.

    The store gives it a `seq`; `import_chain` also gives it the `agent_key` of the new agent.
    """

    turn: Turn
    records: tuple[Record, ...]


# The parts of a chain, in this order; a turn may come before its parent.
ChainPart = WholeTurn | Session | Link | Conversation | Item


@dataclass(frozen=True, slots=True)
class NewChain:
    """An agent to import with its history. It began at `created_at`, and is imported `now`. `head`: one of its
    turns."""

    owner: str
    agent_id: str
    dir: str
    named: bool
    created_at: float
    now: float
    head: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class MirrorKey:
    """A transcript as the Claude Agent SDK names it. `subpath` is a sub-agent's; "" for the session's own."""

    project: str
    session_id: str
    subpath: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A named result about a subject, e.g. of a self-check, and when it was found."""

    subject: str
    name: str
    found: JSON
    at: float


@dataclass(frozen=True, slots=True)
class MirroredLines:
    """The first `lines` of a mirrored transcript, which become turns."""

    key: MirrorKey
    lines: int


# The fields of a turn that its beginning decides, and those that say what is asked.
BEGIN_FIELDS = ("parent_id", "session_id", "frame_uuid", "continuity", "evidence", "started_at", "instance")
COMPOSED_FIELDS = ("input", "system", "placed", "options", "call")


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """What a turn leaves beside its answer: the session that ends at it, what it added to the transcript, and the links
    that explain both."""

    records: tuple[Record, ...]
    session: Session
    links: tuple[Link, ...] = ()


# The fields of a turn that its end decides; `session_id` follows from `KeptTurn.session`.
ENDED = (
    "status", "output", "stop_reason", "stop_sequence", "usage", "cost_usd", "tools", "timings", "attempts",
    "path_hash", "depth", "delivery", "finished_at", "evidence", "backend", "answered_by", "fallback",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent when its turn begins: the turn to continue, and the session that ends there.

    `others`: whether other proxies may have unfinished earlier turns of the agent.
    """

    agent: Agent
    parent: Turn | None
    session: Session | None
    others: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class TurnOutline:
    """The fields of a turn that a drawing of the whole chain needs, without images."""

    id: str
    seq: int
    parent_id: str | None
    status: Status
    session_id: str | None
    input: tuple[Message, ...]
    evidence: Evidence
    attempts: tuple[JSON, ...]


@dataclass(frozen=True, slots=True)
class TurnPage:
    """Turns of an agent, newest first, with the links made at them.

    `newest` is the place of the first one in the order of acceptance (1 is the agent's first turn), `total` how many
    turns the agent has, `link_counts` how many links of each reason, `cost_usd` what all turns cost, at the time of the
    page.
    """

    turns: tuple[Turn, ...]
    links: tuple[Link, ...]
    newest: int
    total: int
    link_counts: dict[LinkReason, int]
    cost_usd: float


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """The fields of a turn for sums and charts. `model`: the one that answered or, without an answer, the requested
    one. `code`: the code of its error. `repairs`: how many of its links are repairs."""

    id: str
    seq: int
    agent_key: int
    owner: str
    status: Status
    model: str
    created_at: float
    finished_at: float | None
    cost_usd: float | None
    usage: Usage
    code: str | None
    repairs: int


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a part of a chain, in the order of acceptance: for each turn the number of its parent (0: none), and
    the numbers of turns with a repair or an adoption. Turns are numbered from 1."""

    parents: tuple[int, ...]
    marked: tuple[int, ...]


class Leases(Protocol):
    """Who may write an agent, by the store's clock.

    - One proxy at a time holds an agent's lease. `begin`, `commit`, `adopt` and the end of a running turn carry it and
      raise `LeaseLost` once another proxy has been granted it, in the transaction of the write itself.
    - A heartbeat renews all leases of a proxy. An expired lease still belongs to its holder until another proxy takes
      it.
    - None of these methods waits for the disk: after a power cut no holder is left.
    - `stale_writes` counts the writes that raised `LeaseLost` since this store was opened.
    """

    stale_writes: int = 0

    async def clock(self) -> float:
        """The store's own clock, by which leases expire, in seconds since 1970."""
        return time.time()

    async def renew(self, proxy: Proxy) -> list[HeldLease]:
        """A heartbeat. Returns the leases that this proxy holds now."""

    async def acquire(
        self,
        agent_key: int,
        proxy: Proxy,
        *,
        dead: Collection[str] = (),
        awake: Callable[[], bool] = lambda: True,
        asks: bool = True,
    ) -> Granted | LeaseHeld:
        """The agent's lease, or who has it. `dead`: proxies that the caller knows to have ended. A holder whose
        heartbeat has expired is replaced if `awake()`: the caller was not paused. It is called after that heartbeat was
        read, perhaps on another thread. Without `asks` a holder is not asked to hand over."""

    async def release(self, lease: Lease) -> None:
        """Release the lease, if it is still held."""

    async def asked(self, proxy_id: str) -> PeerRequests:
        """What other proxies request of this one. A single query, because it runs many times a second."""

    async def until_asked(self, proxy_id: str, longest: float) -> None:  # noqa: ARG002 - for stores with notifications
        """Wait until `asked` should be called: at a notification if the store has them, after `longest` at most."""
        await asyncio.sleep(min(ASKED_POLL, longest))

    async def cancel(self, turn_id: str, proxy_id: str, by: CancelledBy) -> None:
        """Ask that proxy to end a turn. Idempotent; the caller calls `forget_cancel` afterwards."""

    async def forget_cancel(self, turn_id: str) -> None: ...

    async def whereabouts(self, agent_key: int) -> Whereabouts: ...

    async def proxy(self, proxy_id: str) -> Proxy | None:
        """That proxy, if it responds. Its `lease` is the remaining time."""

    async def addresses(self) -> frozenset[str]:
        """The addresses of all proxies that respond."""

    async def responds(self, proxy_id: str) -> bool:
        """Whether its last heartbeat has not expired."""

    async def silent(self, seconds: float) -> list[str]:
        """The proxies whose last heartbeat expired longer ago than this, and that have not resigned."""

    async def introduce(self, proxy_id: str, facts: Facts) -> None:
        """Store the facts of this proxy's host, until it resigns."""

    async def hosts(self) -> list[tuple[str, Facts]]:
        """The host name of each proxy that responds and has introduced itself, and its facts."""

    async def resign(self, proxy_id: str) -> None:
        """Remove a proxy that has ended or is about to: its leases become free, and its clients no longer wait."""


class Expiry(NamedTuple):
    """Which agents to delete: each field is a time, and agents of that kind last active before it match (None: none of
    that kind). `before`: any agent; `once`: those to be deleted once their answer was delivered.

    A one-shot is an unnamed agent with one turn, whose client got no id to come back with. With a `version`, an agent
    matches only while its chain has that version: it was archived in that state.
    """

    before: float | None = None
    one_shots: float | None = None
    once: float | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Deleted one-shots, summed up by hour (which began `at`), owner and model."""

    at: float
    owner: str
    model: str
    turns: int
    cost_usd: float


class Agents(Protocol):
    """The agents of all owners."""

    async def agent(self, owner: str, agent_id: str) -> Agent | None: ...

    async def agent_by_key(self, key: int) -> Agent | None: ...

    async def ensure_agent(self, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
        """The agent, created when new. Two callers at once get the same one. No other agent had its key before."""

    async def delete_agent(self, key: int, expiry: Expiry | None = None) -> bool:
        """Remove the agent with its turns, sessions, links, records, keys and unshared images.

        Freed space is overwritten. With an `expiry`, remove it only if it still matches, and add the cost of an unnamed
        agent with one request to `forgotten`. False if nothing was removed.
        """

    async def forget_copies(self, agent: Agent) -> None:
        """Remove the agent from backup copies that the store has made. Raises `StoreUnavailable` if that fails."""

    async def named_by(self, agent_key: int) -> list[str]:
        """The ids of its turns and sessions, also of sessions that only its turns name. Other agents' sessions are left
        out. Logs and backups may mention these ids."""

    async def expired_agents(self, expiry: Expiry, *, only: int | None = None) -> list[Agent]:
        """The agents that match; `only`: look at this agent alone."""

    async def version(self, agent_key: int) -> str | None:
        """A value that differs after every change of the chain: turns, deliveries, head, sessions, links,
        conversations, mirrors. None if there is no agent."""

    def summaries(self, owner: str | None = None, *, since: float | None = None) -> AsyncIterator[ChainSummary]:
        """One row for each agent of this owner (None: of all owners), last active first. Without one-shots that were
        last active before `since`."""

    async def one_shots(self, owner: str | None, *, since: float, until: float) -> tuple[int, float]:
        """How many one-shots were last active in this time, and what they cost in USD; deleted ones included."""

    async def forgotten(self, owner: str | None, since: float) -> list[Forgotten]:
        """The cost of deleted one-shots that were active since then, by the hour."""

    async def spent(self, account: str | None = None) -> list[Spent]:
        """What this account spent, in current and earlier periods. None: all keys' accounts."""

    async def spend(self, of: Sequence[Budget], usage: Usage, cost_usd: float | None, now: float) -> None:
        """Count the usage of a turn in these budgets; for a turn that is not committed."""

    async def chain(self, agent_key: int) -> Chain | None: ...


class Turns(Protocol):
    """The life of a turn: accepted, begun, and committed or failed."""

    async def arrival(self, owner: str, fingerprint: str, agent_id: str | None) -> tuple[Turn | None, Agent | None]:
        """The latest turn with this fingerprint, in any status, and the agent of this name, if they exist."""

    async def agent_state(self, agent_key: int, parent_id: str | None, *, at_head: bool) -> AgentState | None:
        """The agent, the turn `parent_id` (with `at_head` the agent's head instead), and the session that ends at this
        turn. None if there is no such agent."""

    async def accept(
        self,
        turn: Turn,
        *,
        idempotency_key: str | None = None,
        idempotency_until: float | None = None,
        replaces: str | None = None,
        durable: bool = False,
        budgets: Sequence[Budget] = (),
    ) -> tuple[Turn, AgentState | None]:
        """Store a queued turn. Returns it with its `seq`, the last in the order of acceptance, and the agent's state as
        `agent_state` returns it, for a turn that may run next. The state may be None: then read it separately.

        Raises `KeyTaken` if the idempotency key belongs to another turn, unless `replaces` is the id of that turn.

        With budgets the turn's request is counted in the same transaction. Over a limit: `BudgetExceeded`, and nothing
        is counted. Turns that several proxies accept at once are counted one after the other.

        When this returns, the turn survives the end of this process. With `durable` (the client hears of the turn
        before it ends) it also survives a power cut; else it does so a moment later, and at the latest when it begins.
        """

    async def begin(
        self,
        lease: Lease,
        turn: Turn,
        attempt: JSON,
        *,
        system: str | None = None,
        left_off: Sequence[str] = (),
        home: Home | None = None,
        takes: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """Journal: status `running`. Called before the frame is sent; again for each new `attempt`.

        Of `turn` the store takes `BEGIN_FIELDS`. Where its messages are composed only now (`TurnRequest.compose`), it
        also takes `COMPOSED_FIELDS`, and `takes`: hand-written items, each with the turn that it is part of. `system`:
        taken over from the parent; None leaves the turn's own. `left_off`: turns before the parent that are left off
        the path, because their answers never arrived. `home`: where its tools leave their files from now on.

        `PathChanged` where the answer of a turn in `left_off` was claimed meanwhile, or an item that it takes is gone;
        `StoreUnavailable` where a server has lost the turn. It survives the end of this process and of a server at
        once, a power cut a moment later.
        """

    async def note(self, lease: Lease, turn_id: str, evidence: Evidence) -> None:
        """Replace a running turn's evidence. It is on the disk when this returns."""

    async def commit(
        self, lease: Lease, turn: Turn, kept: KeptTurn | None, *, move_head: bool = True, budgets: Sequence[Budget] = ()
    ) -> Turn:
        """Store everything that a finished turn changes, its spending included, in one transaction. Returns the turn as
        stored.

        Of `turn` the store takes what its end decides (`ENDED`). One that is `completed` or `requires_action` becomes
        the head (`move_head`). One that is `refused` has an answer and is on no path: nothing of it is `kept`, and the
        head stays. A turn that is `uncertain` (see `doubt`) or `delivered` already (one in the background, by its id)
        stays so.
        """

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
        """End a turn as `failed` or `cancelled`, and mark its session dirty. The head does not move.

        Without a `lease`, only a turn that has never begun or has already ended like this; with an `instance`, only a
        turn of that proxy.
        """

    async def requeue(
        self, turn_id: str, instance: str | None, budgets: Sequence[Budget] = (), now: float = 0.0
    ) -> Turn:
        """A failed or cancelled turn becomes `queued` again (a new attempt); its `seq` and parent stay.

        Its request was counted when it was accepted. Over a limit of tokens or USD: `BudgetExceeded`.
        """

    async def postpone(
        self,
        lease: Lease,
        turn_id: str,
        wait: LimitWait,
        attempts: Sequence[JSON],
        timings: JSON,
        *,
        behind: Collection[str] = (),
    ) -> Turn:
        """Queue a turn again that met a limit, and mark its session dirty. The queued turns `behind` it get the same
        wait. `begin`, `fail` and `requeue` end the wait."""

    async def take_over(self, lease: Lease, turn_id: str, instance: str) -> Turn | None:
        """Give a queued turn that waits for a limit to this proxy, with delivery `uncertain` if it is not `delivered`:
        its clients were at the other one. None if it no longer waits."""

    async def turn(self, turn_id: str) -> Turn | None: ...

    async def turn_by_key(self, owner: str, idempotency_key: str, now: float) -> Turn | None:
        """The turn an unexpired idempotency key belongs to."""

    def unfinished(self) -> AsyncIterator[Turn]:
        """Turns that are `queued` or `running`, in the order of acceptance."""

    async def unfinished_of(self, agent_key: int, *, excluding: str | None = None) -> list[Turn]:
        """The unfinished turns of one agent in the order of acceptance, without those of the instance `excluding`."""

    async def add_to_call(self, turn_id: str, more: JSON) -> None:
        """Merge these values into what a stateful wire keeps with the turn."""


class Answers(Protocol):
    """Deliveries of answers, and which proxies wait for them."""

    async def set_delivery(
        self, turn_id: str, delivery: Delivery, *, by: str | None = None, soon: bool = False
    ) -> None:
        """Note whether the answer arrived, if the note `counts` (see `domain.deliveries`). `by`: the proxy that notes
        it; None counts as the answer's own. `soon`: it may be stored a moment later."""

    async def claim(self, turn_id: str, instance: str | None) -> bool:
        """Set an undelivered answer to `pending`, for a client that asks again; one that may have arrived, to
        `uncertain`. False if the conversation went on without this answer."""

    async def doubt(
        self, agent_key: int, instances: Collection[str], turn_id: str | None, fingerprint: str | None
    ) -> None:
        """The line between these proxies was lost: nobody may ever say whether the answer of this turn arrived. If it
        is still `pending` at one of them, it becomes `uncertain`, also while the turn waits or runs; `commit` keeps
        that. Without `turn_id`: the agent's latest turn with this fingerprint."""

    async def hand_on(self, turn_id: str, by: str, to: str) -> None:
        """Note that the proxy `to` delivers this answer from now on, if it is pending at `by`. It may be stored a
        moment later."""

    async def follow(self, turn_id: str, proxy_id: str) -> None:
        """Note that clients at this proxy wait for the answer of another proxy's turn. Idempotent."""

    async def unfollow(self, turn_id: str, proxy_id: str) -> None: ...

    async def followers(self, turn_id: str) -> list[str]:
        """The proxies whose clients wait for it (dead ones too, until `resign`)."""

    async def pending_deliveries(self, agent_key: int | None = None) -> list[Turn]:
        """The answers on a path (of one agent, or of all) whose delivery is still `pending`."""


class Paths(Protocol):
    """The tree of turns, and what a session is made of."""

    async def deepest(self, owner: str, path_hashes: Sequence[str], agent_key: int | None = None) -> Turn | None:
        """The answered (or refused) turn at the last of these hashes that the store has. Bounded work.

        Within one agent or, with `agent_key` None, among the owner's unnamed agents. The hashes go down one path: if
        one is stored, all before it are. Very many turns may have the same hash; of the newest few a head is preferred,
        then one on a path, then one whose answer arrived, then the newest.
        """

    async def ancestors(self, turn_id: str) -> list[str]:
        """The ids of the turns from the root to this one."""

    async def path(self, turn_id: str) -> list[Turn]:
        """The turns from the root to this one. O(depth): not for the warm path. Raises `ContextTooLong`."""

    async def path_texts(self, turn_id: str, most: int | None = None) -> list[Turn]:
        """The same, with empty data in images and documents. Raises `ContextTooLong` before it reads more than `most`
        characters of messages (None: as many as `path` reads)."""

    async def children(self, turn_id: str) -> list[tuple[str, Status]]:
        """The id and the status of each, in the order of acceptance."""

    async def records(self, turn_id: str) -> list[Record]:
        """The transcript records of the whole path to this turn, in order. O(depth): only for repairs. Raises
        `ContextTooLong`."""

    async def own_records(self, turn_id: str) -> list[Record]:
        """The transcript records of this turn alone, in order."""

    async def own_frames(self, agent_key: int, uuids: Sequence[str]) -> set[str]:
        """Which of these record uuids are frames that we sent (any attempt of any turn of this agent)."""

    def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        """All turns of an agent in the order of acceptance, streamed."""

    def outlines(self, agent_key: int) -> AsyncIterator[TurnOutline]:
        """The outlines of the same turns: less than half the work."""

    async def page(
        self,
        agent_key: int,
        *,
        before_seq: int | None,
        limit: int,
        newest: int | None = None,
        most_bytes: int | None = None,
    ) -> TurnPage:
        """At most `limit` turns of an agent accepted before `before_seq` (None: the newest ones), newest first.
        `most_bytes`: of all of them together, where it is more than one.

        `newest`: the page begins with the turn at this place instead (`TurnPage.newest`).
        """

    async def tree(self, agent_key: int, *, after: int = 0) -> Tree:
        """The shape of the turns after the first `after` ones."""

    async def places(self, agent_key: int, turn_ids: Sequence[str]) -> dict[str, int]:
        """The places of these turns in the order of acceptance (1 is the agent's first turn)."""

    async def facts(self, owner: str | None, *, since: float, limit: int) -> list[TurnFacts]:
        """The newest `limit` turns of the owner's agents (None: of all agents) that were accepted since (UTC seconds),
        newest first."""

    async def repairs(self, agent_key: int, *, limit: int) -> list[Link]:
        """The newest `limit` links of an agent that are not a plain start, newest first."""

    async def session(self, session_id: str) -> Session | None: ...

    async def session_at(self, agent_key: int, turn_id: str) -> Session | None:
        """The newest session of this agent whose tip is this turn."""

    async def save_session(self, session: Session, links: Sequence[Link] = ()) -> None:
        """Insert or replace a session, with the links that explain it."""


class Transfers(Protocol):
    """Finished turns from elsewhere, with their transcript records."""

    async def import_turns(self, turns: Sequence[WholeTurn], head: str | None = None) -> None:
        """Store finished turns, parents first, all or none; `head` moves the agent's head to that turn."""

    async def adopt(
        self,
        lease: Lease,
        turns: Sequence[WholeTurn],
        session: Session,
        links: Sequence[Link],
        became_turns: MirroredLines | None = None,
    ) -> Turn:
        """Add turns that somebody made in a session outside the proxy, all or none. The head moves to the last of them,
        which is returned. `session` ends there. Lines that `became_turns` are no longer
        mirrored."""

    async def rewind(self, lease: Lease, to: str | None) -> None:
        """Move the agent's head back to an earlier turn (None: before the first). Nothing else changes.

        `SessionBusy` while a turn of the agent waits or runs, in any proxy.
        """

    async def import_chain(self, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
        """Store a whole chain. It becomes visible when all of it is stored; after a failure nothing is left.

        `parts` is read once, piece by piece, on a thread. `new.head` is read after the last part. `InvalidRequest` if
        the agent has turns already or the parts do not fit together. Other writers wait for one piece at most.
        """


class Mirrors(Protocol):
    """Transcripts of sessions that an application runs with the Claude Agent SDK.

    Lines of a session stay here until their exchange is complete and becomes a turn; lines of sub-agents stay for good.
    """

    async def mirror(self, agent_key: int, key: MirrorKey, lines: Sequence[Record]) -> None:
        """Append these lines in order, without those whose uuid is stored already, here or in the session's latest
        turns."""

    async def mirrored(self, agent_key: int, key: MirrorKey) -> list[Record] | None:
        """The lines that have not become turns; None if nothing was ever mirrored under this key."""

    async def mirrors(self, agent_key: int, project: str) -> list[tuple[MirrorKey, float]]:
        """The mirrored transcripts of this project, and when each was last written."""


class Findings(Protocol):
    """Named results about subjects, shared so that only one proxy has to find them (e.g. the self-check of a binary).

    They are kept for a bit more than a year.
    """

    async def claim_finding(self, subject: str, name: str, seconds: float) -> bool:
        """Claim the search for a result for so many seconds. False if it is stored already, or claimed by another."""

    async def keep_findings(self, subject: str, found: Mapping[str, JSON]) -> None:
        """Insert or replace results by name, and end claims of these names."""

    async def findings(self, subject: str | None = None) -> list[Finding]:
        """All results, or those of one subject, oldest first."""


class Conversations(Protocol):
    """Data of OpenAI's Conversations beside the chain."""

    async def conversation(self, agent_key: int) -> Conversation | None: ...

    async def annotate(self, agent_key: int, metadata: JSON) -> None:
        """Replace the client's metadata. Removed items stay removed."""

    async def add_items(self, agent_key: int, new: Sequence[Item]) -> None: ...

    async def items(self, agent_key: int) -> list[Item]:
        """All items that a client wrote itself, in order."""

    async def items_off(self, agent_key: int, tip: str | None) -> list[Item]:
        """The client's own items whose latest turn is not on the path to `tip` (None: the path is empty), in order."""

    async def take_out(self, agent_key: int, item_id: str) -> None:
        """Mark an item as removed. One that no turn has used is deleted."""


class Searches(Protocol):
    """Full-text search of turns; agents, sessions and turns are also found by a part of their name or id.

    The index is updated when somebody searches; no turn waits for it. It holds no secrets and nothing of deleted
    agents.
    """

    async def index(self, seconds: float) -> Indexed:
        """Index new and changed turns, newest first, for about so many seconds."""

    async def search(self, wanted: Search) -> Found:
        """Search what is indexed so far."""


class Store(Agents, Turns, Answers, Paths, Transfers, Mirrors, Findings, Conversations, Leases, Searches, Protocol):
    """All of these on one database. See the module docstring for the contract. Times are UTC seconds since the epoch.

    `spans_hosts`: proxies on other hosts may use it, so only heartbeats show which live. Else all proxies share one
    `var/`, and the kernel knows.
    """

    spans_hosts: bool = False

    async def open(self) -> None:
        """Create or migrate the schema (an older one is copied aside first; a newer one: `StoreUnavailable`)."""

    async def close(self) -> None: ...

    async def size(self) -> int | None:
        """Bytes on its disk, copies and index included; None if unknown."""

    async def probe(self) -> None:
        """Write a test value durably, and read it back. Raises `StoreUnavailable`."""


class PathChanged(Exception):
    """The path that a turn should continue has changed: an answer that it left off, or an item (raised by `begin`)."""


class KeyTaken(Exception):
    """An idempotency key already belongs to `turn_id` (raised inside `Store.accept`, never shown to a client)."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(turn_id)
        self.turn_id = turn_id
