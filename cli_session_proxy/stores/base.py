"""What a store must do. The chain is the truth, and this is where it is kept.

- Every method is one transaction: all of it is durable when it returns, or nothing is.
- A failed write raises `StoreUnavailable` and leaves the store as it was; it never loses an earlier commit. With
  `in_doubt` in its `detail` the write is there whole or not at all, and only a read tells: a server was lost meanwhile.
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

# How often a proxy looks whether another one asks something of it, where nothing tells it. Seconds.
ASKED_POLL = 0.05


class TellStep(Protocol):
    def __call__(self, step: str, done: int, total: int) -> None:
        """Progress of a step of a migration: `done` of `total`. Called on a thread of the store."""


# Entered while a store is opened; what it gives hears of the migration, where there is one.
Telling = Callable[[], AbstractContextManager[TellStep]]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy as the store knows it. `lease`: for how many seconds it is taken to respond after each heartbeat.

    `address`: where the other proxies reach it; None where they cannot.
    """

    id: str
    host: str
    lease: float
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """The host that has an agent's files. `host` names its `var` for ever, `address` leads to a proxy there."""

    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Who may write an agent just now, and where its files are.

    `holder` is a proxy that responds, `address` where it is reached. `home` is where its last turn with tools ran.
    """

    holder: str | None = None
    address: str | None = None
    home: Home | None = None


@dataclass(frozen=True, slots=True)
class PeerRequests:
    """What other proxies ask of this one: leases to hand over (by agent), and turns to end."""

    leases: tuple[int, ...] = ()
    cancels: tuple[tuple[str, CancelledBy], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leases or self.cancels)


# What has to be the same on every host that shares a store, by its name.
Facts = dict[str, str]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one agent's turns and sessions. Each new holder gets a higher `epoch`, also from a store that
    was put back from a backup: none is ever granted twice."""

    agent_key: int
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Granted:
    """`taken_from`: the holder that did not release it, whose unfinished turns and processes are to be settled."""

    lease: Lease
    taken_from: str | None


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Another proxy holds the lease and responds; it is asked to hand over."""

    holder: str


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease of ours. `wanted`: the proxy that asks for it."""

    lease: Lease
    wanted: str | None


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to accept durably, `queued`. Its `seq` is given by the store: the last in the order of acceptance."""

    turn: Turn
    idempotency_key: str | None = None
    idempotency_until: float | None = None
    replaces: str | None = None  # the turn that gives its idempotency key up to this one
    durable: bool = False  # on the disk before its acceptance is told: the client hears of it before it ends
    budgets: tuple[Budget, ...] = ()  # whose limits hold for it


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A finished turn with its transcript records: a client's history, an adopted session, a chain from another store.

    The store gives it a `seq`; `import_chain` also gives it the `agent_key` of the new agent.
    """

    turn: Turn
    records: tuple[Record, ...]


# What a chain consists of; in this order, but a turn may come before its parent.
ChainPart = WholeTurn | Session | Link | Conversation | Item


@dataclass(frozen=True, slots=True)
class NewChain:
    """An agent that comes with a history; it began at `created_at` and is taken in `now`. `head`: one of its turns."""

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
    """What was found out about a subject, under a name, and when."""

    subject: str
    name: str
    found: JSON
    at: float


@dataclass(frozen=True, slots=True)
class Taken:
    """The first `lines` of a mirrored transcript that are turns from now on."""

    key: MirrorKey
    lines: int


@dataclass(frozen=True, slots=True)
class TurnStart:
    """The journal entry, written before the frame is sent: what runs, where, as which attempt.

    Of `turn` the store takes `BEGIN_FIELDS`; where its messages are composed only now (`TurnRequest.compose`), it also
    takes `COMPOSED_FIELDS`, and `takes`: hand-written items, each with the turn that it is part of.
    `left_off`: turns before the parent that are left off the path, because their answers never arrived.
    """

    lease: Lease
    turn: Turn
    attempt: JSON
    system: str | None = None  # taken over from the parent; None leaves the turn's own
    left_off: tuple[str, ...] = ()
    home: Home | None = None  # where its tools leave their files from now on; None: as before
    takes: tuple[tuple[str, str], ...] | None = None  # None: it says what was accepted


