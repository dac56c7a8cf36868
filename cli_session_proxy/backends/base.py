"""The contract of what executes a turn: the Claude CLI, any other model, or the tests' own backend.

The core decides what continues what, in which order, and under whose lease. A backend answers:

    prepare   the path and the options of a turn -> an exchange that is about to continue that path; nothing was sent
    say       send the new prompt to the model; yields its events, the last is `Completed`, `Called` or `Refused`
    keep      returns what to store: records, the session's new state, links
    release   the core has stored the turn; or
    discard   the core stores nothing of the turn

- How the backend makes its memory equal to the path is its own business; links and evidence report what it did.
- `say` raises `Lost` if the exchange ended without an answer, and a `ProxyError` if the answer is an error.
- The core holds the agent's lease, so no two of these calls run at once for one agent.

Not a backend's business: the chain, clients and deliveries, time limits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ..domain.approvals import Verdict
from ..domain.client_tools import Check, Offers
from ..domain.evidence import CacheMiss, Evidence, NoteCode
from ..domain.limits import is_record
from ..domain.lineage import Past
from ..domain.models import (
    JSON,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Continuity,
    Link,
    Record,
    Session,
    Turn,
    Usage,
)
from ..domain.options import ParameterName, Window
from ..errors import ProxyError
from ..settings import Profile
from ..stores.base import Facts, KeptTurn, Store, WholeTurn

# What another attempt may change after the model's API refused a turn: leave out the path's thinking, images,
# documents or calls of tools; summarise the oldest turns; use a login that was renewed meanwhile.
Remedy = Literal["thinking", "images", "documents", "calls", "summary", "login"]

# --- input -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of one turn. `session` is the one that ends at `parent`; None for both: a new root.

    `prompt`: the new blocks, apart from the `results` of the parent's calls, by call. `frame_uuid` identifies this
    attempt. `offers`: the client's tools that may be called; other options are in `turn.options`. `check` validates the
    arguments of strict tools' calls; `fit` makes blocks smaller that the model would refuse, and counts them. `adopt`:
    the turn is at the head, so a person's turns in the session are adopted first. `remedies`: changes that earlier
    attempts asked for. `window`: how much of the path the model is shown.
    """

    agent: Agent
    parent: Turn | None
    session: Session | None
    turn: Turn
    frame_uuid: str
    model: str
    system: str | None
    effort: str | None
    profile: Profile
    prompt: tuple[Block, ...]
    check: Check
    fit: Callable[[Sequence[Block], Counter[NoteCode]], Awaitable[tuple[Block, ...]]]
    offers: Offers = field(default_factory=Offers)
    results: Mapping[str, Block] = field(default_factory=dict)
    adopt: bool = False
    remedies: frozenset[Remedy] = frozenset()
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Adoptable:
    """Turns that a person added to a session of ours after its tip, in order, each the child of the one before.

    `session` ends at the last of them. `ended`: the last answer is known to be complete. `lines`: how many lines of an
    application's session they are made of.
    """

    turns: tuple[WholeTurn, ...]
    session: Session
    detail: JSON
    ended: bool
    lines: int = 0


# --- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionSeen:
    """From now on the backend's session for this path has this id."""

    session_id: str


