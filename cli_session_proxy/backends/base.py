"""What executes a turn: one contract for the Claude CLI, for any other model, and for the tests' own backend.

The core decides what continues what, in which order, and under whose lease. A backend answers:

    prepare   the path and the options of a turn -> an exchange that is about to continue that path; nothing was sent
    say       what is new goes to the model, and its events come back; the last is `Completed`, `Called` or `Refused`
    keep      what to store of it: records, the session as it is now, links
    release   the turn is committed; or discard: nothing of the turn is kept

- Whatever the backend does to make its memory equal to the path is its own business, and is told as links and evidence.
- `say` raises `Lost` where the exchange ended without an answer, and a `ProxyError` where the answer is an error.
- Nobody calls two of these at once for one agent: the core holds the agent's lease.

Not its business: the chain, clients and their delivery, time limits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ..domain.approvals import Verdict
from ..domain.client_tools import Check, Offers
from ..domain.evidence import CacheMiss, Evidence
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
from ..domain.parameters import Name
from ..domain.windows import Window
from ..errors import ProxyError
from ..settings import Profile
from ..stores.base import Facts, KeptTurn, WholeTurn

# What may let a turn be answered that its model's API refused: without the thoughts, images or documents of the path;
# with a summary of what is longest ago; with a login that was renewed meanwhile.
Remedy = Literal["thinking", "images", "documents", "summary", "login"]

# --- what a turn wants -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of one turn. `session` is the one that ends at `parent`; None for both: a new root.

    `prompt` is what is said, beside the `results` of the parent's calls, by call. `frame_uuid` names this attempt for
    ever. `offers`: the tools of the client's that may be called; what else the request asks is in `turn.options`.
    `check` holds the arguments of calls of strict tools against their schemas. `adopt`: at the head of the chain, where
    what somebody else said in the session is taken into the chain first. `remedies`: what earlier attempts of the turn
    called for. `window`: how much of the path the model is shown.
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
    offers: Offers = field(default_factory=Offers)
    results: Mapping[str, Block] = field(default_factory=dict)
    adopt: bool = False
    remedies: frozenset[Remedy] = frozenset()
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Adoptable:
    """What somebody else said in a session of ours after its tip: turns for the chain, in order, each under the last.

    `session` ends at the last of them. `ended`: the last answer is known to be whole.
    """

    turns: tuple[WholeTurn, ...]
    session: Session
    detail: JSON
    ended: bool


# --- what comes back ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionSeen:
    """The backend's memory of this path has this id from now on."""

    session_id: str


@dataclass(frozen=True, slots=True)
class AnswerBlocks:
    """Blocks of the answer, whole. The turn's output is made of these, whatever was streamed before."""

    blocks: tuple[Block, ...]
    model: str | None = None  # that said them, as the backend names it


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The provider's stream was cut: these blocks will not be finished, and the backend keeps nothing of them. It asks
    again by itself. What a client was given of them is part of the answer (`Answered.partial`)."""

    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ToolActivity:
    """A tool that ran inside the turn, not the client's: its call or its result, for the dump only."""

    entry: JSON


@dataclass(frozen=True, slots=True)
class PermissionAsked:
    """A tool, not the client's, waits for a person's word and does not run before it. `id` is the backend's, `agent` a
    sub-agent's. `answer` brings the word, once; what comes later or again is dropped."""

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
    """What the provider said of the subscription's windows, for `domain.plan.Plan.read`."""

    detail: JSON


@dataclass(frozen=True, slots=True)
class Activity:
    """The backend is working; nothing else to report."""

    kind: str