# The fields of a turn that its beginning decides, and those that say what is asked.
BEGIN_FIELDS = ("parent_id", "session_id", "frame_uuid", "continuity", "evidence", "started_at", "instance")
COMPOSED_FIELDS = ("input", "system", "placed", "options", "call")


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything that a finished turn changes, committed at once: the turn itself, records, session, links, head.

    Of `turn` the store takes what its end decides (`ENDED`). One that is `completed` or `requires_action` becomes the
    head (`move_head`). One that is `refused` has an answer and is on no path: it has no session and no records, and the
    head stays.
    """

    lease: Lease
    turn: Turn
    records: tuple[Record, ...]
    session: Session | None
    links: tuple[Link, ...]
    move_head: bool = True
    budgets: tuple[Budget, ...] = ()  # whose spending it counts as


# The fields of a turn that its end decides; `session_id` follows from `Commit.session`.
ENDED = (
    "status", "output", "stop_reason", "stop_sequence", "usage", "cost_usd", "tools", "timings", "attempts",
    "path_hash", "depth", "delivery", "finished_at", "evidence", "backend", "answered_by", "fallback",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent when its turn begins: the turn to continue, and the session that ends there.

    `others`: turns of the agent that other proxies accepted before this one may be unfinished.
    """

    agent: Agent
    parent: Turn | None
    session: Session | None
    others: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class TurnOutline:
    """Of a turn what a drawing of the whole chain needs; the images of its input are cut out."""

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
    """Of a turn what sums and charts are made of. `model` is who answered, or was asked for; `code` its error's.

    `repairs`: how many links of it stand for a repair.
    """

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
    """The shape of an agent's turns from one place on in the order of acceptance: of each the place of its parent (0:
    none), and the places of those at which a session was repaired or adopted. Places begin with 1."""

    parents: tuple[int, ...]
    marked: tuple[int, ...]


class Leases(Protocol):
    """Who may write an agent, by the store's clock.

    - One proxy at a time holds an agent's lease. `begin`, `commit`, `adopt` and the end of a running turn carry it and
      raise `LeaseLost` once another proxy has been granted it, in the transaction of the write itself.
    - A lease is as old as its holder's last heartbeat. One that expired, and that nobody took, is still its holder's.
    - None of these waits for the disk: after a power cut no holder is left to be fenced out.
    - `stale_writes` counts the writes that were refused so since this store was made.
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
        """The agent's lease, or who has it. `dead` are proxies that the caller knows to have ended. A holder whose
        heartbeat has expired is replaced, unless the caller itself was asleep: `awake` is called after that heartbeat
        was read, perhaps on another thread. Without `asks` a holder is not asked to hand it over."""

    async def release(self, lease: Lease) -> None:
        """Give it back, if it is still held."""

    async def asked(self, proxy_id: str) -> PeerRequests:
        """What the others want of this proxy. One look for all of it: it comes many times a second."""

    async def until_asked(self, proxy_id: str, longest: float) -> None:  # noqa: ARG002 - of one that is told
        """Return when it is time for that look, after `longest` seconds at most. Here: again and again."""
        await asyncio.sleep(min(ASKED_POLL, longest))

    async def cancel(self, turn_id: str, proxy_id: str, by: CancelledBy) -> None:
        """Ask this proxy to end a turn that waits or runs there. Idempotent; who asks calls `forget_cancel` then."""

    async def forget_cancel(self, turn_id: str) -> None: ...

    async def whereabouts(self, agent_key: int) -> Whereabouts: ...

    async def proxy(self, proxy_id: str) -> Proxy | None:
        """A proxy that responds. Its `lease` is what is left of it."""

    async def addresses(self) -> frozenset[str]:
        """Where the proxies that respond are reached."""

    async def responds(self, proxy_id: str) -> bool:
        """Its last heartbeat has not expired."""

    async def silent(self, seconds: float) -> list[str]:
        """The proxies whose last heartbeat expired longer ago than this, and that nobody has made resign."""

    async def introduce(self, proxy_id: str, facts: Facts) -> None:
        """Note what this proxy's host is like, until it resigns."""

    async def hosts(self) -> list[tuple[str, Facts]]:
        """The host name of each proxy that responds and has introduced itself, and its facts."""

    async def resign(self, proxy_id: str) -> None:
        """Forget a proxy that has ended, or is about to: its leases are free, its clients are gone."""