@dataclass(frozen=True, slots=True)
class AnswerBlocks:
    """Complete blocks of the answer. The turn's output consists of these, whatever was streamed before."""

    blocks: tuple[Block, ...]
    model: str | None = None  # as the backend names it


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The provider's stream was cut. These blocks stay unfinished, and the backend drops them and asks again by itself.
    Parts that a client has already received become part of the answer (`Answered.partial`)."""

    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ToolActivity:
    """A call or result of a tool that ran inside the turn (not the client's), for the dump only."""

    entry: JSON


@dataclass(frozen=True, slots=True)
class PermissionAsked:
    """A tool (not the client's) waits for approval. `id`: the backend's; `agent`: a sub-agent's. `answer` passes the
    decision on; later calls of it are ignored."""

    id: str
    tool: str
    input: JSON
    call: str | None
    agent: str | None
    answer: Callable[[Verdict], None] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PermissionWithdrawn:
    """The approval is no longer needed: the backend dropped the call."""

    id: str


@dataclass(frozen=True, slots=True)
class Retried:
    """The provider is asked again."""

    detail: JSON


@dataclass(frozen=True, slots=True)
class Compacted:
    """The start of the conversation was replaced by a summary."""

    detail: JSON


@dataclass(frozen=True, slots=True)
class PlanTold:
    """A report on the subscription's windows, for `domain.plan.read`."""

    detail: JSON


@dataclass(frozen=True, slots=True)
class Activity:
    """The backend is working; nothing else to report."""

    kind: str


@dataclass(frozen=True, slots=True)
class Used:
    """The usage of this exchange so far, as reported by the provider. It is recorded if the turn ends without a final
    usage (`Completed`, `Called` or `Refused`)."""

    usage: Usage
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """The answer so far ends with `calls` of the client's tools. Their results come with the client's next turn.

    `usage` and `cost_usd` are those of this turn.
    """

    calls: tuple[Block, ...]
    usage: Usage
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is complete. `usage` and `cost_usd` are those of this turn.

    `stop_reason`: the provider's. `stop_sequence`: the one of the turn's stop sequences at which the provider stopped.
    `cache_miss`: the provider's report of why its prompt cache did not apply.
    """

    stop_reason: str | None
    usage: Usage
    cost_usd: float | None = None
    stop_sequence: str | None = None
    cache_miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The model, or a guard before it, refused to answer or to go on. `category` and `explanation` are the provider's;
    `usage` is that of this turn. The core then calls `discard`."""

    category: str | None
    explanation: str | None
    usage: Usage


Event = (
    SessionSeen
    | AnswerBlocks
    | Abandoned
    | ToolActivity
    | PermissionAsked
    | PermissionWithdrawn
    | Retried
    | Compacted
    | PlanTold
    | Activity
    | Used
    | BlockStart
    | BlockDelta
    | BlockStop
    | Called
    | Completed
    | Refused
)


class Lost(Exception):
    """The exchange ended without an answer. `error`: for the client, if the turn is not repeated.

    `remedy`: what another attempt should change; None: nothing.
    """

    def __init__(self, why: str, error: ProxyError, remedy: Remedy | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.error = error
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer as the engine sees it: `output` is what clients received.

    `calls`: ids of calls of the client's tools, whose results are still to come. `stopped`: the engine cut the answer.
    `partial`: the indices in `output` of blocks that the backend broke off after a client had received their beginning.
    """

    output: tuple[Block, ...]
    calls: frozenset[str] = frozenset()
    stopped: bool = False
    partial: frozenset[int] = frozenset()


class Execution(Protocol):
    """A turn that is ready to be sent to a model. `links` and `evidence` explain how its session was obtained."""

    @property
    def backend(self) -> str:
        """The backend's name. Stored with the turn."""

    @property
    def who(self) -> str:
        """What answers, for messages: a program with its version and path, or a model."""

    @property
    def session_id(self) -> str: ...

    @property
    def continuity(self) -> Continuity: ...

    @property
    def links(self) -> Sequence[Link]: ...

    @property
    def evidence(self) -> Evidence: ...

    @property
    def keeps_path(self) -> bool:
        """Whether the path stays in this process's memory until the answer is there."""

    @property
    def unmet(self) -> Sequence[ParameterName]:
        """Parameters of the job that have no effect here. If `max_tokens` is among them, the engine cuts the answer."""

    def say(self) -> AsyncGenerator[Event, None]:
        """Send the new prompt, and yield events. Called once. Raises `Lost` and `ProxyError`."""

    async def interrupt(self) -> None:
        """End the answer where it is: `Completed` follows soon."""

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        """What to store of the turn, with further links. The evidence says where its records came from (`records`) and
        what the backend left out (`notes`)."""

    async def release(self) -> None:
        """The turn is committed, so errors here do not matter. The session may serve the next turn."""

    async def discard(self, *, owned: bool) -> None:
        """The turn is not stored. `owned` is False if another proxy has the agent now: files outside the chain then
        belong to it."""


@dataclass(frozen=True, slots=True)
class ComparedRecord:
    """One record of a turn. `state`: equal, lost, changed, or on one side only. `chain` and `file`: the blocks on each
    side; None if there is no such record, or for `file` if both are equal."""

    uuid: str | None
    kind: str
    state: str
    chain: Sequence[Any] | None
    file: Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The backend's files compared with the chain, at one turn.

    `found`: `equal`, `busy` (a turn is writing them now), `different`, or `none` (no session has this turn).
    `differences`: kinds and sentences. `by_hand`: the command with which a person can continue that session.
    """

    found: Literal["none", "equal", "busy", "different"]
    differences: tuple[tuple[str, str], ...] = ()
    records: tuple[ComparedRecord, ...] = ()
    session_id: str | None = None
    transcript: str | None = None
    tip_turn_id: str | None = None
    by_hand: str | None = None


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A turn's last request to the model, reconstructed from the backend's records and compared with the chain.

    Of the `turns` of the path, the first `summarised` ones were in a summary, and those in `missing` (ids) were not
    sent. `messages`: the request's blocks with their roles. `extends`: it begins with the last turn's request, so that
    the provider's cache is used; None for a first turn.
    """

    turns: int
    missing: tuple[str, ...]
    summarised: int
    messages: tuple[tuple[str, Block], ...]
    extends: bool | None


class Counts(NamedTuple):
    """How many processes are in use, idle and warm, or spares; and the memory of all in bytes, as last measured."""

    busy: int
    warm: int
    spare: int
    memory: int


class Process(NamedTuple):
    """One process. `session_id`: None for a spare. `since`: when its turn or its idle time began (UTC seconds).
    `memory`: bytes as last measured, 0 before that."""

    pid: int
    state: Literal["busy", "warm", "spare"]
    session_id: str | None
    since: float
    memory: int


class Observed(NamedTuple):
    """One result of the check of a backend's program. `outcome`: ok, failed, not tried. `surprising`: the opposite was
    expected of its version."""

    name: str
    outcome: str
    detail: str
    surprising: bool


class Program(NamedTuple):
    """A backend's program: its version and path. `runs`: the version that is run, its own or another one's instead.

    `observed`: the results of its check; empty before that.
    """

    version: str
    path: str
    runs: str
    observed: tuple[Observed, ...]


# How the program is billed: a person's subscription, by use (a key, a cloud), not logged in, or unknown.
LoginKind = Literal["subscription", "by use", "none", "unknown"]


class Login(NamedTuple):
    """`advice`: what to do before the program can answer; None if nothing."""

    kind: LoginKind
    advice: str | None


class ProcessHooks(NamedTuple):
    """Callbacks about the backend's processes. They must not fail.

    `on_spawn`: pid, start time and directory, before the first prompt and again when the directory changes. `on_exit`:
    the pid, when it is gone. `on_first_output`: seconds from the start to the first output.
    """

    on_spawn: Callable[[int, str | None, Path], None] = lambda _pid, _start, _cwd: None
    on_exit: Callable[[int], None] = lambda _pid: None
    on_first_output: Callable[[float], None] = lambda _seconds: None


NO_HOOKS = ProcessHooks()


class Backend(ABC):
    """One per engine. See the module docstring. `name` is stored with its turns.

    Every backend implements `prepare` and `history_records`. The other methods are for backends with files or
    processes; their defaults here are for those without.
    """

    name: str

    async def can_take(self, job: Job) -> bool:
        """Whether the job's model can take its images, documents, tools and length. Sends nothing. Called before a turn
        falls back to this model."""
        return True

    @abstractmethod
    async def prepare(self, job: Job) -> Execution | Adoptable:
        """`Adoptable` only if the job says `adopt`. Raises `ProxyError`, and `Lost` if another attempt may succeed."""

    async def adoptable(self, agent: Agent, parent: Turn) -> Adoptable | None:
        """The turns that a person added after `parent`, if nothing else changed. Read only."""
        return None

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        """A turn that was running when its proxy ended, if its complete answer is found; else None. Read only."""
        return None

    async def compare(self, agent: Agent, turn: Turn) -> Comparison:
        """How the turn's session differs from the chain. Read only; takes time in proportion to the path."""
        return Comparison("none")

    async def request_of(self, turn: Turn) -> RequestSeen | None:
        """The turn's last request to the model; None if the backend keeps no records. Takes time in proportion to the
        path."""
        return None

    async def end_strays(self, strays: Sequence[tuple[int, str]]) -> bool:
        """End these processes of other proxies (pid, start time) and wait. False if one is still alive."""
        return not strays

    @abstractmethod
    def history_records(
        self, agent: Agent, parent: Turn | None, path: Sequence[Record], exchanges: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        """The records of the exchanges of a client's history, one tuple for each. Called on a thread.

        `parent`: the turn that they follow. `path`: the records of the path up to it.
        """

    def project_of(self, agent: Agent) -> str:
        """The name under which the Claude Agent SDK keeps sessions of the agent's directory."""
        return agent.dir

    async def lines_of(self, session: Session, waiting: Sequence[Record]) -> Sequence[str]:
        """The session's transcript as the chain has it, followed by the lines that are not turns yet. A CLI that loads
        it continues after all of them. Takes time in proportion to its path."""
        return [record.line for record in waiting]

    def is_sound(self, record: Record) -> bool:
        """Whether an import takes this record again. A chain with another one is not archived."""
        return is_record(record.line)

    def has_end_of_answer(self, records: Sequence[Record]) -> bool:
        """Whether one of these records can be the end of an answer. Only then all waiting records are read."""
        return False

    async def turns_from_sdk(
        self, agent: Agent, parent: Turn | None, session: Session, lines: Sequence[Record]
    ) -> Adoptable | None:
        """The complete exchanges at the start of these lines, as turns that follow `parent`; None if there are none.
        Read only. A turn's records are all lines of its exchange."""
        return None

    async def facts(self) -> Facts:
        """Facts of this host that must be equal on all hosts, so that each request begins with the one before it.
        Starts the backend's program once. Raises `ProxyError`."""
        return {}

    async def changes(self) -> AsyncGenerator[str, None]:
        """Ids of sessions to which a person may have added something. Never ends by itself."""
        await asyncio.Event().wait()
        yield ""

    async def retire(self, agent: Agent) -> None:
        """Release the agent: another proxy writes its sessions from now on."""

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        """Remove all data of the agent that is outside the store."""

    async def close(self) -> None:
        """End all processes, and wait until they have ended."""

    def kill(self) -> None:
        """Kill all processes without waiting. May be called on any thread."""

    def counts(self) -> Counts:
        return Counts(0, 0, 0, 0)

    def processes(self) -> Sequence[Process]:
        """The processes that `counts` counts."""
        return ()

    def program(self) -> Program | None:
        """The backend's program, if it has one and its version is known; else None. Does not start it."""
        return None


async def last_records(store: Store, turn: Turn | None) -> list[Record]:
    """The records that new ones of the path to this turn follow: of its newest turn with a uuid in them. Not every turn
    has one."""
    records: list[Record] = []
    while turn is not None:
        records = await store.own_records(turn.id)
        if any(record.uuid for record in records):
            break
        turn = await store.turn(turn.parent_id) if turn.parent_id is not None else None
    return records