@dataclass(frozen=True, slots=True)
class Used:
    """What this exchange has used until now, as far as the provider has told: it counts where nothing else is told."""

    usage: Usage
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """The answer is complete so far and calls tools of the client: their results come with another turn."""

    calls: tuple[Block, ...]
    usage: Usage
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The model's last word. `cost_usd` is this turn's own; `usage` too.

    `stop_sequence` is the one of the job's that the provider stopped at. `cache_miss` is what the provider said.
    """

    stop_reason: str | None
    usage: Usage
    cost_usd: float | None = None
    stop_sequence: str | None = None
    cache_miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The model, or what guards it, refused to say (more of) an answer. `category` and `explanation` as it gave them.

    Nothing of the turn is kept: `discard` follows.
    """

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
    """The exchange ended without an answer. `error` is what a client is told when the turn is not repeated.

    `remedy` is what another attempt of the turn should do better; None: just the same once more.
    """

    def __init__(self, why: str, error: ProxyError, remedy: Remedy | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.error = error
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Answered:
    """How the answer ended, as the core saw it: `output` is what clients were given.

    `calls` are the client's that wait for results; `stopped`: the core cut the answer. `partial`: which
    blocks of `output` are of abandoned ones, which a client had been given words of.
    """

    output: tuple[Block, ...]
    calls: frozenset[str] = frozenset()
    stopped: bool = False
    partial: frozenset[int] = frozenset()


class Execution(Protocol):
    """A path that is about to be continued. `links` and `evidence` explain how the session came to be what it is."""

    @property
    def backend(self) -> str:
        """The name of the backend that answers; kept with the turn."""

    @property
    def who(self) -> str:
        """Who answers, for messages: a program with its version and place, or a model."""

    @property
    def session_id(self) -> str: ...

    @property
    def continuity(self) -> Continuity: ...

    @property
    def links(self) -> Sequence[Link]: ...

    @property
    def evidence(self) -> Evidence: ...

    @property
    def unmet(self) -> Sequence[Name]:
        """Parameters of the job that this exchange runs without. `max_tokens` among them is honoured by the core."""

    def say(self) -> AsyncGenerator[Event, None]:
        """Send what is new, once, and yield what comes back. Raises `Lost` and `ProxyError`."""

    async def interrupt(self) -> None:
        """End the answer where it is: `Completed` follows soon."""

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        """What to store of it, with links beyond the exchange's; and where the records came from, and what the backend
        itself was seen to leave out (`Evidence.records`, `notes`)."""

    async def release(self) -> None:
        """What was kept is committed, whatever happens here. The memory of the path may serve the next turn."""

    async def discard(self, *, owned: bool) -> None:
        """Nothing of the turn is kept. `owned` is False where another proxy writes the agent by now: what is stored
        outside the chain is its own."""


@dataclass(frozen=True, slots=True)
class TurnsFromSdk:
    """Turns made of a session that an application runs by itself: of the first `line_count` of its lines."""

    adoptable: Adoptable
    line_count: int


@dataclass(frozen=True, slots=True)
class ComparedRecord:
    """One record of a turn. `state`: equal, lost, changed, or on one side only. `chain` and `file` are what either side
    says, as blocks; None where it has no such record, and for the file where both say the same."""

    uuid: str | None
    kind: str
    state: str
    chain: Sequence[Any] | None
    file: Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the backend keeps outside the store, compared with the chain at one turn.

    `found`: `equal`, `busy` (a turn is just writing it), `different`, or `none` where no session holds this turn.
    `differences` are kinds and sentences. `by_hand`: the command with which a person goes on in that session.
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
    """A turn's last request by the backend's records of it, beside the chain.

    Of the `turns` of the path, `summarised` (the first ones) stood in a summary, and `missing` (ids) were not sent.
    `messages`: its blocks, each with its role. `extends`: it begins with the request of the turn before, so that the
    provider's cache can hold; None for a first turn.
    """

    turns: int
    missing: tuple[str, ...]
    summarised: int
    messages: tuple[tuple[str, Block], ...]
    extends: bool | None


class Counts(NamedTuple):
    """Processes in use, idle ones that are kept warm, spares; and the bytes of all, as last measured."""

    busy: int
    warm: int
    spare: int
    memory: int


class Process(NamedTuple):
    """One process: the session that it serves (None for a spare), since when it runs its turn or waits for the next
    (UTC seconds), and its bytes as last measured (0: not yet)."""

    pid: int
    state: Literal["busy", "warm", "spare"]
    session_id: str | None
    since: float
    memory: int


class Observed(NamedTuple):
    """One thing that the program behind a backend was checked for. `outcome`: ok, failed, not tried. `surprising`: its
    version lets expect the opposite."""

    name: str
    outcome: str
    detail: str
    surprising: bool


class Program(NamedTuple):
    """The program behind a backend: its version and place; `runs`: the version that is run in its place, or its own.

    `observed`: what its check has seen; empty before that.
    """

    version: str
    path: str
    runs: str
    observed: tuple[Observed, ...]


# How the program pays: with a person's subscription, by use (a key, a cloud), not at all yet; or it cannot tell.
LoginKind = Literal["subscription", "by use", "none", "unknown"]


class Login(NamedTuple):
    """`advice`: what must be done before the program can answer; None where nothing must."""

    kind: LoginKind
    advice: str | None


class ProcessHooks(NamedTuple):
    """What is told of the backend's processes. None of these may fail.

    `on_spawn`: the pid, start time and directory of each before it gets a prompt, and again when it gets another
    directory. `on_exit`: the pid when it is gone. `on_first_output`: how many seconds one took to its first word.
    """

    on_spawn: Callable[[int, str | None, Path], None] = lambda _pid, _start, _cwd: None
    on_exit: Callable[[int], None] = lambda _pid: None
    on_first_output: Callable[[float], None] = lambda _seconds: None


NO_HOOKS = ProcessHooks()


class Backend(ABC):
    """One per engine. See the module docstring. `name` is kept with the turns that it settles.

    `prepare` and `imported` are what every backend has. The rest is for one that keeps files or runs processes: a class
    that inherits from this one has neither until it says so.
    """

    name: str

    async def can_take(self, job: Job) -> bool:
        """Whether the model that the job names can be asked this: its images, documents, tools and length. Only looks,
        and sends nothing: asked before a turn that another model could not answer goes to this one."""
        return True

    @abstractmethod
    async def prepare(self, job: Job) -> Execution | Adoptable:
        """`Adoptable` only where the job says `adopt`. Raises `ProxyError`, and `Lost` where it may be tried again."""

    async def adoptable(self, agent: Agent, parent: Turn) -> Adoptable | None:
        """What somebody else said after `parent`, if that is all that changed. Only looks."""
        return None

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        """The turn that ran when its proxy ended, if its whole answer is found; else None. Changes nothing."""
        return None

    async def compare(self, agent: Agent, turn: Turn) -> Comparison:
        """How the turn's session differs from the chain. Only looks; costs as much as the path is long."""
        return Comparison("none")

    async def request_of(self, turn: Turn) -> RequestSeen | None:
        """What the model was sent in this turn; None where the backend keeps no records of it. Costs as much as the
        path is long."""
        return None

    async def end_strays(self, strays: Sequence[tuple[int, str]]) -> bool:
        """End these processes of other proxies, by pid and start time, and wait for it. False where one lives on."""
        return not strays

    @abstractmethod
    def imported(
        self, agent: Agent, above: Turn | None, known: Sequence[Record], history: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        """The records of exchanges that a client brings along as its history, one tuple each. Runs on a thread.

        `above` is the turn that they follow, `known` the records of the path to it.
        """

    def project_of(self, agent: Agent) -> str:
        """The name under which the Claude Agent SDK keeps sessions of the agent's directory."""
        return agent.dir

    async def lines_of(self, session: Session) -> Sequence[str]:
        """The transcript of a session as the chain has it. Costs as much as its path is long."""
        return ()

    def may_end(self, lines: Sequence[Record]) -> bool:
        """Whether an exchange may be whole with these lines: only then all that wait are looked at."""
        return False

    async def turns_from_sdk(
        self, agent: Agent, parent: Turn | None, session: Session, lines: Sequence[Record]
    ) -> TurnsFromSdk | None:
        """The complete exchanges at the start of these lines, as turns that follow `parent`; None where there are
        none. Changes nothing."""
        return None

    async def facts(self) -> Facts:
        """What of this host has to be the same on every other one, so that a request there begins with the one before
        it. Costs a start of the program behind it. Raises `ProxyError`."""
        return {}

    async def changes(self) -> AsyncGenerator[str, None]:
        """Sessions that somebody else may have said something in, by id. Never ends by itself."""
        await asyncio.Event().wait()
        yield ""

    async def retire(self, agent: Agent) -> None:
        """Let go of the agent: another proxy writes its sessions from now on."""

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        """Remove all that is kept of the agent outside the store."""

    async def close(self) -> None:
        """End every process, and wait for it."""

    def kill(self) -> None:
        """End every process at once, without a wait. Any thread may ask for it."""

    def counts(self) -> Counts:
        return Counts(0, 0, 0, 0)

    def processes(self) -> Sequence[Process]:
        """What `counts` counts, one by one."""
        return ()

    def program(self) -> Program | None:
        """What is known of the program behind it; None where there is none, or nobody has asked it yet. Asks nobody."""
        return None