class Expiry(NamedTuple):
    """Which agents are to be forgotten, by when they were last active (None: none of that kind): those before `before`;
    one-shots; and those that were to be deleted once their answer was delivered (`once`).

    A one-shot is an unnamed agent with one turn, whose client was given no id to come back with. With a `version` only
    where the chain still has it: what was archived is forgotten as it was archived.
    """

    before: float | None = None
    one_shots: float | None = None
    once: float | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Requests whose unnamed agents are forgotten: of one hour, which began `at`, one owner and one model."""

    at: float
    owner: str
    model: str
    turns: int
    cost_usd: float


class Agents(Protocol):
    """Whose conversations there are."""

    async def agent(self, owner: str, agent_id: str) -> Agent | None: ...

    async def agent_by_key(self, key: int) -> Agent | None: ...

    async def ensure_agent(self, owner: str, agent_id: str, dir: str, *, named: bool, now: float) -> Agent:
        """The agent, created when new. Two callers at once get the same one."""

    async def delete_agent(self, key: int, expiry: Expiry | None = None) -> bool:
        """Remove the agent and all that is its own: turns, sessions, links, records, keys, unshared images.

        Nothing of it is left in what the store has freed. With an `expiry` only where it still is one of those: then
        what an unnamed agent of one request cost is counted (`forgotten`). False where nothing was removed.
        """

    async def forget_copies(self, agent: Agent) -> None:
        """Remove the agent from copies that the store has made of itself; `StoreUnavailable` where one resists."""

    async def named_by(self, agent_key: int) -> list[str]:
        """The ids of its turns and sessions, and of sessions that only its turns name: what else may speak of it."""

    async def expired_agents(self, expiry: Expiry, *, only: int | None = None) -> list[Agent]:
        """Those that are to be forgotten; of the agent `only`, where one is given."""

    async def version(self, agent_key: int) -> str | None:
        """Another one after every change of the chain: turns and their delivery, head, sessions, links, and what is
        kept beside it (conversations, mirrors). None where there is no agent."""

    def summaries(self, owner: str | None = None, *, folded: float | None = None) -> AsyncIterator[ChainSummary]:
        """One row an agent (of every owner when None), last active first; without one-shots older than `folded`."""

    async def one_shots(self, owner: str | None, *, since: float, until: float) -> tuple[int, float]:
        """How many one-shots were last active in this time, and what they cost; with those that are forgotten."""

    async def forgotten(self, owner: str | None, since: float) -> list[Forgotten]:
        """What unnamed agents of one request cost that are forgotten by now and were active since then, to the hour."""

    async def spent(self, account: str | None = None) -> list[Spent]:
        """What this account spent in the running periods and in earlier ones; None: the accounts of all keys."""

    async def spend(self, of: Sequence[Budget], usage: Usage, cost_usd: float | None, now: float) -> None:
        """Count for these budgets what a turn used that is not committed."""

    async def chain(self, agent_key: int) -> Chain | None: ...


class Turns(Protocol):
    """The life of a turn: accepted, begun, and committed or failed."""

    async def arrival(self, owner: str, fingerprint: str, agent_id: str | None) -> tuple[Turn | None, Agent | None]:
        """The latest turn with this fingerprint, whatever its status, and the agent of this name, if there is one."""

    async def agent_state(self, agent_key: int, parent_id: str | None, *, at_head: bool) -> AgentState | None:
        """The agent, the turn `parent_id` (the agent's head where `at_head`), and `session_at` it; None without
        the agent."""

    async def accept(self, new: NewTurn) -> Turn:
        """Store a queued turn. With an idempotency key already taken by another turn: `KeyTaken`.

        With budgets its request is counted in the same transaction; over a limit: `BudgetExceeded`, and nothing is
        counted. Of turns that several proxies accept at once each is counted before the next one is looked at.

        It survives the end of this process at once; a power cut too where it is `durable`, else a moment later, and
        at the latest when it begins.
        """

    async def accept_next(self, new: NewTurn) -> tuple[Turn, AgentState | None]:
        """`accept`, for a turn that may be the next one of its agent: with the state in which that would begin, as
        `agent_state` tells it; None where it has to be read by itself."""

    async def begin(self, begun: TurnStart) -> None:
        """Journal: status `running`. Called before the frame is sent; again for each new attempt.

        `PathChanged` where the answer of a turn in `left_off` was claimed meanwhile, or an item that it takes is gone;
        `StoreUnavailable` where a server has lost the turn. It survives the end of this process and of a server at
        once, a power cut a moment later.
        """

    async def note(self, lease: Lease, turn_id: str, evidence: Evidence) -> None:
        """Replace what a running turn has to show. It survives a power cut before this returns."""

    async def commit(self, commit: Commit) -> Turn:
        """One transaction for all that a finished turn changes, with what its budgets have spent. Returns the turn as
        stored."""

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

        Without a `lease` only a turn that has never begun, or that has ended so already; with an `instance` only while
        that proxy is to run it.
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
        """A turn that met a limit is `queued` until it is over, and its session is marked dirty; those of its proxy's
        queued turns that are `behind` it wait as long. `begin`, `fail` and `requeue` end the wait."""

    async def take_over(self, lease: Lease, turn_id: str, instance: str) -> Turn | None:
        """A queued turn that waits for a limit is this proxy's to run, its delivery `uncertain`: its clients were the
        other's. None where it waits for none any more."""

    async def turn(self, turn_id: str) -> Turn | None: ...

    async def turn_by_key(self, owner: str, idempotency_key: str, now: float) -> Turn | None:
        """The turn an unexpired idempotency key belongs to."""

    def unfinished(self) -> AsyncIterator[Turn]:
        """Turns that are `queued` or `running`, in the order of acceptance."""

    async def unfinished_of(self, agent_key: int, *, excluding: str | None = None) -> list[Turn]:
        """The unfinished turns of one agent in the order of acceptance, without those of the instance `excluding`."""

    async def add_to_call(self, turn_id: str, more: JSON) -> None:
        """Add to what a stateful wire keeps with the turn, whatever was written there meanwhile."""


class Answers(Protocol):
    """Whether answers arrived, and who still wants them."""

    async def set_delivery(
        self, turn_id: str, delivery: Delivery, *, by: str | None = None, soon: bool = False
    ) -> None:
        """Note whether the answer arrived. `delivered` is final: a later word does not change it.

        An answer that another turn continues has arrived: `undelivered` does not change it; neither does it where
        another proxy than `by` has claimed the answer for its own client. `soon`: it may be stored a moment later,
        as nothing depends on it yet.
        """

    async def claim(self, turn_id: str, instance: str | None) -> bool:
        """Take an undelivered answer for the client that asks again: it is `pending` from now on.

        True where the conversation goes on from this answer, or still can; False where it goes on without it.
        """

    async def follow(self, turn_id: str, proxy_id: str) -> None:
        """Clients at this proxy wait for the answer of a turn that another proxy runs. Idempotent."""

    async def unfollow(self, turn_id: str, proxy_id: str) -> None: ...

    async def followers(self, turn_id: str) -> list[str]:
        """The proxies whose clients wait for it (dead ones too, until `resign`)."""

    async def pending_deliveries(self) -> list[Turn]:
        """Finished turns whose delivery is still `pending`."""


class Paths(Protocol):
    """The tree of turns, and what a session is made of."""

    async def deepest(self, owner: str, path_hashes: Sequence[str], agent_key: int | None = None) -> Turn | None:
        """The turn with an answer at the last of these hashes that is known; bounded work. It may be a refused one.

        Within one agent, or, with `agent_key` None, among the owner's agents that are not named.
        The hashes lead down one path: where one is known, those before it are. Very many turns may share a hash;
        of the newest few a head is preferred, then one on a path, then one whose answer arrived, then the newest.
        """

    async def path(self, turn_id: str) -> list[Turn]:
        """The turns from the root to this one. O(depth): not for the warm path."""

    async def children(self, turn_id: str) -> list[Turn]: ...

    async def records(self, turn_id: str) -> list[Record]:
        """The transcript records of the whole path to this turn, in order. O(depth): only for repairs."""

    async def own_records(self, turn_id: str) -> list[Record]:
        """The transcript records of this turn alone, in order."""

    async def own_frames(self, agent_key: int, uuids: Sequence[str]) -> set[str]:
        """Which of these record uuids are frames that we sent (any attempt of any turn of this agent)."""

    def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        """All turns of an agent in the order of acceptance, streamed."""

    def outlines(self, agent_key: int) -> AsyncIterator[TurnOutline]:
        """The same turns, of each only its outline: less than half the work."""

    async def page(self, agent_key: int, *, before_seq: int | None, limit: int, newest: int | None = None) -> TurnPage:
        """At most `limit` turns of an agent accepted before `before_seq` (None: the newest ones), newest first.

        `newest`: the page begins with the turn at this place instead (`TurnPage.newest`).
        """

    async def tree(self, agent_key: int, *, after: int = 0) -> Tree:
        """The shape of the turns behind the first `after` ones."""

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
    """Turns from elsewhere: finished, with their transcript records."""

    async def import_turns(self, turns: Sequence[WholeTurn], head: str | None = None) -> None:
        """Store finished turns, parents first, all or none; `head` moves the agent's head to that turn."""

    async def adopt(
        self,
        lease: Lease,
        turns: Sequence[WholeTurn],
        session: Session,
        links: Sequence[Link],
        taken: Taken | None = None,
    ) -> Turn:
        """What somebody else had in a session, all or none: these turns, the head at the last of them, the session that
        ends there, and why; `taken` is not mirrored any more. Returns the last one."""

    async def rewind(self, lease: Lease, to: str | None) -> None:
        """Move the agent's head back to a turn before it, None for before the first; nothing else changes.

        `SessionBusy` while a turn of the agent waits or runs, in any proxy.
        """

    async def import_chain(self, new: NewChain, parts: Iterable[ChainPart]) -> Agent:
        """Store a whole chain: nobody sees anything of it before all of it is there, and nothing is left otherwise.

        `parts` is read once, piece by piece, on a thread. `new.head` is asked after the last part. `InvalidRequest`
        where the agent has turns already or a part does not fit the others. Other writers wait for one piece.
        """


class Mirrors(Protocol):
    """Transcripts of sessions that an application runs with the Claude Agent SDK.

    Those of the sessions themselves wait here until their exchanges are whole, and then are turns; those of sub-agents
    stay.
    """

    async def mirror(self, agent_key: int, key: MirrorKey, lines: Sequence[Record]) -> None:
        """Append these lines, in order; without those whose uuid is known already, here or among the session's latest
        turns."""

    async def mirrored(self, agent_key: int, key: MirrorKey) -> list[Record] | None:
        """The lines that no turn has taken over; None where nothing was ever mirrored under this key."""

    async def mirrors(self, agent_key: int, project: str) -> list[tuple[MirrorKey, float]]:
        """What was mirrored of this project, and when last."""


class Findings(Protocol):
    """What was found out about subjects that others name, so that of all who share the store one finds it out.

    A finding is kept for a bit more than a year.
    """

    async def claim_finding(self, subject: str, name: str, seconds: float) -> bool:
        """Whether the caller is to find it out, within so many seconds. False where it is found already, or somebody
        else has claimed it and has time left."""

    async def keep_findings(self, subject: str, found: Mapping[str, JSON]) -> None:
        """Insert or replace them, by name; a claim of that name is over."""

    async def findings(self, subject: str | None = None) -> list[Finding]:
        """All that was found, or that of one subject, the oldest first."""


class Conversations(Protocol):
    """What OpenAI's Conversations keep beside the chain."""

    async def conversation(self, agent_key: int) -> Conversation | None: ...

    async def annotate(self, agent_key: int, metadata: JSON) -> None:
        """Replace the client's notes. What was taken out stays."""

    async def add_items(self, agent_key: int, new: Sequence[Item]) -> None: ...

    async def items(self, agent_key: int) -> list[Item]:
        """All that was written by hand, in order."""

    async def items_off(self, agent_key: int, tip: str | None) -> list[Item]:
        """The hand-written items whose latest turn is not on the path to `tip` (None: the path is empty), in order."""

    async def take_out(self, agent_key: int, item_id: str) -> None:
        """Note that an item was taken out; one that no turn has begun with is gone."""


class Searches(Protocol):
    """All that was said, found by its words; agents, sessions and turns by a part of what they are called.

    The index follows the chains when somebody asks for it, beside every turn: none waits for it. It holds no secret,
    and nothing of an agent that was deleted.
    """

    async def index(self, seconds: float) -> Indexed:
        """Take in turns that are new or have changed, the newest first, for about so long."""

    async def search(self, wanted: Search) -> Found:
        """What the index holds of it by now."""


class Store(Agents, Turns, Answers, Paths, Transfers, Mirrors, Findings, Conversations, Leases, Searches, Protocol):
    """All of it on one database. See the module docstring for the contract. Times are UTC seconds since the epoch.

    `spans_hosts`: other proxies on it may run elsewhere, so that only their heartbeats tell of them. Without it all of
    them share one `var/`, where the kernel knows which of them live.
    """

    spans_hosts: bool = False

    async def open(self) -> None:
        """Create or migrate the schema (an older one is copied aside first; a newer one: `StoreUnavailable`)."""

    async def close(self) -> None: ...

    async def size(self) -> int | None:
        """Bytes that it takes on its disk, with what it keeps beside itself; None where nobody can tell."""

    async def probe(self) -> None:
        """Write something that means nothing, durably, and read it. Raises `StoreUnavailable`."""


class PathChanged(Exception):
    """What a turn is to follow has changed: a turn that it left off, or an item (raised inside `Store.begin`)."""


class KeyTaken(Exception):
    """An idempotency key already belongs to `turn_id` (raised inside `Store.accept`, never shown to a client)."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(turn_id)
        self.turn_id = turn_id
